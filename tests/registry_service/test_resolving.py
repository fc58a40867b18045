"""ResolveAdapter, aliases, deletion, and what is read of adapters and versions."""

import asyncio

import pytest
from sqlalchemy import select

from registry_service import service
from registry_service.models import Change
from shared.errors import (
    AdapterDeleted,
    AdapterNotFound,
    BaseModelMismatch,
    EtagMismatch,
    FailedPrecondition,
    InvalidArgument,
    RegistryUnavailable,
)
from tests.registry_service.conftest import bare


@pytest.fixture
async def two_versions(registry, folders):
    """Adapter `a` with versions 1 and 2, `prod` on 1."""
    first = await registry.register(uri=folders.write("v1", seed=1), aliases=["prod"])
    second = await registry.register(uri=folders.write("v2", seed=2))
    return first.version, second.version


async def test_every_way_to_name_a_version(registry, two_versions):
    first, second = two_versions
    for reference, version, alias in [
        ("a", second, "latest"),
        ("a@latest", second, "latest"),
        ("a@2", second, ""),
        ("a@1", first, ""),
        ("default/a@prod", first, "prod"),
        (f"a@{first.digest}", first, ""),
        ("namespaces/default/adapters/a", second, "latest"),
        ("namespaces/default/adapters/a/versions/1", first, ""),
        ("namespaces/default/adapters/a/aliases/prod", first, "prod"),
    ]:
        answer = await registry.resolve(reference)
        assert answer.version == version, reference
        assert answer.alias == alias
        assert [(target.version, target.weight) for target in answer.targets] == [(version, 1.0)]
        assert answer.ttl.seconds == 10
        assert answer.adapter_uid == (await registry("GetAdapter", name="a")).uid
        assert answer.registry_revision == await registry.revision()


async def test_what_does_not_exist_is_named(registry, two_versions):
    for reference, kind, value in [
        ("nosuch", "adapter", "namespaces/default/adapters/nosuch"),
        ("nosuch@1", "adapter", "namespaces/default/adapters/nosuch"),
        ("a@3", "version", "3"),
        ("a@2147483647", "version", "2147483647"),
        ("a@staging", "alias", "staging"),
        ("a@sha256:" + "0" * 64, "digest", "sha256:" + "0" * 64),
        ("other/a", "adapter", "namespaces/other/adapters/a"),
    ]:
        error = await registry.refused(AdapterNotFound, "ResolveAdapter", reference=reference)
        assert error.metadata[kind] == value
        assert error.code == "NOT_FOUND"


async def test_references_that_are_none(registry):
    for reference in ["", "@1", "A", "a@", "a@0", "a@1@2", "a/b/c", "a,b", "a@sha256:xyz", "\0", "é"]:
        error = await registry.refused(InvalidArgument, "ResolveAdapter", reference=reference)
        assert error.violations[0].field == "reference"


async def test_the_base_model_must_fit(registry, two_versions):
    assert (await registry.resolve("a", base_model="tiny")).version == two_versions[1]
    assert (await registry.resolve("a", base_model="baseModels/tiny")).version == two_versions[1]
    error = await registry.refused(BaseModelMismatch, "ResolveAdapter", reference="a", base_model="other")
    assert error.metadata == {"base_model": "tiny", "requested": "other"}


async def test_min_revision_waits(registry, folders, two_versions, monkeypatch):
    now = await registry.revision()
    waiting = asyncio.ensure_future(registry.resolve("a", min_revision=now + 1))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    third = await registry.register(uri=folders.write("v3", seed=3))
    assert (await waiting).version == third.version
    monkeypatch.setattr(service, "MIN_REVISION_WAIT_SECONDS", 0.1)
    error = await registry.refused(RegistryUnavailable, "ResolveAdapter", reference="a", min_revision=1 << 62)
    assert error.retry_after
    await registry.refused(InvalidArgument, "ResolveAdapter", reference="a", min_revision=-1)


# ---- aliases


async def test_an_alias_moves_with_its_etag(registry, two_versions):
    before = await registry("GetAdapter", name="a")
    answer = await registry("SetAdapterAlias", name="a@prod", targets=[{"version": 2}], etag=before.etag)
    assert answer.adapter.etag != before.etag
    assert answer.adapter.aliases[0].targets[0].version == 2
    assert answer.adapter.aliases[0].name == "namespaces/default/adapters/a/aliases/prod"
    assert (await registry.resolve("a@prod", min_revision=answer.registry_revision)).version == two_versions[1]
    error = await registry.refused(
        EtagMismatch, "SetAdapterAlias", name="a@prod", targets=[{"version": 1}], etag=before.etag
    )
    assert error.code == "ABORTED"
    name = "namespaces/default/adapters/a/aliases/canary"
    answer = await registry("SetAdapterAlias", name=name, targets=[{"version": 1, "weight": 0.5}])
    assert (await registry.resolve("a@canary")).targets[0].weight == 0.5
    assert [alias.name.rpartition("/")[2] for alias in answer.adapter.aliases] == ["canary", "prod"]


async def test_aliases_that_are_refused(registry, two_versions):
    revision = await registry.revision()
    for name, targets, error in [
        ("a", [{"version": 1}], InvalidArgument),
        ("a@1", [{"version": 1}], InvalidArgument),
        ("a@latest", [{"version": 1}], InvalidArgument),
        ("a@x", [], InvalidArgument),
        ("a@x", [{"version": 0}], InvalidArgument),
        ("a@x", [{"version": 1 << 62}], InvalidArgument),
        ("a@x", [{"version": 1, "weight": 0}], InvalidArgument),
        ("a@x", [{"version": 1, "weight": float("nan")}], InvalidArgument),
        ("a@x", [{"version": 1, "weight": float("inf")}], InvalidArgument),
        ("a@x", [{"version": 1}, {"version": 1}], InvalidArgument),
        ("a@x", [{"version": n + 1} for n in range(17)], InvalidArgument),
        ("a@x", [{"version": 1, "weight": 1e300}], InvalidArgument),
        ("a@x", [{"version": 1}, {"version": 3}], AdapterNotFound),
        ("a@x", [{"version": 3}], AdapterNotFound),
        ("nosuch@x", [{"version": 1}], AdapterNotFound),
    ]:
        await registry.refused(error, "SetAdapterAlias", name=name, targets=targets)
    assert await registry.revision() == revision


# ---- deletion


async def test_a_deleted_adapter_is_gone_but_not_forgotten(registry, two_versions):
    before = await registry("GetAdapter", name="a")
    await registry.refused(EtagMismatch, "DeleteAdapter", name="a", etag='"stale"')
    answer = await registry("DeleteAdapter", name="a", etag=before.etag)
    assert answer.adapter.HasField("delete_time")
    assert answer.registry_revision == await registry.revision()
    for reference in ("a", "a@1", "a@prod", f"a@{two_versions[0].digest}"):
        error = await registry.refused(AdapterNotFound, "ResolveAdapter", reference=reference)
        assert "deleted" in error.message
    await registry.refused(AdapterNotFound, "DeleteAdapter", name="a")
    await registry.refused(AdapterNotFound, "SetAdapterAlias", name="a@x", targets=[{"version": 1}])
    assert (await registry("GetAdapter", name="a")).HasField("delete_time")
    assert not (await registry("ListAdapters")).adapters
    (listed,) = (await registry("ListAdapters", show_deleted=True)).adapters
    assert bare(listed) == answer.adapter
    assert (await registry("GetAdapterVersion", name="a@1")) == two_versions[0]
    await registry.refused(AdapterNotFound, "DeleteAdapter", name="nosuch")


async def test_an_undeleted_adapter_is_as_it_was(registry, running, two_versions):
    before = await registry("GetAdapter", name="a")
    deleted = await registry("DeleteAdapter", name="a")
    answer = await registry("UndeleteAdapter", name="namespaces/default/adapters/a")
    assert answer.registry_revision == deleted.registry_revision + 1 == await registry.revision()
    assert not answer.adapter.HasField("delete_time")
    assert answer.adapter.etag not in (before.etag, deleted.adapter.etag)
    for field in ("uid", "aliases", "latest_version", "default_alias", "labels", "create_time"):
        assert getattr(answer.adapter, field) == getattr(before, field), field
    assert await registry.adapter("a") == answer.adapter
    assert [bare(adapter) for adapter in (await registry("ListAdapters")).adapters] == [answer.adapter]
    first, second = two_versions
    for reference, version in (("a", second), ("a@1", first), ("a@prod", first), (f"a@{second.digest}", second)):
        found = await registry.resolve(reference, min_revision=answer.registry_revision)
        assert found.version == version
    changes = await running.database.read(lambda session: _changes(session))
    assert changes[-2:] == [(deleted.registry_revision, "DELETE"), (answer.registry_revision, "UPSERT")]


async def _changes(session):
    rows = await session.execute(select(Change.revision, Change.kind).order_by(Change.revision))
    return [tuple(row) for row in rows]


async def test_what_cannot_be_undeleted(registry, two_versions):
    revision = await registry.revision()
    error = await registry.refused(FailedPrecondition, "UndeleteAdapter", name="a")
    assert error.message == "adapter namespaces/default/adapters/a is not deleted"
    assert error.metadata == {"adapter": "namespaces/default/adapters/a"}
    await registry.refused(AdapterNotFound, "UndeleteAdapter", name="nosuch")
    await registry.refused(AdapterNotFound, "UndeleteAdapter", name="other/a")
    assert (await registry.refused(InvalidArgument, "UndeleteAdapter", name="a@1")).violations[0].field == "name"
    assert await registry.revision() == revision


async def test_an_undeleted_adapter_takes_versions_again(registry, folders, two_versions):
    await registry("DeleteAdapter", name="a")
    source = {"uri": folders.write("v3", seed=3)}
    error = await registry.refused(AdapterDeleted, "RegisterAdapter", adapter_id="a", source=source, base_model="tiny")
    assert "UndeleteAdapter" in error.message
    await registry("UndeleteAdapter", name="a")
    assert (await registry("RegisterAdapter", adapter_id="a", source=source)).version.name.endswith("/versions/3")
    assert (await registry.resolve("a@prod")).version == two_versions[0]


# ---- versions


async def test_versions_are_shown(registry, two_versions):
    first, second = two_versions
    for name, version in [
        ("a@1", first),
        (second.name, second),
        ("a@prod", first),
        ("a@latest", second),
        (f"a@{first.digest}", first),
    ]:
        assert await registry("GetAdapterVersion", name=name) == version
    error = await registry.refused(AdapterNotFound, "GetAdapterVersion", name="a@9")
    assert error.metadata["version"] == "9"
    await registry.refused(InvalidArgument, "GetAdapterVersion", name="a")
    await registry.refused(InvalidArgument, "GetAdapter", name="a@1")
    for parent in ("a", "namespaces/default/adapters/a"):
        assert list((await registry("ListAdapterVersions", parent=parent)).versions) == [second, first]
    await registry.refused(AdapterNotFound, "ListAdapterVersions", parent="nosuch")


# ---- pages


async def test_pages_of_adapters_do_not_move_under_inserts(registry, folders):
    uri = folders.write()
    for name in ("b", "d", "f", "h", "j"):
        await registry.register(name, uri=uri)
    first = await registry("ListAdapters", page_size=2)
    await registry.register("a", uri=uri)
    await registry.register("e", uri=uri)
    await registry("DeleteAdapter", name="d")
    names, token = [a.name[-1] for a in first.adapters], first.next_page_token
    while token:
        page = await registry("ListAdapters", page_size=2, page_token=token)
        names += [a.name[-1] for a in page.adapters]
        token = page.next_page_token
    assert names == ["b", "d", "e", "f", "h", "j"]
    everything = await registry("ListAdapters", parent="namespaces/-", page_size=100_000)
    assert [a.name[-1] for a in everything.adapters] == ["a", "b", "e", "f", "h", "j"]
    assert not everything.next_page_token
    exact = await registry("ListAdapters", parent="namespaces/default", page_size=6)
    assert len(exact.adapters) == 6
    assert not exact.next_page_token


async def test_pages_of_versions(registry, folders):
    for seed in range(5):
        await registry.register(uri=folders.write(seed=seed))
    numbers, token = [], ""
    while True:
        page = await registry("ListAdapterVersions", parent="a", page_size=2, page_token=token)
        numbers += [int(version.name[-1]) for version in page.versions]
        token = page.next_page_token
        if not token:
            break
    assert numbers == [5, 4, 3, 2, 1]


async def test_pages_that_are_refused(registry, folders):
    uri = folders.write()
    for name in ("a", "b"):
        await registry.register(name, uri=uri)
    token = (await registry("ListAdapters", page_size=1)).next_page_token
    for fields in (
        {"page_size": -1},
        {"page_token": "x"},
        {"page_token": "é"},
        {"page_token": "bnVsbA"},
        {"page_token": "W1tdLFtdXQ"},
        {"page_token": token, "show_deleted": True},
        {"page_token": token, "parent": "namespaces/-"},
    ):
        error = await registry.refused(InvalidArgument, "ListAdapters", **fields)
        assert error.violations[0].field in fields
    await registry.refused(InvalidArgument, "ListAdapterVersions", parent="a", page_token=token)
    await registry.refused(InvalidArgument, "ListBaseModels", page_token=token)
    await registry.refused(AdapterNotFound, "ListAdapters", parent="namespaces/other")
    await registry.refused(InvalidArgument, "ListAdapters", parent="other")
