"""trainable_token_indices: some rows of the embedding or the head, trained. `…_delta` holds the rows, not a difference.

In a tied model the head sees the embedding's rows, unless both are named with different tokens. Where the vocabulary
grew as well, PEFT saves the whole matrix beneath the rows (`token_adapter.base_layer`).
"""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format import values
from shared.adapter_format.bound import RowsBinding
from shared.adapter_format.draft import Draft
from shared.adapter_format.kinds.embeddings import bind_base_rows
from shared.adapter_format.kinds.saved_modules import is_saved
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import EMBED, HEAD, Site
from shared.adapter_format.reasons import OTHER_BASE, TRAIN_WITHOUT, key_invalid, key_unsupported, tensor_invalid
from shared.adapter_format.values import Field, used

KEY = "trainable_token_indices"
_ROWS = "token_adapter.trainable_tokens_delta"
_BENEATH = "token_adapter.base_layer.weight"


def _read(key: str, value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if value is None or value == {}:
        return ()
    if isinstance(value, Mapping) and "" in value:
        raise key_invalid(key, "has an empty name", "name embed_tokens or lm_head")
    named = value if isinstance(value, Mapping) else {"": value}
    pairs = tuple((name, values.token_ids(key, ids)) for name, ids in named.items())
    for name, ids in pairs:
        where = f"for {name!r:.100} " if name else ""
        if not ids:
            raise key_invalid(key, f"{where}is an empty list", "name the tokens that were trained, or remove it")
        if len(set(ids)) != len(ids):
            twice = next(token for place, token in enumerate(ids) if token in ids[:place])
            raise key_invalid(key, f"{where}names token {twice} twice", "name each token that has a row once")
    return pairs


FIELDS: Mapping[str, Field] = {KEY: used(None, _read)}


def check(config: LoraConfig) -> None:
    """The config alone does not tell."""


def ids_by_site(config: LoraConfig, embed: str, head: str) -> dict[Site, tuple[int, ...]]:
    """The tokens of the embedding and the head, of which `embed` and `head` are PEFT's names.

    Raises AdapterInvalid if a name ends neither of them.
    """
    found: dict[Site, tuple[int, ...]] = {}
    for name, ids in config.trainable_token_indices:
        site = EMBED if not name or embed.endswith(name) else HEAD if head.endswith(name) else None
        if site is None or site in found:
            raise key_invalid(KEY, f"names {name!r:.100}", "name embed_tokens or lm_head, and each once")
        found[site] = ids
    return found


def bind(draft: Draft) -> None:
    """Bind the rows of either side, over the whole matrices that the file holds."""
    config, names = draft.config, draft.names
    ids = ids_by_site(config, names.module(EMBED), names.module(HEAD))
    if not ids:
        return
    is_shared = draft.is_tied and EMBED in ids and ids.get(HEAD, ids[EMBED]) == ids[EMBED]
    if draft.is_tied and config.ensure_weight_tying and len(ids) == 2 and not is_shared:
        raise key_invalid(
            KEY,
            "names different tokens for embed_tokens and lm_head",
            "name the same, or train without ensure_weight_tying",
        )
    _check_others(draft, ids, is_shared)
    bind_base_rows(draft, draft.take(EMBED, _BENEATH), draft.take(HEAD, _BENEATH))
    if is_shared:
        draft.leave_unread(HEAD, _ROWS)
        rows = _rows(draft, EMBED, ids[EMBED])
        by_site = {EMBED: rows, HEAD: rows}
    else:
        by_site = {site: _rows(draft, site, tokens) for site, tokens in ids.items()}
    if EMBED in by_site:
        draft.embed = draft.embed._replace(rows=by_site[EMBED], grown=draft.embed.rows)
    if HEAD in by_site:
        draft.head = draft.head._replace(rows=by_site[HEAD], grown=draft.head.rows)


def _rows(draft: Draft, site: Site, ids: tuple[int, ...]) -> RowsBinding:
    if max(ids) >= draft.vocab:
        raise key_invalid(KEY, f"names token {max(ids)}, the embedding has {draft.vocab} rows", OTHER_BASE)
    tensor = draft.require(site, _ROWS, key=KEY)
    shape = draft.tensors[tensor].shape
    if len(shape) == 2 and shape[0] != len(ids):
        problem = f"has {shape[0]} rows; {KEY} names {len(ids)} tokens"
        raise tensor_invalid(tensor, problem, f"set {KEY} as in training")
    draft.check_shape(tensor, len(ids), draft.model.hidden_size)
    return RowsBinding(tensor, ids, "trainable_tokens")


def _check_others(draft: Draft, ids: Mapping[Site, tuple[int, ...]], is_shared: bool) -> None:
    """The same rows cannot be trained in two ways."""
    for site in ids:
        name = draft.names.module(site)
        if is_saved(draft, site):
            raise key_invalid(KEY, f"cannot be used on {name} with modules_to_save", TRAIN_WITHOUT)
        if (draft.embed if site == EMBED else draft.head).a is not None:
            raise key_invalid(KEY, f"cannot be used on {name} with LoRA on it", TRAIN_WITHOUT)
    if is_shared and draft.config.use_dora and draft.head.a is not None:
        problem = "cannot be used with DoRA of lm_head on a base model that ties it to embed_tokens"
        raise key_invalid(KEY, problem, TRAIN_WITHOUT)
    if is_shared and is_saved(draft, HEAD):
        problem = "with lm_head in modules_to_save it is not served on a base model that ties the two"
        raise key_unsupported(KEY, f"{problem}; {TRAIN_WITHOUT}")
