"""What a user can get wrong before anything is called: one line that names the option, and status 2."""

import pytest

from tests.loraplex.cli_fakes import run_cli

HUGE = "99999999999999999999999"
NOT_UTF8 = "a\udcffb"  # what Python makes of an argument a\xffb

WRONG = [
    (["generate", NOT_UTF8], "'a\\udcffb' is not UTF-8 text"),
    (["generate", "--chat", "--system", NOT_UTF8, "hi"], "--system 'a\\udcffb' is not UTF-8 text"),
    (["generate", f"--stop={NOT_UTF8}", "hi"], "'--stop=a\\udcffb' is not UTF-8 text"),
    (["generate", "hi", "--seed", HUGE], "'--seed'"),
    (["generate", "hi", "--seed", f"-{HUGE}"], "'--seed'"),
    (["generate", "hi", "--max-tokens", HUGE], "'--max-tokens'"),
    (["generate", "hi", "--top-k", HUGE], "'--top-k'"),
    (["generate", "hi", "--n", HUGE], "'--n'"),
    (["generate", "hi", "--n", "0"], "'--n'"),
    (["generate", "hi", "--temperature", "warm"], "'--temperature'"),
    (["generate", "hi", "--timeout", "0"], "'--timeout': 0 is not a number of seconds above 0"),
    (["generate", "hi", "--timeout", "-1"], "'--timeout'"),
    (["generate", "hi", "--timeout", "nan"], "'--timeout'"),
    (["generate", "hi", "--timeout", "1e300"], "'--timeout'"),
    (["generate", "hi", "--system", "Be brief."], "--system: a system message needs --chat"),
    (["generate", "hi", "--adapter", "No Such"], "'--adapter': 'No Such' is not an id"),
    (
        ["generate", "hi", "--server", "localhost"],
        "'--server' (env var: 'LORAPLEX_SERVER'): 'localhost' is not HOST:PORT",
    ),
    (["generate", "hi", "--server", "http://localhost:50052"], "leave http:// out; with a CA"),
    (["status", "--registry", "https://localhost:50051"], "leave https:// out; with a CA"),
    (["--token-file", "/no/such", "status"], "--token-file: /no/such cannot be read: No such file"),
    (["--token-file", "/no/such", "adapter", "list"], "--token-file: /no/such cannot be read: No such file"),
    (["--token-file", "/no/such", "generate", "hi"], "--token-file: /no/such cannot be read: No such file"),
    (["--token", "two words", "adapter", "list"], "--token: must hold one token"),
    (["--token", "a", "--token-file", "b", "replicas"], "--token-file: cannot be given together with token"),
    (["--ca", "/no/such", "bench"], "--ca: "),
    (["--ca", "system", "--cert", "/no/such", "adapter", "list"], "--key: is required with cert"),
    (["generate", "hi", "--server", "localhost:0"], "is not HOST:PORT"),
    (["generate", "hi", "--server", "localhost:65536"], "is not HOST:PORT"),
    (["status", "--registry", ":50051"], "'--registry'"),
    (["bench", "--streams", HUGE], "'--streams'"),
    (["bench", "--prompt-tokens", HUGE], "'--prompt-tokens'"),
    (["bench", "--adapter", "a", "--adapter", "B"], "'--adapter': 'B' is not an id"),
    (["adapter", "register", "x@1", "--base-model", "m", "--source", "file://a/b"], "ADAPTER: 'x@1' names a version"),
    (
        ["adapter", "register", "x", "--base-model", "m", "--source", "s", "--label", "team"],
        "--label: 'team' is not KEY",
    ),
    (["adapter", "delete", "x@prod"], "ADAPTER: 'x@prod' names a version"),
    (["adapter", "undelete", "X"], "ADAPTER: 'X' is not an id"),
    (["adapter", "versions", "x@1"], "ADAPTER: 'x@1' names a version"),
    (["adapter", "alias", "x", "1"], "REFERENCE: 'x' names no alias"),
    (["adapter", "alias", "x@prod", HUGE], "VERSION"),
    (["adapter", "alias", "x@prod", "1:0"], "VERSION: '1:0': a weight must be above 0"),
    (["adapter", "alias", "x@prod", "1:x"], "VERSION: '1:x' is not VERSION or VERSION:WEIGHT"),
    (["adapter", "show", "x@sha256:12"], "is not sha256: and 64 lowercase hex digits"),
    (["adapter", "load", "x@"], "is not an id"),
    (["adapter", "unload", "sha256:12"], "is not sha256: and 64 lowercase hex digits"),
    (["adapter", "update", "x", "--residency", "foo"], "'--residency': 'foo' is not one of on-demand, preload, pinned"),
    (
        ["adapter", "convert", "a", "--base", "/no/such", "--out", "b"],
        "--base: /no/such is not a folder on this machine; give the local folder of the base model",
    ),
    (["adapter", "convert", "a", "--base", "org/repo", "--out", "b"], "a Hub id is not downloaded"),
    (["adapter", "convert", "a", "--base", "/", "--out", "b"], "--base: / holds no config.json"),
    (["base-model", "register", "/no/such/folder"], "FOLDER: /no/such/folder/config.json cannot be read: No such file"),
    (["apply", "-f", "/no/such.yaml"], "--file: /no/such.yaml: cannot be read: No such file"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=[" ".join(a)[:50].encode("ascii", "replace").decode() for a, _ in WRONG]
)
def test_wrong_usage_is_one_line_and_status_2(arguments, message):
    ran = run_cli(*arguments)
    last = ran.err.splitlines()[-1]
    assert (ran.status, ran.out) == (2, "")
    assert last.startswith("Error: ")
    assert message.lower() in last.lower().replace("'{", "").replace("}'", "")


def test_a_config_json_that_is_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff")
    ran = run_cli("base-model", "register", tmp_path)
    assert ran.status == 2
    assert "config.json is not UTF-8 text" in ran.err


def test_a_base_that_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("[")
    ran = run_cli("adapter", "convert", tmp_path, "--base", tmp_path, "--out", tmp_path / "out")
    assert ran.status == 1
    assert f"base: {tmp_path} must be a folder on this machine with the base model; config.json: is not JSON" in ran.err


def test_a_folder_that_has_no_real_path(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    ran = run_cli("base-model", "register", tmp_path / "loop")
    assert ran.status == 2
    assert "cannot be read: Too many levels of symbolic links" in ran.err


def test_usage_shows_what_may_be_repeated():
    assert "{reference} [VERSION[:WEIGHT]]...\n" in run_cli("adapter", "alias", "--help").out


def test_alone_it_prints_help():
    for arguments in ([], ["adapter"], ["base-model"]):
        ran = run_cli(*arguments)
        assert ran == run_cli(*arguments, "--help")
        assert ran.status == 0
        assert "Commands:" in ran.out


@pytest.mark.parametrize("group", [[], ["adapter"], ["base-model"]])
def test_no_command_is_summed_up_in_half_a_sentence(group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = run_cli(*group, "--help").out.partition("Commands:\n")[2].splitlines()
    assert len(commands) > 1
    assert not [line for line in commands if not line.endswith(".") or line.endswith("...")]


def test_help_promises_only_what_is_built():
    out = run_cli("adapter", "register", "--help").out
    assert all(word in out for word in ("file://ROOT/path", "hf://", "s3://", "--credential"))
    assert "convert" in run_cli("adapter", "--help").out


def test_a_wrong_flag_of_a_service_is_one_line():
    for service in ("registry", "serve"):
        ran = run_cli(service, "--lisen", "x")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err == f"loraplex {service}: error: unrecognized arguments: --lisen x\n"


def test_version():
    ran = run_cli("--version")
    assert ran.status == 0
    assert ran.out.startswith("loraplex 0.")
