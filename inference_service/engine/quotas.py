"""What one tenant may have at once, so that it leaves something to the others. Torch-free."""

from typing import NamedTuple

from shared.errors import TenantQuota


class TenantLimits(NamedTuple):
    """Per tenant; 0 is no limit.

    Attributes:
        max_queued: Sequences that may wait; more are refused.
        max_running: Sequences in steps; more wait.
        adapter_bytes: Of the adapter arena; more of its adapters wait until others of them are idle.
    """

    max_queued: int = 0
    max_running: int = 0
    adapter_bytes: int = 0

    def check_queued(self, num_waiting: int, count: int, retry_after: float) -> None:
        """Whether `count` more sequences may wait beside `num_waiting`. A request alone always may, whatever its n.

        Raises:
            TenantQuota: with the seconds after which to retry.
        """
        if self.max_queued and num_waiting and num_waiting + count > self.max_queued:
            raise TenantQuota(
                f"{num_waiting} sequences of this tenant are waiting, its limit is {self.max_queued}",
                metadata={"limit": "queued_requests", "value": str(self.max_queued)},
                retry_after=retry_after,
            )

    def may_run(self, num_running: int) -> bool:
        """Whether a tenant with `num_running` running sequences may have another."""
        return not self.max_running or num_running < self.max_running
