"""What names without a namespace mean: the one of --namespace, or where there is none the caller's own.

Which one is the own of a caller that shows who it is, the services know: they take names without a namespace as in it.
Who does not is in `default`.
"""

from loraplex.cli.identity import identity, own_namespace
from shared.auth import DEFAULT_NAMESPACE
from shared.references import Reference, namespace_name, parse_reference


def read(text: str) -> Reference:
    """A reference. Its namespace is empty if only the services know it.

    Raises:
        InvalidArgument: it is none.
    """
    reference = parse_reference(text, own_namespace() or DEFAULT_NAMESPACE)
    who = identity()
    is_known = "/" in text or own_namespace() or not (who.token or who.token_file or who.cert)
    return reference if is_known else reference._replace(namespace="")


def written(reference: Reference) -> str:
    """A reference that `read` has read, for a request."""
    return reference.canonical().removeprefix("/")


def parent(namespace: str) -> str:
    """The parent of what is in a namespace, for a request; empty for the caller's own."""
    return namespace_name(namespace) if namespace else ""


def qualified(text: str) -> str:
    """`text` for a request, with the namespace of --namespace before it if it has none and is no digest."""
    namespace = own_namespace()
    if not text or not namespace or "/" in text or text.startswith("sha256:"):
        return text
    return f"{namespace}/{text}"
