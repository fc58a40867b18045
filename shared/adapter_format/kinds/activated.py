"""aLoRA: the adapter acts from the last occurrence of a token sequence on, the sequence included.

Before it the base model runs, and its KV is shared. So nothing may act that PEFT does not switch: it switches LoRA of
linears and of the head, and no more.
"""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format import values
from shared.adapter_format.draft import Draft
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.reasons import OTHER_BASE, key_invalid, key_unsupported
from shared.adapter_format.values import Field, used

KEY = "alora_invocation_tokens"
_BEFORE = "which would act before its activation too; train an activated LoRA without, or one that is not activated"


def _read(key: str, value: Any) -> tuple[int, ...]:
    return () if values.is_nothing(value) else values.token_ids(key, value)


FIELDS: Mapping[str, Field] = {KEY: used(None, _read)}


def check(config: LoraConfig) -> None:
    """The config alone does not tell."""


def bind(draft: Draft) -> None:
    """Note the sequence, and refuse what PEFT would apply to every position."""
    tokens = draft.config.alora_invocation_tokens
    if not tokens:
        return
    if draft.vocab > draft.model.vocab_size:
        raise key_unsupported(KEY, f"the adapter adds tokens to the vocabulary, {_BEFORE}")
    if max(tokens) >= draft.model.vocab_size:
        raise key_invalid(KEY, f"names token {max(tokens)}, the base model has {draft.model.vocab_size}", OTHER_BASE)
    rows = (draft.embed.rows, draft.head.rows)
    everywhere = {
        "bias": any(vector.kind == "bias" for vector in draft.vectors),
        "modules_to_save": bool(draft.norms) or any(each and each.source == "modules_to_save" for each in rows),
        "trainable_token_indices": bool(draft.config.trainable_token_indices),
    }
    for key, is_bound in everywhere.items():
        if is_bound:
            raise key_unsupported(key, f"the adapter has more than LoRA, {_BEFORE}")
    draft.activation = tokens
