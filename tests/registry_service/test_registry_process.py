"""The registry as a process: flags, log, signals, and what it does not load."""

import asyncio
import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing

import grpc
import pytest
import sqlalchemy
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.stack import free_address
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from registry_service import migrations
from registry_service.__main__ import main
from registry_service.config import RegistryConfig
from registry_service.database import driver_url
from registry_service.server import SERVICE, start
from shared.config import ConfigError, load, options
from tests.e2e import raw_http2 as http2

LORAPLEX = "from loraplex.cli.main import main; main()"


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)


def run(*arguments, **names):
    command = [sys.executable, "-m", "registry_service", *arguments]
    env = {**os.environ, **names.pop("env", {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **names)


def until_ready(process):
    """Reads the log until the line that the registry is ready, which is returned."""
    for line in process.stderr:
        record = json.loads(line)
        if record["message"] == "the registry is ready":
            return record
    raise AssertionError("it has ended")


def test_nothing_loads_torch():
    modules = "{'torch', 'triton', 'transformers', 'peft'}"
    code = f"import sys, registry_service.__main__; print(sorted({modules} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(tmp_path, signum):
    process = run(
        "--listen", "127.0.0.1:0", "--database", f"sqlite:///{tmp_path}/r.db", "--file-root", f"main={tmp_path}"
    )  # fmt: skip
    channel = grpc.insecure_channel(f"127.0.0.1:{until_ready(process)['port']}")
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    channel.close()
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    assert [json.loads(line)["message"] for line in err.splitlines()][-1] == "the registry has stopped"


@pytest.mark.parametrize("command", [["-m", "registry_service"], ["-c", LORAPLEX, "registry"]])
@pytest.mark.parametrize("port", ["listen", "health_listen"])
def test_what_a_client_says_as_it_leaves_is_no_line_of_the_log(tmp_path, command, port, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    health = free_address()
    flags = ["--listen=127.0.0.1:0", f"--database=sqlite:///{tmp_path}/r.db", f"--health-listen={health}"]
    process = subprocess.Popen([sys.executable, *command, *flags], stderr=subprocess.PIPE, text=True)
    record = until_ready(process)
    address = health if port == "health_listen" else f"127.0.0.1:{record['port']}"
    connection = http2.RawConnection(address)
    goaway = http2.frame(http2.GOAWAY, payload=bytes(7) + b"\2" + b'x"\n{"forged": "by nobody"}\n')
    ping = http2.frame(http2.PING, payload=b"heard it")
    connection.send(http2.PREFACE + http2.frame(http2.SETTINGS) + goaway + ping)
    content = b""
    while b"heard it" not in content:
        content += connection.socket.recv(4096)
    connection.close()
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "forged" not in err
    assert all(json.loads(line)["service"] == "registry" for line in err.splitlines())


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_ends_well_without_standard_streams(tmp_path, streams):
    address = free_address()
    shell = f'exec "$0" -m registry_service --listen {address} --database sqlite:///{tmp_path}/r.db {streams}'
    with subprocess.Popen(
        ["sh", "-c", shell, sys.executable], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        with grpc.insecure_channel(address, [("grpc.max_reconnect_backoff_ms", 200)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60, wait_for_ready=True)
        process.terminate()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == b""


@pytest.mark.parametrize(("command", "stream"), [("export >&-", "output"), ("restore <&-", "input")])
def test_a_command_whose_stream_is_closed_says_so(tmp_path, command, stream):
    url = f"sqlite:///{tmp_path}/r.db"
    migrations.upgrade(url)
    shell = f'exec "$0" -m registry_service {command} --database {url}'
    ended = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, f"error: standard {stream} is closed\n")


def test_open_watches_do_not_hold_its_end(tmp_path):
    process = run("--listen", "127.0.0.1:0", "--database", f"sqlite:///{tmp_path}/r.db", "--drain-grace", "60")
    record = until_ready(process)
    with grpc.insecure_channel(f"127.0.0.1:{record['port']}") as channel:
        stub = registry_pb2_grpc.AdapterRegistryServiceStub(channel)
        watches = [stub.WatchAdapters(registry_pb2.WatchAdaptersRequest(parent="namespaces/-")) for _ in range(3)]
        for watch in watches:
            assert next(watch).snapshot_complete
        process.send_signal(signal.SIGTERM)
        for watch in watches:
            with pytest.raises(grpc.RpcError) as caught:
                next(watch)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_wrong_settings_are_told_together(tmp_path):
    process = run("--database", "mysql://x", "--file-root", "main", env={"LORAPLEX_REGISTRY_NOSUCH": "1"})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert all(key in line for key in ("--database (flag)", "--file-root (flag)", "LORAPLEX_REGISTRY_NOSUCH"))
    assert "--file-roots" not in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "nowhere"], "error: --listen (flag): expected HOST:PORT, is 'nowhere'\n"),
        (["--file-root", "a=/no/such"], "error: --file-root: no such folder: a=/no/such\n"),
        (["--lisen", "x"], "loraplex registry: error: unrecognized arguments: --lisen x\n"),
        (["serve", "--lisen", "x"], "loraplex registry serve: error: unrecognized arguments: --lisen x\n"),
        (["migrat"], "loraplex registry: error: unrecognized arguments: migrat\n"),
        (["migrate", "--listen", "x"], "loraplex registry migrate: error: unrecognized arguments: --listen x\n"),
    ],
)
def test_what_is_wrong_is_said_as_it_was_typed(arguments, said, capfd):
    try:
        status = main(arguments)
    except SystemExit as end:  # of argparse
        status = end.code
    assert status == 2
    assert capfd.readouterr().err.endswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "registry migrate, loraplex registry export, loraplex registry restore, loraplex registry new"),
        (["serve"], "--listen"),
        (["migrate"], "schema"),
        (["new-epoch"], "backup"),
        (["export"], "JSON lines"),
        (["restore"], "empty"),
    ],
)
def test_every_command_describes_itself(arguments, said, capfd):
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    text = " ".join(capfd.readouterr().out.split())
    assert said in text
    assert ("--listen" in text) == (arguments in ([], ["serve"]))


def test_a_database_that_cannot_be_used_is_one_line(tmp_path, capfd):
    (tmp_path / "file").touch()
    (tmp_path / "no.db").write_text("root:x:0:0:root:/root:/bin/sh\n" * 100)
    newer = f"sqlite:///{tmp_path}/newer.db"
    assert main(["migrate", "--database", newer]) == 0
    with closing(sqlite3.connect(tmp_path / "newer.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v9999'")
    capfd.readouterr()
    for url, code, told in [
        (f"sqlite:///{tmp_path}/file/r.db", 2, "--database: its folder"),
        (f"sqlite:///{tmp_path}/no/such/r.db", 2, "--database: its folder"),
        (f"sqlite:///{tmp_path}/nope/r.db", 2, f"--database: its folder {tmp_path}/nope does not exist; make it, or"),
        (f"sqlite:///{tmp_path}/no.db", 2, "--database: sqlite:///"),
        (f"sqlite:///{tmp_path}", 2, "--database: sqlite:///"),
        (newer, 1, "the database is newer than this registry: it is at revision v9999"),
    ]:
        assert main(["--listen", "127.0.0.1:0", "--database", url]) == code
        error = capfd.readouterr().err
        assert error.splitlines()[-1].startswith(f"error: {told}")
        assert "Traceback" not in error
    assert (tmp_path / "no.db").read_text().startswith("root:x:0:0")
    assert not (tmp_path / "no").exists()
    assert not (tmp_path / "nope").exists()


def test_the_folder_of_the_default_database_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["migrate"]) == 0
    assert (tmp_path / "var" / "registry.db").is_file()


def test_a_newer_database_is_refused_by_every_command_in_one_line(empty_database_url, capfd):
    migrations.upgrade(empty_database_url)
    at(empty_database_url, "0007")
    capfd.readouterr()
    for command in (["migrate"], ["export"], ["restore"], ["new-epoch"], ["serve", "--listen", "127.0.0.1:0"]):
        assert main([*command, "--database", empty_database_url]) == 1, command
        (line,) = capfd.readouterr().err.splitlines()
        assert line == (
            f"error: the database is newer than this registry: it is at revision 0007, and this version knows them up "
            f"to {migrations.head()}; run the version that migrated it, or go back to a backup from before "
            "(`loraplex registry restore` of this version, into an empty database)"
        ), command
        assert at(empty_database_url) == "0007", command


def test_a_process_tells_of_its_schema_only_what_it_has_changed(tmp_path):
    url = f"sqlite:///{tmp_path}/r.db"
    process = run("serve", "--listen", "127.0.0.1:0", "--database", url)
    records = []
    for line in process.stderr:
        records.append(json.loads(line))
        if records[-1]["message"] == "the registry is ready":
            break
    process.terminate()
    process.communicate(timeout=60)
    assert not [record for record in records if "alembic" in record["logger"]]
    (told,) = (record for record in records if "from_revision" in record)
    assert (told["from_revision"], told["to_revision"]) == (None, migrations.head())
    at(url, "9999")
    _, err = run("serve", "--listen", "127.0.0.1:0", "--database", url).communicate(timeout=60)
    (line,) = err.splitlines()
    assert line.startswith("error: the database is newer than this registry: it is at revision 9999")


def at(url, revision=None):
    """The database's revision; or it is made to be this one."""
    engine = sqlalchemy.create_engine(driver_url(url, is_async=False))
    with engine.begin() as connection:
        if revision is not None:
            connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = :to"), {"to": revision})
        found = connection.scalar(sqlalchemy.text("SELECT version_num FROM alembic_version"))
    engine.dispose()
    return found


def test_a_postgres_without_tables_has_no_epoch(make_postgres, capfd):
    assert main(["new-epoch", "--database", make_postgres()]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: the database is without tables, this registry needs ")


@pytest.mark.parametrize("command", ["export", "new-epoch"])
def test_what_works_on_a_database_makes_none(tmp_path, command, capfd):
    assert main([command, "--database", f"sqlite:///{tmp_path}/mistyped.db"]) == 2
    assert capfd.readouterr().err == f"error: --database: there is none at sqlite:///{tmp_path}/mistyped.db\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["migrate", "export", "restore", "new-epoch"])
def test_a_command_makes_no_registry_of_a_mistyped_path_and_says_so_in_one_line(tmp_path, command, capfd):
    assert main([command, "--database", f"sqlite:///{tmp_path}/no/such/r.db"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: --database: ")
    assert not (tmp_path / "no").exists()


def test_migrate(make_postgres):
    url = make_postgres()
    process = run("--listen", "127.0.0.1:0", "--database", url)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = err.splitlines()
    assert line.startswith("error: the database is without tables")
    assert "loraplex registry migrate" in line
    process = run("migrate", "--database", url)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_new_epoch(tmp_path):
    url = f"sqlite:///{tmp_path}/r.db"
    epochs = []
    for command in ("migrate", "new-epoch", "new-epoch"):
        assert main([command, "--database", url]) == 0
        with closing(sqlite3.connect(tmp_path / "r.db")) as connection:
            epochs += connection.execute("SELECT epoch FROM registry_state").fetchone()
    assert len(set(epochs)) == 3


async def test_a_taken_port(tmp_path):
    config = RegistryConfig(listen="127.0.0.1:0", database=f"sqlite:///{tmp_path}/r.db")
    server = await start(config)
    process = run("--listen", f"127.0.0.1:{server.port}", "--database", config.database)
    _, err = await asyncio.to_thread(process.communicate, timeout=60)
    await server.stop()
    assert process.returncode == 2
    (line,) = (line for line in err.splitlines() if not line.startswith("{"))
    assert line == f"error: --listen: cannot listen on 127.0.0.1:{server.port}: address already in use"


@pytest.mark.parametrize("setting", ["listen", "health_listen", "metrics_listen"])
def test_a_taken_port_is_told_before_there_is_a_database(tmp_path, setting, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flag = f"--{setting.replace('_', '-')}"
        flags = ["--listen=127.0.0.1:0", f"--database=sqlite:///{tmp_path}/r.db", f"{flag}={address}"]
        assert main(flags) == 2
    assert capfd.readouterr().err == f"error: {flag}: cannot listen on {address}: address already in use\n"
    assert list(tmp_path.iterdir()) == []


def test_one_port_for_two_is_told_before_there_is_a_database(tmp_path, capfd):
    address = free_address()
    flags = [f"--listen={address}", f"--database=sqlite:///{tmp_path}/r.db", f"--metrics-listen={address}"]
    assert main(flags) == 2
    assert capfd.readouterr().err == f"error: --metrics-listen: cannot listen on {address}: listen has that port\n"
    assert list(tmp_path.iterdir()) == []


def test_one_process_serves_a_sqlite_file(tmp_path):
    """However the one before has ended; commands may look at it and change it meanwhile."""
    link, flags = tmp_path / "link.db", ["--listen=127.0.0.1:0", f"--database=sqlite:///{tmp_path}/r.db"]
    link.symlink_to(tmp_path / "r.db")
    first = run(*flags)
    until_ready(first)
    for name in ("r.db", "link.db"):
        second = run(flags[0], f"--database=sqlite:///{tmp_path}/{name}")
        _, err = second.communicate(timeout=60)
        told = f"another registry serves {tmp_path}/{name}; only Postgres can be shared by several"
        assert (second.returncode, err) == (2, f"error: --database: {told}\n")
    for command in ("migrate", "export", "new-epoch"):
        process = run(command, flags[1])
        process.communicate(timeout=60)
        assert process.returncode == 0, command
    first.kill()
    first.communicate(timeout=60)
    third = run(*flags)
    until_ready(third)
    third.terminate()
    third.communicate(timeout=60)
    assert third.returncode == 0


def test_every_number_has_both_ends():
    for option in options(RegistryConfig):
        if option.kind in (int, float) and not option.is_table:
            for number in (-(1 << 70), 1 << 70):
                with pytest.raises(ConfigError, match=rf"{option.flag} \(flag\): expected .*\d.*, is "):
                    load(RegistryConfig, toml=None, env={}, prefix="", flags={option.name: str(number)})


def test_metrics_have_no_socket_file(tmp_path, capfd):
    assert main(["--metrics-listen=unix:/any", f"--database=sqlite:///{tmp_path}/r.db"]) == 2
    assert capfd.readouterr().err == "error: --metrics-listen (flag): expected HOST:PORT, is 'unix:/any'\n"


def test_wrong_settings_of_a_namespace_are_told_before_there_is_a_database(tmp_path, capfd):
    (tmp_path / "r.toml").write_text('[namespaces."a b"]\nmax_adapters = 1\n')
    flags = ["--listen=127.0.0.1:0", f"--database=sqlite:///{tmp_path}/r.db", f"--config={tmp_path}/r.toml"]
    assert main(flags) == 2
    assert capfd.readouterr().err.startswith("error: --namespaces: 'a b' is not an id: ")
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]
