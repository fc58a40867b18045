"""`adapter import`: a folder, and an organisation on a Hub that is a twenty-line HTTP server."""

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from shared.sources import hub
from shared.sources.policy import Patience
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
        (("long" * 100, *options), "is not a folder"),
    ]:
        ran = cli("adapter", "import", *arguments)
        assert ran.status == 2
        assert said in " ".join(ran.err.split())
    AdapterFolders(folder).write("first.one", seed=1)
    AdapterFolders(folder).write("FIRST.one", seed=1)
    assert "would both be called first.one" in " ".join(cli("adapter", "import", folder, *options).err.split())


class Hub(BaseHTTPRequestHandler):
    """Two adapters of `org` on two pages; `secret` may not be read, `odd` is answered as no Hub does."""

    def do_GET(self):
        path, _, query = self.path.partition("?")
        pages = {"author=org&filter=peft": "org/tiny-b", "author=org&filter=peft&cursor=x": "org/Tiny_A"}
        status = 404 if path != "/api/models" else 403 if "author=secret" in query else 200
        is_odd = query.startswith(("author=odd", "author=secret"))
        models = [{"id": pages[query]}] if query in pages else []
        body = json.dumps({"error": "?"} if is_odd else models).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if query == "author=org&filter=peft":
            self.send_header("Link", f'<{constants.ENDPOINT}/api/models?{query}&cursor=x>; rel="next"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nobody reads it."""


@pytest.fixture
def endpoint(monkeypatch):
    """A Hub on this machine, which is asked twice at most; the server, so that it can be closed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    patience = Patience(attempts=2, first_delay=0.01)
    monkeypatch.setattr(hub, "adapters_of", functools.partial(hub.adapters_of, patience=patience))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_organisation(cli, endpoint):
    assert hub.adapters_of("org") == ["org/Tiny_A", "org/tiny-b"]
    command = ("adapter", "import", "hf://org", "--base-model", "tiny", "--json", "--dry-run")
    found = {row["adapter"] for row in json.loads(cli(*command).out)}  # the registry reads another Hub
    assert found == {"tiny_a", "tiny-b"}
    assert "hf://nobody has no adapters" in cli("adapter", "import", "hf://nobody", "--base-model", "tiny").err


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (
            "secret",
            "SOURCE_FORBIDDEN: hf://secret: the server refuses access (HTTP 403); give a credential that may read it",
        ),
        ("odd", "SOURCE_UNAVAILABLE: hf://odd: the Hub's answer is malformed"),
    ],
)
def test_an_organisation_that_cannot_be_read(cli, endpoint, owner, said):
    ran = cli("adapter", "import", f"hf://{owner}", "--base-model", "tiny")
    assert (ran.status, ran.out, ran.err.splitlines()[0]) == (1, "", said)


def test_a_hub_at_no_address():
    """The Hub's client reads its settings when it is imported."""
    command = [sys.executable, "-m", "loraplex.cli.main", "adapter", "import", "hf://org", "--base-model", "tiny"]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:99999"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2
    assert "Invalid value for HF_ENDPOINT: is no URL: Port out of range" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_hub_that_is_away_is_said_in_one_line(cli, endpoint, caplog):
    endpoint.socket.close()
    ran = cli("adapter", "import", "hf://org", "--base-model", "tiny")
    assert (ran.status, ran.out) == (1, "")
    said = "SOURCE_UNAVAILABLE: hf://org: the Hub is not reachable: ConnectError"
    assert ran.err.splitlines() == [said, "  retry after 5 s"]
    assert not caplog.records
