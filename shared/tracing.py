"""Whether a process traces and sends metrics to a collector, which costs nothing unless it does.

OpenTelemetry is imported by `shared.spans` and `shared.otlp_metrics` alone.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shared.errors import InvalidArgument

if TYPE_CHECKING:
    from shared.otlp_metrics import OtlpMetrics
    from shared.spans import Tracing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_METRICS_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
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
    if _is_off(env) or env.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return None
    if not endpoint and not any(env.get(name) for name in _ENDPOINTS):
        return None
    with _errors_of_settings():
        from shared.spans import Tracing

        return Tracing(endpoint, service, process)


def start_metrics(
    endpoint: str, service: str, process: str, env: Mapping[str, str] = os.environ
) -> "OtlpMetrics | None":
    """What this process sends metrics with; None unless OTEL_METRICS_EXPORTER is `otlp` and a collector is named.

    Many collectors take traces only, so that being named for these is not enough.

    Raises:
        InvalidArgument: as `start_tracing`.
    """
    if _is_off(env) or env.get("OTEL_METRICS_EXPORTER", "").lower() != "otlp":
        return None
    if not endpoint and not any(env.get(name) for name in _METRICS_ENDPOINTS):
        return None
    with _errors_of_settings():
        from shared.otlp_metrics import OtlpMetrics

        return OtlpMetrics(endpoint, service, process)


def _is_off(env: Mapping[str, str]) -> bool:
    return env.get("OTEL_SDK_DISABLED", "").lower() == "true"


@contextmanager
def _errors_of_settings() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _PACKAGE:
            raise
        raise InvalidArgument.of("otlp_endpoint", "needs more packages: pip install 'loraplex[tracing]'") from None
    except (ValueError, OSError) as error:  # of an OTEL_… variable
        raise InvalidArgument.of("otlp_endpoint", f"tracing cannot start: {error}") from error
