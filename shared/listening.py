"""Whether addresses can be listened on, asked before gRPC is: it would write a line of its own about a taken port."""

import errno
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shared.errors import InvalidArgument

_FATAL = (errno.EADDRINUSE, errno.EACCES)
_ANY_HOST = ("0.0.0.0", "::")
_Address = tuple[int, tuple[Any, ...]]  # family, and address of it


def check_ports(addresses: Mapping[str, str], sharing: Collection[str] = ()) -> None:
    """`check_listen` of every address that a service is to have, before it begins anything.

    Args:
        addresses: By their settings; empty ones are not wanted.
        sharing: Settings whose port several processes of the service share.

    Raises:
        InvalidArgument: an address is taken, not ours, or that of another setting.
    """
    known: dict[str, list[_Address]] = {}
    for setting, listen in addresses.items():
        if not listen:
            continue
        check_listen(listen, reuse_port=setting in sharing, setting=setting)
        found = _resolved(listen, setting)
        for other, others in known.items():
            if any(_overlap(one, another) for one in found for another in others):
                raise InvalidArgument.of(setting, f"cannot listen on {listen}: {other} has that port")
        known[setting] = found


def check_listen(listen: str, *, reuse_port: bool = False, setting: str = "listen") -> None:
    """Bind `listen` ("host:port" or "unix:path"), the value of `setting`, and let it go. May block for a name look-up.

    Raises:
        InvalidArgument: a port is taken or not allowed, or no address of the host is this machine's.
    """
    found = _resolved(listen, setting)
    failures = list(_failures(found, reuse_port))
    fatal = next((error for error in failures if error.errno in _FATAL), None)
    if fatal is None and found and len(failures) == len(found):
        fatal = failures[0]
    if fatal is not None:
        raise refused(setting, listen, fatal)


def _resolved(listen: str, setting: str) -> list[_Address]:
    """What is bound for `listen`; of a "unix:path" nothing is."""
    if listen.startswith("unix:"):
        return []
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        raise refused(setting, listen, error) from None
    return [(family, address) for family, _, _, _, address in found]


def _overlap(one: _Address, another: _Address) -> bool:
    """Whether two sockets cannot both have their address. Port 0 is another one each time."""
    (family, (host, port, *_)), (other_family, (other_host, other_port, *_)) = one, another
    is_same_host = host == other_host or not {host, other_host}.isdisjoint(_ANY_HOST)
    return family == other_family and port == other_port != 0 and is_same_host


def _failures(addresses: list[_Address], reuse_port: bool) -> Iterator[OSError]:
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


def refused(setting: str, listen: str, error: OSError | ValueError) -> InvalidArgument:
    """What to say of an address, the value of `setting`, that could not be bound."""
    reason = error.strerror if isinstance(error, OSError) else "the port must be a number"
    return InvalidArgument.of(setting, f"cannot listen on {listen}: {str(reason).lower()}")
