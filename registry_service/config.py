"""The registry's settings. `shared.config.load` reads them from TOML, `LORAPLEX_REGISTRY_…` variables and flags."""

from dataclasses import dataclass, field
from typing import Literal

from shared.config import is_address
from shared.errors import InvalidArgument
from shared.references import check_id

ENV_PREFIX = "LORAPLEX_REGISTRY_"
LogLevel = Literal["debug", "info", "warning", "error"]


def _is_database(url: str) -> str | None:
    path = url.removeprefix("sqlite:///")
    if path != url and path and ":memory:" not in path and "?" not in path:
        return None
    return None if url.startswith("postgresql://") else "sqlite:///PATH or postgresql://USER@HOST/DATABASE"


def _are_roots(roots: dict[str, str]) -> str | None:
    for name in roots:
        try:
            check_id(name, "name")
        except InvalidArgument:
            return f"names like those of adapters for file roots, not {name!r}"
    return None


def _is_positive(value: float) -> str | None:
    return None if value > 0 else "a number above zero"


@dataclass(frozen=True)
class RegistryConfig:
    """One registry process."""

    listen: str = field(
        default="127.0.0.1:50051",
        metadata={"help": "Address for gRPC, HOST:PORT; port 0 is any.", "check": is_address},
    )
    database: str = field(
        default="sqlite:///var/registry.db",
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
    max_adapter_bytes: int = field(
        default=2 << 30, metadata={"help": "Largest weights file that may be registered.", "check": _is_positive}
    )
    max_config_bytes: int = field(
        default=1 << 20, metadata={"help": "Largest adapter_config.json.", "check": _is_positive}
    )
    registration_seconds: float = field(
        default=600.0, metadata={"help": "After this a registration is given up.", "check": _is_positive}
    )
    resolve_ttl_seconds: float = field(
        default=10.0,
        metadata={"help": "How long a resolution may be used without asking again.", "check": _is_positive},
    )
    drain_grace: float = field(
        default=20.0, metadata={"help": "How long running calls may take after SIGTERM.", "check": _is_positive}
    )
    log_level: LogLevel = field(default="info", metadata={"help": "Least severe records to log."})
