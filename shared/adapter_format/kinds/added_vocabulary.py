"""Tokens beyond the base model's: every one of them needs a row in the embedding and one in the head.

PEFT saves the whole matrices of a model whose vocabulary was resized, under the names that `embeddings`,
`saved_modules` and `trainable_tokens` know. Without them nobody can tell the rows that were not trained.
"""

from collections.abc import Mapping

from shared.adapter_format.bound import EmbedBinding, HeadBinding
from shared.adapter_format.draft import Draft
from shared.adapter_format.header import TensorInfo
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import EMBED, HEAD, AdapterNames, Site
from shared.adapter_format.reasons import tensor_invalid
from shared.adapter_format.values import Field
from shared.base_model import ModelConfig

# The dimension of a tensor that counts tokens.
_TOKENS = {
    "weight": 0,
    "base_layer.weight": 0,
    "token_adapter.base_layer.weight": 0,
    "lora_embedding_A": 1,
    "lora_B.weight": 0,
}

FIELDS: Mapping[str, Field] = {}


def measure(config: LoraConfig, names: AdapterNames, tensors: Mapping[str, TensorInfo], model: ModelConfig) -> int:
    """Rows of the embedding and the head with this adapter, which its tensors and trainable tokens tell."""
    counts = [model.vocab_size]
    counts += [max(ids) + 1 for _, ids in config.trainable_token_indices]
    for site in (EMBED, HEAD):
        for role, tensor in names.found.get(site, {}).items():
            shape = tensors[tensor].shape
            if role in _TOKENS and len(shape) == 2:
                counts.append(shape[_TOKENS[role]])
    return max(counts)


def check(config: LoraConfig) -> None:
    """The config alone does not tell."""


def bind(draft: Draft) -> None:
    """Nothing to add: every new token must have been bound on both sides."""
    if draft.vocab > draft.model.vocab_size:
        _check_complete(draft, EMBED, draft.embed)
        _check_complete(draft, HEAD, draft.head)


def _check_complete(draft: Draft, site: Site, bound: EmbedBinding | HeadBinding) -> None:
    if bound.grown is not None or (bound.rows is not None and bound.rows.ids is None):
        return
    added = range(draft.model.vocab_size, draft.vocab)
    given = frozenset(bound.rows.ids or ()) if bound.rows is not None else frozenset()
    if missing := next((token for token in added if token not in given), None):
        counts = f"{draft.vocab} tokens, the base model {draft.model.vocab_size}"
        # Of a model with LoRA on one of the two, PEFT saves the matrix of that one only.
        is_alone = draft.embed.a is not None or draft.head.a is not None
        advice = "train with it in modules_to_save" if is_alone else "save with save_embedding_layers=True"
        raise tensor_invalid(
            draft.names.tensor(site, "weight"),
            f"is missing: the adapter has {counts}, and token {missing} has no row here",
            advice,
        )
