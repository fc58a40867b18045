"""UpdateAdapter, weighted aliases, and the deletion of aliases and versions."""

import asyncio

import pytest

from registry_service.models import Alias
from shared.errors import (
    AdapterNotFound,
    EtagMismatch,
    FailedPrecondition,
    InvalidArgument,
    VersionInUse,
)

PINNED = 3


@pytest.fixture
async def two_versions(registry, folders):
    """Adapter `a` with versions 1 and 2, `prod` on 1."""
    first = await registry.register(uri=folders.write("v1", seed=1), aliases=["prod"], labels={"team": "x"})
    second = await registry.register(uri=folders.write("v2", seed=2))
    return first.version, second.version


async def update(registry, paths, etag="", **fields):
    adapter = {"name": "namespaces/default/adapters/a", "etag": etag, **fields}
    return await registry("UpdateAdapter", adapter=adapter, update_mask={"paths": paths})


# ---- update


async def test_only_what_the_mask_names_is_updated(registry, two_versions):
    before = await registry("GetAdapter", name="a")
    fields = {"labels": {"k": "v"}, "annotations": {"note": "long"}, "description": "d", "residency": PINNED}
    answer = await update(registry, ["annotations", "residency"], before.etag, **fields)
    assert (answer.adapter.residency, dict(answer.adapter.annotations)) == (PINNED, {"note": "long"})
    assert (dict(answer.adapter.labels), answer.adapter.description) == ({"team": "x"}, "")
    assert answer.registry_revision == await registry.revision()
    assert answer.adapter.etag != before.etag
    assert answer.adapter == await registry.adapter("a")
    answer = await update(registry, [], **fields)  # what has a value
    assert (dict(answer.adapter.labels), answer.adapter.description) == ({"k": "v"}, "d")
    answer = await update(registry, ["*"], description="e")
    assert (dict(answer.adapter.labels), answer.adapter.residency, answer.adapter.description) == ({}, 1, "e")


async def test_an_update_that_changes_nothing_is_no_change(registry, two_versions):
    before = await registry.adapter("a")
    revision = await registry.revision()
    answer = await update(registry, ["labels", "residency", "default_alias"], labels={"team": "x"}, residency=1)
    assert (answer.adapter, answer.registry_revision) == (before, revision)


async def test_a_stale_etag_is_refused(registry, two_versions):
    etag = (await registry("GetAdapter", name="a")).etag
    await update(registry, ["description"], etag, description="first")
    error = None
    try:
        await update(registry, ["description"], etag, description="second")
    except EtagMismatch as caught:
        error = caught
    assert error is not None
    assert error.code == "ABORTED"
    assert error.metadata["etag"] == (await registry("GetAdapter", name="a")).etag
    assert (await registry("GetAdapter", name="a")).description == "first"


async def test_of_updates_with_one_etag_one_wins(registry, two_versions):
    etag = (await registry("GetAdapter", name="a")).etag
    found = await asyncio.gather(
        *(update(registry, ["description"], etag, description=f"{n}") for n in range(8)), return_exceptions=True
    )
    assert sum(not isinstance(each, Exception) for each in found) == 1
    assert all(isinstance(each, EtagMismatch) for each in found if isinstance(each, Exception))


REFUSED_UPDATES = [  # paths of the mask, fields of the adapter, the field that is wrong, and what is said of it
    (["nosuch"], {}, "update_mask", "'nosuch' is not a field"),
    (["base_model"], {}, "update_mask", "'base_model' cannot be updated"),
    (["*", "labels"], {}, "update_mask", "'*' is not"),
    (["labels.team"], {}, "update_mask", "'labels.team' is not"),
    (["labels"], {"labels": {"": "x"}}, "adapter.labels['']", "keys"),
    (["annotations"], {"annotations": {"k": "\0"}}, "adapter.annotations['k']", "printable"),
    (["description"], {"description": "x" * 5000}, "adapter.description", "4096"),
    (["residency"], {"residency": 9}, "adapter.residency", "9"),
    (["default_alias"], {"default_alias": "7"}, "adapter.default_alias", "letter"),
    (["default_alias"], {"default_alias": "nosuch"}, "adapter.default_alias", "no alias nosuch"),
]


async def test_updates_that_are_refused(registry, two_versions):
    revision = await registry.revision()
    for paths, fields, field, said in REFUSED_UPDATES:
        adapter = {"name": "a", **fields}
        error = await registry.refused(InvalidArgument, "UpdateAdapter", adapter=adapter, update_mask={"paths": paths})
        (violation,) = error.violations
        assert violation.field == field
        assert said in violation.description
        assert await registry.revision() == revision


async def test_what_is_not_there_cannot_be_updated(registry, two_versions):
    await registry.refused(InvalidArgument, "UpdateAdapter", adapter={"name": "a@1"})
    await registry.refused(AdapterNotFound, "UpdateAdapter", adapter={"name": "nosuch", "description": "d"})
    await registry("DeleteAdapter", name="a")
    await registry.refused(AdapterNotFound, "UpdateAdapter", adapter={"name": "a", "description": "d"})


async def test_the_default_alias_is_what_a_bare_name_means(registry, two_versions):
    await update(registry, ["default_alias"], default_alias="prod")
    found = await registry.resolve("a")
    assert (found.alias, found.version) == ("prod", two_versions[0])
    await registry.refused(FailedPrecondition, "DeleteAdapterAlias", name="a@prod")
    await update(registry, ["default_alias"])
    assert (await registry.resolve("a")).version == two_versions[1]


# ---- aliases


async def test_an_alias_of_several_versions(registry, two_versions):
    targets = [{"version": 1, "weight": 3}, {"version": 2}]
    answer = await registry("SetAdapterAlias", name="a@canary", targets=targets)
    (canary,) = [alias for alias in answer.adapter.aliases if alias.name.endswith("/canary")]
    assert [(t.version, t.weight) for t in canary.targets] == [(1, 3.0), (2, 1.0)]
    found = await registry.resolve("a@canary", min_revision=answer.registry_revision)
    assert [(t.version, t.weight) for t in found.targets] == [(two_versions[0], 3.0), (two_versions[1], 1.0)]
    assert found.version == two_versions[0]
    again = await registry("SetAdapterAlias", name="a@canary", targets=targets[::-1], etag=answer.adapter.etag)
    assert (again.adapter, again.registry_revision) == (answer.adapter, answer.registry_revision)
    await registry.refused(EtagMismatch, "SetAdapterAlias", name="a@canary", targets=targets[1:], etag='"x"')
    moved = await registry("SetAdapterAlias", name="a@canary", targets=targets[1:], etag=answer.adapter.etag)
    assert moved.registry_revision == answer.registry_revision + 1
    assert (await registry.resolve("a@canary", min_revision=moved.registry_revision)).version == two_versions[1]


async def test_an_alias_remembers_what_it_meant_before_its_last_change(registry, folders, two_versions):
    async def previous(alias="prod"):
        (found,) = [a for a in (await registry("GetAdapter", name="a")).aliases if a.name.endswith(f"/{alias}")]
        return [(target.version, target.weight) for target in found.previous_targets]

    async def point(*targets):
        fields = [{"version": version, "weight": weight} for version, weight in targets]
        return await registry("SetAdapterAlias", name="a@prod", targets=fields)

    assert await previous() == []
    answer = await point((1, 0.1 + 0.2), (2, 3))
    assert [t.version for t in answer.adapter.aliases[0].previous_targets] == [1]
    await point((2, 3), (1, 0.1 + 0.2))  # no change
    await registry("SetAdapterAlias", name="a@other", targets=[{"version": 2}])
    assert (await previous(), await previous("other")) == ([(1, 1.0)], [])
    await registry.register(uri=folders.write("v3", seed=3), aliases=["prod"])
    assert await previous() == [(1, 0.1 + 0.2), (2, 3.0)]
    await point((2, 1))
    await registry("DeleteAdapterVersion", name="a@3")  # it is in no alias's way
    assert await previous() == [(3, 1.0)]
    await registry("DeleteAdapterAlias", name="a@prod")
    await point((1, 1))
    assert await previous() == []


async def test_an_alias_that_is_deleted(registry, running, two_versions):
    etag = (await registry("GetAdapter", name="a")).etag
    await registry.refused(EtagMismatch, "DeleteAdapterAlias", name="a@prod", etag='"stale"')
    answer = await registry("DeleteAdapterAlias", name="a@prod", etag=etag)
    assert not answer.adapter.aliases
    error = await registry.refused(AdapterNotFound, "ResolveAdapter", reference="a@prod")
    assert error.metadata["alias"] == "prod"
    await registry.refused(AdapterNotFound, "DeleteAdapterAlias", name="a@prod")
    await registry.refused(InvalidArgument, "DeleteAdapterAlias", name="a@latest")
    await registry.refused(InvalidArgument, "DeleteAdapterAlias", name="a")
    assert await running.database.read(lambda session: session.get(Alias, ("x", "prod"))) is None


# ---- versions


async def test_a_version_that_an_alias_names_stays(registry, two_versions):
    error = await registry.refused(VersionInUse, "DeleteAdapterVersion", name="a@1")
    assert error.code == "FAILED_PRECONDITION"
    assert error.metadata["aliases"] == "prod"
    version = "namespaces/default/adapters/a/versions/1"
    assert error.message == f"{version} is what alias prod means: point it elsewhere first"
    await registry("SetAdapterAlias", name="a@canary", targets=[{"version": 1}])
    error = await registry.refused(VersionInUse, "DeleteAdapterVersion", name="a@1")
    assert error.metadata["aliases"] == "canary,prod"
    assert error.message == f"{version} is what aliases canary, prod mean: point them elsewhere first"
    for alias in ("prod", "canary"):
        await registry("SetAdapterAlias", name=f"a@{alias}", targets=[{"version": 2}])
    assert (await registry("DeleteAdapterVersion", name="a@1")).version.state == 3


async def test_a_deleted_version_is_gone_and_its_number_is_not_used_again(registry, folders, two_versions):
    etag = (await registry("GetAdapter", name="a")).etag
    await registry.refused(EtagMismatch, "DeleteAdapterVersion", name="a@2", etag='"stale"')
    name = "namespaces/default/adapters/a/versions/2"
    answer = await registry("DeleteAdapterVersion", name=name, etag=etag)
    assert answer.version.HasField("delete_time")
    assert answer.version.purge_time.seconds > answer.version.delete_time.seconds
    assert answer.registry_revision == await registry.revision()
    for reference in ("a@2", f"a@{two_versions[1].digest}"):
        await registry.refused(AdapterNotFound, "ResolveAdapter", reference=reference)
    assert (await registry.resolve("a")).version == two_versions[0]
    assert (await registry("GetAdapterVersion", name="a@2")) == answer.version
    assert [v.name[-1] for v in (await registry("ListAdapterVersions", parent="a")).versions] == ["1"]
    listed = await registry("ListAdapterVersions", parent="a", show_deleted=True)
    assert [v.name[-1] for v in listed.versions] == ["2", "1"]
    await registry.refused(AdapterNotFound, "DeleteAdapterVersion", name="a@2")
    await registry.refused(AdapterNotFound, "SetAdapterAlias", name="a@x", targets=[{"version": 2}])
    again = await registry.register(uri=folders.write("v2", seed=2))
    assert (again.created, again.version.name[-1], again.version.digest) == (True, "3", two_versions[1].digest)


async def test_a_version_is_deleted_by_its_number_only(registry, two_versions):
    for name in ("a", "a@latest", "a@prod", f"a@{two_versions[1].digest}"):
        await registry.refused(InvalidArgument, "DeleteAdapterVersion", name=name)


async def test_an_alias_and_a_deletion_at_once(registry, folders, two_versions):
    """Whatever the order: no alias ever names a deleted version."""
    for number in range(3, 9):
        await registry.register(uri=folders.write(f"v{number}", seed=number))
        alias = registry("SetAdapterAlias", name="a@x", targets=[{"version": number}])
        deletion = registry("DeleteAdapterVersion", name=f"a@{number}")
        found = await asyncio.gather(alias, deletion, return_exceptions=True)
        failed = [type(each) for each in found if isinstance(each, Exception)]
        assert failed in ([AdapterNotFound], [VersionInUse])
