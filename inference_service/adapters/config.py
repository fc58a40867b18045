"""What the adapter process is told at its start, as one line of JSON on its standard input."""

from typing import Literal

import msgspec

Dtype = Literal["float32", "float16", "bfloat16"]


class AdapterProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the adapter process.

    `registry`: host:port. `base_model`: the id under which the replica serves. `model_folder`: holds config.json and
    the weights. `dtype`: of packed adapters. `disk_bytes`: budget of `cache_dir`. `file_roots`: name → folder.
    `max_stale`: seconds for which an answer of the registry serves while the registry is unreachable.
    """

    registry: str
    base_model: str
    model_folder: str
    dtype: Dtype
    cache_dir: str
    disk_bytes: int
    file_roots: dict[str, str] = {}
    max_stale: float = 3600.0
    log_level: str = "info"


class AdapterProcessStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line on standard input.

    `host_arena_fd`: an inherited memfd (`host_arena.create_host_arena`); its size is the budget of the host tier.
    `wait_for_engine`: set when the process replaces one that died while the engine lived: nothing is written to the
    arena, which the engine may still be reading, until the engine has said `EngineStarted`.
    """

    config: AdapterProcessConfig
    address: str
    host_arena_fd: int
    wait_for_engine: bool = False
