"""`apply`: what it says of wrong files, and of adapters that are not as the file says."""

import json

import pytest

from tests.loraplex.cli_fakes import run_cli

ENTRY = "- {name: a, base_model: tiny, source: 'file://main/one'"

WRONG = {
    "empty": ("", ": is empty; expected a list `adapters`"),
    "comment": ("# nothing\n", ": is empty; expected"),
    "text": ("adapters", ", line 1: expected `object`, got `str`"),
    "list": ("- a\n", ", line 1: expected `object`, got `array`"),
    "no list": ("adapters: {}\n", ", line 1, adapters: expected `array`, got `object`"),
    "wrong key": ("\nadaptors: []\n", ", line 2: object contains unknown field `adaptors`"),
    "missing": ("adapters:\n- name: a\n", ", line 2, adapters[0]: object missing required field `source`"),
    "unknown": (
        f"adapters:\n{ENTRY},\n   alias: p}}\n",
        ", line 3, adapters[0]: object contains unknown field `alias`",
    ),
    "type": (f"adapters:\n{ENTRY}, aliases:\n    [a, 5]}}\n", ", line 3, adapters[0].aliases[1]: expected `str`, got"),
    "scalar": (
        f"adapters:\n{ENTRY}, aliases: prod}}\n",
        ", line 2, adapters[0].aliases: expected `object | array`, got",
    ),
    "label": (f"adapters:\n{ENTRY}, labels: {{a: 1}}}}\n", ", line 2, adapters[0].labels[...]: expected `str`, got"),
    "name": (
        f"adapters:\n{ENTRY}}}\n- {{name: A b, base_model: t, source: s}}",
        ", line 3, adapters[1].name: 'A b' is",
    ),
    "version": ("adapters:\n- {name: a@1, base_model: t, source: s}", ", line 2, adapters[0].name: 'a@1' is not [NAME"),
    "syntax": ("adapters:\n  - name: [\n", ", line 3: not YAML: "),
    "tab": ("adapters:\n\t- a\n", ", line 2: not YAML: "),
    "control": ("adapters: \x00", ": not YAML: "),
    "date": ("adapters:\n- 2024-13-45\n", ": not YAML: "),
    "deep": ("[" * 1500, ": not YAML: "),
    "surrogate": ('adapters:\n- {name: a, base_model: t, source: "\\ud800"}', ", line 2, adapters[0]: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_names_file_line_and_key(tmp_path, case):
    text, message = WRONG[case]
    file = tmp_path / "adapters.yaml"
    file.write_text(text)
    ran = run_cli("apply", "-f", file)
    assert (ran.status, ran.out) == (2, "")
    assert f"{file}{message}" in ran.err.splitlines()[-1]


def test_a_file_that_cannot_be_read(tmp_path):
    assert f"{tmp_path}: cannot be read: Is a directory" in run_cli("apply", "-f", tmp_path).err
    (tmp_path / "binary").write_bytes(b"adapters:\n- \xff")
    assert "binary, line 2: is not UTF-8 text" in run_cli("apply", "-f", tmp_path / "binary").err


@pytest.fixture
def apply(cli, tmp_path):
    """Applies entries for the base model `tiny`, and returns the status and the rows."""

    def apply(*entries, options=()):
        file = tmp_path / "adapters.json"  # JSON is YAML
        defaults = {"base_model": "tiny", "source": "file://main/one"}
        file.write_text(json.dumps({"adapters": [{**defaults, **entry} for entry in entries]}))
        ran = cli("apply", "-f", file, "--json", *options)
        return ran.status, json.loads(ran.out)

    return apply


def result(applied):
    status, (row,) = applied
    return status, row["result"], row["detail"]


def test_applying_twice_changes_nothing(apply):
    entry = {"name": "twice", "aliases": ["prod"], "labels": {"team": "x"}, "description": "d"}
    status, (row,) = apply(entry)
    assert (status, row["result"], row["version"], row["detail"]) == (0, "registered", 1, "prod→1")
    assert row["digest"].startswith("sha256:")
    assert result(apply(entry)) == (0, "unchanged", "")
    assert result(apply({"name": "twice"})) == (0, "unchanged", "")


def test_a_new_version_and_its_aliases_are_one_change(apply, cli):
    def revision():
        return json.loads(cli("adapter", "watch", "--json", "--once").out.splitlines()[-1])["revision"]

    apply({"name": "at-once"})
    before = revision()
    entry = {"name": "at-once", "source": "file://main/two", "aliases": ["prod", "stable"]}
    assert result(apply(entry)) == (0, "registered", "prod→2; stable→2")
    assert revision() == before + 1
    assert result(apply({**entry, "aliases": {"prod": 1, "stable": 1}})) == (0, "unchanged", "")
    assert revision() == before + 1


def test_an_alias_that_moves_is_an_update(apply, cli):
    apply({"name": "moving", "aliases": ["prod"]}, {"name": "moving", "source": "file://main/two"})
    assert result(apply({"name": "moving", "source": "file://main/two", "aliases": ["prod"]})) == (
        0,
        "updated",
        "prod→2",
    )
    assert result(apply({"name": "moving", "aliases": ["prod", "new"]})) == (0, "updated", "prod→1; new→1")


def test_fields_become_what_the_file_says(apply, cli):
    apply({"name": "fields", "labels": {"a": "1"}, "description": "d"})
    wanted = {
        "name": "fields", "labels": {"b": "2"}, "annotations": {"n": "x"}, "description": "", "aliases": ["prod"],
        "default_alias": "prod", "residency": "pinned",
    }  # fmt: skip
    changed = "prod→1; description; labels; annotations; default_alias; residency"
    assert result(apply(wanted)) == (0, "updated", changed)
    assert result(apply(wanted)) == (0, "unchanged", "")
    adapter = json.loads(cli("adapter", "show", "fields", "--json").out)["adapter"]
    assert (adapter["labels"], adapter["annotations"], adapter["description"]) == ({"b": "2"}, {"n": "x"}, "")
    assert (adapter["default_alias"], adapter["residency"]) == ("prod", "RESIDENCY_PINNED")
    assert result(apply({"name": "fields", "residency": "on-demand"})) == (0, "updated", "residency")


def test_aliases_that_are_not_listed_differ_until_they_are_pruned(apply, cli):
    apply({"name": "pruned", "aliases": ["prod", "old"]})
    wanted = {"name": "pruned", "aliases": ["prod"]}
    status, what, detail = result(apply(wanted))
    assert (status, what) == (1, "differs")
    assert "not listed: old" in detail
    assert result(apply(wanted, options=["--dry-run"]))[:2] == (1, "differs")
    assert result(apply(wanted, options=["--dry-run", "--prune"])) == (0, "to update", "old taken away")
    assert result(apply(wanted, options=["--prune"])) == (0, "updated", "old taken away")
    assert result(apply(wanted)) == (0, "unchanged", "")


def test_entries_share_an_alias_by_weight(apply, cli):
    entries = [
        {"name": "canary", "aliases": {"prod": 9}},
        {"name": "canary", "source": "file://main/two", "aliases": {"prod": 1}},
    ]
    status, rows = apply(*entries)
    assert (status, [row["detail"] for row in rows]) == (0, ["prod→1:9+2:1"] * 2)
    assert [row["result"] for row in apply(*entries)[1]] == ["unchanged", "unchanged"]
    assert "prod→1:9+2:1" in cli("adapter", "list", "--filter", "name = canary").out
    entries[0]["aliases"] = {"prod": 1}
    assert [row["result"] for row in apply(*entries)[1]] == ["updated", "updated"]


def test_entries_of_one_adapter_share_its_aliases(apply):
    entries = [
        {"name": "shared", "aliases": ["stable"]},
        {"name": "default/shared", "source": "file://main/two", "aliases": ["canary"]},
    ]
    for expected in ("registered", "unchanged"):
        status, rows = apply(*entries)
        assert (status, [row["result"] for row in rows]) == (0, [expected, expected])


def test_one_failure_does_not_stop_the_others(apply):
    status, rows = apply({"name": "bad", "source": "file://main/none"}, {"name": "good"}, {"name": "dry"})
    assert status == 1
    assert [row["result"] for row in rows] == ["failed", "registered", "registered"]
    assert rows[0]["detail"].startswith("SOURCE_NOT_FOUND: ")
    assert rows[0]["version"] == 0


def test_dry_run_registers_nothing(apply, cli):
    imagined = {"name": "imagined", "labels": {"a": "1"}, "residency": "pinned", "aliases": ["prod"]}
    assert result(apply(imagined, options=["--dry-run"])) == (0, "to register", "prod→new; residency")
    assert "ADAPTER_NOT_FOUND" in cli("adapter", "show", "imagined").err


def test_dry_run_says_what_apply_does(apply, cli):
    """For a new version, a known one and aliases that they share."""
    apply({"name": "planned", "aliases": ["prod", "old"], "labels": {"a": "1"}})
    entries = [
        {"name": "planned", "aliases": {"prod": 9}, "labels": {"a": "2"}},
        {"name": "planned", "source": "file://main/two", "aliases": {"prod": 1, "next": 1}, "description": "d"},
        {"name": "planned", "source": "file://main/none"},
    ]
    before = cli("adapter", "show", "planned", "--json").out
    status, planned = apply(*entries, options=["--dry-run"])
    assert cli("adapter", "show", "planned", "--json").out == before
    done_status, done = apply(*entries)
    assert (status, done_status) == (1, 1)
    assert [row["result"] for row in planned] == ["to update", "to register", "failed"]
    assert [row["result"] for row in done] == ["updated", "registered", "failed"]
    assert [row["detail"].replace("new", "2") for row in planned] == [row["detail"] for row in done]
    assert [row["digest"] for row in planned] == [row["digest"] for row in done]


def test_the_table_keeps_digests_whole(cli, tmp_path):
    file = tmp_path / "adapters.yaml"
    file.write_text(f"adapters:\n{ENTRY}, aliases: [prod]}}\n")
    header, row = cli("apply", "-f", file).out.splitlines()
    assert header.split() == ["ADAPTER", "RESULT", "VERSION", "DIGEST", "DETAIL"]
    assert len(row.split()[3]) == len("sha256:") + 12


def test_a_registry_that_is_away_is_not_a_result(cli, tmp_path):
    file = tmp_path / "adapters.yaml"
    file.write_text(f"adapters:\n{ENTRY}}}\n")
    ran = cli("apply", "-f", file, "--registry", "127.0.0.1:1")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("UNAVAILABLE: no registry service answers at 127.0.0.1:1")


def test_the_example_of_the_help_is_valid(cli, tmp_path):
    lines = cli("apply", "--help").out.splitlines()
    begin = lines.index("  adapters:")
    file = tmp_path / "adapters.yaml"
    file.write_text("\n".join(lines[begin : lines.index("", begin)]))
    ran = cli("apply", "-f", file, "--dry-run")
    assert ran.status == 1
    assert [line.split()[:2] for line in ran.out.splitlines()[1:]] == [
        ["refunds", "failed"],
        ["pirate", "failed"],
        ["pirate", "failed"],
    ]
    assert ran.out.count("BASE_MODEL_UNKNOWN") == 3
