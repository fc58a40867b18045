"""The example plugin, installed as users install it, in a registry of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from shared.errors import DigestMismatch, InvalidArgument, LoraplexError, SourceForbidden, SourceNotFound
from shared.sources.resolver import PinnedObject
from shared.status import from_rpc_error
from tests.inference_service.adapters.small_adapters import RAW_CONFIG, manifest, write_adapter
from tests.shared.sources.fault_proxy import Fault
from tests.shared.sources.store_fixtures import web
from tests.shared.sources.stores import WebStore

__all__ = ["web"]

PLUGIN = Path(__file__).parents[2] / "examples" / "resolver_plugin"
MODULE = PLUGIN / "loraplex_https.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin in it; building it writes beside its sources, so that is done to a copy."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, folder / "sources")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", folder / "sources"]
    subprocess.run(command, check=True)
    return folder / "site"


@contextmanager
def registry(folder: Path, env: dict[str, str], *flags: str) -> Iterator[registry_pb2_grpc.AdapterRegistryServiceStub]:
    """A registry process that knows the tiny base model."""
    command = [sys.executable, "-m", "registry_service", "--listen", "127.0.0.1:0"]
    command += ["--database", f"sqlite:///{folder}/r.db", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})
    assert process.stderr is not None
    try:
        ready = next(line for line in map(json.loads, process.stderr) if line["message"] == "the registry is ready")
        with grpc.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
            stub = registry_pb2_grpc.AdapterRegistryServiceStub(channel)
            request = registry_pb2.RegisterBaseModelRequest(id="tiny", config_json=json.dumps(RAW_CONFIG))
            stub.RegisterBaseModel(request, wait_for_ready=True, timeout=30)
            yield stub
    finally:
        process.terminate()
        process.communicate(timeout=60)


def register(stub: Any, uri: str) -> registry_pb2.RegisterAdapterResponse:
    request = registry_pb2.RegisterAdapterRequest(adapter_id="a", base_model="tiny", source={"uri": uri})
    try:
        answer: registry_pb2.RegisterAdapterResponse = stub.RegisterAdapter(request, timeout=60)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    return answer


def refused(stub: Any, uri: str, error: type[LoraplexError]) -> LoraplexError:
    with pytest.raises(error) as caught:
        register(stub, uri)
    return caught.value


def test_it_is_as_short_as_a_plugin_should_be() -> None:
    assert len(MODULE.read_text().splitlines()) < 60


def test_it_adds_a_scheme(installed: Path, tmp_path: Path, web: WebStore) -> None:
    write_adapter(web.folder / "a")
    uri = f"{web.proxy.url}/a/"
    env = {"PYTHONPATH": str(installed), "SSL_CERT_FILE": str(web.certificate)}
    with registry(tmp_path, env, "--allow-endpoint", web.proxy.url) as stub:
        version = register(stub, uri.rstrip("/")).version
        assert {(file.path, file.sha256) for file in version.manifest.files} == {
            (file.path, file.sha256) for file in manifest(web.folder / "a")
        }
        (pinned,) = version.pinned_sources
        assert pinned.uri == uri
        assert [item.path for item in pinned.objects] == ["adapter_config.json", "adapter_model.safetensors"]
        assert all(item.etag for item in pinned.objects)
        assert not register(stub, uri).created
        write_adapter(web.folder / "a", seed=1)
        assert register(stub, uri).version.name.endswith("/versions/2")
        assert refused(stub, f"{web.proxy.url}/nosuch/", SourceNotFound).metadata["file"] == "adapter_config.json"
        web.fault(Fault("/a/", times=1, status=302, headers=(("Location", "https://169.254.169.254/"),)))
        refused(stub, uri, SourceForbidden)
        web.fault(Fault("safetensors", times=2, after=1000))
        assert not register(stub, uri).created
    with registry(tmp_path, env) as stub:
        assert "not public" in refused(stub, uri, SourceForbidden).message
    with registry(tmp_path, {"SSL_CERT_FILE": str(web.certificate)}, "--allow-endpoint", web.proxy.url) as stub:
        assert "reads file://, hf:// and s3://" in refused(stub, uri, InvalidArgument).message


def test_the_same_folder_has_the_same_digest_from_a_disk_and_from_a_web_server(
    installed: Path, tmp_path: Path, web: WebStore
) -> None:
    write_adapter(web.folder / "plain")
    write_adapter(web.folder / "chatty")
    (web.folder / "chatty" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (web.folder / "chatty" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    env = {"PYTHONPATH": str(installed), "SSL_CERT_FILE": str(web.certificate)}
    flags = ["--allow-endpoint", web.proxy.url, "--file-root", f"disk={web.folder}"]
    with registry(tmp_path, env, *flags) as stub:
        for name in ("plain", "chatty"):
            by_https = register(stub, f"{web.proxy.url}/{name}/")
            by_file = register(stub, f"file://disk/{name}")
            assert by_https.version.digest == by_file.version.digest
            assert by_https.created
            assert not by_file.created
        assert [file.path for file in by_https.version.manifest.files] == [
            "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer_config.json"
        ]  # fmt: skip
        web.fault(Fault("chat_template.jinja", times=1, status=403))
        problem = refused(stub, f"{web.proxy.url}/chatty/", SourceForbidden)
        assert problem.metadata["file"] == "chat_template.jinja"


def test_what_a_pin_does_not_name_is_not_there(web: WebStore) -> None:
    uri = web.put("a", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"0", "tokenizer.json": b"{}"})
    assert web.open(web.pinned(uri)).list() == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    pin = web.pinned(uri)._replace(
        objects=(PinnedObject("adapter_config.json"), PinnedObject("adapter_model.safetensors"))
    )
    assert web.open(pin).list() == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_replica_reads_exactly_what_was_pinned(web: WebStore) -> None:
    uri = web.put("a", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"0123456789"})
    source = web.open(web.pinned(uri))
    assert source.list() == ["adapter_config.json", "adapter_model.safetensors"]
    source.open("adapter_model.safetensors").close()
    web.put("a", {"adapter_model.safetensors": b"9876543210"})
    with pytest.raises(DigestMismatch):
        web.open(source.pin()).open("adapter_model.safetensors")
