"""Loraplex for its users: the Python client, the command line and the generated gRPC stubs."""

from loraplex.client import Client, ClientIdentity
from shared.errors import LoraplexError

__all__ = ["Client", "ClientIdentity", "LoraplexError"]
