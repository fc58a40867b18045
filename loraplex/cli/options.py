"""Arguments and options that several commands share, and their checks. What fails them is a usage error."""

from collections.abc import Sequence
from typing import Annotated

import typer

from loraplex.cli.names import read
from loraplex.client import check_address
from shared.digest import check_digest
from shared.errors import InvalidArgument
from shared.references import Reference

MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1
MAX_SECONDS = 1e6

DEFAULT_REGISTRY = "localhost:50051"
DEFAULT_SERVER = "localhost:50052"


def _address(text: str) -> str:
    try:
        return check_address(text, "address")
    except InvalidArgument as error:
        raise typer.BadParameter(error.violations[0].description) from None


def _addresses(texts: list[str]) -> list[str]:
    return [_address(text) for text in texts]


def _reference(text: str) -> str:
    if text:
        parsed(text)
    return text


def _reference_or_digest(text: str) -> str:
    if not text.startswith("sha256:"):
        return _reference(text)
    try:
        return check_digest(text, "reference")
    except InvalidArgument as error:
        raise typer.BadParameter(error.violations[0].description) from None


def _references(texts: list[str]) -> list[str]:
    return [_reference(text) for text in texts]


def _seconds(value: float | None) -> float | None:
    if value is not None and not 0 < value <= MAX_SECONDS:
        raise typer.BadParameter(f"{value:g} is not a number of seconds above 0 and at most {MAX_SECONDS:.0f}")
    return value


_SYNTAX = "[NAMESPACE/]ADAPTER[@VERSION|@ALIAS|@sha256:HEX]"

RegistryAddress = Annotated[
    str,
    typer.Option("--registry", envvar="LORAPLEX_REGISTRY", help="host:port of the registry.", callback=_address),
]
ServerAddress = Annotated[
    str,
    typer.Option("--server", envvar="LORAPLEX_SERVER", help="host:port of the inference service.", callback=_address),
]
ServerAddresses = Annotated[
    list[str],
    typer.Option(
        "--server", envvar="LORAPLEX_SERVER", help="host:port of an inference service; repeatable.", callback=_addresses
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FilterOption = Annotated[str, typer.Option(help="Such as 'labels.team = x AND state = READY' (AIP-160).")]
OrderOption = Annotated[str, typer.Option(help="Such as 'create_time desc, name'.")]
VersionFilterOption = Annotated[str, typer.Option(help="Such as 'rank > 8 AND source:store' (AIP-160).")]
VersionOrderOption = Annotated[str, typer.Option(help="Such as 'size_bytes desc, version'.")]
AdapterArgument = Annotated[str, typer.Argument(metavar="ADAPTER", help="[NAMESPACE/]ADAPTER")]
ReferenceArgument = Annotated[str, typer.Argument(help=_SYNTAX, callback=_reference)]
LoadedArgument = Annotated[
    str, typer.Argument(help=f"{_SYNTAX}, a version's name, or sha256:HEX", callback=_reference_or_digest)
]
AdapterOption = Annotated[str, typer.Option(help=f"{_SYNTAX}; none is the base model.", callback=_reference)]
AdapterOptions = Annotated[
    list[str], typer.Option(help=f"{_SYNTAX}; repeatable, then taken in turn.", callback=_references)
]
Timeout = Annotated[float | None, typer.Option(help="Seconds until the request is given up.", callback=_seconds)]


def parsed(text: str, hint: str | None = None) -> Reference:
    """The reference that the argument `hint` gives; None: the one that is being checked.

    Raises:
        typer.BadParameter: it is none.
    """
    try:
        return read(text)
    except InvalidArgument as error:
        raise typer.BadParameter(error.violations[0].description, param_hint=hint) from None


def parsed_adapter(text: str) -> Reference:
    """The reference to an adapter, and no version of it, that the argument ADAPTER gives.

    Raises:
        typer.BadParameter: it is none, or has an `@`.
    """
    reference = parsed(text, "ADAPTER")
    if names_version(reference):
        message = f"{text!r} names a version; write [NAMESPACE/]ADAPTER (the registry numbers versions itself)"
        raise typer.BadParameter(message, param_hint="ADAPTER")
    return reference


def names_version(reference: Reference) -> bool:
    """Whether it is more than the name of an adapter."""
    return reference != Reference(reference.namespace, reference.adapter)


def key_values(items: Sequence[str], option: str) -> dict[str, str]:
    """`K=V` arguments as a dict.

    Raises:
        typer.BadParameter: an item has no `=` or an empty key.
    """
    pairs = [item.partition("=") for item in items]
    for item, (key, sign, _) in zip(items, pairs, strict=True):
        if not key or not sign:
            raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint=option)
    return {key: value for key, _, value in pairs}
