"""How many tokens a second tenants may have computed by this process."""

import time
from collections.abc import Callable

from shared.auth.tenant_calls import check_rate
from shared.rates import TenantBuckets

LIMIT = "tokens_per_second"


class TokenRates:
    """Prompts count when they are admitted, answers token by token.

    How long an answer gets is known only at its end, so that a tenant may get into debt by what it has running; it then
    starts nothing until the debt is paid.

    Args:
        buckets: Of tokens, by tenant.
        clock: Seconds.
    """

    def __init__(self, buckets: TenantBuckets | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = buckets or TenantBuckets()
        self._clock = clock

    def check(self, tenant: str) -> None:
        """Returns if the tenant may start a request. Raises RateLimited."""
        check_rate(self._buckets, tenant, LIMIT, self._clock())

    def admit(self, tenant: str, prompt_tokens: int) -> None:
        """Starts a request. Raises RateLimited: others of the tenant were started since `check`."""
        self.check(tenant)
        self.spend(tenant, prompt_tokens)

    def spend(self, tenant: str, tokens: int) -> None:
        """So many more were computed."""
        if tokens:
            self._buckets.take(tenant, tokens, self._clock())
