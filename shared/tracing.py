"""Whether a process traces, which costs nothing unless it does: OpenTelemetry is imported by `shared.spans` alone."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shared.errors import InvalidArgument

if TYPE_CHECKING:
    from shared.spans import Tracing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PACKAGE = "opentelemetry"


def _is_endpoint(url: str) -> str | None:
    parts = urlsplit(url)
    is_right = not url or (parts.scheme in ("http", "https") and parts.netloc and parts.path in ("", "/"))
    return None if is_right else "http://HOST:PORT or https://HOST:PORT"


# Metadata of the field `otlp_endpoint` of both services' settings.
OTLP_ENDPOINT: Mapping[str, Any] = {
    "help": "OpenTelemetry collector that traces go to, over gRPC: http://HOST:PORT; empty: none, unless "
    f"{' or '.join(_ENDPOINTS)} says where. Other OTEL_… variables count as well.",
    "check": _is_endpoint,
}


def start_tracing(endpoint: str, service: str, process: str, env: Mapping[str, str] = os.environ) -> "Tracing | None":
    """What this process traces with; None if it does not. `process`: which of the service's.

    Raises:
        InvalidArgument: a collector is named and the packages are not installed, or a variable is wrong.
    """
    if not _is_wanted(endpoint, env):
        return None
    try:
        from shared.spans import Tracing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _PACKAGE:
            raise
        raise InvalidArgument.of("otlp_endpoint", "needs more packages: pip install 'loraplex[tracing]'") from None
    try:
        return Tracing(endpoint, service, process)
    except (ValueError, OSError) as error:  # of an OTEL_… variable
        raise InvalidArgument.of("otlp_endpoint", f"tracing cannot start: {error}") from error


def _is_wanted(endpoint: str, env: Mapping[str, str]) -> bool:
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return False
    return bool(endpoint) or any(env.get(name) for name in _ENDPOINTS)
