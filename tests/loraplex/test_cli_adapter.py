"""`adapter` and `base-model` against a real registry."""

import io
import json
import re

import grpc
import pytest

from loraplex.cli.output import as_dict, print_table
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc, resources_pb2
from tests.registry_service.conftest import TINY

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_register_twice(register):
    first = register("mine", "one", "--alias", "prod")
    assert re.fullmatch(r"registered: mine@1 rank 2, .* MB, sha256:[0-9a-f]{64}\n|registered: mine@1 .* B, .*\n", first)
    assert register("mine").startswith("already registered: mine@1 ")
    assert register("fresh", "one", "--dry-run").startswith("valid: fresh rank 2")
    tried = json.loads(register("fresh", "one", "--dry-run", "--json"))
    assert (tried["validated"], tried["created"]) == (True, False)
    assert json.loads(register("fresh", "one", "--json"))["created"] is True


def test_register_tells_what_the_name_alone_means_if_it_is_another_version(cli, register):
    def again(source):
        return cli("adapter", "register", "older", "--base-model", "tiny", "--source", f"file://main/{source}")

    register("older", "one")
    assert again("two").err == ""
    ran = again("one")
    assert ran.out.startswith("already registered: older@1 ")
    assert ran.err == (
        "older alone means the newest version, 2; `loraplex adapter alias older@prod 1` and `loraplex adapter update "
        "older --default-alias prod` make it mean 1\n"
    )
    assert cli("adapter", "alias", "older@prod", "1").status == 0
    assert cli("adapter", "update", "older", "--default-alias", "prod").status == 0
    assert again("one").err == ""
    assert again("two").err == (
        "older alone means older@prod, version 1; `loraplex adapter alias older@prod 2` makes it mean 2\n"
    )


def test_json_of_an_answer_that_does_not_count_versions_has_no_count(cli, register):
    told = json.loads(register("counted", "one", "--json"))["adapter"]
    assert told["latest_version"] == 1
    assert "num_versions" not in told
    assert json.loads(cli("adapter", "show", "counted", "--json").out)["adapter"]["num_versions"] == 1
    assert cli("adapter", "delete", "counted", "--yes").status == 0
    ran = cli("adapter", "register", "counted", "--base-model", "tiny", "--source", "file://main/one")
    assert "call UndeleteAdapter (loraplex adapter undelete default/counted) first, or" in ran.err
    assert "(loraplex adapter undelete default/counted) brings it back" in cli("adapter", "alias", "counted@x", "1").err


def test_an_unknown_scheme_is_the_servers_to_refuse(cli):
    ran = cli("adapter", "register", "x", "--base-model", "tiny", "--source", "gopher://a/b")
    assert ran.status == 1
    assert "gopher" in ran.err


def test_list_is_as_wide_as_its_content(cli, register):
    words = "[bold] words " * 30
    register("wide-" + "w" * 50, "one", "--description", words, "--alias", "prod", "--alias", "stable")
    ran = cli("adapter", "list")
    (line,) = (line for line in ran.out.splitlines() if line.startswith("wide-"))
    assert line.startswith("wide-" + "w" * 50 + "  1 ")
    assert re.search("1 +prod→1, stable→1 +tiny +2 ", line)
    assert line.endswith(words.strip())


def test_list_json_has_numbers_and_every_key(cli, register):
    register("numbers")
    (adapter,) = (a for a in json.loads(cli("adapter", "list", "--json").out) if a["name"].endswith("/numbers"))
    assert adapter["latest_version"] == 1
    assert adapter["description"] == ""
    assert adapter["labels"] == {}


def test_versions(cli, register):
    register("lines", "one")
    register("lines", "two")
    ran = cli("adapter", "versions", "lines")
    assert [line.split()[:2] for line in ran.out.splitlines()] == [
        ["VERSION", "STATE"],
        ["lines@2", "READY"],
        ["lines@1", "READY"],
    ]
    assert re.search(r"  sha256:[0-9a-f]{12}  20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ  file://main/two$", ran.out, re.M)
    for example in re.findall("Such as '(.*?)'", " ".join(cli("adapter", "versions", "--help").out.split())):
        assert (
            cli("adapter", "versions", "lines", "--order-by" if "desc" in example else "--filter", example).status == 0
        )
    assert [v["name"][-1] for v in json.loads(cli("adapter", "versions", "lines", "--json").out)] == ["2", "1"]


def test_show_and_alias(cli, register):
    register("shown")
    assert cli("adapter", "alias", "shown@prod", "1").out == "shown@prod → version 1\n"
    ran = cli("adapter", "show", "shown@prod")
    assert DIGEST.search(ran.out)
    assert re.search(r"^aliases +prod→1$", ran.out, re.M)
    assert re.search(r"^kinds +lora$", ran.out, re.M)
    assert re.search(r"^own text +-$", ran.out, re.M)
    assert re.search(r"^ends at +the base model's end of sequence$", ran.out, re.M)
    assert re.search(r"^MODULE +LAYERS +RANK +SCALE +KINDS +TENSORS +BYTES$", ran.out, re.M)
    assert re.search(r"^q_proj +0-\d+ +\d+ +[\d.]+ +lora +\d+ +[\d.]+ k?M?B$", ran.out, re.M)
    register("talks", "talks")
    ran = cli("adapter", "show", "talks")
    assert re.search(r"^own text +tokenizer_config.json$", ran.out, re.M)
    assert re.search(r"^ends at +the base model's end of sequence and its own eos_token$", ran.out, re.M)
    assert json.loads(cli("adapter", "show", "shown", "--json").out)["resolved"]["version"]["size_bytes"] > 0


def test_what_keeps_replicas_from_being_ready_stands_before_the_residency(cli, servers):
    """One serves another base model of this id, two others nothing yet."""
    other = registry_pb2.ResidentState(
        digest="sha256:" + "1" * 64, level=registry_pb2.ResidentState.LEVEL_FAILED, reason="BASE_MODEL_CONFLICT"
    )
    with grpc.insecure_channel(servers.registry) as channel:
        stub = registry_pb2_grpc.AdapterRegistryServiceStub(channel)
        stub.RegisterBaseModel(registry_pb2.RegisterBaseModelRequest(id="tiny-loud", config_json=json.dumps(TINY)))
        source = "file://main/one"
        assert cli("adapter", "register", "kept", "--base-model", "tiny-loud", "--source", source).status == 0
        for name, held in (("one", [other]), ("two", []), ("three", [])):
            stub.ReportReplicaState(
                registry_pb2.ReportReplicaStateRequest(
                    replica=name, base_model="tiny-loud", observed_revision=1 << 40, full=True, resident=held
                )
            )
    lines = cli("adapter", "show", "kept").out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("ready replicas"))
    shown = [re.sub(" {2,}", "  ", line) for line in lines[at : at + 4]]
    assert shown == [
        "ready replicas  0/3",
        "not ready  BASE_MODEL_CONFLICT: its base model is not the one that is registered under this id, so it serves "
        "no adapter; start it with the registered weights, or under another id (--model-name) (one)",
        "  ON_DEMAND: version 1 is loaded on its first request (three, two)",
        "residency  ON_DEMAND",
    ]
    (listed,) = (line for line in cli("adapter", "list").out.splitlines() if line.startswith("kept "))
    assert "  0/3 BASE_MODEL_CONFLICT, ON_DEMAND  " in listed


def test_warnings_of_the_registration_are_shown_again(cli, register):
    register("foreign", "foreign")
    assert "warning: base_model_name_or_path says 'org/another', not tiny" in cli("adapter", "show", "foreign").err
    register("silent")
    assert cli("adapter", "show", "silent").err == ""


def test_delete_and_undelete(cli, register):
    register("gone")
    assert cli("adapter", "delete", "gone").out == "deleted: namespaces/default/adapters/gone\n"
    assert "ADAPTER_NOT_FOUND" in cli("adapter", "show", "gone@1").err
    shown = cli("adapter", "show", "gone")
    assert re.search(r"^deleted +20\d\d-", shown.out, re.M)
    assert re.search(r"^purged after +20\d\d-", shown.out, re.M)
    assert "digest" not in shown.out
    assert cli("adapter", "undelete", "gone").out == "undeleted: namespaces/default/adapters/gone\n"
    assert cli("adapter", "show", "gone").status == 0


def test_a_terminal_is_asked_before_a_deletion(cli, register, monkeypatch):
    register("asked")
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    ran = cli("adapter", "delete", "asked")
    assert ran.status == 1
    assert "deleted" not in ran.out
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert "deleted: " in cli("adapter", "delete", "asked").out
    cli("adapter", "undelete", "asked")
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert "deleted: " in cli("adapter", "delete", "asked", "--yes").out


def test_no_registry(cli):
    ran = cli("adapter", "list", "--registry", "127.0.0.1:1")
    asked = "is it running and SERVING? or it speaks TLS: --ca; try: loraplex status"
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"UNAVAILABLE: no registry service answers at 127.0.0.1:1 ({asked}): ")
    assert "Connection refused" in ran.err
    secure = cli("--ca", "system", "adapter", "list", "--registry", "127.0.0.1:1").err
    assert "it speaks TLS" not in secure
    assert "it wants a certificate: --cert and --key;" in secure


def test_base_models(cli):
    lines = cli("base-model", "list").out.splitlines()
    assert lines[1].split()[:2] == ["tiny", "LlamaForCausalLM"]


def test_pages(cli, register, monkeypatch):
    for name in ("page-a", "page-b", "page-c"):
        register(name)
    monkeypatch.setattr("loraplex.client._PAGE_SIZE", 1)
    found = [line.split()[0] for line in cli("adapter", "list").out.splitlines() if line.startswith("page-")]
    assert found == ["page-a", "page-b", "page-c"]


def test_on_a_terminal_only_free_text_is_folded(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    digest = "sha256:" + "0" * 64
    print_table(("DIGEST", "DETAIL", "N"), [(digest, "many words " * 9, 123456)], fold="DETAIL")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) > 3
    assert digest in lines[1]
    assert "123456" in lines[1]
    print_table(("DIGEST", "NAME"), [(digest, "n" * 60)])
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("width", "header"), [(80, "NAME TEXT SIZE"), (44, "NAME TEXT SIZE"), (43, "NAME SIZE"), (17, "NAME")]
)
def test_a_narrow_terminal_is_spared_columns(monkeypatch, capsys, width, header):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [("n" * 10, "many words " * 5, "1 MB"), ("m", "-", "2 MB")]
    print_table(("NAME", "TEXT", "SIZE"), rows, fold="TEXT", spare=("TEXT", "SIZE"))
    out, err = capsys.readouterr()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert lines[0].split() == header.split()
    assert max(map(len, lines)) <= width
    assert [column for column in ("TEXT", "SIZE") if column in err] == [c for c in ("TEXT", "SIZE") if c not in header]


@pytest.mark.parametrize(
    ("number", "shown"), [(0, 0), (2**53 - 1, 2**53 - 1), (2**53, str(2**53)), (-(2**53), str(-(2**53)))]
)
def test_integers_in_json(number, shown):
    response = registry_pb2.RegisterAdapterResponse(
        adapter={"labels": {"a": "1"}, "aliases": [{"targets": [{"version": number}]}]}, registry_revision=number
    )
    data = as_dict(response)
    assert data["registry_revision"] == shown
    assert data["adapter"]["aliases"][0]["targets"] == [{"version": shown}]
    assert data["adapter"]["labels"] == {"a": "1"}
    assert as_dict(resources_pb2.AdapterVersion())["warnings"] == []
