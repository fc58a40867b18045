"""`generate`, `bench`, `load` and `unload` against a fake inference service."""

import json
import signal
import subprocess
import sys

import pytest

from loraplex.cli.bench import _for_people
from loraplex.cli.main import _explain
from shared.errors import BaseModelConflict


def test_one_answer_ends_with_a_newline(cli, servers):
    ran = cli("generate", "hëllo", "--adapter", "mine@1", "--temperature", "0", "--max-tokens", "5", "--seed", "-1")
    assert ran == (0, "hëllo, said 0\n", "")
    request = servers.fake.requests[-1]
    assert (request.adapter, request.stop.max_tokens, request.sampling.seed) == ("mine@1", 5, -1)
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")


def test_a_blend_is_named_part_by_part(cli, servers):
    assert cli("generate", "hi", "--blend", "mine@1=0.5", "--blend", "team/other=-2").status == 0
    request = servers.fake.requests[-1]
    assert [(part.reference, part.weight) for part in request.blend] == [("mine@1", 0.5), ("team/other", -2.0)]
    assert request.adapter == ""
    for wrong in ("mine", "mine=x"):
        refused = cli("generate", "hi", "--blend", wrong)
        assert (refused.status, "REFERENCE=WEIGHT" in refused.err) == (2, True)


def test_several_answers_have_headings(cli):
    ran = cli("generate", "hi", "--n", "3")
    assert ran.out == "--- answer 1\nhi, said 0\n--- answer 2\nhi, said 1\n--- answer 3\nhi, said 2\n"


def test_chat(cli, servers):
    assert cli("generate", "hi", "--chat", "--system", "Be brief.").status == 0
    messages = servers.fake.requests[-1].chat.messages
    assert [(m.role, m.content) for m in messages] == [("system", "Be brief."), ("user", "hi")]


def test_json_events_have_all_keys(cli):
    started, delta, finished = map(json.loads, cli("generate", "hi", "--json").out.splitlines())
    assert started["started"]["cached_tokens"] == 0
    assert delta == {"delta": {"index": 0, "text": "hi, said 0", "token_ids": [], "logprobs": []}}
    assert finished["finished"]["usage"] == {"prompt_tokens": 0, "completion_tokens": 3, "cached_tokens": 0}


def test_a_refusal_is_one_line(cli):
    assert cli("generate", "wrong") == (1, "", "INVALID_ARGUMENT: text: is wrong\n")


@pytest.mark.parametrize("kind", ["fingerprint", "weights_fingerprint"])
def test_a_conflict_shows_the_fingerprints_that_differ_and_no_others(kind):
    served = {"served_fingerprint": "sha256:config", "served_weights_fingerprint": "sha256:weights"}
    message = f"registered with {kind} sha256:theirs, not {served[f'served_{kind}']}"
    error = BaseModelConflict(message, metadata={"base_model": "baseModels/tiny", kind: "sha256:theirs", **served})
    facts = ["base_model: baseModels/tiny", f"{kind}: sha256:theirs", f"served_{kind}: {served[f'served_{kind}']}"]
    assert _explain(error).splitlines() == [error.summary, *(f"  {fact}" for fact in sorted(facts))]


def test_a_deadline_says_the_timeout_and_keeps_the_text(cli):
    ran = cli("generate", "slow", "--timeout", "0.3")
    assert ran == (1, "slow, said 0\n", "DEADLINE_EXCEEDED: no complete answer within 0.3 s (--timeout)\n")


@pytest.mark.parametrize(
    "command", [["generate", "hi"], ["bench"], ["adapter", "load", "a"], ["adapter", "unload", "a"]]
)
def test_no_inference_service(cli, command):
    ran = cli(*command, "--server", "127.0.0.1:1")
    asked = "is it running and SERVING? or it speaks TLS: --ca; try: loraplex status"
    line = f"UNAVAILABLE: no inference service answers at 127.0.0.1:1 ({asked}): "
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(line)
    assert "Connection refused" in ran.err.removeprefix(line), "gRPC's cause"


def test_another_service(cli, servers):
    ran = cli("generate", "hi", "--server", servers.registry)
    line = f"UNAVAILABLE: {servers.registry} speaks another service, not the inference service\n"
    assert ran == (1, "", line)


def test_not_ready(cli, servers):
    ran = cli("generate", "hi", "--server", servers.unready)
    line = f"the inference service at {servers.unready} is not ready: NOT_SERVING (try: loraplex status)\n"
    assert ran == (1, "", f"UNAVAILABLE: {line}")


def test_ctrl_c_ends_with_130(servers):
    command = [sys.executable, "-m", "loraplex.cli.main", "generate", "slow", "--server", servers.inference]
    with subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(5) == b"slow,"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b" said 0\n", b"")


def test_bench_prints_figures_with_units_and_progress(cli, servers):
    ran = cli("bench", "--requests", "20", "--streams", "4", "--adapter", "a", "--adapter", "b")
    rows = dict(line.rsplit("  ", 1) for line in ran.out.splitlines())
    rows = {key.strip(): value.strip() for key, value in rows.items()}
    assert rows["requests"] == "20"
    assert rows["tokens"] == "60"
    assert rows["time"].endswith(" s")
    assert rows["first token p99"].endswith(" ms")
    progress = ran.err.splitlines()
    assert progress[-1].startswith("20 of 20 requests")
    assert len(set(progress)) == len(progress) <= 10
    assert {r.adapter for r in servers.fake.requests[-20:]} == {"a", "b"}


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("seconds", 18.84, ("time", "18.8 s")),
        ("seconds", 0.123, ("time", "0.12 s")),
        ("first_token_p50_ms", 1876.4, ("first token p50", "1,876 ms")),
        ("time_per_token_ms", 7.25, ("time per token", "7.2 ms")),
        ("tokens", 20480, ("tokens", "20,480")),
        ("tokens_per_second", 1234.56, ("tokens per second", "1,234.6")),
    ],
)
def test_figures_for_people(key, value, shown):
    assert _for_people(key, value) == shown


def test_bench_json(cli):
    figures = json.loads(cli("bench", "--requests", "1", "--json").out)
    assert figures["requests"] == 1
    assert figures["tokens"] == 3


def test_load_and_unload(cli, servers):
    assert cli("adapter", "load", "mine@1").out == "loaded: mine@1 0.02 MB\n"
    assert not servers.fake.requests[-1].pinned
    assert servers.fake.requests[-1].wait
    assert cli("adapter", "load", "mine@1", "--pin", "--no-wait").out == "loading: mine@1 0.02 MB, pinned\n"
    digest = "sha256:" + "0" * 64
    unloaded = cli("adapter", "unload", digest, "--force").out
    assert unloaded == f"unloaded: {digest}, freed: 0.03 MB of device, 0.02 MB of host memory\n"
    assert servers.fake.requests[-1].force


def test_unload_says_what_comes_back(cli):
    freed, back = cli("adapter", "unload", "wanted").out.splitlines()
    assert freed.startswith("unloaded: wanted, freed: ")
    assert back == "it comes back, for its residency is pinned: loraplex adapter update NAME --residency on-demand"


def test_unload_says_what_it_is_taken_from_as_well(cli):
    freed, others = cli("adapter", "unload", "shared").out.splitlines()
    assert freed == "unloaded: shared, freed: 0.03 MB of device, 0.02 MB of host memory"
    assert others == "also unloaded, for it is the same content: mine@1, team/mine@12"
    assert cli("adapter", "unload", "shared-gone").out == "unloaded: shared-gone, freed: nothing\n"
    assert json.loads(cli("adapter", "unload", "shared", "--json").out)["shared_with"][1].endswith(
        "team/adapters/mine/versions/12"
    )
