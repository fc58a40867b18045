"""Names of adapters, versions, aliases and base models: how they are written, read and checked.

    reference      [NS/]ADAPTER[@N | @ALIAS | @sha256:HEX]   or any of the resource names of an adapter below
    adapter        namespaces/NS/adapters/ADAPTER
    version        namespaces/NS/adapters/ADAPTER/versions/N
    alias          namespaces/NS/adapters/ADAPTER/aliases/ALIAS
    base model     baseModels/ID

Ids are 1–63 of `a-z 0-9 . _ -`, with a letter or digit at both ends; `namespaces` is reserved. An alias is an id with
a letter in it, so that `@3` is always a version; `latest` is computed and cannot be set. Everything here raises
`InvalidArgument` naming the field it was given.
"""

import re
from typing import NamedTuple

from shared.digest import check_digest
from shared.errors import InvalidArgument

LATEST = "latest"
ALL_NAMESPACES = "-"
MAX_VERSION = (1 << 31) - 1

_ID = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_VERSION = re.compile(r"[1-9][0-9]{0,9}")
_DIGITS = re.compile(r"[0-9]+")


class Reference(NamedTuple):
    """What a caller asked for. At most one of version, alias and digest is set; none means the default alias."""

    namespace: str
    adapter: str
    version: int | None = None
    alias: str | None = None
    digest: str | None = None

    def canonical(self) -> str:
        """`NS/ADAPTER[@…]`, which `parse_reference` reads back to an equal reference."""
        suffix = self.version if self.version is not None else self.alias or self.digest
        return f"{self.namespace}/{self.adapter}" + ("" if suffix is None else f"@{suffix}")


class AdapterName(NamedTuple):
    namespace: str
    adapter: str


class VersionName(NamedTuple):
    namespace: str
    adapter: str
    version: int


class AliasName(NamedTuple):
    namespace: str
    adapter: str
    alias: str


def parse_reference(text: str, default_namespace: str, field: str = "reference") -> Reference:
    """Read a short reference or the resource name of an adapter, version or alias."""
    if text.startswith("namespaces/"):
        return _parse_resource_reference(text, field)
    path, at, suffix = text.partition("@")
    namespace, slash, adapter = path.rpartition("/")
    if slash and not namespace:
        raise InvalidArgument.of(field, "the namespace before / is empty")
    name = Reference(check_id(namespace or default_namespace, field), check_id(adapter, field))
    if not at:
        return name
    if suffix.startswith("sha256:"):
        return name._replace(digest=check_digest(suffix, field))
    if _DIGITS.fullmatch(suffix):
        return name._replace(version=_version(suffix, field))
    return name._replace(alias=check_alias(suffix, field))


def _parse_resource_reference(text: str, field: str) -> Reference:
    match text.split("/"):
        case [_, _, "adapters", _]:
            return Reference(*parse_adapter_name(text, field))
        case [_, _, "adapters", _, "versions", _]:
            namespace, adapter, version = parse_version_name(text, field)
            return Reference(namespace, adapter, version=version)
        case [_, _, "adapters", _, "aliases", _]:
            namespace, adapter, alias = parse_alias_name(text, field)
            return Reference(namespace, adapter, alias=alias)
    raise InvalidArgument.of(
        field, f"{text!r:.200} is not namespaces/NS/adapters/ADAPTER[/versions/N or /aliases/ALIAS]"
    )


# ---- ids


def check_id(text: str, field: str) -> str:
    """`text` if it is a valid id of a namespace, adapter or base model."""
    if not _ID.fullmatch(text):
        description = "is not an id: 1 to 63 of a-z 0-9 . _ -, beginning and ending with a letter or digit"
        raise InvalidArgument.of(field, f"{text!r:.100} {description}")
    if text == "namespaces":
        raise InvalidArgument.of(field, "the id namespaces is reserved")
    return text


def check_alias(text: str, field: str) -> str:
    """`text` if it is a valid alias, `latest` included."""
    check_id(text, field)
    if not any("a" <= character <= "z" for character in text):
        raise InvalidArgument.of(field, f"alias {text!r} must contain a letter")
    return text


def check_settable_alias(text: str, field: str) -> str:
    """`text` if it is an alias that a caller may set or delete."""
    if check_alias(text, field) == LATEST:
        raise InvalidArgument.of(field, "the alias latest is computed and cannot be set or deleted")
    return text


def _version(text: str, field: str) -> int:
    if not _VERSION.fullmatch(text) or int(text) > MAX_VERSION:
        raise InvalidArgument.of(field, f"version {text!r:.40} is not a whole number from 1 to {MAX_VERSION}")
    return int(text)


# ---- resource names


def namespace_name(namespace: str) -> str:
    """`namespaces/NS`."""
    return f"namespaces/{namespace}"


def adapter_name(namespace: str, adapter: str) -> str:
    """`namespaces/NS/adapters/ADAPTER`."""
    return f"namespaces/{namespace}/adapters/{adapter}"


def version_name(namespace: str, adapter: str, version: int) -> str:
    """`namespaces/NS/adapters/ADAPTER/versions/N`."""
    return f"{adapter_name(namespace, adapter)}/versions/{version}"


def alias_name(namespace: str, adapter: str, alias: str) -> str:
    """`namespaces/NS/adapters/ADAPTER/aliases/ALIAS`."""
    return f"{adapter_name(namespace, adapter)}/aliases/{alias}"


def base_model_name(base_model: str) -> str:
    """`baseModels/ID`."""
    return f"baseModels/{base_model}"


def parse_namespace_name(text: str, field: str, *, allow_all: bool = False) -> str:
    """The namespace of `namespaces/NS`; with `allow_all` also ALL_NAMESPACES for `namespaces/-`."""
    (namespace,) = _parts(text, ("namespaces",), field)
    return namespace if allow_all and namespace == ALL_NAMESPACES else check_id(namespace, field)


def parse_adapter_name(text: str, field: str) -> AdapterName:
    """Read `namespaces/NS/adapters/ADAPTER`."""
    namespace, adapter = _parts(text, ("namespaces", "adapters"), field)
    return AdapterName(check_id(namespace, field), check_id(adapter, field))


def parse_version_name(text: str, field: str) -> VersionName:
    """Read `namespaces/NS/adapters/ADAPTER/versions/N`."""
    namespace, adapter, version = _parts(text, ("namespaces", "adapters", "versions"), field)
    return VersionName(check_id(namespace, field), check_id(adapter, field), _version(version, field))


def parse_alias_name(text: str, field: str) -> AliasName:
    """Read `namespaces/NS/adapters/ADAPTER/aliases/ALIAS`."""
    namespace, adapter, alias = _parts(text, ("namespaces", "adapters", "aliases"), field)
    return AliasName(check_id(namespace, field), check_id(adapter, field), check_alias(alias, field))


def parse_base_model(text: str, field: str) -> str:
    """The id in `baseModels/ID`, or in a plain `ID`."""
    return check_id(text.removeprefix("baseModels/"), field)


def _parts(text: str, collections: tuple[str, ...], field: str) -> list[str]:
    parts = text.split("/")
    if len(parts) != 2 * len(collections) or tuple(parts[::2]) != collections:
        pattern = "/".join(f"{collection}/…" for collection in collections)
        raise InvalidArgument.of(field, f"{text!r:.200} is not of the form {pattern}")
    return parts[1::2]
