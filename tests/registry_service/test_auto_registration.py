"""Unknown names are looked for where the configuration says, once, and nowhere else."""

import asyncio
import dataclasses
import json
import time
from types import SimpleNamespace

import pytest

from registry_service import auto_registration
from registry_service.auto_registration import NamespaceSettings, are_templates
from registry_service.config import ENV_PREFIX, RegistryConfig
from registry_service.server import start
from shared.config import ConfigError, load
from shared.errors import (
    AdapterInvalid,
    AdapterNotFound,
    BaseModelUnknown,
    InvalidArgument,
    QueueFull,
    SourceUnavailable,
)
from shared.sources.credentials import Credential
from tests.shared.sources.hub_server import TOKEN
from tests.shared.sources.store_fixtures import hub

__all__ = ["hub"]


@pytest.fixture(autouse=True)
def _searches_may_take_long(monkeypatch):
    """However busy this machine is."""
    monkeypatch.setattr(auto_registration, "WAIT_SECONDS", 60.0)


@pytest.fixture
def settings():
    return NamespaceSettings(auto_register=("file://main/first/{adapter}", "file://main/{adapter}"), base_model="tiny")


@pytest.fixture
def config(config, settings):
    """As in conftest, and unknown adapters of the default namespace are looked for."""
    return dataclasses.replace(config, namespaces={"default": settings})


async def test_an_unknown_adapter_becomes_version_one(registry, folders):
    folders.write("found", seed=1)
    answer = await registry.resolve("found", base_model="tiny")
    assert answer.version.name == "namespaces/default/adapters/found/versions/1"
    assert answer.version.source.uri == "file://main/found"
    assert answer.version.creator == "auto_register"
    assert (await registry("GetAdapter", name="found")).base_model == "baseModels/tiny"
    assert (await registry.resolve("found@1")).version == answer.version
    assert await registry.revision() == answer.registry_revision


async def test_templates_are_tried_in_order(registry, folders):
    folders.write("both", seed=1)
    folders.write("first/both", seed=2)
    assert (await registry.resolve("both")).version.source.uri == "file://main/first/both"


async def test_what_is_in_no_place_is_said_and_remembered_for_a_moment(registry, folders, monkeypatch):
    monkeypatch.setattr(auto_registration, "ABSENT_SECONDS", 3600.0)
    revision = await registry.revision()
    error = await registry.refused(AdapterNotFound, "ResolveAdapter", reference="late")
    assert "file://main/first/late (SOURCE_NOT_FOUND), file://main/late (SOURCE_NOT_FOUND)" in error.message
    assert error.metadata == {"adapter": "namespaces/default/adapters/late"}
    folders.write("late")
    await registry.refused(AdapterNotFound, "ResolveAdapter", reference="late")
    assert await registry.revision() == revision
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3601)
    monkeypatch.setattr(auto_registration, "time", later)
    assert (await registry.resolve("late")).version.name.endswith("/late/versions/1")


async def test_what_is_found_and_wrong_is_said(registry, folders):
    folders.write("wrong", config={"r": 3})
    error = await registry.refused(AdapterInvalid, "ResolveAdapter", reference="wrong")
    assert "lora_A" in error.metadata["tensor"]
    assert error.message.startswith("file://main/wrong: tensor ")
    assert error.metadata["uri"] == "file://main/wrong"
    await registry.refused(AdapterNotFound, "GetAdapter", name="wrong")


async def test_only_what_a_first_version_answers_is_looked_for(registry, folders):
    folders.write("a")
    for fields in ({"reference": "a@2"}, {"reference": "a@prod"}, {"reference": "a", "base_model": "other"}):
        await registry.refused(AdapterNotFound, "ResolveAdapter", **fields)
    await registry.refused(AdapterNotFound, "GetAdapter", name="a")
    await registry.refused(AdapterNotFound, "ResolveAdapter", reference="other/a")
    await registry.refused(AdapterNotFound, "GetAdapterVersion", name="a@latest")


async def test_who_asks_for_registered_ones_only_registers_nothing(registry, folders):
    digest = (await registry.register("b", uri=folders.write("content"))).version.digest
    folders.write("a")
    revision = await registry.revision()
    for reference in ("a", "a@1", "a@latest", f"a@{digest}"):
        await registry.refused(AdapterNotFound, "ResolveAdapter", reference=reference, registered_only=True)
    assert await registry.revision() == revision
    found = await registry.resolve("a")  # nor was it taken for absent
    assert await registry.resolve("a", registered_only=True) == found


async def test_what_was_deleted_does_not_come_back(registry, folders):
    folders.write("a")
    await registry.resolve("a")
    await registry("DeleteAdapter", name="a")
    error = await registry.refused(AdapterNotFound, "ResolveAdapter", reference="a")
    assert "deleted" in error.message


async def test_many_who_ask_for_one_name_cause_one_registration(registry, folders):
    folders.write("a")
    answers = await asyncio.gather(*(registry.resolve("a") for _ in range(50)))
    assert {answer.version.name for answer in answers} == {"namespaces/default/adapters/a/versions/1"}
    assert len((await registry("ListAdapterVersions", parent="a")).versions) == 1


async def test_a_caller_who_registers_the_name_first_is_not_overtaken(registry, folders):
    """Whoever wins: there is never a second version that nobody asked for after the caller's own."""
    for number in range(10):
        name = f"a{number}"
        folders.write(name, seed=number)
        own = folders.write(f"own/{name}", seed=100 + number)
        answers = await asyncio.gather(registry.resolve(name), registry.register(name, uri=own))
        latest = (await registry.resolve(name)).version
        assert latest == answers[1].version


async def test_names_cannot_leave_the_template(registry, folders):
    folders.write("secret")
    for reference in ("..", "first/../secret", "a%2f..%2fsecret", "default/first/secret", "a b", "{adapter}"):
        await registry.refused(InvalidArgument, "ResolveAdapter", reference=reference)
    for name in ("a..b", "a.b", "x" * 63):
        await registry.refused(AdapterNotFound, "ResolveAdapter", reference=name)
    outside = folders.root.parent / "outside"
    (folders.root / "link").symlink_to(outside)
    outside.mkdir()
    error = await registry.refused(AdapterNotFound, "ResolveAdapter", reference="link")
    assert "file://main/link (SOURCE_FORBIDDEN)" in error.message


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_search_is_waited_for_only_so_long_and_goes_on(registry, folders, monkeypatch):
    monkeypatch.setattr(auto_registration, "WAIT_SECONDS", 0.0)
    folders.write("slow")
    error = await registry.refused(SourceUnavailable, "ResolveAdapter", reference="slow")
    assert error.retry_after
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await registry("GetAdapter", name="slow")).latest_version == 1
                break
            except AdapterNotFound:
                await asyncio.sleep(0.05)
    assert (await registry.resolve("slow")).version.name.endswith("/versions/1")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_flood_of_unknown_names_is_bounded(registry, folders, monkeypatch):
    monkeypatch.setattr(auto_registration, "MAX_WAITING", 8)
    folders.write("known")
    known = await registry.resolve("known")
    outcomes = await asyncio.gather(*(_outcome(registry, f"flood-{i}") for i in range(400)))
    assert set(outcomes) == {AdapterNotFound, QueueFull}
    assert outcomes.count(AdapterNotFound) >= 8
    assert (await registry.resolve("known")).version == known.version


async def _outcome(registry, reference):
    try:
        await registry.resolve(reference)
    except (AdapterNotFound, QueueFull) as error:
        return type(error)


async def test_the_base_model_must_be_known(config, folders, connect):
    settings = NamespaceSettings(auto_register=("file://main/{adapter}",), base_model="nobody")
    server = await start(dataclasses.replace(config, namespaces={"default": settings}))
    caller = connect(server.port)
    folders.write("a")
    await caller.refused(BaseModelUnknown, "ResolveAdapter", reference="a")
    await caller.close()
    await server.stop()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_hub_and_then_a_folder(config, folders, connect, hub, tiny):
    """A repository that may not be read is passed over; one that cannot be read now is waited for."""
    credential = Credential("hf", f"value:{TOKEN}", ("default",), ("hf://org/",), endpoint=hub.proxy.url)
    settings = NamespaceSettings(("hf://org/{adapter}", "file://main/{adapter}"), "tiny", {"hf": "hub"})
    config = dataclasses.replace(config, credentials={"hub": credential}, namespaces={"default": settings})
    server = await start(config)
    registry = connect(server.port)
    await registry("RegisterBaseModel", id="tiny", config_json=json.dumps(tiny))
    folders.write("a", seed=1)
    hub.put("a", {path.name: path.read_bytes() for path in (folders.root / "a").iterdir()})
    assert (await registry.resolve("a")).version.pinned_sources[0].uri.startswith("hf://org/a")
    folders.write("b", seed=2)
    assert (await registry.resolve("b")).version.source.uri == "file://main/b"
    hub.close()
    folders.write("c", seed=3)
    await registry.refused(SourceUnavailable, "ResolveAdapter", reference="c")
    await registry.close()
    await server.stop()


# ---- configuration


def test_templates():
    for good in (
        "hf://org/{adapter}",
        "file://store/x-{adapter}",
        "s3://bucket/a/{adapter}/v1",
        "file:///srv/{adapter}",
    ):
        assert are_templates((good,)) is None, good
    for bad in (
        "", "{adapter}", "hf://{adapter}", "hf://{adapter}/repo", "file://store/", "file://store/{name}",
        "file://store/{adapter}/{adapter}", "file://store/{adapter.__class__}", "file://st{adapter}/x",
        "file://store/{adapter} x",
    ):  # fmt: skip
        assert are_templates((bad,)) is not None, bad


def test_settings_are_tables(tmp_path):
    toml = tmp_path / "registry.toml"

    def read(text):
        toml.write_text(text)
        return load(RegistryConfig, toml=toml, env={}, prefix=ENV_PREFIX, flags={})

    text = '[namespaces.team]\nauto_register = ["hf://org/{adapter}"]\nbase_model = "tiny"\n'
    found = read(text + 'credential_refs = {hf = "hub"}\n')
    assert found.namespaces["team"] == NamespaceSettings(("hf://org/{adapter}",), "tiny", {"hf": "hub"})
    with pytest.raises(ConfigError, match=r"namespaces.team.auto_register .*in their path"):
        read('[namespaces.team]\nauto_register = ["hf://{adapter}/x"]\n')
    assert read("").namespaces == {}


async def test_settings_that_cannot_be_used(config):
    rules = ("file://main/{adapter}",)
    for name, settings in [("default", NamespaceSettings(rules)), ("No!", NamespaceSettings(rules, "tiny"))]:
        with pytest.raises(InvalidArgument, match="namespaces"):
            await start(dataclasses.replace(config, namespaces={name: settings}))
