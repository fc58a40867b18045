"""The settings of both services about how much a client, a connection and a tenant may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shared.ranges import Check, between, is_limit, is_positive
from shared.rates import Rate, TenantBuckets

NEVER_MS = (1 << 31) - 1  # gRPC's own "never"


def _setting(default: Any, description: str, check: Check) -> Any:
    return field(default=default, metadata={"help": description, "check": check})


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Of one process. What exceeds a limit is refused or cut with a typed error; a connection is just closed."""

    max_connections: int = _setting(
        1024, "connections of one process; more are closed as they come; 0: any number", is_limit
    )
    max_streams_per_connection: int = _setting(
        1024, "calls at once on one connection; its client keeps more back", is_positive
    )
    max_calls: int = _setting(4096, "calls at once of one process before QUEUE_FULL; 0: any number", is_limit)
    max_calls_per_tenant: int = _setting(
        2048, "calls at once of one tenant in one process before TENANT_QUOTA; 0: any number", is_limit
    )
    max_request_bytes: int = _setting(16 << 20, "bytes of a request", between(1 << 10, 1 << 30))
    max_metadata_bytes: int = _setting(
        8 << 10, "bytes of a call's metadata, tokens among it", between(1 << 10, 1 << 20)
    )
    handshake_seconds: float = _setting(20.0, "seconds that a new connection has for TLS and HTTP/2", is_positive)
    connection_idle_seconds: float = _setting(
        900.0, "a connection without a call for so long is closed; 0: it is not", is_limit
    )
    connection_age_seconds: float = _setting(
        3600.0, "a connection takes no more calls after so long, give or take a tenth; 0: it does", is_limit
    )
    connection_grace_seconds: float = _setting(
        3600.0, "seconds that its running calls have then; 0: as long as they take", is_limit
    )
    keepalive_seconds: float = _setting(60.0, "a silent connection is asked so often whether it is alive", is_positive)
    keepalive_timeout_seconds: float = _setting(20.0, "and closed if it does not answer for so long", is_positive)
    slow_client_seconds: float = _setting(
        60.0, "a stream whose client takes nothing for so long ends with CLIENT_TOO_SLOW; 0: it does not", is_limit
    )
    tenant_requests_per_second: float = _setting(
        0.0, "calls a second of one tenant in one process before RATE_LIMITED; 0: any number", is_limit
    )
    tenant_burst_seconds: float = _setting(10.0, "how many seconds of its rate a tenant may save up", is_positive)

    def limits(self) -> "LimitSettings":
        """These settings alone, of a service's configuration that has others as well."""
        return LimitSettings(**{about.name: getattr(self, about.name) for about in fields(LimitSettings)})

    def server_options(self) -> list[tuple[str, int]]:
        """What gRPC's core enforces by itself."""
        options = [
            ("grpc.max_concurrent_streams", self.max_streams_per_connection),
            ("grpc.max_receive_message_length", self.max_request_bytes),
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.server_handshake_timeout_ms", _milliseconds(self.handshake_seconds)),
            ("grpc.max_connection_idle_ms", _milliseconds(self.connection_idle_seconds)),
            ("grpc.max_connection_age_ms", _milliseconds(self.connection_age_seconds)),
            ("grpc.max_connection_age_grace_ms", _milliseconds(self.connection_grace_seconds)),
            ("grpc.keepalive_time_ms", _milliseconds(self.keepalive_seconds)),
            ("grpc.keepalive_timeout_ms", _milliseconds(self.keepalive_timeout_seconds)),
            ("grpc.http2.ping_timeout_ms", _milliseconds(self.keepalive_timeout_seconds)),  # behind proxies
        ]
        if self.max_connections:
            options.append(("grpc.max_allowed_incoming_connections", self.max_connections))
        return options

    def buckets(self, per_second: float, own: Mapping[str, float]) -> TenantBuckets:
        """Of tenants that may have `per_second` of something, or what `own` says of them; 0 is no limit."""
        rates = {tenant: rate for tenant, number in own.items() if (rate := self._rate(number)) is not None}
        return TenantBuckets(self._rate(per_second), rates)

    def _rate(self, per_second: float) -> Rate | None:
        return Rate(per_second, max(1.0, per_second * self.tenant_burst_seconds)) if per_second else None


def _milliseconds(seconds: float) -> int:
    return min(NEVER_MS, max(1, int(seconds * 1e3))) if seconds else NEVER_MS


USUAL_LIMITS = LimitSettings()
