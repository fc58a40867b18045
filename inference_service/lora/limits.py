"""What could never be placed, or only after others were unloaded, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import AdapterMemory, TenantQuota


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Of a slot table. `retry_after`: seconds to wait when pins are in the way. `owner_bytes`: of the adapters of one
    owner; 0 for all there are."""

    num_slots: int
    arena_bytes: int
    retry_after: float
    owner_bytes: int

    def check_possible(self, needed: int, pinned: Sequence[int]) -> None:
        """Whether `needed` bytes and a slot can be had beside adapters that take `pinned` bytes each.

        Raises:
            AdapterMemory: no; with `retry_after` if it could when some of these were unloaded.
        """
        facts = {"bytes_needed": str(needed), "arena_bytes": str(self.arena_bytes)}
        if needed > self.arena_bytes:
            raise AdapterMemory(
                f"the adapter takes {needed} bytes of device memory and the adapter arena has {self.arena_bytes}; "
                "enlarge it with --adapter-memory",
                metadata=facts,
            )
        if len(pinned) == self.num_slots:
            raise AdapterMemory(
                f"pinned adapters take all {self.num_slots} slots; unload one, or raise --max-adapters",
                metadata={"slots": str(self.num_slots)},
                retry_after=self.retry_after,
            )
        if needed > self.arena_bytes - sum(pinned):
            raise AdapterMemory(
                f"pinned adapters leave no room for {needed} bytes in the adapter arena of {self.arena_bytes}; "
                "unload one, or enlarge the arena with --adapter-memory",
                metadata=facts,
                retry_after=self.retry_after,
            )

    def check_owner(self, needed: int, owner: str) -> None:
        """Whether an owner, if there is one, may have an adapter of `needed` bytes at all.

        Raises:
            TenantQuota: no.
        """
        if owner and 0 < self.owner_bytes < needed:
            raise TenantQuota(
                f"the adapter takes {needed} bytes of device memory, and a tenant's adapters may take "
                f"{self.owner_bytes}; raise --adapter-memory-per-tenant",
                metadata={"limit": "adapter_bytes", "value": str(self.owner_bytes), "bytes_needed": str(needed)},
            )
