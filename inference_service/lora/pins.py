"""Who wants which adapters to stay. Torch-free."""

from collections.abc import Set

from inference_service.types import PinOwner


class Pins:
    """Pins by digest, of operators and of the registry; they outlive failed loads. Nobody's pin ends another's."""

    def __init__(self) -> None:
        self._of: dict[PinOwner, set[str]] = {"operator": set(), "registry": set()}

    def __contains__(self, digest: str) -> bool:
        return any(digest in digests for digests in self._of.values())

    def owners(self, digest: str) -> tuple[PinOwner, ...]:
        """Whom it stays for."""
        return tuple(owner for owner, digests in self._of.items() if digest in digests)

    def add(self, digest: str, owner: PinOwner) -> None:
        """It is to stay."""
        self._of[owner].add(digest)

    def end(self, digest: str) -> None:
        """It need not stay for anybody."""
        for digests in self._of.values():
            digests.discard(digest)

    def keep(self, owner: PinOwner, digests: Set[str]) -> list[str]:
        """End the owner's pins but those of `digests`. Returns those that ended."""
        ended = self._of[owner] - digests
        self._of[owner] &= digests
        return list(ended)
