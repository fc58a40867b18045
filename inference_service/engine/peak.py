"""What a step of the largest size takes on a GPU beside the weights: one is run before the KV cache exists."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from itertools import pairwise

import torch

from inference_service.engine.config import EngineLimits
from inference_service.engine.memory import Device
from inference_service.model.attention import KVCache
from inference_service.model.batch import DeviceBatch
from inference_service.model.decoder import Decoder
from inference_service.model.fused import FusedDecoder


@torch.inference_mode()
def measure_peak(decoder: Decoder, limits: EngineLimits, block_size: int) -> Device:
    """Run a prefill of `max_batched_tokens` and the logits of `max_num_seqs` rows; what the device has then.

    The activations' memory stays with PyTorch's allocator, where later steps find it.
    """
    device = decoder.embed.device
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(decoder, limits, block_size)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return Device(total, free, weights, torch.cuda.max_memory_allocated(device) - weights)


def _run(decoder: Decoder, limits: EngineLimits, block_size: int) -> None:
    """Prefill of as few sequences as there can be. They share one block and store nothing."""
    config, device, dtype = decoder.config, decoder.embed.device, decoder.embed.dtype
    kv_cache = KVCache(config.num_layers, 1, block_size, config.num_kv_heads, config.head_dim, dtype, device)
    num_tokens = min(limits.max_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    starts = [*range(0, num_tokens, limits.max_model_len), num_tokens]
    lengths = [end - start for start, end in pairwise(starts)]
    num_blocks = -(-limits.max_model_len // block_size)
    batch = DeviceBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.cat([torch.arange(length, dtype=torch.int32, device=device) for length in lengths]),
        kv_slots=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        block_tables=torch.zeros(len(lengths), num_blocks, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        decode_lens=torch.zeros(0, dtype=torch.int32, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        max_len=limits.max_model_len,
        chunks=None,
    )
    fused = FusedDecoder(decoder, limits.max_model_len)
    fused.logits(fused.forward(batch, kv_cache)[: limits.max_num_seqs])
