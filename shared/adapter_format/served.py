"""The kinds of adapters that the engine serves today. Registry and replica ask here, so that they agree.

Everything in `KINDS` is bound exactly by `binding.plan`; what is not in `SERVED_KINDS` is refused after that.
"""

from shared.adapter_format.bound import BindingPlan
from shared.errors import UnsupportedAdapter

# Kind → the config key that asks for it.
KINDS = {
    "lora": "target_modules",
    "dora": "use_dora",
    "lora_bias": "lora_bias",
    "bias": "bias",
    "embedding": "target_modules",
    "embedding_dora": "use_dora",
    "lm_head": "target_modules",
    "modules_to_save": "modules_to_save",
    "norms": "modules_to_save",
    "trainable_tokens": "trainable_token_indices",
    "added_vocabulary": "modules_to_save",
    "block_diagonal": "use_bdlora",
    "activated": "alora_invocation_tokens",
}

SERVED_KINDS = frozenset(KINDS)


def check_served(binding: BindingPlan) -> None:
    """Raises UnsupportedAdapter (metadata `kind` and `key`) for the first kind of `binding` that is not served."""
    for kind in binding.kinds:
        if kind not in SERVED_KINDS:
            raise UnsupportedAdapter(
                f"adapter_config.json: {KINDS[kind]}: the adapter is of the kind {kind}, which is not served; "
                f"served are: {', '.join(sorted(SERVED_KINDS))}",
                metadata={"kind": kind, "key": KINDS[kind]},
            )


def kinds_of(binding: BindingPlan) -> tuple[str, ...]:
    """The kinds that a binding is made of, in the order of `KINDS`."""
    vectors = {vector.kind for vector in binding.vectors}
    embed, head = binding.embed, binding.head
    rows = [side.rows for side in (embed, head) if side is not None and side.rows is not None]
    sources = {found.source for found in rows}
    all_blocks = [module.blocks for module in binding.modules] + ([head.blocks] if head is not None else [])
    has_lora = any(side is not None and side.a is not None for side in (embed, head))
    is_there = {
        "lora": bool(binding.modules),
        "dora": "magnitude" in vectors or (head is not None and head.magnitude is not None),
        "lora_bias": "lora_bias" in vectors or (head is not None and head.lora_bias is not None),
        "bias": "bias" in vectors,
        "embedding": embed is not None and embed.a is not None,
        "embedding_dora": embed is not None and embed.magnitude is not None,
        "lm_head": head is not None and head.a is not None,
        "modules_to_save": "modules_to_save" in sources or (sources == {"copy"} and not has_lora),
        "norms": bool(binding.norms),
        "trainable_tokens": "trainable_tokens" in sources,
        "added_vocabulary": binding.extra_vocab > 0,
        "block_diagonal": any(blocks != (1, 1) for blocks in all_blocks),
        "activated": bool(binding.activation),
    }
    return tuple(kind for kind in KINDS if is_there[kind])
