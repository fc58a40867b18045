import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import references
from shared.errors import InvalidArgument
from shared.references import MAX_VERSION, Reference, parse_reference

HEX = "0123456789abcdef" * 4

edges = st.sampled_from(string.ascii_lowercase + string.digits)
inner = st.text(string.ascii_lowercase + string.digits + "._-", max_size=61)
ids = st.one_of(edges, st.builds(lambda a, b, c: a + b + c, edges, inner, edges)).filter(lambda i: i != "namespaces")
aliases = ids.filter(lambda i: any(c in string.ascii_lowercase for c in i))
versions = st.integers(1, MAX_VERSION)
digests = st.text("0123456789abcdef", min_size=64, max_size=64).map(lambda text: f"sha256:{text}")
suffixes = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"version": versions}),
    st.fixed_dictionaries({"alias": aliases}),
    st.fixed_dictionaries({"digest": digests}),
)


@given(ids, ids, suffixes)
def test_canonical_round_trip(namespace, adapter, suffix):
    reference = Reference(namespace, adapter, **suffix)
    assert parse_reference(reference.canonical(), "other") == reference


@given(ids, ids, versions, aliases)
def test_resource_names_round_trip(namespace, adapter, version, alias):
    name = references.adapter_name(namespace, adapter)
    assert references.parse_adapter_name(name, "f") == (namespace, adapter)
    assert parse_reference(name, "other") == Reference(namespace, adapter)
    name = references.version_name(namespace, adapter, version)
    assert references.parse_version_name(name, "f") == (namespace, adapter, version)
    assert parse_reference(name, "other") == Reference(namespace, adapter, version=version)
    name = references.alias_name(namespace, adapter, alias)
    assert references.parse_alias_name(name, "f") == (namespace, adapter, alias)
    assert parse_reference(name, "other") == Reference(namespace, adapter, alias=alias)
    assert references.parse_namespace_name(references.namespace_name(namespace), "f") == namespace
    assert references.parse_base_model(references.base_model_name(adapter), "f") == adapter
    assert references.parse_base_model(adapter, "f") == adapter


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pirate", Reference("mine", "pirate")),
        ("ns/pirate", Reference("ns", "pirate")),
        ("pirate@3", Reference("mine", "pirate", version=3)),
        ("ns/pirate@prod", Reference("ns", "pirate", alias="prod")),
        ("pirate@latest", Reference("mine", "pirate", alias="latest")),
        (f"pirate@sha256:{HEX}", Reference("mine", "pirate", digest=f"sha256:{HEX}")),
        ("0@0a", Reference("mine", "0", alias="0a")),
    ],
)
def test_short_references(text, expected):
    assert parse_reference(text, "mine") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@3",
        "/a",
        "a/",
        "a/b/c",
        "A",
        "a b",
        "a,b",
        "-a",
        "a-",
        "a" * 64,
        "a\n",
        "é",
        "namespaces",
        "namespaces/a",
        "namespaces/a/b",
        "a@",
        "a@0",
        "a@01",
        "a@-1",
        "a@٣",
        "a@2147483648",
        "a@1.2",
        "a@1@2",
        "a@Prod",
        "a@sha256:abc",
        f"a@sha256:{HEX.upper()}",
        f"a@sha512:{HEX}",
        "namespaces/n/adapters/",
        "namespaces/n/adapters/a@3",
        "namespaces/n/adapters/a/versions/x",
        "namespaces/n/adapters/a/aliases/3",
        "namespaces/n/adapters/a/tags/x",
        "namespaces/-/adapters/a",
    ],
)
def test_malformed_references_name_the_field(text):
    with pytest.raises(InvalidArgument) as caught:
        parse_reference(text, "mine", field="adapter")
    assert [violation.field for violation in caught.value.violations] == ["adapter"]


@given(st.text(max_size=200))
def test_no_text_raises_anything_else(text):
    try:
        reference = parse_reference(text, "mine")
    except InvalidArgument:
        return
    assert parse_reference(reference.canonical(), "x") == reference


def test_latest_cannot_be_set():
    assert references.check_alias("latest", "f") == "latest"
    assert references.check_settable_alias("prod", "f") == "prod"
    with pytest.raises(InvalidArgument, match="latest"):
        references.check_settable_alias("latest", "f")


def test_all_namespaces_only_where_allowed():
    assert references.parse_namespace_name("namespaces/-", "parent", allow_all=True) == references.ALL_NAMESPACES
    with pytest.raises(InvalidArgument):
        references.parse_namespace_name("namespaces/-", "parent")


@pytest.mark.parametrize("text", ["", "baseModels/", "baseModels/A", "baseModels/a/b", "org/model"])
def test_malformed_base_models(text):
    with pytest.raises(InvalidArgument, match="base_model"):
        references.parse_base_model(text, "base_model")
