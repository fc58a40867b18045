"""How a client is told where servers are: HOST:PORT, or another of gRPC's targets. One rule for all clients of ours."""

import ipaddress
import re
from collections.abc import Callable
from typing import Any

# What follows their colon is checked; these are passed on to gRPC as they are written.
_FAMILIES: dict[str, Callable[[str], Any]] = {"ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address}
_NAMED = ("unix-abstract", "vsock", "xds", "google-c2p")
SCHEMES = ("dns", *_FAMILIES, "unix", *_NAMED)

_ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+(?:%\w+)?\]):([0-9]{1,5})")
_AUTHORITY = re.compile(r"//[^/\s]*/")  # of the DNS server to ask
_EXPECTED = f"HOST:PORT, such as localhost:50051, or a gRPC target ({':, '.join(SCHEMES)}:)"


def is_target(text: str) -> str | None:
    """A `check` for where servers are. HOST:PORT and `dns:///HOST:PORT` mean all addresses of the name,
    `ipv4:IP:PORT,…` and `ipv6:[IP]:PORT,…` several servers without a name; `unix:PATH`, `xds:///NAME` and so on.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "dns":
        match = _AUTHORITY.match(rest)
        is_right = _is_host_port(rest[match.end() :] if match else rest)
    elif scheme in _FAMILIES:
        is_right = all(_is_literal(each, _FAMILIES[scheme]) for each in rest.split(","))
    elif scheme == "unix":
        is_right = bool(rest.strip("/")) and (rest.startswith("///") or not rest.startswith("//"))
    elif scheme in _NAMED:
        is_right = bool(rest.strip("/")) and not re.search(r"\s", rest)
    else:
        is_right = _is_host_port(text)
    if is_right:
        return None
    if scheme.lower() in ("http", "https", "grpc", "grpcs") and rest.startswith("//"):
        return f"{_EXPECTED}: leave {scheme}:// out; with a CA (`--ca`, `--registry-ca`) the connection is TLS"
    return _EXPECTED


def grpc_target(text: str) -> str:
    """What gRPC is given for `text`, which `is_target`: HOST:PORT is resolved by DNS."""
    return text if text.partition(":")[0] in SCHEMES else f"dns:///{text}"


def _is_host_port(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[2]) <= 65535


def _is_literal(text: str, family: Callable[[str], Any]) -> bool:
    """Whether it is IP:PORT of this family."""
    if not _is_host_port(text):
        return False
    try:
        family(text.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True
