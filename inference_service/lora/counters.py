"""What the slot pool counts, and what it says of its memory."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from inference_service.stats import Seconds, Usage

LoadPhase = Literal["prepare", "acquire", "place", "copy", "total"]
LOAD_PHASES: tuple[LoadPhase, ...] = ("prepare", "acquire", "place", "copy", "total")


@dataclass
class LoadCounters:
    """Since the start. See `stats.EngineStats` for what each one means."""

    load_seconds: dict[str, Seconds] = field(default_factory=lambda: {phase: Seconds() for phase in LOAD_PHASES})
    evictions: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    needless_reloads: int = 0
    moves: int = 0
    moved_bytes: int = 0


class PoolMemory(NamedTuple):
    """How the arena and the slots are used. `free_in_gaps`: free bytes outside the largest gap."""

    arena: Usage
    pinned_bytes: int
    free_in_gaps: int
    slots: Usage
