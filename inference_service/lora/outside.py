"""The embedding, the norms and the head with adapters. The decoder does not know that LoRA exists.

Only rows whose adapter changes something here cost more than the base model's; of such rows a batch knows (`rich`).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm

from inference_service.lora.arena import Arena
from inference_service.lora.batch import LoraBatch
from inference_service.lora.extras import Outside
from inference_service.types import OUTSIDE_LAYERS

NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


class LoraEmbedding(nn.Module):
    """Wraps the embedding: rows in place of the base model's, then LoRA, then DoRA's gain."""

    def __init__(self, base: nn.Module, arena: Arena) -> None:
        super().__init__()
        self.base = base
        self._arena = arena

    def forward(self, token_ids: Tensor, lora: LoraBatch | None) -> Tensor:
        """token_ids `[rows]` int64 → `[rows, hidden]`. Ids beyond the base model's are those of the rows' adapter."""
        if lora is None or not lora.rich:
            y: Tensor = self.base(token_ids, None)
            return y
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        y = self.base(token_ids.clamp(max=weight.shape[0] - 1), None)
        for slot, start, end in lora.rich:
            embed = self._arena.extras[slot].embed
            if embed is not None:
                y[start:end] = _embedded(token_ids[start:end], y[start:end], embed)
        return y


def _embedded(token_ids: Tensor, base: Tensor, embed: Outside) -> Tensor:
    """The rows of one adapter's tokens, from the base model's `[rows, hidden]`."""
    y = base
    if embed.rows is not None:
        ids, rows = embed.rows
        place = torch.searchsorted(ids, token_ids).clamp_(max=ids.shape[0] - 1)
        y = torch.where((ids[place] == token_ids)[:, None], rows[place], y)
    if embed.factors is None:
        return y
    a, b, scale = embed.factors
    y = torch.addmm(y.float(), a[token_ids].float(), b.float(), alpha=scale)
    if embed.affine is not None:
        embed.affine.apply(y)
    return y.to(base.dtype)


class LoraNorm(nn.Module):
    """Wraps one RMSNorm: other weights for rows whose adapter has them. `layer` −1: the last norm."""

    def __init__(self, base: nn.Module, arena: Arena, layer: int, name: str) -> None:
        super().__init__()
        self.base = base
        self._arena = arena
        self._key = layer, name

    @property
    def weight(self) -> Tensor:
        """The base model's."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """x `[rows, …, size]` → the same shape."""
        y: Tensor = self.base(x, None)
        if lora is not None:
            for slot, start, end in lora.rich:
                weight = self._arena.extras[slot].norms.get(self._key)
                if weight is not None:
                    y[start:end] = rms_norm(x[start:end], weight.shape, weight, self.base.eps)  # type: ignore[arg-type]
        return y


class LoraHead(nn.Module):
    """Wraps the head: rows in place of the base model's, LoRA, gain and offset, and columns for added tokens."""

    def __init__(self, base: nn.Module, arena: Arena) -> None:
        super().__init__()
        self.base = base
        self._arena = arena

    def forward(self, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        """hidden `[rows, hidden]` → `[rows, vocab + most added by any row's adapter]` float32.

        Where a row's adapter has not added a token, it is −inf.
        """
        logits: Tensor = self.base(hidden, None)
        if lora is None or not lora.rich:
            return logits
        vocab = logits.shape[1]
        most = max(self._arena.extras[slot].extra_vocab for slot, _, _ in lora.rich)
        if most:
            logits = pad(logits, (0, most), value=float("-inf"))
        for slot, start, end in lora.rich:
            extras = self._arena.extras[slot]
            if extras.head is not None:
                _score(logits[start:end, : vocab + extras.extra_vocab], hidden[start:end], extras.head)
        return logits


def _score(logits: Tensor, hidden: Tensor, head: Outside) -> None:
    """One adapter's rows, in place: logits `[rows, vocab + its own]` float32, hidden `[rows, hidden]`."""
    if head.rows is not None:
        ids, rows = head.rows
        logits.index_copy_(1, ids, linear(hidden, rows).float())
    if head.factors is not None:
        a, b, scale = head.factors
        logits.addmm_(linear(hidden.float(), a.float()), b.float(), alpha=scale)
    if head.affine is not None:
        head.affine.apply(logits)


def install_outside(decoder: nn.Module, num_layers: int, arena: Arena) -> None:
    """Wrap embedding, norms and head of `decoder` (`embedding`, `layers.N.input_layernorm` …, `head`), in place."""
    decoder.embedding = LoraEmbedding(decoder.get_submodule("embedding"), arena)
    decoder.head = LoraHead(decoder.get_submodule("head"), arena)
    decoder.norm = LoraNorm(decoder.get_submodule("norm"), arena, OUTSIDE_LAYERS, "norm")
    for layer in range(num_layers):
        for path in NORMS:
            parent, name = f"layers.{layer}.{path}".rsplit(".", 1)
            owner = decoder.get_submodule(parent)
            if isinstance(base := getattr(owner, name), nn.Module):  # None where the architecture has no such norm
                setattr(owner, name, LoraNorm(base, arena, layer, name))
