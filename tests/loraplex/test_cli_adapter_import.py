"""`adapter import`: a folder, and an organisation on a Hub that is a twenty-line HTTP server."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from loraplex.cli import adapter_import
from tests.registry_service.conftest import AdapterFolders


@pytest.fixture
def folder(servers, tmp_path_factory):
    """Three adapters, one of them broken, below the root that the registry calls file://main."""
    root = servers.root / "many"
    adapters = AdapterFolders(root)
    adapters.write("First One", seed=11)
    adapters.write("nested/second", seed=12)
    adapters.write("broken", seed=13)
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"x")
    (root / "none").mkdir()
    adapters.write("weights-only", seed=14)
    (root / "weights-only" / "adapter_config.json").unlink()
    yield root
    shutil.rmtree(root)


def rows(ran):
    return {row["adapter"]: (row["result"], row["version"]) for row in json.loads(ran.out)}


def test_a_folder(cli, folder):
    command = ("adapter", "import", folder, "--uri", "file://main/many/", "--base-model", "tiny", "--json")
    halves = {"broken": ("failed", 0), "weights-only": ("failed", 0)}
    ran = cli(*command, "--dry-run")
    assert (ran.status, ran.err) == (1, "")
    assert rows(ran) == {**halves, "first-one": ("valid", 0), "nested-second": ("valid", 0)}
    assert {row["adapter"]: "adapter_config.json" in row["detail"] for row in json.loads(ran.out)}["weights-only"]
    ran = cli(*command, "--alias", "prod")
    assert rows(ran) == {**halves, "first-one": ("registered", 1), "nested-second": ("registered", 1)}
    for broken in halves:
        shutil.rmtree(folder / broken)
    ran = cli(*command)
    assert (ran.status, rows(ran)) == (0, {"first-one": ("unchanged", 1), "nested-second": ("unchanged", 1)})
    assert "prod→1" in cli("adapter", "list", "--filter", "name = first-one").out


def test_what_is_no_import(cli, folder, tmp_path):
    options = ("--base-model", "tiny", "--uri", "file://main")
    for arguments, said in [
        ((folder / "nosuch", *options), "is not a folder"),
        ((folder, "--base-model", "tiny"), "needs --uri"),
        ((tmp_path, *options), "has no adapters"),
        (("hf://org/repo", "--base-model", "tiny"), "is not hf://ORGANISATION"),
    ]:
        ran = cli("adapter", "import", *arguments)
        assert ran.status == 2
        assert said in " ".join(ran.err.split())
    AdapterFolders(folder).write("first.one", seed=1)
    AdapterFolders(folder).write("FIRST.one", seed=1)
    assert "would both be called first.one" in " ".join(cli("adapter", "import", folder, *options).err.split())


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        is_list = self.path.startswith("/api/models?") and "author=org" in self.path and "peft" in self.path
        body = json.dumps([{"id": "org/Tiny_A", "tags": []}, {"id": "org/tiny-b", "tags": []}] if is_list else {})
        self.send_response(200 if is_list else 400)  # 5xx would be tried again
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        """Nobody reads it."""


def test_an_organisation(cli, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(adapter_import, "HfApi", lambda: huggingface_hub.HfApi(endpoint=endpoint))
    try:
        found = adapter_import._of_hub("hf://org")
        failed = cli("adapter", "import", "hf://other", "--base-model", "tiny")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert found == [("tiny_a", "hf://org/Tiny_A"), ("tiny-b", "hf://org/tiny-b")]
    assert (failed.status, failed.err.split(":")[0]) == (1, "SOURCE_UNAVAILABLE")
