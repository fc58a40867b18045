"""How many calls a tenant has at once in this process, and how many it begins a second."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from shared.auth.caller import EVERY_NAMESPACE, Caller
from shared.errors import RateLimited, TenantQuota
from shared.rates import TenantBuckets

RETRY_AFTER_SECONDS = 1.0


class TenantCalls:
    """Counts calls by the caller's own namespace. Replicas are counted with nobody: they act for all tenants.

    Args:
        max_calls: Of one tenant at once; 0 for any number.
        rates: Of calls a second.
        clock: Seconds.
    """

    def __init__(
        self, max_calls: int = 0, rates: TenantBuckets | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_calls = max_calls
        self._rates = rates or TenantBuckets()
        self._clock = clock
        self._running: Counter[str] = Counter()

    def begin(self, caller: Caller, context: Any) -> None:
        """Counts a call until gRPC is done with it, which may be after its handler: a client may not read its end.

        Raises:
            RateLimited, TenantQuota: instead, with the seconds after which to retry.
        """
        if _is_replica(caller):
            return
        tenant, now = caller.namespace, self._clock()
        check_rate(self._rates, tenant, "requests_per_second", now)
        running = self._running[tenant]
        if 0 < self._max_calls <= running:
            raise TenantQuota(
                f"{running} calls of this tenant are under way here, its limit is {self._max_calls}",
                metadata={"limit": "calls", "value": str(self._max_calls)},
                retry_after=RETRY_AFTER_SECONDS,
            )
        self._rates.take(tenant, 1.0, now)
        self._running[tenant] += 1
        context.add_done_callback(lambda _: self._done(tenant))

    def _done(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]


def check_rate(rates: TenantBuckets, tenant: str, limit: str, now: float) -> None:
    """Returns if a tenant may go on; `limit` is what its rate is called.

    Raises:
        RateLimited: with the seconds after which it may.
    """
    seconds = rates.wait(tenant, now)
    if seconds > 0:
        message = f"this tenant has used up its {limit}; retry in {seconds:.3g} seconds"
        raise RateLimited(message, metadata={"limit": limit}, retry_after=seconds)


def _is_replica(caller: Caller) -> bool:
    return caller.credential != "none" and "replica" in caller.roles.get(EVERY_NAMESPACE, frozenset())
