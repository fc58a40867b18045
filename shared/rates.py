"""How often something may be done: token buckets, one a tenant. Plain arithmetic; time is an argument, in seconds."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

FORGET_EVERY = 256  # new buckets: how often those that a new one would equal are looked for


class Rate(NamedTuple):
    """`per_second` in the long run; `burst`, which is 1 or more, at once after a pause."""

    per_second: float
    burst: float


class TokenBucket:
    """Fills up to the rate's burst. It is open while it holds a whole unit, and what is taken may leave it in debt:
    how much work a request makes is known only when it is done. Then it is closed until the debt is paid.

    In any time t no more is let in than burst + t · rate, beyond the size of the last that was.
    """

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self._level = rate.burst
        self._at = now

    def level(self, now: float) -> float:
        """What it holds. Time that goes backwards adds nothing."""
        return min(self.rate.burst, self._level + max(0.0, now - self._at) * self.rate.per_second)

    def wait(self, now: float) -> float:
        """Seconds until it is open; 0 if it is."""
        return max(0.0, (1.0 - self.level(now)) / self.rate.per_second)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, whether or not it is there."""
        self._level = self.level(now) - amount
        self._at = max(self._at, now)


class TenantBuckets:
    """A bucket for each tenant: of its `own` rate, or else of the `usual` one, if there is any."""

    def __init__(self, usual: Rate | None = None, own: Mapping[str, Rate] = MappingProxyType({})) -> None:
        self._usual = usual
        self._own = dict(own)
        self._buckets: dict[str, TokenBucket] = {}

    def wait(self, tenant: str, now: float) -> float:
        """Seconds after which the tenant may go on; 0 for at once."""
        bucket = self._buckets.get(tenant)
        return bucket.wait(now) if bucket is not None else 0.0

    def take(self, tenant: str, amount: float, now: float) -> None:
        """The tenant has used `amount`."""
        bucket = self._buckets.get(tenant) or self._opened(tenant, now)
        if bucket is not None:
            bucket.take(amount, now)

    @property
    def num_buckets(self) -> int:
        """Tenants that are remembered."""
        return len(self._buckets)

    def _opened(self, tenant: str, now: float) -> TokenBucket | None:
        rate = self._own.get(tenant, self._usual)
        if rate is None:
            return None
        if len(self._buckets) % FORGET_EVERY == FORGET_EVERY - 1:
            self._buckets = {name: b for name, b in self._buckets.items() if b.level(now) < b.rate.burst}
        bucket = self._buckets[tenant] = TokenBucket(rate, now)
        return bucket
