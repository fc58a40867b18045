"""What an adapter_config.json says, once it is read (`config.py`)."""

from dataclasses import dataclass
from typing import Literal

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class BlockDiagonal:
    """use_bdlora: lora_A of modules whose name contains one of `a` consists of `nblocks`, lora_B of those of `b`.

    `is_strict`: every adapted module must be one or the other.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    nblocks: int
    is_strict: bool


@dataclass(frozen=True)
class LoraConfig:
    """What adapter_config.json says of a LoRA. Patterns keep the order of the file, which counts.

    `target_modules`, `exclude_modules`: names, or one string that is a regular expression (or "all-linear").
    `layers_to_transform`: None for every layer.
    `trainable_token_indices`: token ids by the name of the module whose rows they replace; "" is the embedding.
    The keys that have defaults below belong to the kinds of adapters in `kinds/`.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    base_model_name_or_path: str | None
    peft_type: str = "LORA"
    init_lora_weights: bool | str = True
    loftq_config: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: Literal["none", "lora_only", "all"] = "none"
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ensure_weight_tying: bool = False
    alora_invocation_tokens: tuple[int, ...] = ()
    use_bdlora: BlockDiagonal | None = None
    use_qalora: bool = False
    qalora_group_size: int = 16
    velora_config: bool = False
    target_parameters: tuple[str, ...] = ()
