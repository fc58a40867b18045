"""QALoRA: A takes means over groups of the input. PEFT does so on GPTQ linears only, and elsewhere ignores the flag.

Whether it did shows in A's width: a plain LoRA is as wide as the input. An adapter of a quantised base model does not
fit the unquantised one that is served.
"""

from collections.abc import Mapping

from shared.adapter_format import values
from shared.adapter_format.draft import Draft
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.reasons import tensor_unsupported
from shared.adapter_format.values import Field, used

FIELDS: Mapping[str, Field] = {
    "use_qalora": used(False, values.flag),
    "qalora_group_size": used(16, values.count),
}


def check(config: LoraConfig) -> None:
    """The flag alone says nothing."""


def bind(draft: Draft) -> None:
    """No tensors of its own."""


def check_width(draft: Draft, a: str, columns: int) -> None:
    """Raises UnsupportedAdapter if A is as wide as the groups of an input of `columns`."""
    group, shape = draft.config.qalora_group_size, draft.tensors[a].shape
    if draft.config.use_qalora and group > 1 and len(shape) == 2 and shape[1] * group == columns:
        raise tensor_unsupported(
            a, "use_qalora", "it takes group means of the input of a GPTQ model; train on the unquantised base model"
        )
