"""RegisterAdapter from end to end."""

import asyncio
import hashlib
import json
import uuid

import numpy as np
import pytest

from loraplex.registry.v1 import resources_pb2
from registry_service.server import start
from shared.errors import (
    AdapterDeleted,
    AdapterInvalid,
    AdapterNotFound,
    BaseModelMismatch,
    BaseModelUnknown,
    CredentialNotAllowed,
    InvalidArgument,
    LoraplexError,
    RequestIdReused,
)


async def failure(awaitable, error):
    with pytest.raises(LoraplexError) as caught:
        await awaitable
    assert type(caught.value) is error, caught.value.message
    return caught.value


async def test_a_registration_answers_with_everything_known(registry, folders):
    uri = folders.write()
    answer = await registry.register(
        uri=uri, labels={"team": "x"}, description="An adapter.", aliases=["prod", "canary", "prod"]
    )
    adapter, version = answer.adapter, answer.version
    assert answer.created
    assert adapter.name == "namespaces/default/adapters/a"
    assert adapter.base_model == "baseModels/tiny"
    assert adapter.default_alias == "latest"
    assert adapter.latest_version == 1
    assert dict(adapter.labels) == {"team": "x"}
    assert adapter.description == "An adapter."
    assert [(a.name.rpartition("/")[2], a.targets[0].version) for a in adapter.aliases] == [("canary", 1), ("prod", 1)]
    assert adapter.etag
    assert not adapter.HasField("delete_time")
    assert version.name == "namespaces/default/adapters/a/versions/1"
    assert version.source.uri == uri
    assert [source.uri for source in version.pinned_sources] == [uri]
    assert version.state == version.STATE_READY
    assert version.creator == "anonymous"
    assert version.num_tensors == 8
    assert version.lora_config.rank == 2
    assert version.lora_config.alpha == 4
    assert list(version.lora_config.target_modules) == ["q_proj", "v_proj"]
    assert list(version.lora_config.kinds) == ["lora"]
    assert version.lora_config.num_modules == 4
    assert version.lora_config.device_bytes == 2 * 2 * 2 * ((16 + 16) + (8 + 16))
    assert [
        (m.module, m.layers, m.rank, m.scale, list(m.kinds), m.num_tensors) for m in version.lora_config.modules
    ] == [
        ("q_proj", "0-1", 2, 2.0, ["lora"], 4),
        ("v_proj", "0-1", 2, 2.0, ["lora"], 4),
    ]
    assert sum(module.device_bytes for module in version.lora_config.modules) == version.lora_config.device_bytes
    assert version.base_model_fingerprint == (await registry("GetBaseModel", name="tiny")).fingerprint
    contents = {file.name: file.read_bytes() for file in (folders.root / "a").iterdir()}
    assert {file.path: file.sha256 for file in version.manifest.files} == {
        name: hashlib.sha256(content).hexdigest() for name, content in contents.items()
    }
    assert version.size_bytes == sum(map(len, contents.values()))
    assert (await registry.resolve("a")).version == version
    assert await registry.adapter("a") == adapter


async def test_an_adapter_saved_under_a_name_is_found_one_folder_down(registry, folders):
    folders.write("run/pirate")
    (folders.root / "run" / "README.md").write_text("a model card")
    version = (await registry.register(uri="file://main/run/")).version
    assert version.source.uri == "file://main/run/"
    assert [source.uri for source in version.pinned_sources] == ["file://main/run/pirate"]


async def test_versions_count_from_one_and_latest_follows(registry, folders):
    for number in (1, 2, 3):
        answer = await registry.register(uri=folders.write(seed=number))
        assert answer.version.name.endswith(f"/versions/{number}")
        assert (await registry.resolve("a")).version.name.endswith(f"/versions/{number}")
    assert (await registry.resolve("a@1")).version.digest != answer.version.digest


async def test_known_content_is_the_same_version(registry, folders):
    first = await registry.register(uri=folders.write("a", seed=1))
    again = await registry.register(uri="file://main/a")
    assert not again.created
    assert again.version == first.version
    assert again.registry_revision == first.registry_revision
    moved = await registry.register(uri=folders.write("elsewhere/b", seed=1), aliases=["prod"])
    assert not moved.created
    assert moved.version.name == first.version.name
    assert [source.uri for source in moved.version.pinned_sources] == ["file://main/a", "file://main/elsewhere/b"]
    assert moved.registry_revision > first.registry_revision
    assert (await registry.resolve("a@prod")).version.name == first.version.name
    other = await registry.register("b", uri="file://main/a")
    assert other.created
    assert other.version.digest == first.version.digest
    assert other.version.name == "namespaces/default/adapters/b/versions/1"


async def test_aliases_move_to_the_registered_version(registry, folders):
    await registry.register(uri=folders.write(seed=1), aliases=["prod"])
    await registry.register(uri=folders.write(seed=2), aliases=["prod"])
    assert (await registry.resolve("a@prod")).version.name.endswith("/2")
    await registry.register(uri=folders.write(seed=1), aliases=["prod"])
    assert (await registry.resolve("a@prod")).version.name.endswith("/1")


async def test_absolute_paths_are_pinned_to_the_root(registry, folders):
    folders.write("deep/er/a b%")
    answer = await registry.register(uri=f"file://{folders.root}/deep/er/a%20b%25")
    assert answer.version.pinned_sources[0].uri == "file://main/deep/er/a%20b%25"
    again = await registry.register(uri=answer.version.pinned_sources[0].uri)
    assert len(again.version.pinned_sources) == 1


async def test_base_model_rules(registry, folders, tiny):
    uri = folders.write()
    error = await failure(registry.register(uri=uri, base_model="other"), BaseModelUnknown)
    assert error.metadata["base_model"] == "other"
    assert "RegisterBaseModel (loraplex base-model register)" in error.message
    error = await failure(registry.register(uri=uri, base_model=""), InvalidArgument)
    assert error.violations[0].field == "base_model"
    await failure(registry("GetAdapter", name="a"), AdapterNotFound)
    assert (await registry.register(uri=uri, base_model="baseModels/tiny")).created
    assert not (await registry.register(uri=uri, base_model="")).created
    await registry("RegisterBaseModel", id="twin", config_json=json.dumps(tiny))
    error = await failure(registry.register(uri=uri, base_model="twin"), BaseModelMismatch)
    assert error.metadata["base_model"] == "tiny"


async def test_another_base_model_name_in_the_files_only_warns(registry, folders):
    answer = await registry.register(uri=folders.write(config={"base_model_name_or_path": "Some/Other"}))
    assert "Some/Other" in answer.version.warnings[0]
    for name in ("/data/Tiny", "/data/Tiny/", "SomeOrg/Tiny", "tiny", "../models/tiny"):
        answer = await registry.register(uri=folders.write(config={"base_model_name_or_path": name}))
        assert not answer.version.warnings, name
    for name in ("SomeOrg/Tiny-Instruct", "tiny/other", "notiny"):
        answer = await registry.register(uri=folders.write(config={"base_model_name_or_path": name}))
        assert name in answer.version.warnings[0]


async def test_a_base_model_may_be_named_without_its_publisher(registry, folders, tiny):
    await registry("RegisterBaseModel", id="someorg--tiny", config_json=json.dumps(tiny))
    for name, num_warnings in (("SomeOrg/Tiny", 0), ("/models/Tiny", 0), ("Another/Tiny", 0), ("SomeOrg/Other", 1)):
        uri = folders.write(config={"base_model_name_or_path": name})
        answer = await registry.register("b", uri=uri, base_model="someorg--tiny")
        assert len(answer.version.warnings) == num_warnings, name


async def test_a_failed_registration_leaves_nothing(registry, folders):
    tensors = folders.tensors()
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][0, 0] = np.nan
    revision = await registry.revision()
    await failure(registry.register(uri=folders.write(tensors=tensors), request_id=str(uuid.uuid4())), AdapterInvalid)
    await failure(registry("GetAdapter", name="a"), AdapterNotFound)
    assert not (await registry("ListAdapters", show_deleted=True)).adapters
    assert await registry.revision() == revision
    answer = await registry.register(uri=folders.write())
    assert answer.version.name.endswith("/versions/1")
    assert answer.registry_revision == revision + 1


async def test_validate_only_writes_nothing(registry, folders):
    uri = folders.write()
    request_id = str(uuid.uuid4())
    answer = await registry.register(uri=uri, validate_only=True, request_id=request_id, aliases=["prod"])
    assert answer.created
    assert not answer.version.name
    assert answer.version.digest
    assert answer.version.lora_config.rank == 2
    await failure(registry("GetAdapter", name="a"), AdapterNotFound)
    real = await registry.register(uri=uri, request_id=request_id)
    assert real.created
    pretended = await registry.register(uri=uri, validate_only=True)
    assert not pretended.created
    assert pretended.version.digest == real.version.digest
    assert pretended.adapter == real.adapter


async def test_a_request_id_gets_one_answer(registry, folders):
    uri = folders.write(seed=1)
    request_id = str(uuid.uuid4())
    first = await registry.register(uri=uri, request_id=request_id)
    folders.write(seed=2)
    again = await registry.register(uri=uri, request_id=request_id.upper())
    assert again == first
    error = await failure(registry.register("b", uri=uri, request_id=request_id), RequestIdReused)
    assert error.violations[0].field == "request_id"
    assert (await registry.register(uri=uri)).version.name.endswith("/2")


async def test_concurrent_calls_with_one_request_id_are_one(registry, folders):
    uri = folders.write()
    request_id = str(uuid.uuid4())
    answers = await asyncio.gather(*(registry.register(uri=uri, request_id=request_id) for _ in range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].created


async def test_two_registries_on_one_database(registry, folders, config, connect):
    second = await start(config)
    other = connect(second.port)
    try:
        uri = folders.write()
        request_id = str(uuid.uuid4())
        calls = [caller.register(uri=uri, request_id=request_id) for caller in (registry, other) * 4]
        answers = await asyncio.gather(*calls)
        assert all(answer == answers[0] for answer in answers)
        assert (await other.resolve("a", min_revision=answers[0].registry_revision)).version == answers[0].version
    finally:
        await other.close()
        await second.stop()


async def test_many_at_once_on_one_adapter_get_all_numbers(registry, folders):
    uris = [folders.write(f"v{seed}", seed=seed) for seed in range(32)]
    before = await registry.revision()
    answers = await asyncio.gather(*(registry.register(uri=uri) for uri in uris))
    assert sorted(int(answer.version.name.rpartition("/")[2]) for answer in answers) == list(range(1, 33))
    assert all(answer.created for answer in answers)
    assert sorted(answer.registry_revision - before for answer in answers) == list(range(1, 33))
    assert (await registry("GetAdapter", name="a")).latest_version == 32
    by_revision = sorted(answers, key=lambda answer: answer.registry_revision)
    numbers = [int(answer.version.name.rpartition("/")[2]) for answer in by_revision]
    assert numbers == sorted(numbers)


async def test_many_at_once_with_the_same_content_make_one_version(registry, folders):
    uris = [folders.write(f"v{copy}", seed=1) for copy in range(12)]
    answers = await asyncio.gather(*(registry.register(uri=uri) for uri in uris))
    assert {answer.version.name for answer in answers} == {"namespaces/default/adapters/a/versions/1"}
    assert sum(answer.created for answer in answers) == 1
    (version,) = (await registry("ListAdapterVersions", parent="a")).versions
    assert sorted(source.uri for source in version.pinned_sources) == sorted(uris)


async def test_a_deleted_adapter_is_not_registered_again(registry, folders):
    uri = folders.write()
    await registry.register(uri=uri)
    await registry("DeleteAdapter", name="a")
    error = await failure(registry.register(uri=uri), AdapterDeleted)
    assert error.code == "ALREADY_EXISTS"


async def test_unknown_credentials_and_namespaces(registry, folders):
    source = resources_pb2.AdapterSource(uri=folders.write(), credential_ref="s3")
    error = await registry.refused(
        CredentialNotAllowed, "RegisterAdapter", adapter_id="a", base_model="tiny", source=source
    )
    assert error.metadata["credential_ref"] == "s3"
    error = await failure(registry.register(parent="namespaces/other"), AdapterNotFound)
    assert error.metadata == {"adapter": "namespaces/other/adapters/a"}


async def test_all_wrong_fields_are_told_at_once(registry):
    error = await failure(
        registry.register(
            "Upper",
            uri="",
            base_model="a,b",
            request_id="no-uuid",
            labels={"": "x", "k": "\0"},
            description="\0",
            aliases=["latest", "7", "ok", "namespaces"],
        ),
        InvalidArgument,
    )
    fields = {violation.field for violation in error.violations}
    assert {
        "adapter_id", "source.uri", "base_model", "request_id", "description",
        "aliases[0]", "aliases[1]", "aliases[3]", "labels['']", "labels['k']",
    } == fields  # fmt: skip
