"""Prefixes are borders: nothing that only begins alike, or climbs out, lies below one."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import SourceForbidden
from shared.sources.policy import SourcePolicy, is_below, split_rule

segments = st.text(st.characters(codec="ascii", exclude_characters="/@\\%", min_codepoint=33), min_size=1).filter(
    lambda text: text not in (".", "..")
)


@pytest.mark.parametrize(
    ("uri", "prefix", "expected"),
    [
        ("s3://bucket/a/b", "s3://bucket/a", True),
        ("s3://bucket/a/b", "s3://bucket/a/", True),
        ("s3://bucket/a", "s3://bucket/a/", True),
        ("s3://bucket/ab", "s3://bucket/a", False),
        ("s3://bucket2/a", "s3://bucket", False),
        ("s3://bucket@x/a", "s3://bucket", False),
        ("s3://x/y", "s3://", True),
        ("s3://:", "s3://:", True),
        ("s3://:x", "s3://:", False),
        ("hf://x/y", "s3://", False),
        ("hf://org/repo@main/sub", "hf://org/repo", True),
        ("hf://org/repo@main", "hf://org", True),
        ("hf://org/repo2", "hf://org/repo", False),
        ("hf://org2/repo", "hf://org", False),
        ("https://host@evil.com/x", "https://host", False),
        ("https://host:8443/x", "https://host", False),
        ("https://host.evil.com/x", "https://host", False),
        ("https://host/a/../b", "https://host/a", False),
        ("https://host/a/%2e%2E/b", "https://host/a", False),
        ("https://host/a/..%2fb", "https://host/a", False),
        ("https://host/a/%252e%252e/b", "https://host/a", False),
        ("https://host/a/..\\b", "https://host/a", False),
        ("https://host/a/...", "https://host/a", True),
    ],
)
def test_borders(uri: str, prefix: str, expected: bool) -> None:
    assert is_below(uri, prefix) is expected


@given(st.lists(segments, min_size=1, max_size=4), st.lists(segments, max_size=3), segments)
def test_what_is_appended_to_a_prefix_lies_below_it(base: list[str], rest: list[str], other: str) -> None:
    prefix = "s3://" + "/".join(base)
    assert is_below("/".join([prefix, *rest]), prefix)
    assert is_below("/".join([prefix, *rest]), prefix + "/")
    assert not is_below(prefix + other, prefix)
    for climbing in ("..", quote("..", safe=""), "%2e%2e", "%2E."):
        assert not is_below("/".join([prefix, climbing, other]), prefix)


def test_namespaces_read_what_their_rules_say() -> None:
    policy = SourcePolicy({}, allowed=("a=s3://bucket/a/", "b=s3://bucket/b", "hf://public/", "*=https://host/x=y/"))
    assert split_rule("https://host/x=y/") == ("*", "https://host/x=y/")
    for uri, namespaces in [
        ("s3://bucket/a/1", "a"),
        ("s3://bucket/b/1", "b"),
        ("s3://bucket", ""),
        ("hf://public/repo@v1", "abc"),
        ("hf://private/repo", ""),
        ("https://host/x=y/z", "abc"),
    ]:
        assert [name for name in "abc" if policy.is_allowed(uri, name)] == list(namespaces)
    with pytest.raises(SourceForbidden, match="namespace c may not read s3://bucket/a/1"):
        policy.check("s3://bucket/a/1", "", "c")
    assert SourcePolicy({}).check("s3://anything/at/all", "", "c") is None
