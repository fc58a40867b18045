"""Which variants of the Triton kernels a server's warm-up compiles, and which others its steps would, without a GPU.

A program of its own, for the test beside it: Triton must be imported without its interpreter. Launches go as far as the
key by which Triton looks a variant up, on tensors that have a shape and no memory.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from inference_service.engine.device_batch import num_chunks
from inference_service.engine.step_kinds import Kind, StepKinds
from inference_service.engine.warm_up import _kinds
from inference_service.lora.linear import install
from inference_service.model.attention import KVCache
from inference_service.model.batch import DeviceBatch
from inference_service.model.decoder import Decoder
from inference_service.model.fused import FusedDecoder
from kernels import sampling
from kernels.beside import Sides
from kernels.lora import rows_per_chunk
from kernels.table import AdapterTable, Chunks
from shared.base_model import parse_config
from tests.bench.shapes import SHAPES

META, DTYPE, BLOCK_SIZE = torch.device("meta"), torch.bfloat16, 16
SMALL = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 1000, "hidden_size": 448, "intermediate_size": 1216,
    "num_hidden_layers": 1, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768, "sliding_window": 4096, "torch_dtype": "bfloat16", "eos_token_id": 1,
}  # fmt: skip
NUM_STEPS = 100
SERVERS = {
    "8B": (SHAPES["llama-3.1-8b"], (32, 16384, 4096)),
    "one KV head, a window": (SMALL, (256, 8192, 32768)),
    "few": (SMALL, (7, 40, 100)),
}


class Hopper:
    """What Triton asks its driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Address:
    """What Triton asks a tensor."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


class Model:
    """A decoder of one layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        model = parse_config({**config, "num_hidden_layers": 1})
        decoder = Decoder(model, device=META, dtype=DTYPE)
        entries, affines = (torch.empty((128, 1, 7, n), dtype=torch.int32, device=META) for n in (4, 2))
        table = AdapterTable(torch.empty(1 << 24, dtype=DTYPE, device=META), entries, affines=affines)
        install(decoder, model, SimpleNamespace(table=table, sides=Sides(Mock(), Mock())))  # type: ignore[arg-type]
        self.vocab_size = model.vocab_size
        self.fused = FusedDecoder(decoder, 4096)
        self.cache = KVCache(1, 64, BLOCK_SIZE, model.num_kv_heads, model.head_dim, DTYPE, META)

    def launch(self, kind: Kind, limits: tuple[int, int, int]) -> None:
        """As `CudaRunner.compute` does."""
        seqs, tokens, max_len = limits
        rows = kind.num_tokens

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=META)

        ids = ints(tokens, dtype=torch.int64)[:rows]
        work = Chunks(ints(tokens, 4)[: num_chunks(kind)], rows_per_chunk(rows), kind.max_rank, kind.has_affine)
        batch = DeviceBatch(
            token_ids=sampling.take_sampled(ids, ids, ints(seqs, dtype=torch.int64), ids),
            positions=ints(tokens)[:rows],
            kv_slots=ints(tokens, dtype=torch.int64)[:rows],
            block_tables=ints(seqs, -(-max_len // BLOCK_SIZE)),
            seq_lens=ints(seqs),
            decode_lens=ints(seqs)[: kind.max_decodes],
            query_starts=None if kind.is_decode else ints(seqs + 1)[: kind.max_prefills + 1],
            max_len=kind.max_len,
            chunks=work if kind.max_rank else None,
        )
        self.fused.forward(batch, self.cache)


def steps(kinds: StepKinds, limits: tuple[int, int, int], count: int) -> Iterator[Kind]:
    """Of any steps that there can be."""
    chosen, (seqs, tokens, max_len) = random.Random(1), limits
    for _ in range(count):
        decodes = chosen.randint(0, seqs)
        most = min(seqs - decodes, (tokens - decodes) // 2)
        prefills = chosen.choice((0, min(1, most), chosen.randint(0, most)))
        if not decodes + prefills:
            continue
        room = chosen.choice((2 * prefills, min(tokens - decodes, 3 * prefills + 300), tokens - decodes))
        num_tokens = decodes + (chosen.randint(2 * prefills, max(room, 2 * prefills)) if prefills else 0)
        max_rank, has_affine = chosen.choice((0, 8, 64, 512)), chosen.random() < 0.2
        if prefills == 0 and chosen.random() < 0.7:
            yield kinds.decode(decodes, chosen.randint(1, max_len), max_rank, has_affine)
        yield kinds.mixed(num_tokens, decodes, prefills, max_rank, has_affine)


def variants(server: str, seen: dict[tuple[str, str], None]) -> dict[str, Any]:
    """How many the warm-up launches, and those that steps launch besides. `seen`: all so far, by kernel and key."""
    config, limits = SERVERS[server]
    model, kinds = Model(config), StepKinds(*limits)
    sizes = SimpleNamespace(max_num_seqs=limits[0], max_batched_tokens=limits[1])
    seen.clear()
    for kind in _kinds(SimpleNamespace(kinds=kinds, limits=sizes)):  # type: ignore[arg-type]
        model.launch(kind, limits)
    warm = len(seen)
    for kind in steps(kinds, limits, NUM_STEPS):
        model.launch(kind, limits)
    return {"warm": warm, "late": sorted(f"{name} {key}" for name, key in list(seen)[warm:])}


def main() -> None:
    """Print the `variants` of every server, as JSON."""
    seen: dict[tuple[str, str], None] = {}
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        addresses = [
            Address(x.dtype, x.storage_offset() * x.element_size()) if isinstance(x, Tensor) else x for x in args
        ]
        return launch(kernel, *addresses, warmup=True, **options)

    def note(kernel: Any, key: str, *_: Any) -> None:
        seen[f"{kernel.module}.{kernel.__name__}", key] = None

    driver.set_active(Hopper())
    with (
        patch.object(JITFunction, "run", run),
        patch.object(JITFunction, "_do_compile", note),
        patch.object(torch.Tensor, "is_cuda", True),
        patch.object(torch.cuda, "current_stream", Mock()),
        patch.object(torch.cuda, "stream", Mock(return_value=patch.dict({}))),
        patch.object(torch.backends.cuda, "preferred_blas_library", Mock()),
        torch.inference_mode(),
    ):
        print(json.dumps({server: variants(server, seen) for server in SERVERS}))


if __name__ == "__main__":
    main()
