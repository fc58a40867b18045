"""What the engine and the adapter process say of themselves when they are asked (`GetStats`). Counts since their start.

Counters only grow for the life of a process; whoever adds them up across restarts notices when one falls.
"""

from bisect import bisect_left
from typing import Literal

import msgspec

Tier = Literal["gpu", "host", "disk", "source"]

# Upper bounds of the buckets of every histogram of seconds, the last one being without bound.
SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Seconds(msgspec.Struct):
    """A histogram of durations. `buckets[i]`: those at most SECONDS_BOUNDS[i] and above the bound before; not summed
    up. One bucket more than bounds. `longest`: of them all."""

    sum: float = 0.0
    count: int = 0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    longest: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """One more duration, or `count` of the same."""
        self.sum += seconds * count
        self.count += count
        self.buckets[bisect_left(SECONDS_BOUNDS, seconds)] += count
        self.longest = max(self.longest, seconds)

    def quantile(self, share: float) -> float:
        """About the duration that `share` of them do not exceed: as if each bucket were evenly filled, and ended with
        the longest of all; 0 of none.
        """
        left = share * self.count
        for index, count in enumerate(self.buckets):
            if count and left <= count:
                lower = SECONDS_BOUNDS[index - 1] if index else 0.0
                upper = min((*SECONDS_BOUNDS[index : index + 1], self.longest))
                return lower + (upper - lower) * left / count
            left -= count
        return 0.0


class Usage(msgspec.Struct, frozen=True):
    """Of a resource that is handed out: blocks, bytes or slots."""

    used: int = 0
    total: int = 0


class TokenCounts(msgspec.Struct):
    """Tokens served: prompts of admitted requests, and answers."""

    prompt: int = 0
    generated: int = 0


class LoadInFlight(msgspec.Struct, frozen=True):
    """A load that has not ended. `phase`: RESOLVING, FETCHING, PACKING in the adapter process; ACQUIRING, PLACING,
    COPYING in the engine. `progress`: of the phase, 0 to 1. `seconds`: since the load began.

    `bytes_done` of `bytes_total` have been fetched, packed or copied; both 0 where there is no saying.
    """

    digest: str
    phase: str
    progress: float = 0.0
    seconds: float = 0.0
    bytes_done: int = 0
    bytes_total: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine process.

    Attributes:
        num_running: Sequences in steps.
        num_waiting: Sequences in the queue.
        num_waiting_for_adapter: Those of them whose adapter is not READY.
        requests_running: Requests that have been admitted, by adapter digest; "" is the base model.
        requests_waiting: Likewise those that have not.
        kv_blocks: Of the KV cache, `block_size` tokens each; those kept only for the prefix cache are not used.
        arena: Bytes of the adapter arena.
        arena_pinned_bytes: Of pinned adapters.
        arena_free_in_gaps: Free bytes outside the largest gap: what compaction is for.
        slots: Adapters resident at once.
        prefix_tokens_queried, prefix_tokens_hit: Prompt tokens looked for in the prefix cache, and found.
        num_preemptions: Of sequences.
        tokens: Served in all.
        tokens_by_adapter: By digest; "" is the base model. The most recently served adapters only.
        hits: Requests for an adapter by the tier that held it when they arrived.
        load_seconds: Of loads to the device, by phase: `prepare` in the adapter process, for the request that began the
            load, `acquire` until the blob is in host memory, `place` until there is room on the device, `copy` until it
            is READY; `total` of these.
        evictions: Adapters that left the device, by reason: `bytes` or `slots` made room for another, `unload`.
        needless_reloads: Loads of an adapter that was evicted while a request was waiting for it. 0, unless something
            is wrong.
        moves: Chunks moved within the arena, so that others fit; `moved_bytes` in all.
        loads_in_flight: Those that have not ended.
        load_failures: By reason.
        adapters_waiting: Digests that requests in the queue wait for, most urgent first.
        waited_longest: Seconds that the oldest of these requests has waited.
    """

    num_running: int
    num_waiting: int
    num_waiting_for_adapter: int
    requests_running: dict[str, int]
    requests_waiting: dict[str, int]
    kv_blocks: Usage
    block_size: int
    arena: Usage
    arena_pinned_bytes: int
    arena_free_in_gaps: int
    slots: Usage
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    num_preemptions: int
    tokens: TokenCounts
    tokens_by_adapter: dict[str, TokenCounts]
    hits: dict[Tier, int]
    load_seconds: dict[str, Seconds]
    evictions: dict[str, int]
    needless_reloads: int
    moves: int
    moved_bytes: int
    loads_in_flight: list[LoadInFlight]
    load_failures: dict[str, int]
    adapters_waiting: list[str]
    waited_longest: float


class AdapterStats(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter process.

    Attributes:
        host: Bytes of the host arena; `host_held_bytes` the engine refers to, or are being filled.
        host_adapters: Blobs in it.
        disk: Bytes of the disk cache; `disk_adapters` in it.
        loads_in_flight: Those on their way to host memory.
        load_seconds: By phase: `resolve` (the registry's answer, cached or not), `fetch` (files to the disk tier),
            `pack` (read, hashed, laid out in host memory).
        fetched_bytes: Downloaded.
        failures: Loads and resolutions that failed, by reason.
        evictions: By tier (`host`, `disk`) for room, of what had its place there.
        registry_revision: The highest that the registry has told; 0 before its first answer.
        registry_lag: Changes up to there that the watch has not told.
        registry_heard_at: When the watch last said that it is up to date, of the monotonic clock; None: it never has.
        base_model_conflict: Why no adapter is served: the registry has another base model of this id. Else empty.
    """

    host: Usage
    host_held_bytes: int
    host_adapters: int
    disk: Usage
    disk_adapters: int
    loads_in_flight: list[LoadInFlight]
    load_seconds: dict[str, Seconds]
    fetched_bytes: int
    failures: dict[str, int]
    evictions: dict[str, int]
    registry_revision: int
    registry_lag: int = 0
    registry_heard_at: float | None = None
    base_model_conflict: str = ""
