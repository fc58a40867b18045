"""The registry's settings. `shared.config.load` reads them from TOML, `LORAPLEX_REGISTRY_…` variables and flags."""

from dataclasses import dataclass, field
from typing import Literal

from registry_service.auto_registration import NamespaceSettings
from registry_service.database import DEFAULT_URL
from registry_service.quotas import is_quota
from shared.auth.settings import AccessSettings
from shared.config import is_address, is_tcp_address
from shared.errors import InvalidArgument
from shared.limits import LimitSettings
from shared.ranges import between, is_positive
from shared.references import check_id
from shared.sources.credentials import Credential
from shared.sources.settings import ALLOWED_ENDPOINTS, ALLOWED_SOURCES, CREDENTIALS
from shared.tracing import OTLP_ENDPOINT

ENV_PREFIX = "LORAPLEX_REGISTRY_"
LogLevel = Literal["debug", "info", "warning", "error"]


def _is_database(url: str) -> str | None:
    path = url.removeprefix("sqlite:///")
    if path != url and path and ":memory:" not in path and "?" not in path:
        return None
    return None if url.startswith("postgresql://") else "sqlite:///PATH or postgresql://USER@HOST/DATABASE"


def _is_postgres(url: str) -> str | None:
    return None if not url or url.startswith("postgresql://") else "postgresql://USER@HOST/DATABASE"


def _are_roots(roots: dict[str, str]) -> str | None:
    for name in roots:
        try:
            check_id(name, "name")
        except InvalidArgument:
            return f"names like those of adapters for file roots, not {name!r}"
    return None


def _is_address_or_off(address: str) -> str | None:
    return None if address == "" else is_tcp_address(address)


@dataclass(frozen=True)
class RegistryConfig(AccessSettings, LimitSettings):
    """One registry process."""

    listen: str = field(
        default="127.0.0.1:50051",
        metadata={"help": "Address for gRPC, HOST:PORT; port 0 is any.", "check": is_address},
    )
    database: str = field(
        default=DEFAULT_URL,
        metadata={"help": "sqlite:///PATH or postgresql://USER@HOST/DATABASE.", "check": _is_database},
    )
    file_roots: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "flag": "--file-root",
            "help": "A folder that sources file://NAME/… may lie in; repeatable.",
            "check": _are_roots,
        },
    )
    credentials: dict[str, Credential] = field(default_factory=dict, metadata=CREDENTIALS)
    allowed_sources: tuple[str, ...] = field(default=(), metadata=ALLOWED_SOURCES)
    allowed_endpoints: tuple[str, ...] = field(default=(), metadata=ALLOWED_ENDPOINTS)
    max_adapter_bytes: int = field(
        default=2 << 30, metadata={"help": "Largest weights file that may be registered.", "check": between(1, 1 << 60)}
    )
    max_config_bytes: int = field(
        default=1 << 20, metadata={"help": "Largest adapter_config.json.", "check": between(1, 1 << 30)}
    )
    registration_seconds: float = field(
        default=600.0, metadata={"help": "After this a registration is given up.", "check": is_positive}
    )
    namespaces: dict[str, NamespaceSettings] = field(
        default_factory=dict, metadata={"help": "What is special about namespaces, by name."}
    )
    namespace_max_adapters: int = field(
        default=0, metadata={"help": "Adapters that a namespace may hold; 0: any number.", "check": is_quota}
    )
    namespace_max_versions: int = field(
        default=0, metadata={"help": "Versions that a namespace may hold; 0: any number.", "check": is_quota}
    )
    namespace_max_bytes: int = field(
        default=0, metadata={"help": "Bytes of all versions of a namespace; 0: any number.", "check": is_quota}
    )
    resolve_ttl_seconds: float = field(
        default=10.0,
        metadata={"help": "How long a resolution may be used without asking again.", "check": is_positive},
    )
    listen_url: str = field(
        default="",
        metadata={
            "help": "postgresql://… past any pooler, to hear of other registries' changes at once; without, they are "
            "polled for.",
            "check": _is_postgres,
        },
    )
    poll_seconds: float = field(
        default=0.25,
        metadata={"help": "How often to look for changes of other registries.", "check": is_positive},
    )
    log_keep_seconds: float = field(
        default=86_400.0,
        metadata={"help": "A watch that was away for longer begins anew.", "check": is_positive},
    )
    log_keep_changes: int = field(
        default=100_000,
        metadata={"help": "A watch that missed more changes begins anew.", "check": is_positive},
    )
    cached_adapters: int = field(
        default=20_000,
        metadata={"help": "Adapters that are resolved from memory, about 10 kB each.", "check": is_positive},
    )
    deleted_keep_seconds: float = field(
        default=30 * 86_400.0,
        metadata={"help": "How long what was deleted can be seen and undeleted.", "check": is_positive},
    )
    replica_lease_seconds: float = field(
        default=15.0,
        metadata={"help": "A replica that does not report for so long counts as gone.", "check": is_positive},
    )
    drain_grace: float = field(
        default=20.0, metadata={"help": "How long running calls may take after SIGTERM.", "check": is_positive}
    )
    metrics_listen: str = field(
        default="",
        metadata={"help": "Address of Prometheus metrics (GET /metrics); empty: none.", "check": _is_address_or_off},
    )
    otlp_endpoint: str = field(default="", metadata=OTLP_ENDPOINT)
    log_level: LogLevel = field(default="info", metadata={"help": "Least severe records to log."})
