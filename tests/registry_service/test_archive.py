"""Export and restore, from either database into either."""

import asyncio
import io
import json

import pytest

from registry_service import archive, migrations
from registry_service.config import RegistryConfig
from registry_service.server import start
from shared.errors import AdapterNotFound, FailedPrecondition, InvalidArgument, WatchCompacted
from tests.registry_service.watching import Watch


@pytest.fixture
async def registered(registry, folders):
    """Two adapters, one of them deleted, with aliases and a deleted version."""
    await registry.register(uri=folders.write("v1", seed=1), aliases=["prod"], labels={"k": "ü"}, description="é\n")
    await registry.register(uri=folders.write("v2", seed=2))
    await registry("SetAdapterAlias", name="a@split", targets=[{"version": 1}, {"version": 2, "weight": 0.25}])
    await registry.register(uri=folders.write("v3", seed=3), aliases=["split"])
    await registry("SetAdapterAlias", name="a@split", targets=[{"version": 2}])
    await registry("SetAdapterAlias", name="a@split", targets=[{"version": 1}, {"version": 2, "weight": 0.25}])
    await registry("SetAdapterAlias", name="a@split", targets=[{"version": 2}])
    await registry("DeleteAdapterVersion", name="a@3")
    await registry.register("gone", uri=folders.write("v1", seed=1))
    await registry("DeleteAdapter", name="gone")


async def exported(url):
    return await asyncio.to_thread(export, url)


def export(url):
    output = io.StringIO()
    count = archive.export(url, output)
    lines = output.getvalue().splitlines()
    assert len(lines) == count + 2
    return lines


async def everything(registry):
    adapters = (await registry("ListAdapters", show_deleted=True)).adapters
    parents = [adapter.name for adapter in adapters]
    return adapters, [await registry("ListAdapterVersions", parent=name, show_deleted=True) for name in parents]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_restored_registry_is_as_it_was(
    config, registry, registered, connect, folders, kind, request, tmp_path
):
    before, revision = await everything(registry), await registry.revision()
    watch = await Watch(registry.stub).complete()
    watch.cancel()
    lines = await exported(config.database)
    url = f"sqlite:///{tmp_path}/new.db" if kind == "sqlite" else request.getfixturevalue("make_postgres")()
    assert archive.restore(url, io.StringIO("\n".join(lines))) == len(lines) - 2
    assert sorted((await exported(url))[3:]) == sorted(lines[3:])
    server = await start(RegistryConfig(listen="127.0.0.1:0", database=url, file_roots={"main": str(folders.root)}))
    caller = connect(server.port)
    try:
        assert await everything(caller) == before
        assert await caller.revision() == revision
        assert (await caller.resolve("a@prod")).version.name.endswith("/1")
        again = await caller.register(uri=folders.write("v4", seed=4))
        assert again.version.name.endswith("/4")
        await Watch(caller.stub, resume_token=watch.token).refused(WatchCompacted)
        await caller("UndeleteAdapter", name="gone")
        await caller.refused(AdapterNotFound, "ResolveAdapter", reference="a@3")
    finally:
        await caller.close()
        await server.stop()


@pytest.mark.parametrize("schema", ["0003", "0004", "0005"])
async def test_an_export_of_an_older_version_is_restored(config, registered, tmp_path, schema):
    lines = [line for line in await exported(config.database) if "previous_alias_targets" not in line]
    url = f"sqlite:///{tmp_path}/new.db"
    older = json.dumps({**json.loads(lines[0]), "schema": schema})
    end = json.dumps({"end": len(lines) - 2})
    assert archive.restore(url, io.StringIO("\n".join([older, *lines[1:-1], end]))) == len(lines) - 2
    assert export(url)[3:-1] == lines[3:-1]
    migrations.check(url)


async def test_what_is_no_export_restores_nothing(config, registered, tmp_path):
    lines = await exported(config.database)
    url = f"sqlite:///{tmp_path}/new.db"
    row = json.loads(lines[2])
    wrong_column = json.dumps({**row, "row": {**row["row"], "more": 1}})
    for wrong, said in [
        ([], "line 1"),
        (["{}"], "line 1"),
        (['{"format": "loraplex-registry", "schema": "0001"}'], "line 1"),
        (lines[:-1], f"line {len(lines)}"),
        (lines[:-2], f"line {len(lines) - 1}"),
        ([*lines[:-2], lines[-1]], f"line {len(lines) - 1}"),
        ([*lines[:2], "no JSON", *lines[3:]], "line 3"),
        ([*lines[:2], wrong_column, *lines[3:]], "line 3"),
        ([*lines[:2], '{"table": "replicas", "row": {}}'], "line 3"),
        ([lines[0], *lines[3:-1], json.dumps({"end": len(lines) - 4})], ""),  # without its base models
    ]:
        with pytest.raises(InvalidArgument) as caught:
            archive.restore(url, io.StringIO("\n".join(wrong)))
        assert said in caught.value.violations[0].field
        assert len(export(url)) == 3
    archive.restore(url, io.StringIO("\n".join(lines)))
    with pytest.raises(FailedPrecondition):
        archive.restore(url, io.StringIO("\n".join(lines)))
    migrations.check(url)
