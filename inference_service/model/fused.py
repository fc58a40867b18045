"""The decoder's forward pass on a GPU, in fused kernels over the parameters of `model.decoder`.

`Decoder.forward` is the plain form of the same arithmetic, and what this one is tested against.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding

from inference_service.lora.linear import LoraLinear
from inference_service.model.attention import KVCache
from inference_service.model.batch import DeviceBatch
from inference_service.model.decoder import Decoder, DecoderLayer, SelfAttention
from inference_service.model.layers import Linear
from kernels.paged_attention import paged_decode, paged_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import HeadNorm, rotary_kv_write, rotary_table
from kernels.silu_mul import silu_mul


class FusedDecoder:
    """Runs a `Decoder` on a GPU. Call it within `torch.inference_mode()`; every launch can be captured in a graph.

    Args:
        decoder: The model, its projections wrapped in `LoraLinear` or not.
        max_position: Positions that the rotary table covers.
    """

    def __init__(self, decoder: Decoder, max_position: int) -> None:
        self._decoder = decoder
        self._layers: list[DecoderLayer] = list(decoder.layers)  # type: ignore[arg-type]
        self._windows = [window or 0 for window in decoder.config.sliding_windows]
        self._eps = decoder.config.rms_norm_eps
        self._rotary = rotary_table(decoder.frequencies, max_position, decoder.attention_factor)
        self._head_norms = [_head_norm(layer.self_attn, self._eps) for layer in self._layers]
        # Every norm but the first follows the addition of a sub-layer's output.
        after_mlp = [layer.input_layernorm.weight for layer in self._layers[1:]] + [decoder.norm.weight]
        self._after_mlp: list[Tensor] = list(after_mlp)

    @property
    def num_kinds(self) -> int:
        """First layers that launch every kernel that any layer does: they differ in their windows alone."""
        return max(self._windows.index(window) for window in self._windows) + 1

    def forward(
        self, batch: DeviceBatch, kv_cache: KVCache, num_layers: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Normed hidden states of all rows, `[tokens, hidden]`, in `out` if given. Writes K and V into `kv_cache`.

        `num_layers`: only the first ones, to warm up; None for all.
        """
        layers = self._layers[:num_layers]
        residual = embedding(batch.token_ids, self._decoder.embed)  # [tokens, hidden]
        x = rms_norm(residual, self._layers[0].input_layernorm.weight, self._eps)
        for index, layer in enumerate(layers):
            y, delta = project(layer.self_attn.o_proj, self._attend(x, index, batch, kv_cache), batch)
            x = add_rms_norm(y, residual, layer.post_attention_layernorm.weight, self._eps, delta)
            gate_up, delta = project(layer.mlp.gate_up_proj, x, batch)
            y, delta = project(layer.mlp.down_proj, silu_mul(gate_up, delta), batch)
            target = out if index + 1 == len(layers) else None
            x = add_rms_norm(y, residual, self._after_mlp[index], self._eps, delta, target)
        return x

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Scores of the next token, `[rows, vocab]` in the model's dtype, in `out` if given."""
        return torch.mm(hidden, self._decoder.lm_head.t(), out=out)

    def _attend(self, x: Tensor, index: int, batch: DeviceBatch, kv_cache: KVCache) -> Tensor:
        """`x` `[tokens, hidden]` → attention's output before its projection, `[tokens, heads · head_dim]`."""
        attention, window = self._layers[index].self_attn, self._windows[index]
        qkv, delta = project(attention.qkv_proj, x, batch)
        k_cache, v_cache = kv_cache.k[index], kv_cache.v[index]
        q = rotary_kv_write(
            qkv, self._rotary, batch.positions, batch.kv_slots, k_cache, v_cache, self._head_norms[index], delta=delta
        )
        out, decodes, scale = torch.empty_like(q), batch.decode_lens.shape[0], 1.0 / math.sqrt(attention.head_dim)
        if decodes:
            paged_decode(
                q[:decodes], k_cache, v_cache, batch.block_tables[:decodes], batch.decode_lens,
                max_len=batch.max_len, scale=scale, window=window, out=out[:decodes],
            )  # fmt: skip
        if batch.query_starts is not None:
            paged_prefill(
                q, k_cache, v_cache, batch.block_tables, batch.query_starts, batch.seq_lens,
                scale=scale, window=window, out=out,
            )  # fmt: skip
        return out.flatten(1)


def project(projection: torch.nn.Module, x: Tensor, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
    """A projection's base output and what adapters still add to it, which the next kernel does."""
    if isinstance(projection, LoraLinear):
        return projection.project(x, batch.chunks)
    assert isinstance(projection, Linear)
    return projection(x), None


def _head_norm(attention: SelfAttention, eps: float) -> HeadNorm | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return HeadNorm(attention.q_norm.weight, attention.k_norm.weight, eps)
