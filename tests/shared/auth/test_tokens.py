"""Token files: who a token stands for, what is refused, and that the file is followed."""

import json
import os
import time
from pathlib import Path

import pytest

from shared.auth.tokens import TokenFile, hash_token
from tests.shared.auth.token_files import entry, token


def caller(tokens: TokenFile, subject: str):
    return tokens.caller(hash_token(token(subject)))


def written(path: Path, text: str) -> TokenFile:
    path.write_text(text)
    return TokenFile(path)


def test_roles_and_namespaces(tmp_path):
    tokens = written(tmp_path / "t.toml", entry("ci", ["writer"], ["b", "a"]))
    found = caller(tokens, "ci")
    assert (found.name, found.namespace, found.credential) == ("ci", "b", "token")
    assert found.roles_in("a") == {"reader", "writer"} == found.roles_in("b")
    assert not found.roles_in("c")
    assert caller(tokens, "other") is None


def test_entries_of_one_token_add_up(tmp_path):
    text = entry("ci", ["writer"], ["a"]) + entry("ci", ["reader"], ["b"]) + entry("ci", ["replica"])
    found = caller(written(tmp_path / "t.toml", text), "ci")
    assert found.namespace == "a"
    assert found.roles_in("a") == {"reader", "writer", "replica"}
    assert found.roles_in("b") == {"reader", "replica"}
    assert found.roles_in("elsewhere") == {"replica"}
    assert found.namespaces(["reader"]) == {"a", "b"}
    assert found.namespaces(["replica"]) is None


def test_a_token_that_has_expired_is_nobodys(tmp_path):
    text = entry("old", ["reader"], ["a"], expires="2020-01-01T00:00:00Z") + entry(
        "new", ["reader"], ["a"], expires="2999-01-01T00:00:00Z"
    )
    tokens = written(tmp_path / "t.toml", text)
    assert caller(tokens, "old") is None
    assert caller(tokens, "new") is not None


def test_json_lines(tmp_path):
    line = {"subject": "ci", "sha256": hash_token(token("ci")).hex(), "roles": ["admin"], "namespaces": ["*"]}
    found = caller(written(tmp_path / "t.jsonl", json.dumps(line) + "\n\n"), "ci")
    assert found.roles_in("anything") == {"reader", "writer", "operator", "admin"}
    assert found.namespace == "default"
    assert found.has_everywhere(["admin"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tokens = 3", "tables"),
        ("[[token]]", "tables"),
        ("[[tokens", "Expected"),
        (entry("x", ["king"], ["a"]), "king"),
        (entry("x", ["reader"]), "must not be empty"),
        (entry("x", [], ["a"]), "must not be empty"),
        (entry("x", ["reader"], ["A B"]), "not an id"),
        (entry("", ["reader"], ["a"]), "subject"),
        (entry("x", ["reader"], ["a"], password='"secret"'), "unknown field"),
        (entry("x", ["reader"], ["a"]).replace('sha256 = "', 'sha256 = "g'), "64 hex"),
        (entry("x", ["reader"], ["a"]) + entry("x", ["reader"], ["a"]).replace('"x"', '"y"'), "the same token"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        written(tmp_path / "t.toml", text)


def test_the_file_is_followed_and_a_wrong_one_is_not(tmp_path, monkeypatch, caplog):
    path = tmp_path / "t.toml"
    tokens = written(path, entry("first", ["reader"], ["a"]))
    now = time.monotonic()

    def replace(text: str) -> None:
        nonlocal now
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        os.replace(fresh, path)  # noqa: PTH105
        now += 2
        monkeypatch.setattr(time, "monotonic", lambda: now)

    replace(entry("second", ["reader"], ["a"]))
    assert caller(tokens, "first") is None
    assert caller(tokens, "second") is not None
    replace("[[tokens")
    assert caller(tokens, "second") is not None
    assert "the last good content counts" in caplog.text
    replace(entry("third", ["reader"], ["a"]))
    assert caller(tokens, "third") is not None
    path.unlink()
    now += 2
    assert caller(tokens, "third") is not None
