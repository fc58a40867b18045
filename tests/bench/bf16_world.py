"""A base model in bfloat16 and adapters of it by PEFT, on disk: made where PEFT is, measured where a GPU is."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

BASES = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")  # of tests/kinds/bases.py
WIDE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.03,
}  # fmt: skip
MORE = ("rank 33", "rank 512", "patterns and rslora")
LEFT_OUT = {"older layouts"}  # the same numbers under other names
PLAIN = "plain"  # which every world has: step times are of it
_INDEX = "world.json"


class Adapter(NamedTuple):
    """One adapter. `asked`: tokens that its prompts must have: those that activate it, or that it adds."""

    case: str
    kind: str
    asked: list[int]
    extra_vocab: int

    def folder(self, world: Path) -> Path:
        return world / self.case


def cases_of(base: str) -> list[str]:
    """The first case of each kind that says something of its own in bfloat16, and a few of many roundings."""
    from tests.kinds.cases import CASES, default_cases

    chosen = {name for name in default_cases(base) if CASES[name].kind not in LEFT_OUT}
    return sorted(chosen | set(MORE), key=list(CASES).index)


def make(world: Path, base: str, names: Sequence[str] | None, sizes: dict[str, Any]) -> None:
    """Writes the base model `base` of `sizes`, and adapters of the cases `names`, or of `cases_of`. Needs PEFT."""
    from loraplex.convert.conversion import convert
    from tests.kinds.bases import VOCAB, build
    from tests.kinds.cases import CASES
    from tests.kinds.peft_answers import save_trained

    build(base, world / "base", torch.bfloat16, **sizes)
    adapters = []
    for name in dict.fromkeys([PLAIN, *(names or cases_of(base))]):
        case = CASES[name]
        asked = [*case.lora.get("alora_invocation_tokens", ()), *range(VOCAB, VOCAB + case.extra_vocab)]
        adapters.append(Adapter(name, case.kind, asked, case.extra_vocab))
        folder = adapters[-1].folder(world)
        save_trained(name, case, world / "base", folder, strength=0.04 if sizes else 0.15)
        if case.repaired:
            convert(folder.rename(world / f"{name} as trained"), world / "base", folder, lambda done, of: None)
    (world / _INDEX).write_text(json.dumps([adapter._asdict() for adapter in adapters]))


def read(world: Path) -> list[Adapter]:
    """What `make` wrote."""
    return [Adapter(**entry) for entry in json.loads((world / _INDEX).read_text())]
