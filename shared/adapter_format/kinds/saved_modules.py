"""modules_to_save: whole weights in place of the base model's, for embed_tokens, lm_head and the norms.

PEFT saves them under the module's own name. A matrix of the embedding or the head under that name that
modules_to_save does not ask for is a copy of the base (`save_embedding_layers`), as a rule of a grown vocabulary.
Where it saves both, the copies lie beside it as `original_module` and `modules_to_save`, and loading skips these.
"""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format import values
from shared.adapter_format.bound import FINAL_NORM, NormBinding, RowsBinding
from shared.adapter_format.draft import Draft
from shared.adapter_format.kinds.embeddings import bind_base_rows
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import EMBED, HEAD, Site, linear_site
from shared.adapter_format.names import FINAL_NORM as FINAL_NORM_SITE
from shared.adapter_format.reasons import TRAIN_WITHOUT, key_invalid, tensor_unsupported
from shared.adapter_format.values import Field, used
from shared.base_model import MODULES

KEY = "modules_to_save"
LINEARS_ADVICE = (
    "fully trained linears are not served; train LoRA on them, or merge the adapter into the base model and register "
    "that as a base model"
)
_WEIGHT = "weight"
_REPEATED = ("modules_to_save.weight", "original_module.weight")


def _read(key: str, value: Any) -> tuple[str, ...]:
    return tuple(name for name in values.names(key, value or None) if name)


FIELDS: Mapping[str, Field] = {KEY: used(None, _read), "ensure_weight_tying": used(False, values.flag)}


def check(config: LoraConfig) -> None:
    """The config alone does not tell."""


def is_saved(draft: Draft, site: Site) -> bool:
    """Whether PEFT saves all of the module at `site`; with ensure_weight_tying also the one that is tied to it."""

    def named(site: Site) -> bool:
        name = draft.names.module(site)
        parents = [name[:end] for end, char in enumerate(name) if char == "."]
        return any(module.endswith(draft.config.modules_to_save) for module in (name, *parents))

    if site in (EMBED, HEAD) and draft.is_tied and draft.config.ensure_weight_tying:
        return named(EMBED) or named(HEAD)
    return named(site)


def bind(draft: Draft) -> None:
    """Bind matrices and norms. Saved linears are refused, also where the file lacks them."""
    for layer in range(draft.model.num_layers):
        for module in range(len(MODULES)):
            if is_saved(draft, site := linear_site(layer, module)):
                raise tensor_unsupported(draft.names.tensor(site, _WEIGHT), KEY, LINEARS_ADVICE)
    copies: dict[Site, str | None] = {EMBED: None, HEAD: None}
    for site in (EMBED, HEAD):
        if site == HEAD and not draft.names.head and HEAD not in draft.names.found:
            continue  # a bare backbone
        if is_saved(draft, site):
            _check_alone(draft, site)
            tensor = draft.require(site, _WEIGHT, key=KEY)
            draft.check_shape(tensor, draft.vocab, draft.model.hidden_size)
            rows = RowsBinding(tensor, None, "modules_to_save")
            if site == EMBED:
                draft.embed = draft.embed._replace(rows=rows)
            else:
                draft.head = draft.head._replace(rows=rows)
            draft.leave_unread(site, *_REPEATED)
        elif (draft.embed if site == EMBED else draft.head).a is None:
            copies[site] = draft.take(site, _WEIGHT)
    bind_base_rows(draft, copies[EMBED], copies[HEAD])
    for layer in range(draft.model.num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            _bind_norm(draft, Site(layer, norm), draft.model.hidden_size)
        if draft.model.qk_norm:
            for norm in ("q_norm", "k_norm"):
                _bind_norm(draft, Site(layer, norm), draft.model.head_dim)
    _bind_norm(draft, FINAL_NORM_SITE, draft.model.hidden_size)


def _check_alone(draft: Draft, site: Site) -> None:
    """PEFT wraps a saved module once more where its rows are trained too, and then cannot run it."""
    if any(role.startswith("token_adapter.") for role in draft.names.found.get(site, ())):
        name = draft.names.module(site)
        raise key_invalid(KEY, f"cannot be used on {name} with trainable_token_indices", TRAIN_WITHOUT)


def _bind_norm(draft: Draft, site: Site, size: int) -> None:
    if is_saved(draft, site):
        tensor = draft.require(site, _WEIGHT, key=KEY)
        draft.check_shape(tensor, size)
        layer = FINAL_NORM if site == FINAL_NORM_SITE else site.layer
        draft.norms.append(NormBinding(layer, site.part, tensor))  # type: ignore[arg-type] # one of the norms above
