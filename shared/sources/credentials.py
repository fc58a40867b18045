"""Credentials are names: what stands behind one is in the services' configuration, and nowhere else.

A secret is written as where to find it: `env:NAME` (a variable), `file:PATH` (a mounted secret) or `value:TEXT`. It is
read when it is used, so that a rotated one counts at once, and no `repr`, log or error repeats it.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from shared.errors import SourceUnavailable

DEFAULT, NONE = "default", "none"
EVERY_NAMESPACE = "*"
MAX_SECRET_BYTES = 64 << 10

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_PREFIX = re.compile(r"[a-z][a-z0-9+.-]*://\S*")
Setting = Literal["secret", "key_id", "session_token"]


def is_endpoint(url: str) -> str | None:
    """A `check` for the address of a server."""
    parts = urlsplit(url)
    is_right = (
        parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment or "@" in url)
    )
    return None if is_right else "a URL such as https://HOST:PORT"


def _is_secret(text: str) -> str | None:
    kind, _, rest = text.partition(":")
    is_right = bool(rest) if kind in ("env", "file", "value") else text in (DEFAULT, NONE)
    return None if is_right else "env:NAME, file:PATH, value:TEXT, default or none"


def _are_prefixes(prefixes: tuple[str, ...]) -> str | None:
    is_right = bool(prefixes) and all(_PREFIX.fullmatch(prefix) for prefix in prefixes)
    return None if is_right else "URI prefixes such as s3://bucket/folder/"


@dataclass(frozen=True)
class Credential:
    """One entry `[credentials.NAME]`. It serves sources of its scheme, namespaces and prefixes only.

    The scheme's library decides with `default` what it finds by itself (a role of the machine, its own variables), and
    with `none` asks anonymously.
    """

    scheme: str = field(
        metadata={
            "help": "scheme of the sources",
            "check": lambda text: None if _SCHEME.fullmatch(text) else "a scheme such as s3",
        }
    )
    secret: str = field(
        repr=False,
        metadata={"help": "token or secret access key", "check": _is_secret, "is_secret": True},
    )
    namespaces: tuple[str, ...] = field(
        metadata={
            "help": "who may use it; * is everybody",
            "check": lambda names: None if names else "names of namespaces, or *",
        }
    )
    prefixes: tuple[str, ...] = field(metadata={"help": "which URIs it may open", "check": _are_prefixes})
    endpoint: str = field(default="", metadata={"help": "server, where it is not the usual one", "check": is_endpoint})
    region: str = field(default="", metadata={"help": "region of the bucket"})
    key_id: str = field(
        default="", repr=False, metadata={"help": "access key id", "check": _is_secret, "is_secret": True}
    )
    session_token: str = field(
        default="", repr=False, metadata={"help": "session token", "check": _is_secret, "is_secret": True}
    )

    def serves(self, scheme: str, namespace: str) -> bool:
        """Whether sources of this scheme and namespace may use it; their URI must lie below a prefix as well."""
        return self.scheme == scheme and (namespace in self.namespaces or EVERY_NAMESPACE in self.namespaces)

    def reveal(self, setting: Setting = "secret") -> str:
        """The secret itself; empty where there is none.

        Raises:
            SourceUnavailable: the variable is not set or the file cannot be read, here and now.
        """
        text = getattr(self, setting)
        kind, _, rest = text.partition(":")
        match kind:
            case "value":
                return str(rest)
            case "env":
                if (found := os.environ.get(rest, "")) == "":
                    raise SourceUnavailable(f"the credential's {setting} is not here: variable {rest} is not set")
                return found
            case "file":
                return _read(Path(rest), setting)
        return ""


def _read(path: Path, setting: str) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_SECRET_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SourceUnavailable(f"the credential's {setting} is not here: {path} cannot be read: {problem}") from None
