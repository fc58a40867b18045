"""What could never be placed, or only after others were let go, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inference_service.lora.residents import Resident
from inference_service.types import PinOwner
from shared.errors import AdapterMemory, TenantQuota

PINNED_RETRY_SECONDS = 5.0  # nothing tells when somebody lets go: who can wait asks again so often


class _Pinning(NamedTuple):
    """What callers know a pin's owner as, and how its pin ends."""

    name: str
    end: str


_PINNING: dict[PinOwner, _Pinning] = {
    "operator": _Pinning("operator", "`loraplex adapter unload NAME` lets go of one that LoadAdapter pinned"),
    "registry": _Pinning(
        "residency", "`loraplex adapter update NAME --residency on-demand` lets go of one whose residency is pinned"
    ),
}


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Of a slot table. `owner_bytes`: of the adapters of one owner; 0 for all there are."""

    num_slots: int
    arena_bytes: int
    owner_bytes: int

    def check_possible(self, needed: int, pinned: Sequence[Resident]) -> None:
        """Whether `needed` bytes and a slot can be had beside the `pinned` adapters.

        Raises:
            AdapterMemory: no; with `retry_after` if it could once somebody lets go of what is pinned. Metadata says by
                whom it is (`pinned_by`).
        """
        facts = {"bytes_needed": str(needed), "arena_bytes": str(self.arena_bytes)}
        if needed > self.arena_bytes:
            raise AdapterMemory(
                f"the adapter takes {needed} bytes of device memory and the adapter arena has {self.arena_bytes}; "
                "enlarge it with --adapter-memory",
                metadata=facts,
            )
        pinning = [_PINNING[owner] for owner in sorted({owner for each in pinned for owner in each.pinned_by})]
        advice = f"{', '.join(by.end for by in pinning)} (`loraplex status` shows which)"
        facts["pinned_by"] = ",".join(by.name for by in pinning)
        if len(pinned) == self.num_slots:
            raise AdapterMemory(
                f"pinned adapters take all {self.num_slots} slots; {advice}, or raise --max-adapters",
                metadata={"slots": str(self.num_slots), "pinned_by": facts["pinned_by"]},
                retry_after=PINNED_RETRY_SECONDS,
            )
        if needed > self.arena_bytes - sum(resident.nbytes for resident in pinned):
            raise AdapterMemory(
                f"pinned adapters leave no room for {needed} bytes in the adapter arena of {self.arena_bytes}; "
                f"{advice}, or enlarge the arena with --adapter-memory",
                metadata=facts,
                retry_after=PINNED_RETRY_SECONDS,
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
