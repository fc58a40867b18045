"""LoRA on the linears of the layers, and that the modules with tensors are those that the config promises."""

from collections.abc import Mapping

from shared.adapter_format.bound import ModuleBinding
from shared.adapter_format.draft import Draft
from shared.adapter_format.kinds import block_diagonal, qalora
from shared.adapter_format.names import EMBED, HEAD, Site, linear_site
from shared.adapter_format.pair import rank_and_scale, take_pair
from shared.adapter_format.reasons import OTHER_BASE, key_invalid, tensor_invalid
from shared.adapter_format.targets import suffixes
from shared.base_model import MODULES, linear_shape, module_path
from shared.errors import AdapterInvalid

# PEFT's DUMMY_TARGET_MODULES, of an adapter that has none.
NO_TARGET = "dummy-target-modules"
_NOT_NAMED = (
    "set target_modules and exclude_modules as in training, or load the adapter with PEFT, which leaves the tensor "
    "out, and save it again"
)
_FIRST_ROLE = {EMBED: "lora_embedding_A"}


def bind_linears(draft: Draft) -> None:
    """Add every adapted linear to the draft, in order of (layer, module).

    Raises:
        AdapterInvalid, UnsupportedAdapter: a tensor is missing, not promised, or does not fit.
    """
    _check_promises(draft)
    for layer in range(draft.model.num_layers):
        for module in range(len(MODULES)):
            _bind(draft, layer, module)


def _bind(draft: Draft, layer: int, module: int) -> None:
    site = linear_site(layer, module)
    pair = take_pair(draft, site)
    if pair is None:
        return
    rows, columns = linear_shape(draft.model, module)
    qalora.check_width(draft, pair[0], columns)
    blocks = block_diagonal.blocks(draft.config, draft.names.module(site))
    rank, scale = rank_and_scale(draft, site, *pair, rows, columns, blocks)
    draft.modules.append(ModuleBinding(layer, module, module_path(layer, module), rank, scale, *pair, blocks))


def _check_promises(draft: Draft) -> None:
    sites = [linear_site(layer, module) for layer in range(draft.model.num_layers) for module in range(len(MODULES))]
    if draft.names.head or HEAD in draft.names.found:  # a bare backbone has no head
        sites.append(HEAD)
    places = {draft.names.module(site): site for site in [*sites, EMBED]}
    promised = {name for name, site in places.items() if _is_promised(draft, site)}
    if not promised and draft.targets.names != NO_TARGET:
        raise _no_target(draft, places)
    missing = [name for name in places if name in promised and not _has_lora(draft, places[name])]
    for name, site in places.items():
        if _has_lora(draft, site) and name not in promised:
            tensor = next(tensor for role, tensor in draft.names.found[site].items() if role.startswith("lora_"))
            raise tensor_invalid(tensor, "target_modules and the keys beside it do not name this module", _NOT_NAMED)
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        role = _FIRST_ROLE.get(places[missing[0]], "lora_A.weight")
        tensor = draft.names.tensor(places[missing[0]], role)
        raise tensor_invalid(tensor, f"is missing: target_modules promises {shown}", f"{OTHER_BASE}, or save it again")
    if not isinstance(draft.targets.names, str):
        known = {suffix for name in places for suffix in suffixes(name)}
        unknown = sorted(set(draft.targets.names) - known)
        draft.warnings += [
            f"target_modules names {name[:100]!r}, which this base model does not have" for name in unknown[:10]
        ]


def _no_target(draft: Draft, places: Mapping[str, Site]) -> AdapterInvalid:
    """PEFT cannot load such an adapter either (NoMatchingPeftModuleError)."""
    key = draft.targets.key_to_blame({name: _layer(site) for name, site in places.items()})
    if key == "target_modules":
        return key_invalid(key, "names no module of this base model", f"correct it, or {OTHER_BASE}")
    return key_invalid(key, "leaves none of the modules that target_modules names", "correct both as in training")


def _is_promised(draft: Draft, site: Site) -> bool:
    def named(site: Site) -> bool:
        return draft.targets.promises(draft.names.module(site), _layer(site))

    if site in (EMBED, HEAD) and draft.is_tied and draft.config.ensure_weight_tying:
        return named(EMBED) or named(HEAD)  # PEFT adapts both where one is named
    return named(site)


def _layer(site: Site) -> int | None:
    return site.layer if site.layer >= 0 else None


def _has_lora(draft: Draft, site: Site) -> bool:
    roles = draft.names.found.get(site, {})
    return any(role.startswith(("lora_A.", "lora_B.weight", "lora_embedding_")) for role in roles)
