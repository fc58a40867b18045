"""The registry as a process: flags, log, signals, and what it does not load."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from registry_service.config import RegistryConfig
from registry_service.server import SERVICE, start


def run(*arguments, **names):
    command = [sys.executable, "-m", "registry_service", *arguments]
    env = {**os.environ, **names.pop("env", {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **names)


def test_nothing_loads_torch():
    modules = "{'torch', 'triton', 'transformers', 'peft'}"
    code = f"import sys, registry_service.__main__; print(sorted({modules} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(tmp_path, signum):
    process = run(
        "--listen", "127.0.0.1:0", "--database", f"sqlite:///{tmp_path}/new/r.db", "--file-root", f"main={tmp_path}"
    )  # fmt: skip
    records = []
    for line in process.stderr:
        records.append(json.loads(line))
        if records[-1]["message"] == "the registry is ready":
            break
    channel = grpc.insecure_channel(f"127.0.0.1:{records[-1]['port']}")
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    channel.close()
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == ""
    assert [json.loads(line)["message"] for line in err.splitlines()][-1] == "the registry has stopped"


def test_wrong_settings_are_told_together(tmp_path):
    process = run("--database", "mysql://x", "--file-root", "main", env={"LORAPLEX_REGISTRY_NOSUCH": "1"})
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    message = json.loads(err.splitlines()[-1])["message"]
    assert all(key in message for key in ("database", "file-root", "LORAPLEX_REGISTRY_NOSUCH"))


def test_migrate(make_postgres):
    url = make_postgres()
    process = run("--listen", "127.0.0.1:0", "--database", url)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "loraplex registry migrate" in err
    process = run("migrate", "--database", url)
    process.communicate(timeout=20)
    assert process.returncode == 0


async def test_a_taken_port(tmp_path):
    config = RegistryConfig(listen="127.0.0.1:0", database=f"sqlite:///{tmp_path}/r.db")
    server = await start(config)
    process = run("--listen", f"127.0.0.1:{server.port}", "--database", config.database)
    _, err = await asyncio.to_thread(process.communicate, timeout=20)
    await server.stop()
    assert process.returncode == 1
    assert "in use" in err
