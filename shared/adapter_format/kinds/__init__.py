"""One file for each kind of adapter beyond LoRA on the layers' linears.

A kind names the fields of adapter_config.json that it answers for, says which of their values contradict others, and
takes its tensors out of a draft into the binding. A new option of PEFT is a new file here, a line in `KINDS` and the
fields it needs in `LoraConfig`.
"""

from collections.abc import Mapping
from typing import Protocol

from shared.adapter_format.draft import Draft
from shared.adapter_format.kinds import (
    activated,
    added_vocabulary,
    biases,
    block_diagonal,
    dora,
    embeddings,
    experts,
    initialisation,
    qalora,
    saved_modules,
    trainable_tokens,
    velora,
)
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.values import Field


class Kind(Protocol):
    """What each module here has."""

    FIELDS: Mapping[str, Field]

    def check(self, config: LoraConfig, /) -> None:
        """Raises AdapterInvalid or UnsupportedAdapter for what `config` alone shows to be wrong."""

    def bind(self, draft: Draft, /) -> None:
        """Take the kind's tensors into the binding. Raises as `check`."""


# In the order in which they bind: added_vocabulary and activated judge what the others bound.
KINDS: tuple[Kind, ...] = (
    initialisation,
    qalora,
    block_diagonal,
    velora,
    experts,
    embeddings,
    saved_modules,
    trainable_tokens,
    dora,
    biases,
    added_vocabulary,
    activated,
)
