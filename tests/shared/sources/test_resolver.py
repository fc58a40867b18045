"""Which schemes there are, and how that is said."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from shared.errors import InvalidArgument
from shared.sources import resolver


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
    monkeypatch.setattr(resolver, "entry_points", lambda **wanted: found.select(**wanted))
    with pytest.raises(InvalidArgument) as caught:
        resolver.open_source("hf://org/repo", {"a": Path("/")}, reader="replica")
    assert caught.value.message == f"source.uri: scheme hf:// is not available; {said}"
