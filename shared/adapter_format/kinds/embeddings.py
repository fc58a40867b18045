"""LoRA on embed_tokens and on lm_head.

The embedding's A and B are `lora_embedding_A` [rank, vocabulary] and `lora_embedding_B` [hidden, rank]; the head's are
those of a linear. Beside them PEFT may save the base weights (`base_layer.weight`), which are the base model's own
unless the vocabulary grew. LoRA on one side of a tied model leaves the other alone, but with ensure_weight_tying, where
the head's A and B are the embedding's, unless their initialisation has parted them again.
"""

from collections.abc import Mapping
from typing import Literal

from shared.adapter_format.bound import RowsBinding
from shared.adapter_format.draft import Draft
from shared.adapter_format.kinds import block_diagonal
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import EMBED, HEAD
from shared.adapter_format.pair import rank_and_scale, take_pair
from shared.adapter_format.reasons import TRAIN_WITHOUT, key_invalid
from shared.adapter_format.values import Field

FIELDS: Mapping[str, Field] = {}  # target_modules is every LoRA's

# With these PEFT gives the head new factors after it has tied them, when it makes an adapter and when it loads one.
_UNTYING = ("orthogonal", "mica")


def check(config: LoraConfig) -> None:
    """The config alone does not tell."""


def bind(draft: Draft) -> None:
    """Bind both sides, and the base weights beside them."""
    hidden, vocab = draft.model.hidden_size, draft.vocab
    pair = take_pair(draft, EMBED, ("lora_embedding_A", "lora_embedding_B"))
    if pair is not None:
        _check_variants(draft.config)
        rank, scale = rank_and_scale(draft, EMBED, *pair, hidden, vocab)
        draft.embed = draft.embed._replace(a=pair[0], b=pair[1], rank=rank, scale=scale)
    pair = take_pair(draft, HEAD)
    if pair is not None:
        blocks = block_diagonal.blocks(draft.config, draft.names.module(HEAD))
        is_tied = draft.is_tied and draft.config.ensure_weight_tying and draft.config.init_lora_weights not in _UNTYING
        rank, scale = rank_and_scale(draft, HEAD, *pair, vocab, hidden, blocks, is_tied)
        draft.head = draft.head._replace(
            a=pair[0], b=pair[1], rank=rank, scale=scale, blocks=blocks, is_embedding=is_tied
        )
    bind_base_rows(
        draft,
        embed=draft.take(EMBED, "base_layer.weight") if draft.embed.a is not None else None,
        head=draft.take(HEAD, "base_layer.weight") if draft.head.a is not None else None,
    )


def bind_base_rows(draft: Draft, embed: str | None, head: str | None) -> None:
    """Bind the whole base matrices that the file holds; that of one side is both sides' in a tied model."""
    for tensor in (embed, head):
        if tensor is not None:
            draft.check_shape(tensor, draft.vocab, draft.model.hidden_size)
    if draft.is_tied:
        embed, head = embed or head, head or embed
    source: Literal["copy", "added"] = "added" if draft.vocab > draft.model.vocab_size else "copy"
    if embed is not None and draft.embed.rows is None:
        draft.embed = draft.embed._replace(rows=RowsBinding(embed, None, source))
    if head is not None and draft.head.rows is None:
        draft.head = draft.head._replace(rows=RowsBinding(head, None, source))


def _check_variants(config: LoraConfig) -> None:
    """Of its variants PEFT has only DoRA for an embedding."""
    for key, is_set in {
        "lora_bias": config.lora_bias,
        "use_bdlora": config.use_bdlora is not None,
        "alora_invocation_tokens": bool(config.alora_invocation_tokens),
        "velora_config": config.velora_config,
    }.items():
        if is_set:
            raise key_invalid(key, "cannot be used with LoRA on embed_tokens", TRAIN_WITHOUT)
