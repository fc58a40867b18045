"""Who the caller is: options that come before the command and hold for each."""

from contextvars import ContextVar
from typing import Annotated

import typer

from shared.channel import NOBODY, ClientIdentity, check_identity
from shared.errors import InvalidArgument, LoraplexError, Unauthenticated
from shared.references import check_id

Token = Annotated[
    str,
    typer.Option(
        "--token",
        envvar="LORAPLEX_TOKEN",
        show_default=False,
        help="Bearer token; others see it in the list of processes, so better in LORAPLEX_TOKEN or a file.",
    ),
]
TokenFile = Annotated[str, typer.Option("--token-file", envvar="LORAPLEX_TOKEN_FILE", help="File with the token.")]
Ca = Annotated[
    str, typer.Option("--ca", envvar="LORAPLEX_CA", help="PEM file of the services' CA, or system; with it TLS.")
]
Cert = Annotated[str, typer.Option("--cert", envvar="LORAPLEX_CERT", help="PEM file of your certificate, for mTLS.")]
Key = Annotated[str, typer.Option("--key", envvar="LORAPLEX_KEY", help="PEM file of its private key.")]


def _is_namespace(text: str) -> str:
    try:
        return check_id(text, "namespace") if text else ""
    except InvalidArgument as error:
        raise typer.BadParameter(error.violations[0].description) from None


OwnNamespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        envvar="LORAPLEX_NAMESPACE",
        callback=_is_namespace,
        show_default="your own",
        help="What names without a namespace mean.",
    ),
]

_identity = ContextVar("identity", default=NOBODY)
_namespace = ContextVar("namespace", default="")


def identity() -> ClientIdentity:
    """What the options before the running command say.

    Raises:
        typer.BadParameter: a token or a file of theirs cannot be used.
    """
    who = _identity.get()
    try:
        check_identity(who)
    except InvalidArgument as error:
        wrong = error.violations[0]
        raise typer.BadParameter(wrong.description, param_hint=f"--{wrong.field.replace('_', '-')}") from None
    return who


def advice(error: LoraplexError) -> str:
    """How to say who calls, if nobody did and `error` says that it is wanted; else empty."""
    who = _identity.get()
    if not isinstance(error, Unauthenticated) or who.token or who.token_file:
        return ""
    return "give a token before the command, --token-file FILE or --token TOKEN, or set LORAPLEX_TOKEN"


def own_namespace() -> str:
    """What names without a namespace mean to the running command; empty for the namespace that is the caller's own."""
    return _namespace.get()


def set_identity(identity: ClientIdentity, namespace: str) -> None:
    """Said before a command; typer brings its own click, whose current context is not click's."""
    _identity.set(identity)
    _namespace.set(namespace)
