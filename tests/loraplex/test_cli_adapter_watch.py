"""`adapter watch` and the client's watch against a real registry."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import aclosing

import pytest

from examples.stack import free_address
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2
from registry_service.config import RegistryConfig
from registry_service.server import start
from shared.errors import InvalidArgument, LoraplexError
from tests.registry_service.watching import add_adapters


def test_a_line_a_change(cli, register):
    register("watched", "one", "--alias", "prod")
    register("watched", "two")
    lines = cli("adapter", "watch", "--once").out.splitlines()
    (line,) = (line.split() for line in lines if "  watched  " in line)
    assert line[1:] == ["UPSERT", "watched", "tiny", "latest→2,", "prod→1"]
    cli("adapter", "alias", "watched@prod", "1:9", "2")
    assert "latest→2, prod→1:9+2:1" in cli("adapter", "watch", "--once").out
    assert cli("adapter", "watch", "--once", "--skip-snapshot").out == ""
    assert cli("adapter", "watch", "--once", "--base-model", "other").out == ""


def test_json_has_a_token_to_continue_with(cli, register):
    register("followed")
    found = [json.loads(line) for line in cli("adapter", "watch", "--once", "--json").out.splitlines()]
    assert all("resume_token" not in change for change in found[:-1])
    assert {"type", "adapter", "versions", "revision", "resume_token"} <= set(found[-1])
    register("followed", "two")
    rest = cli("adapter", "watch", "--once", "--json", "--resume-token", found[-1]["resume_token"]).out.splitlines()
    (change,) = map(json.loads, rest)
    assert [version["name"] for version in change["versions"]] == ["namespaces/default/adapters/followed/versions/2"]
    assert change["revision"] > found[-1]["revision"]
    cli("adapter", "delete-version", "followed@1", "--yes")
    lines = cli("adapter", "watch", "--once", "--resume-token", change["resume_token"]).out.splitlines()
    assert [line.split()[1:] for line in lines] == [["UPSERT", "followed", "tiny", "latest→2", "(1", "deleted)"]]


def test_what_is_refused(cli):
    ran = cli("adapter", "watch", "--resume-token", "nonsense")
    assert ran.status == 1
    assert "resume_token" in ran.err
    assert "UNAVAILABLE" in cli("adapter", "watch", "--registry", "localhost:1").err


def test_it_prints_as_changes_happen_and_ends_with_control_c(servers, register):
    env = {**os.environ, "LORAPLEX_REGISTRY": servers.registry, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "loraplex.cli.main", "adapter", "watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        for name in ("live-1", "live-2"):
            register(name)
            assert any(name in line for line in iter(process.stdout.readline, ""))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


async def test_the_client_continues_where_a_watch_broke_off(tmp_path):
    config = RegistryConfig(listen=free_address(), database=f"sqlite:///{tmp_path}/r.db")
    server = await start(config)
    names = [f"a{i}" for i in range(6)]
    async with Client(registry=config.listen) as client:
        model = json.dumps({"architectures": ["LlamaForCausalLM"], **_SIZES})
        request = registry_pb2.RegisterBaseModelRequest(id="tiny", config_json=model)
        await client.call(client.registry.RegisterBaseModel(request))
        seen = []
        async with aclosing(client.watch_adapters()) as responses, asyncio.timeout(60):
            assert (await anext(responses)).snapshot_complete
            for name in names:
                await add_adapters(server.database, [name])
                if name == "a3":
                    await server.stop()
                    server = await start(config)
                while len(seen) <= names.index(name):
                    seen += [change.adapter.name.rpartition("/")[2] for change in (await anext(responses)).changes]
        assert seen == names
        with pytest.raises(InvalidArgument):
            await anext(client.watch_adapters(resume_token="nonsense"))
    await server.stop()
    async with Client(registry=config.listen) as client:
        with pytest.raises(LoraplexError, match="connect"):
            await anext(client.watch_adapters())


_SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
