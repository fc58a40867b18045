"""Loraplex for its users: the Python client, the command line and the generated gRPC stubs."""

from typing import TYPE_CHECKING, Any

from shared.errors import LoraplexError

if TYPE_CHECKING:
    from loraplex.client import Client, ClientIdentity

__all__ = ["Client", "ClientIdentity", "LoraplexError"]


def __getattr__(name: str) -> Any:
    """The client is imported when it is asked for: the command line sets gRPC's variables before gRPC is imported."""
    if name not in ("Client", "ClientIdentity"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from loraplex import client

    return getattr(client, name)
