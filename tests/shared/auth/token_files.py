"""Token files for tests: every kind of caller, with a token that is its name."""

import hashlib
from pathlib import Path


def entry(subject: str, roles: list[str], namespaces: list[str] = (), **more: str) -> str:
    """One table of a token file; the token is `token-SUBJECT`."""
    lines = [f'subject = "{subject}"', f'sha256 = "{hashlib.sha256(token(subject).encode()).hexdigest()}"']
    lines += [f"roles = {list(roles)}", f"namespaces = {list(namespaces)}", *(f"{k} = {v}" for k, v in more.items())]
    return "\n".join(["[[tokens]]", *lines, ""])


def token(subject: str) -> str:
    return f"token-{subject}"


CALLERS: dict[str, tuple[list[str], list[str]]] = {
    "reader-a": (["reader"], ["team-a"]),
    "writer-a": (["writer"], ["team-a"]),
    "operator-a": (["operator"], ["team-a"]),
    "admin-a": (["admin"], ["team-a"]),
    "reader-all": (["reader"], ["*"]),
    "admin-all": (["admin"], ["*"]),
    "replica": (["replica"], []),
}


def write_callers(path: Path) -> Path:
    """A file with `CALLERS`."""
    path.write_text("\n".join(entry(name, *grants) for name, grants in CALLERS.items()))
    return path
