"""Which modules `target_modules`, `exclude_modules`, `layers_to_transform` and `layers_pattern` promise.

The rules are those of PEFT's `check_target_module_exists`, on module names as PEFT sees them.
"""

from collections.abc import Mapping

from shared.adapter_format.lora_config import ALL_LINEAR, LoraConfig
from shared.adapter_format.patterns import NamePattern, StepBudget

_LAYER_OF = r"(?:^|.*?\.){}\.\d+\."
_SAVED = r"(^|.*\.){}($|\..*)"


class Targets:
    """The target rules of one adapter, compiled once. Patterns are paid from `budget`."""

    def __init__(self, config: LoraConfig, budget: StepBudget) -> None:
        self.names = config.target_modules
        self.is_all_linear = isinstance(self.names, str) and self.names.lower() == ALL_LINEAR
        self._budget = budget
        self._target = _matcher(self.names, "target_modules")
        self._exclude = _matcher(config.exclude_modules, "exclude_modules")
        # PEFT takes modules_to_save as patterns here, and as ends of names where it wraps them.
        self._saved = [NamePattern(name, "modules_to_save", _SAVED, whole=False) for name in config.modules_to_save]
        self._layers = None if config.layers_to_transform is None else frozenset(config.layers_to_transform)
        self._layer_patterns = [
            NamePattern(pattern, "layers_pattern", _LAYER_OF, whole=False) for pattern in config.layers_pattern
        ]

    def promises(self, name: str, layer: int | None) -> bool:
        """Whether PEFT adapts the module `name`, which lies in `layer` (None: outside the layers)."""
        if self._matches(self._exclude, name) or any(saved.matches(name, self._budget) for saved in self._saved):
            return False
        if self.is_all_linear:
            return layer is not None
        if isinstance(self._target, frozenset) and name in self._target:
            return True  # named in full: layers_to_transform does not apply
        return self._matches(self._target, name) and self._is_in_layers(name, layer)

    def key_to_blame(self, layers: Mapping[str, int | None]) -> str:
        """The key that leaves none of these modules, whose layers are given and of which `promises` holds for none."""
        named = [
            name
            for name, layer in layers.items()
            if (layer is not None if self.is_all_linear else self._matches(self._target, name))
        ]
        if not named:
            return "target_modules"
        left = [name for name in named if not self._matches(self._exclude, name)]
        if not left:
            return "exclude_modules"
        if all(any(saved.matches(name, self._budget) for saved in self._saved) for name in left):
            return "modules_to_save"
        return "layers_to_transform"

    def _is_in_layers(self, name: str, layer: int | None) -> bool:
        if self._layers is None:
            return True
        if layer not in self._layers:
            return False
        if not self._layer_patterns:
            # PEFT looks for `.*?\.[^.]*\.(\d+)\.`, which finds nothing where `layers` is the first component.
            return not name.startswith("layers.")
        return any(pattern.matches(name, self._budget) for pattern in self._layer_patterns)

    def _matches(self, matcher: frozenset[str] | NamePattern, name: str) -> bool:
        if isinstance(matcher, NamePattern):
            return matcher.matches(name, self._budget)
        return not matcher.isdisjoint(suffixes(name))


def suffixes(name: str) -> list[str]:
    """`a.b.c` → [`a.b.c`, `b.c`, `c`]: what a name in a list may say to mean this module."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _matcher(names: tuple[str, ...] | str, key: str) -> frozenset[str] | NamePattern:
    if isinstance(names, tuple):
        return frozenset(names)
    return NamePattern(names, key) if names else frozenset()
