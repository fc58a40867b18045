"""What the adapter process is told at its start, as one line of JSON on its standard input."""

from typing import Literal

import msgspec

from shared.channel import NOBODY, ClientIdentity
from shared.sources.credentials import Credential

Dtype = Literal["float32", "float16", "bfloat16"]


class AdapterProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the adapter process.

    `registry`: host:port. `registry_identity`: how the replica shows the registry who it is.
    `base_model`: the id under which the replica serves. `model_folder`: holds config.json.
    `weights_fingerprint`: of the base model's weights, told to the registry; empty if it is not known. `has_weights`:
    whether the replica serves the weights in `model_folder`, and not random ones.
    `dtype`: of packed adapters. `disk_bytes`: budget of `cache_dir`. `device_bytes`: of the engine's arena, if that is
    set. `file_roots`: name → folder.
    `credentials`, `allowed_sources`, `allowed_endpoints`: see `shared.sources.policy.SourcePolicy`.
    `replica`: the name under which the replica reports; empty: it does not.
    `otlp_endpoint`: see `shared.tracing.start_tracing`.
    `max_stale`: seconds for which an answer of the registry serves while the registry is unreachable.
    """

    registry: str
    registry_identity: ClientIdentity = NOBODY
    base_model: str
    model_folder: str
    weights_fingerprint: str = ""
    has_weights: bool = True
    dtype: Dtype
    cache_dir: str
    disk_bytes: int
    device_bytes: int = 0
    file_roots: dict[str, str] = {}
    credentials: dict[str, Credential] = {}
    allowed_sources: tuple[str, ...] = ()
    allowed_endpoints: tuple[str, ...] = ()
    max_stale: float = 3600.0
    replica: str = ""
    log_level: str = "info"
    otlp_endpoint: str = ""


class AdapterProcessStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line on standard input.

    `host_arena_fd`: an inherited memfd (`host_arena.create_host_arena`); its size is the budget of the host tier.
    `engine_address`: where the engine answers calls; empty: residency is not looked after.
    `wait_for_engine`: set when the process replaces one that died while the engine lived: nothing is written to the
    arena, which the engine may still be reading, until the engine has said `EngineStarted`.
    """

    config: AdapterProcessConfig
    address: str
    host_arena_fd: int
    wait_for_engine: bool = False
    engine_address: str = ""
