"""LoraConfig + tensors of the file + base model → what acts where, at what rank and scale."""

from collections.abc import Mapping

from shared.adapter_format.bound import BindingPlan, EmbedBinding, HeadBinding, ModuleBinding
from shared.adapter_format.draft import Draft
from shared.adapter_format.header import TensorInfo
from shared.adapter_format.kinds import KINDS
from shared.adapter_format.kinds.added_vocabulary import measure
from shared.adapter_format.linears import bind_linears
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import AdapterNames, read_names
from shared.adapter_format.overrides import Overrides
from shared.adapter_format.patterns import StepBudget
from shared.adapter_format.reasons import SAVE_AGAIN, tensor_invalid
from shared.adapter_format.served import kinds_of
from shared.adapter_format.targets import Targets
from shared.adapter_format.unsupported import check_format, left_over
from shared.base_model import ModelConfig
from shared.errors import AdapterInvalid, LoraplexError, UnsupportedAdapter

__all__ = ["BindingPlan", "ModuleBinding", "plan"]


def plan(config: LoraConfig, tensors: Mapping[str, TensorInfo], model: ModelConfig) -> BindingPlan:
    """Bind every tensor of an adapter to the base model, or say why that cannot be done.

    Whether the engine serves the kinds of adapters that this finds is another question (`served.check_served`).

    Raises:
        AdapterInvalid: a tensor is left over, missing, of the wrong shape, dtype or rank (metadata `tensor`), or a
            key contradicts the tensors (metadata `key`).
        UnsupportedAdapter: something valid for PEFT that is never served.
    """
    check_format(tensors)
    names = read_names(tensors, model)
    if names.unknown:
        raise left_over(names.unknown[0])
    budget = StepBudget()
    found: list[BindingPlan] = []
    errors: list[LoraplexError] = []
    for reading in names.readings():
        try:
            found.append(_bound(config, tensors, model, reading, budget))
        except (AdapterInvalid, UnsupportedAdapter) as error:
            errors.append(error)
    if not found:
        raise next((error for error in errors if isinstance(error, UnsupportedAdapter)), errors[0])
    if any(other._replace(warnings=()) != found[0]._replace(warnings=()) for other in found[1:]):
        raise _ambiguous(names)
    return found[0]


def _ambiguous(names: AdapterNames) -> AdapterInvalid:
    shown = next(tensor for roles in names.found.values() for tensor in roles.values())
    return tensor_invalid(
        shown,
        "may be a bare backbone's or an old file's, and patterns of adapter_config.json mean something else on each",
        SAVE_AGAIN,
    )


def _bound(
    config: LoraConfig, tensors: Mapping[str, TensorInfo], model: ModelConfig, names: AdapterNames, budget: StepBudget
) -> BindingPlan:
    """The plan for one reading of the tensors' names."""
    draft = Draft(
        config=config,
        tensors=tensors,
        model=model,
        names=names,
        targets=Targets(config, budget),
        ranks=Overrides("rank_pattern", config.rank_pattern, config.r, budget),
        alphas=Overrides("alpha_pattern", config.alpha_pattern, config.lora_alpha, budget),
        vocab=measure(config, names, tensors, model),
    )
    bind_linears(draft)
    for kind in KINDS:
        kind.bind(draft)
    for roles in names.found.values():
        for role, tensor in roles.items():
            raise left_over(tensor, role)
    return _finished(draft)


def _finished(draft: Draft) -> BindingPlan:
    binding = BindingPlan(
        modules=tuple(draft.modules),
        rank=max((module.rank for module in draft.modules), default=0),
        num_tensors=len(draft.tensors),
        warnings=(*draft.warnings, *draft.ranks.warnings(), *draft.alphas.warnings()),
        vectors=tuple(draft.vectors),
        embed=draft.embed if draft.embed != EmbedBinding() else None,
        head=draft.head if draft.head != HeadBinding() else None,
        norms=tuple(draft.norms),
        extra_vocab=draft.vocab - draft.model.vocab_size,
        activation=draft.activation,
        unread=tuple(draft.unread),
    )
    return binding._replace(kinds=kinds_of(binding))
