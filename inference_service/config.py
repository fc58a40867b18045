"""Everything that can be set about the inference service, and how memory sizes are written."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from inference_service.engine.event_queue import MAX_UNREAD
from inference_service.hang_watch import LEAST_TIMEOUT
from shared.auth.settings import AccessSettings
from shared.config import is_address, is_tcp_address
from shared.limits import LimitSettings
from shared.ranges import MOST, between, is_limit, is_positive
from shared.sources.credentials import Credential
from shared.sources.settings import ALLOWED_ENDPOINTS, ALLOWED_SOURCES, CREDENTIALS
from shared.targets import is_target
from shared.tracing import OTLP_ENDPOINT

ENV_PREFIX = "LORAPLEX_INFERENCE_"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_UNITS["ti"] = 1 << 40
_UNITS_TEXT = " (bytes, or with kB, MB, GB, TB, KiB, MiB, GiB, TiB)"
_LARGEST_SIZE = 1 << 60
_LEAST_ADAPTER_MEMORY = 1 << 20  # no adapter of any model is as small as that
_CACHE_DIR = Path("~/.cache/loraplex")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in `256MiB`, `2GB`, `1.5Gi` or `1048576`. Raises ValueError for anything else, and beyond 1 EiB."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (nbytes := float(match[1]) * _UNITS[(match[2] or "").lower()]) > _LARGEST_SIZE:
        raise ValueError(f"{text!r:.40} is not a size such as 256MiB")
    return int(nbytes)


def _bytes(text: str) -> int:
    """0 for what is no size."""
    try:
        return parse_size(text)
    except ValueError:
        return 0


def _is_size(text: str) -> str | None:
    return None if _bytes(text) > 0 else f"a size such as 256MiB{_UNITS_TEXT}"


def _is_adapter_memory(text: str) -> str | None:
    return None if _bytes(text) >= _LEAST_ADAPTER_MEMORY else f"a size such as 256MiB, of 1MiB or more{_UNITS_TEXT}"


def _is_hang_timeout(value: float) -> str | None:
    is_right = value == 0 or LEAST_TIMEOUT <= value <= MOST
    return None if is_right else f"0, or {LEAST_TIMEOUT:.0f} to {MOST} seconds"


def _is_share(value: float) -> str | None:
    return None if 0 < value <= 1 else "a number above 0, at most 1"


def _is_address_or_off(address: str) -> str | None:
    return None if address == "" else is_tcp_address(address)


def _is_replica_name(name: str) -> str | None:
    is_name = re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._:-]{0,126}[A-Za-z0-9])?", name)
    return None if is_name else "1 to 128 of A-Z a-z 0-9 . _ : -"


def _setting(default: Any, description: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": description, **metadata})


@dataclass(frozen=True)
class NamespaceRates:
    """One table `[namespaces.NAME]`: what the tenant may do a second instead of the usual."""

    requests_per_second: float = _setting(0.0, "calls; 0: tenant_requests_per_second", check=is_limit)
    tokens_per_second: float = _setting(0.0, "tokens; 0: tenant_tokens_per_second", check=is_limit)


@dataclass(frozen=True)
class InferenceConfig(AccessSettings, LimitSettings):
    """Settings of `loraplex serve`. None means: chosen by the model or the device."""

    model: str = field(metadata={"help": "folder or Hub id of the base model"})
    model_name: str | None = _setting(None, "id of the base model; by default its Hub id or folder name, lowercased")
    registry: str = _setting(
        "127.0.0.1:50051", "address of the registry: HOST:PORT, or a gRPC target of several", check=is_target
    )
    registry_token_file: str = _setting("", "file with the bearer token that this replica shows the registry")
    registry_ca: str = _setting(
        "", "PEM file of the CA of the registry's certificate, or `system`; with it the connection is TLS"
    )
    registry_cert: str = _setting("", "PEM file of the certificate that this replica shows the registry")
    registry_key: str = _setting("", "PEM file of its private key")
    listen: str = _setting("127.0.0.1:50052", "address to listen on", check=is_address)
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting("auto", "type of the model's weights")
    load_format: Literal["safetensors", "dummy"] = _setting(
        "safetensors", "where weights come from; dummy: random ones of the shape in config.json, for benchmarks"
    )
    dummy_seed: int = _setting(0, "seed of dummy weights", check=between(-(1 << 63), (1 << 63) - 1))
    file_roots: dict[str, str] = field(
        default_factory=dict,
        metadata={"flag": "--file-root", "help": "NAME=DIR that file:// adapters may lie under; repeatable"},
    )
    credentials: dict[str, Credential] = field(default_factory=dict, metadata=CREDENTIALS)
    allowed_sources: tuple[str, ...] = field(default=(), metadata=ALLOWED_SOURCES)
    allowed_endpoints: tuple[str, ...] = field(default=(), metadata=ALLOWED_ENDPOINTS)
    cache_dir: Path = field(default=_CACHE_DIR, metadata={"help": "folder of downloaded adapters"})
    kernel_cache_dir: Path | None = field(
        default=None, metadata={"help": "folder of compiled kernels; by default `kernels` in the cache folder"}
    )
    disk_bytes: str = _setting("20GiB", "size of the adapter cache on disk", check=_is_adapter_memory)
    host_memory: str = _setting("1GiB", "host memory for packed adapters", check=_is_adapter_memory)
    memory_fraction: float = _setting(
        0.9, "share of the GPU's memory to fill with weights, adapters, keys and values", check=_is_share
    )
    adapter_memory: str | None = _setting(None, "device memory for adapters", check=_is_adapter_memory)
    kv_cache_memory: str | None = _setting(None, "device memory for keys and values", check=_is_size)
    max_model_len: int | None = _setting(
        None,
        "tokens of prompt and output together, at most what the model and the KV cache take; by default 8192",
        check=is_positive,
    )
    max_num_seqs: int | None = _setting(None, "sequences in one step", check=between(1, 1 << 16))
    max_batched_tokens: int | None = _setting(None, "tokens computed in one step", check=between(1, 1 << 20))
    max_adapters: int = _setting(128, "adapters on the device at once", check=between(1, 1 << 16))
    max_queue: int = _setting(1024, "sequences that may wait before QUEUE_FULL", check=is_positive)
    max_queued_per_tenant: int = _setting(
        0, "sequences of one tenant that may wait before TENANT_QUOTA; 0: any number", check=is_limit
    )
    max_running_per_tenant: int = _setting(
        0, "sequences of one tenant in a step, others wait; 0: any number", check=is_limit
    )
    tenant_tokens_per_second: float = _setting(
        0.0,
        "tokens of prompts and answers a second of one tenant in one API process before RATE_LIMITED; 0: any number",
        check=is_limit,
    )
    namespaces: dict[str, NamespaceRates] = field(
        default_factory=dict, metadata={"help": "rates of tenants that have their own, by namespace"}
    )
    adapter_memory_per_tenant: str | None = _setting(
        None, "device memory for the adapters of one tenant; by default all there is", check=_is_adapter_memory
    )
    max_unread: int = _setting(
        MAX_UNREAD,
        "tokens and logprobs of a stream that may wait for its client before CLIENT_TOO_SLOW",
        check=is_positive,
    )
    adapter_age_limit: float = _setting(
        5.0, "seconds that an adapter is waited for before another makes room", check=is_positive
    )
    threads: int | None = _setting(None, "CPU threads of the engine", check=between(1, 1024))
    prefix_caching: bool = _setting(True, "reuse the keys and values of equal prefixes")
    api_processes: int = _setting(1, "processes that share the listening port", check=between(1, 256))
    metrics_listen: str = _setting(
        "127.0.0.1:50054", "address of Prometheus metrics (GET /metrics); empty: none", check=_is_address_or_off
    )
    otlp_endpoint: str = field(default="", metadata=OTLP_ENDPOINT)
    log_requests: bool = _setting(True, "log a line for each request that has ended: who, which adapter, tokens, times")
    log_prompts: bool = _setting(False, "have prompts and answers in these lines and in traces")
    drain_grace: float = _setting(30.0, "seconds that running streams have after SIGTERM", check=is_positive)
    max_stale: float = _setting(
        3600.0, "seconds that resolutions serve while the registry is unreachable", check=is_positive
    )
    replica_name: str | None = _setting(
        None, "name under which this replica reports to the registry; by default HOST:PORT", check=_is_replica_name
    )
    residency_wait: float = _setting(
        60.0,
        "seconds that readiness waits for adapters that are to be PRELOADed or PINNED; 0: it does not",
        check=is_limit,
    )
    hang_timeout: float | None = _setting(
        None,
        "seconds after which a process that is ready and answers nothing is killed and started again; 0: never; "
        "unset: 60 on a GPU, 300 on CPUs, whose steps may take long",
        check=_is_hang_timeout,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least severe level to log")


class ApiStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an API process is told when it starts, as a line of JSON. The last two addresses are ZeroMQ's."""

    listen: str
    reuse_port: bool
    model_folder: str
    model_id: str
    api_address: str
    adapter_address: str
    drain_grace: float
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    tenant_tokens_per_second: float = 0.0
    namespaces: dict[str, NamespaceRates] = {}
    residency_wait: float = 0.0
    max_unread: int = MAX_UNREAD
    log_level: str = "info"
    log_requests: bool = True
    log_prompts: bool = False
    otlp_endpoint: str = ""
