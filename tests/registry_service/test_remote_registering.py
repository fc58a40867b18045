"""RegisterAdapter from the Hub and from S3: what is pinned, what is refused and why, and what is never written down."""

import asyncio
import dataclasses
import uuid
from functools import partial

import numpy as np
import pytest

from registry_service.readers import NUM_THREADS
from shared.errors import (
    AdapterInvalid,
    CredentialNotAllowed,
    InvalidArgument,
    SourceForbidden,
    SourceNotFound,
    SourceUnavailable,
)
from shared.sources.credentials import Credential
from shared.sources.policy import Patience, SourcePolicy
from shared.sources.remote import HEAD_BYTES
from tests.shared.sources.fault_proxy import Fault
from tests.shared.sources.hub_server import TOKEN, Repo
from tests.shared.sources.store_fixtures import hub, s3, s3_url
from tests.shared.sources.stores import SECRET

__all__ = ["hub", "s3", "s3_url"]

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def database_url(tmp_path):
    """The sources do not care which database there is."""
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture(autouse=True)
def _attempts_follow_each_other_fast(monkeypatch):
    """As many as ever, without the seconds between them."""
    monkeypatch.setattr(
        "registry_service.server.SourcePolicy", partial(SourcePolicy, patience=Patience(first_delay=0.01))
    )


@pytest.fixture
def config(config, hub, s3):
    credentials = {
        "hub": Credential("hf", f"value:{TOKEN}", ("default",), ("hf://org/",), endpoint=hub.proxy.url),
        "store": dataclasses.replace(s3.policy.credentials["test"], prefixes=(f"s3://{s3.bucket}/adapters/",)),
        "theirs": Credential("hf", f"value:{TOKEN}", ("other",), ("hf://",), endpoint=hub.proxy.url),
    }
    return dataclasses.replace(config, credentials=credentials)


@pytest.fixture
def files(folders):
    """The files of an adapter for `tiny`."""

    def make(name="a", **changes):
        folders.write(name, **changes)
        return {path.name: path.read_bytes() for path in (folders.root / name).iterdir()}

    return make


def register(registry, uri, credential_ref="hub", **fields):
    source = {"uri": uri, "credential_ref": credential_ref}
    return registry("RegisterAdapter", adapter_id="a", base_model="tiny", source=source, **fields)


async def refused(registry, error, uri, credential_ref="hub"):
    source = {"uri": uri, "credential_ref": credential_ref}
    found = await registry.refused(error, "RegisterAdapter", adapter_id="a", base_model="tiny", source=source)
    assert not (await registry("ListAdapters", show_deleted=True)).adapters
    return found


async def test_a_branch_of_the_hub_is_pinned_to_its_commit(registry, hub, files):
    uri = hub.put("a", files())
    commit = hub.hub.repos["org/a"].refs["main"]
    answer = await register(registry, f"{uri}@main")
    assert answer.version.source.uri == "hf://org/a@main"
    assert answer.version.source.credential_ref == "hub"
    (pinned,) = answer.version.pinned_sources
    assert (pinned.uri, pinned.revision, pinned.credential_ref) == ("hf://org/a", commit, "hub")
    hub.put("a", {**files(), "README.md": b"more"})
    again = await register(registry, uri)
    assert not again.created
    assert [source.revision for source in again.version.pinned_sources] == [hub.hub.repos["org/a"].refs["main"]]
    assert (await registry.resolve("a")).version == again.version


async def test_objects_are_pinned_one_by_one(registry, s3, hub, files):
    uri = s3.put("a", files())
    answer = await register(registry, uri, "store")
    (pinned,) = answer.version.pinned_sources
    head = s3.client.head_object(Bucket=s3.bucket, Key=f"adapters/a/{WEIGHTS}")
    assert {item.path: item.etag for item in pinned.objects}[WEIGHTS] == head["ETag"]
    assert len(pinned.objects) == 2
    also = await register(registry, hub.put("a", files()))
    assert also.version.name == answer.version.name
    assert [source.credential_ref for source in also.version.pinned_sources] == ["store", "hub"]
    assert (await registry.resolve("a")).version.pinned_sources == also.version.pinned_sources


async def test_an_adapter_saved_under_a_name_is_found_one_folder_down(registry, s3, hub, files):
    below = {"README.md": b"a model card", **{f"pirate/{name}": content for name, content in files().items()}}
    answer = await register(registry, hub.put("a", below))
    assert [source.uri for source in answer.version.pinned_sources] == ["hf://org/a/pirate"]
    again = await register(registry, s3.put("a", below), "store")
    assert again.version.digest == answer.version.digest
    assert [source.uri for source in again.version.pinned_sources][1] == f"s3://{s3.bucket}/adapters/a/pirate"


async def test_weights_that_do_not_fit_are_not_downloaded(registry, hub, files):
    config, wrong = files(), {"x": np.zeros((200, 200), np.float32)}
    uri = hub.put("a", {**config, WEIGHTS: files("b", tensors=wrong)[WEIGHTS]})
    await refused(registry, AdapterInvalid, uri)
    assert 0 < hub.sent() <= HEAD_BYTES
    hub.put("a", {**config, WEIGHTS: bytes(2 << 20)})
    error = await refused(registry, AdapterInvalid, uri)
    assert error.metadata == {"file": WEIGHTS, "limit": str(1 << 20)}
    assert hub.sent() <= 2 * HEAD_BYTES


async def test_interrupted_reads_are_resumed(registry, hub, s3, files):
    config = {"layers_to_transform": [0, 1]}
    made = files(rank=64, config={"r": 64, **config})
    assert len(made[WEIGHTS]) > 25_000
    expected = (await register(registry, hub.put("a", made), validate_only=True)).version.digest
    for store, credential in ((hub, "hub"), (s3, "store")):
        store.fault(Fault("", 2, after=20_000))
        answer = await register(registry, store.put("b", made), credential, validate_only=True)
        assert answer.version.digest == expected


async def test_what_is_wrong_with_a_source_is_told(registry, hub, s3, files):
    made = files()
    uri = hub.put("a", made)
    hub.hub.repos["org/disabled"] = Repo(is_disabled=True)
    for wrong, error in [
        ("hf://org/nosuch", SourceNotFound),
        ("hf://org/a@nosuch", SourceNotFound),
        ("hf://org/a/nosuch", SourceNotFound),
        ("hf://org/disabled", SourceForbidden),
        ("hf://org", InvalidArgument),
    ]:
        found = await refused(registry, error, wrong)
        assert found.violations or found.metadata["uri"] == wrong
    for fault, error in [
        (Fault(status=403), SourceForbidden),
        (Fault(status=404), SourceNotFound),
        (Fault(status=500), SourceUnavailable),
        (Fault(status=429, headers=(("Retry-After", "30"),)), SourceUnavailable),
    ]:
        for store, source, credential in ((hub, uri, "hub"), (s3, s3.put("a", made), "store")):
            store.fault(fault)
            found = await refused(registry, error, source, credential)
            assert (found.retry_after or 0) == (30 if fault.headers else found.retry_after or 0)
            assert bool(found.retry_after) == (error is SourceUnavailable)
            store.proxy.faults.clear()
    hub.close()
    await refused(registry, SourceUnavailable, uri)
    assert (await register(registry, s3.put("a", made), "store")).created


async def test_only_its_own_credentials_serve_a_namespace(registry, hub, s3, files):
    uri = hub.put("a", files())
    messages = set()
    for source, credential in [
        (uri, "nosuch"),
        (uri, "theirs"),
        (uri, "store"),
        ("hf://else/a", "hub"),
        (f"s3://{s3.bucket}/secret", "store"),
        (f"s3://{s3.bucket}/adapters/../secret", "store"),
    ]:
        error = await refused(registry, CredentialNotAllowed, source, credential)
        assert error.metadata == {"credential_ref": credential, "uri": source}
        messages.add(error.message.replace(repr(credential), "X").replace(source, "Y"))
    assert len(messages) == 1
    assert hub.proxy.seen == []
    assert s3.proxy.seen == []


async def test_namespaces_read_what_they_may(config, connect, tiny, hub, folders):
    import json

    from registry_service.server import start

    folders.write("a")
    hub.put("a", {path.name: path.read_bytes() for path in (folders.root / "a").iterdir()})
    allowed = ("default=file://main/b/", "other=hf://org/")
    server = await start(dataclasses.replace(config, allowed_sources=allowed))
    caller = connect(server.port)
    await caller("RegisterBaseModel", id="tiny", config_json=json.dumps(tiny))
    for uri in ("file://main/a", "hf://org/a"):
        await refused(caller, SourceForbidden, uri, "")
    folders.write("b")
    assert (await register(caller, "file://main/b", "")).created
    await caller.close()
    await server.stop()


async def test_no_secret_is_written_down(registry, hub, s3, files, tmp_path, caplog):
    caplog.set_level("DEBUG")
    made = files()
    await register(registry, hub.put("a", made))
    await register(registry, s3.put("a", made), "store")
    hub.fault(Fault(status=500))
    await asyncio.sleep(0)
    source = {"uri": hub.put("b", made), "credential_ref": "hub"}
    error = await registry.refused(
        SourceUnavailable, "RegisterAdapter", adapter_id="b", base_model="tiny", source=source
    )
    written = b"".join(path.read_bytes() for path in tmp_path.glob("registry.db*"))
    assert b"credential_ref" in written
    for secret in (TOKEN, SECRET, "SECRETSIGNATURE", "AKIATEST"):
        assert secret.encode() not in written
        assert secret not in caplog.text
        assert secret not in str(error.record())


async def test_a_registration_outlives_its_caller(registry, hub, files):
    """Who leaves while the files are read, and asks again with the same request_id, gets what the first call did."""
    uri, request_id = hub.put("slow", files()), str(uuid.uuid4())
    hub.fault(Fault(path="adapter_config.json", rate=40.0))  # for two seconds

    def reads():
        return [seen for seen in hub.proxy.seen if "adapter_config.json" in seen.path and seen.sent[0]]

    async def is_registered():
        return bool((await registry("ListAdapters")).adapters)

    call = asyncio.ensure_future(register(registry, uri, request_id=request_id))
    async with asyncio.timeout(60):
        while not reads():  # noqa: ASYNC110 - the proxy is another thread
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while not await is_registered():  # noqa: ASYNC110 - it is asked over the wire
            await asyncio.sleep(0.05)
    assert call.cancelled()
    answer = await register(registry, uri, request_id=request_id)
    assert (answer.created, answer.version.name[-1]) == (True, "1")
    assert len(reads()) == 1


async def test_a_source_that_hangs_does_not_keep_others_waiting(registry, hub, s3, files):
    made = files()
    uris = [hub.put(f"slow{index}", made) for index in range(NUM_THREADS + 2)]
    hub.fault(Fault(after=100, ending="stall"))
    source = {"credential_ref": "hub"}
    waiting = [
        asyncio.ensure_future(
            registry("RegisterAdapter", adapter_id=f"s{n}", base_model="tiny", source={"uri": uri, **source})
        )
        for n, uri in enumerate(uris)
    ]
    await asyncio.sleep(0.3)
    assert (await asyncio.wait_for(register(registry, s3.put("a", made), "store"), 50)).created
    assert not all(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
