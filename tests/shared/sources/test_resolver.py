"""Which schemes there are, and how that is said."""

import threading
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from shared.errors import InvalidArgument
from shared.sources import resolver
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import PinnedSource


@pytest.mark.parametrize(
    ("schemes", "said"),
    [
        ("", "this replica reads nothing"),
        ("file", "this replica reads file://"),
        ("s3 file", "this replica reads file:// and s3://"),
        ("s3 file gs", "this replica reads file://, gs:// and s3://"),
    ],
)
def test_an_unknown_scheme_lists_the_known(monkeypatch: pytest.MonkeyPatch, schemes: str, said: str) -> None:
    found = EntryPoints(EntryPoint(name, "x:y", resolver.GROUP) for name in schemes.split())
    monkeypatch.setattr(resolver, "installed", lambda: found)
    policy = SourcePolicy({"a": Path("/")})
    with pytest.raises(InvalidArgument) as caught:
        resolver.open_source(PinnedSource("gs2://x"), "default", policy, threading.Event(), reader="replica")
    assert caught.value.message == f"source.uri: scheme gs2:// is not available; {said}"
