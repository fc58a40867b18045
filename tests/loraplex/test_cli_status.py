"""`status` against a real registry and a fake inference service: on paper, as JSON, and on a terminal."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from loraplex.cli.status_screen import on_screen
from loraplex.cli.status_view import Replica, Snapshot, bar, sections
from loraplex.inference.v1 import control_pb2 as pb
from loraplex.inference.v1 import inference_pb2
from shared.errors import Unauthenticated

PIRATE = "namespaces/default/adapters/pirate/versions/3"
LOADING = pb.LoadInFlight(
    adapter_version=PIRATE, digest="sha256:aa", phase=pb.LoadInFlight.PHASE_COPYING, progress=0.5,
    elapsed_seconds=0.25, bytes_done=42_000_000, bytes_total=84_000_000,
)  # fmt: skip
STATUS = pb.GetReplicaStatusResponse(
    engine=pb.EngineStatus(
        gpu=pb.TierUsage(used_bytes=3_000_000_000, budget_bytes=4_000_000_000, held_bytes=84_000_000, num_adapters=30),
        slots_used=30, slots_total=128, running_sequences=32, waiting_sequences=5, waiting_for_adapter=2,
        longest_wait_seconds=1.5, kv_blocks_used=100, kv_blocks_total=400, kv_block_size=16, prompt_tokens=5000,
        generated_tokens=7000, prefix_tokens_queried=4000, prefix_tokens_hit=1000, preemptions=3,
        hits={"gpu": 90, "host": 9, "source": 1}, evictions={"bytes": 7, "unload": 1},
        load_seconds={"copy": pb.PhaseSeconds(count=10, sum_seconds=0.02, median_seconds=0.002, p99_seconds=0.004)},
        load_failures={"ADAPTER_INVALID": 1},
    ),
    adapters=pb.AdapterStatus(
        host=pb.TierUsage(used_bytes=500, budget_bytes=2_000_000, num_adapters=4),
        disk=pb.TierUsage(used_bytes=9000, budget_bytes=10_000, num_adapters=6),
        load_seconds={"fetch": pb.PhaseSeconds(count=2, median_seconds=1.25, p99_seconds=2)},
        failures={"SOURCE_UNAVAILABLE": 2, "ADAPTER_INVALID": 1}, evictions={"host": 3}, registry_revision=17,
    ),
    loads_in_flight=[LOADING],
    memory=pb.MemoryBudget(total=140_000_000_000, weights=16_000_000_000, kv_cache=90_000_000_000),
    waiting_adapters=[pb.WaitingAdapter(adapter_version=PIRATE, digest="sha256:aa", waiting_requests=2)],
)  # fmt: skip


def test_status_shows_short_names_of_every_page(cli):
    ran = cli("status", "--once")
    assert ran.status == 0
    assert "tiny (LlamaForCausalLM) on cpu, float32" in ran.out
    assert [line.split() for line in ran.out.splitlines()[-2:]] == [
        ["mine@1", "GPU", "4", "10", "B", "no", "0"],
        ["team/mine@12", "GPU", "4", "10", "B", "no", "0"],
    ]


def test_status_tells_by_whom_adapters_are_pinned(cli, servers, monkeypatch):
    owner = pb.LoadedAdapter
    both = [owner.PIN_OWNER_OPERATOR, owner.PIN_OWNER_RESIDENCY]
    monkeypatch.setattr(servers.fake, "pins", [[owner.PIN_OWNER_RESIDENCY], both])
    first, second = cli("status", "--once").out.splitlines()[-2:]
    assert first.split()[5:] == ["by", "residency", "0"]
    assert second.split()[5:] == ["by", "operator,", "residency", "0"]
    (replica,) = json.loads(cli("status", "--json").out)["replicas"]
    assert replica["adapters"][0]["pinned_by"] == ["PIN_OWNER_RESIDENCY"]


def test_a_pin_of_a_replica_that_does_not_say_by_whom():
    pinned = pb.LoadedAdapter(adapter_version="namespaces/default/adapters/a/versions/1", level=3, pinned=True)
    model = inference_pb2.GetModelInfoResponse(base_model="baseModels/tiny")
    shown = sections(Snapshot("", "SERVING", (Replica("", "SERVING", model, None, (pinned,)),)))[-1]
    assert shown.rows[0][shown.columns.index("PINNED")] == "yes"


def test_adapters_of_one_content_are_one_line_with_all_names():
    versions = [
        f"namespaces/{name}/versions/1" for name in ("default/adapters/f", "default/adapters/h", "team/adapters/g")
    ]
    held = pb.LoadedAdapter(adapter_version=versions[0], level=3, other_versions=versions[1:])
    model = inference_pb2.GetModelInfoResponse(base_model="baseModels/tiny")
    shown = sections(Snapshot("", "SERVING", (Replica("", "SERVING", model, None, (held,)),)))[-1]
    assert shown.rows[0][0] == "f@1, h@1, team/g@1"


def test_status_json_has_numbers(cli):
    found = json.loads(cli("status", "--json").out)
    assert found["registry"]["health"] == "SERVING"
    (replica,) = found["replicas"]
    assert replica["health"] == "SERVING"
    assert replica["status"] == {"loads_in_flight": [], "waiting_adapters": []}
    assert replica["model"]["kv_cache_tokens"] == 0
    assert replica["adapters"][0]["size_bytes"] == 10
    assert replica["adapters"][0]["pinned"] is False


def test_status_of_what_does_not_serve(cli, servers):
    ran = cli("status", "--registry", "127.0.0.1:1", "--server", servers.unready)
    assert ran.status == 1
    assert [line.split()[-1] for line in ran.out.splitlines()[1:]] == ["UNAVAILABLE", "NOT_SERVING"]
    ran = cli("status", "--server", servers.registry)
    assert ran.status == 1
    assert ran.out.splitlines()[-1].split()[-1] == "OTHER_SERVICE"


def test_who_gave_no_token_where_one_is_wanted_is_told_how(cli, servers, monkeypatch):
    monkeypatch.setattr(servers.fake, "refusal", Unauthenticated("the call has no bearer token"))
    ran = cli("status", "--once")
    assert ran.status == 1
    assert ran.out.splitlines()[2].split() == ["inference", servers.inference, "UNAUTHENTICATED"]
    refused = f"{servers.inference}: UNAUTHENTICATED: the call has no bearer token"
    assert ran.out.splitlines()[-1].startswith(f"{refused}; give a token before the command, --token-file FILE")
    assert cli("--token", "x", "status", "--once").out.splitlines()[-1] == refused
    found = json.loads(cli("--token", "x", "status", "--json").out)
    assert found["replicas"][0]["problem"] == "UNAUTHENTICATED: the call has no bearer token"
    ran = cli("adapter", "load", "a")
    assert ran.err.splitlines()[-1].startswith("  give a token before the command, --token-file FILE")
    assert cli("--token", "x", "adapter", "load", "a").err == "UNAUTHENTICATED: the call has no bearer token\n"


def test_status_tells_of_tiers_loads_and_what_waits(cli, servers):
    servers.fake.status = STATUS
    ran = cli("status", "--once")
    assert ran.status == 0
    words = [line.split() for line in ran.out.splitlines()]
    gpu, host, disk = (next(line for line in words if line[:1] == [tier]) for tier in ("GPU", "HOST", "DISK"))
    assert (gpu[1], gpu[-6:]) == ("30", ["7", "bytes,", "1", "unload", "30/128", "slots"])
    assert "75%" in gpu
    assert (host[1], host[-1], disk[1]) == ("4", "3", "6")
    lines = ran.out.splitlines()
    assert "sequences: 32 running, 5 waiting (2 for an adapter, up to 1.5 s), 3 preempted" in lines
    assert "KV cache: 100/400 blocks of 16 tokens, 25% of prompt tokens found cached" in lines
    assert "requests by adapter tier: gpu 90%, host 9%, source 1%; 0 needless reloads" in lines
    assert "memory: weights 16.00 GB, kv cache 90.00 GB of 140.00 GB" in lines
    failed = "loads that failed so far, each attempt and repeated ones of residency counted: "
    assert f"{failed}1 ADAPTER_INVALID, 2 SOURCE_UNAVAILABLE" in lines
    assert ["fetch", "2", "1.2", "s", "2.0", "s"] in words
    assert ["copy", "10", "2", "ms", "4", "ms"] in words
    loading = next(line for line in words if "COPYING" in line)
    assert (loading[0], loading[3:]) == ("pirate@3", ["50%", "42.00", "MB", "of", "84.00", "MB", "250", "ms"])
    assert ["pirate@3", "2"] in words


def test_status_tells_why_no_adapter_is_served(cli, servers):
    text = "this replica's base model is not the tiny that adapters are registered for"
    servers.fake.status = pb.GetReplicaStatusResponse(adapters=pb.AdapterStatus(base_model_conflict=text))
    assert f"BASE_MODEL_CONFLICT: {text}" in cli("status", "--once").out.splitlines()
    assert json.loads(cli("status", "--json").out)["replicas"][0]["status"]["adapters"]["base_model_conflict"] == text
    servers.fake.status = STATUS
    assert "BASE_MODEL_CONFLICT" not in cli("status", "--once").out


def test_status_json_has_every_figure_as_a_number(cli, servers):
    servers.fake.status = STATUS
    found = json.loads(cli("status", "--json").out)["replicas"][0]["status"]
    assert found["engine"]["hits"] == {"gpu": 90, "host": 9, "source": 1}
    assert found["engine"]["load_seconds"]["copy"]["count"] == 10
    assert found["engine"]["gpu"]["budget_bytes"] == 4_000_000_000
    assert found["loads_in_flight"][0]["phase"] == "PHASE_COPYING"
    assert found["adapters"]["registry_revision"] == 17


def test_status_of_several_replicas(cli, servers):
    ran = cli("status", "--once", "--server", servers.inference, "--server", servers.unready)
    assert ran.status == 1
    assert [line.split()[-1] for line in ran.out.splitlines()[1:4]] == ["SERVING", "SERVING", "NOT_SERVING"]
    assert f"{servers.inference}: tiny (LlamaForCausalLM) on cpu, float32" in ran.out
    found = json.loads(cli("status", "--json", "--server", servers.unready, "--server", servers.inference).out)
    assert [replica["health"] for replica in found["replicas"]] == ["NOT_SERVING", "SERVING"]
    assert found["replicas"][0]["model"] is None


def screen(num_adapters, width, height):
    """The lines of a replica that is busy and holds so many adapters on disk, and one on the GPU."""
    adapters = tuple(
        pb.LoadedAdapter(
            adapter_version=f"namespaces/default/adapters/a{i:03}/versions/1", level=pb.LoadedAdapter.LEVEL_DISK
        )
        for i in range(num_adapters)
    )
    busy = pb.LoadedAdapter(adapter_version=PIRATE, level=pb.LoadedAdapter.LEVEL_GPU, active_requests=3)
    model = inference_pb2.GetModelInfoResponse(base_model="baseModels/tiny", architecture="[Llama]")
    replica = Replica("here", "SERVING", model, STATUS, (*adapters, busy))
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(on_screen(sections(Snapshot("there", "SERVING", (replica,))), width, height), end="")
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def _missing(lines):
    return sum(int(found[1]) for line in lines if (found := re.fullmatch(r"… and (\d+) more", line)))


@pytest.mark.parametrize("height", [3, 20, 40, 600])
def test_a_screen_shows_what_fits_and_counts_the_rest(height):
    lines = screen(500, 120, height)
    assert len(lines) <= height
    if height >= 40:
        assert "tiny ([Llama]) on ," in lines
        shown = [line for line in lines if re.match("a\\d{3}@1", line)]
        assert len(shown) + _missing(lines) == 500
        assert lines.index(next(line for line in lines if line.startswith("pirate@3  GPU"))) < lines.index(shown[0])
        assert lines[-3].split() == ["PHASE", "LOADS", "MEDIAN", "P99"]  # a long table takes no room of a short one


def test_a_small_terminal_loses_bars_and_rows_before_words():
    lines = screen(30, 80, 24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    assert ["TIER", "ADAPTERS", "BYTES", "BUDGET", "USED", "HELD"] in words
    assert "GPU   30        3.00 GB  4.00 GB  75%   84.00 MB pinned  30/128 slots" in lines
    assert {"HOST", "DISK", "pirate@3"} <= {line[0] for line in words}
    assert sum(bool(re.match("a\\d{3}@1|pirate@3  GPU", line)) for line in lines) + _missing(lines) == 31
    assert "…" not in "".join(line for line in lines if not line.startswith("… "))


def test_bars():
    assert bar(0.0) == "░" * 20
    assert bar(0.5) == "█" * 10 + "░" * 10
    assert bar(1.2) == "█" * 20


def test_on_a_terminal_it_is_refreshed_until_ctrl_c(servers):
    """A real terminal: the second picture shows what changed after the first."""
    servers.fake.status = pb.GetReplicaStatusResponse()
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    command = [sys.executable, "-m", "loraplex.cli.main", "status"]
    places = ["--server", servers.inference, "--registry", servers.registry]
    process = subprocess.Popen([*command, *places], stdin=slave, stdout=slave, stderr=slave, env=_environment())
    os.close(slave)
    try:
        _read_until(master, b"mine@1")
        servers.fake.status = STATUS
        _read_until(master, b"42.00 MB of 84.00 MB")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _environment():
    """The terminal's own size counts, not that of whoever runs the tests."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**inherited, "TERM": "xterm-256color", "PYTHONPATH": str(Path.cwd())}


def _read_until(terminal, wanted, seconds=60):
    seen, end = b"", time.monotonic() + seconds
    while wanted not in seen:
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
