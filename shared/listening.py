"""Whether an address can be listened on, asked before gRPC is: it would write a line of its own about a taken port."""

import errno
import socket
from collections.abc import Iterator

from shared.errors import InvalidArgument

_FATAL = (errno.EADDRINUSE, errno.EACCES)


def check_listen(listen: str, *, reuse_port: bool = False, setting: str = "listen") -> None:
    """Bind `listen` ("host:port" or "unix:path"), the value of `setting`, and let it go. May block for a name look-up.

    Raises:
        InvalidArgument: a port is taken or not allowed, or no address of the host is this machine's.
    """
    if listen.startswith("unix:"):
        return
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        raise _refused(setting, listen, error) from None
    failures = list(_failures([(family, address) for family, _, _, _, address in found], reuse_port))
    fatal = next((error for error in failures if error.errno in _FATAL), None)
    if fatal is None and len(failures) == len(found):
        fatal = failures[0]
    if fatal is not None:
        raise _refused(setting, listen, fatal)


def _failures(addresses: list[tuple[int, tuple[object, ...]]], reuse_port: bool) -> Iterator[OSError]:
    """Why addresses cannot be bound; one of a family that this machine lacks does not matter beside another."""
    for family, address in addresses:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if reuse_port:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            yield error


def _refused(setting: str, listen: str, error: OSError | ValueError) -> InvalidArgument:
    reason = error.strerror if isinstance(error, OSError) else "the port must be a number"
    return InvalidArgument.of(setting, f"cannot listen on {listen}: {str(reason).lower()}")
