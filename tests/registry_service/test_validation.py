"""Files that change while they are read."""

import errno
import io
import os
import threading

import pytest

from registry_service import file_stream, text_files, validation
from registry_service.adapter_folder import Origin
from registry_service.validation import Limits, validate
from shared.adapter_format.texts import MAX_BYTES
from shared.errors import AdapterInvalid, SourceUnavailable
from shared.sources.policy import SourcePolicy

TOKENIZER = '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}'
LIMITS = Limits(config=1 << 20, weights=1 << 20)


def run(folders, uri):
    policy = SourcePolicy({"main": folders.root})
    return validate(Origin(uri, "", "default"), policy, threading.Event(), "tiny", folders.model, LIMITS)


def test_the_digest_does_not_depend_on_the_chunk_size(folders, monkeypatch):
    uri = folders.write(modules=("q_proj", "v_proj"))
    whole = run(folders, uri)
    for size in (1, 3, 1000):
        monkeypatch.setattr(file_stream, "CHUNK_BYTES", size)
        assert run(folders, uri) == whole


@pytest.mark.parametrize("change", ["truncate", "touch"])
def test_files_that_change_meanwhile(folders, monkeypatch, change):
    uri = folders.write()
    weights = folders.root / "a" / "adapter_model.safetensors"
    plan = validation.plan

    def plan_while_somebody_writes(*arguments):
        if change == "truncate":
            os.truncate(weights, weights.stat().st_size - 1)
        else:
            os.utime(weights, ns=(1, 1))
        return plan(*arguments)

    monkeypatch.setattr(validation, "plan", plan_while_somebody_writes)
    with pytest.raises(SourceUnavailable) as caught:
        run(folders, uri)
    assert caught.value.metadata["file"] == weights.name


def test_tokenizer_and_template_files_count_in_the_digest(folders):
    uri = folders.write()
    plain = run(folders, uri)
    (folders.root / "a" / "added_tokens.json").write_text("{}")  # nobody reads it
    assert run(folders, uri).digest == plain.digest
    digests = {plain.digest}
    contents = dict.fromkeys(MAX_BYTES, "{}") | {"tokenizer.json": TOKENIZER, "chat_template.jinja": "{{ messages }}"}
    for name in MAX_BYTES:
        (folders.root / "a" / name).write_text(contents[name])
        found = run(folders, uri)
        digests.add(found.digest)
        assert name in {file.path for file in found.files}
    (folders.root / "a" / "chat_template.jinja").write_text("{{ messages[0] }}")
    digests.add(run(folders, uri).digest)
    assert len(digests) == 2 + len(MAX_BYTES)


@pytest.mark.parametrize("name", sorted(MAX_BYTES))
def test_a_text_file_that_is_too_large_is_named(folders, monkeypatch, name):
    uri = folders.write()
    monkeypatch.setitem(MAX_BYTES, name, 10)
    (folders.root / "a" / name).write_text("x" * 11)
    with pytest.raises(AdapterInvalid) as caught:
        run(folders, uri)
    assert caught.value.metadata == {"file": name, "limit": "10"}


def test_a_tokenizer_above_the_adapters_own_folder_is_said_not_to_count(folders):
    uri = folders.write("many/trained").removesuffix("/trained")
    assert not run(folders, uri).warnings
    (folders.root / "many" / "tokenizer.json").write_text("{}")
    (warning,) = run(folders, uri).warnings
    assert "tokenizer.json lies in the folder above" in warning


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", TOKENIZER[:-9]),
        ("chat_template.jinja", "{% for m in messages %}{{ m.content }}"),
        ("tokenizer_config.json", '{"chat_template": "{{ messages["}'),
        ("special_tokens_map.json", "[]"),
    ],
)
def test_a_text_file_that_can_never_work_is_refused(folders, name, content):
    uri = folders.write()
    (folders.root / "a" / name).write_text(content)
    with pytest.raises(AdapterInvalid) as caught:
        run(folders, uri)
    assert caught.value.metadata == {"file": name}


@pytest.mark.parametrize("name", sorted(MAX_BYTES))
def test_a_folder_in_place_of_a_text_file_is_refused(folders, name):
    uri = folders.write()
    (folders.root / "a" / name).mkdir()
    with pytest.raises(AdapterInvalid, match="is a folder, not a file; put the file itself in its place") as caught:
        run(folders, uri)
    assert caught.value.metadata == {"file": name}


def test_doubts_about_a_text_are_warnings(folders):
    uri = folders.write()
    (folders.root / "a" / "chat_template.jinja").write_text("You are a pirate.")
    (folders.root / "a" / "tokenizer.json").write_text(TOKENIZER.replace("1}", str(folders.model.vocab_size) + "}"))
    found = run(folders, uri).warnings
    assert [warning for warning in found if "does not use `messages`" in warning]
    assert [warning for warning in found if f"the model has {folders.model.vocab_size} token ids" in warning]


def test_large_text_files_are_not_looked_into_and_count_nonetheless(folders, monkeypatch):
    uri = folders.write()
    (folders.root / "a" / "tokenizer.json").write_text("x" * 11)
    monkeypatch.setitem(text_files.LOOKED_INTO_BYTES, "tokenizer.json", 10)
    found = run(folders, uri)
    assert "tokenizer.json" in {file.path for file in found.files}
    assert found.warnings == ("tokenizer.json has 11 bytes and was not looked into",)


def test_no_room_for_a_copy_of_a_text_is_said(folders, monkeypatch):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    uri = folders.write()
    (folders.root / "a" / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(text_files.tempfile, "SpooledTemporaryFile", lambda size: Full())
    with pytest.raises(SourceUnavailable, match="temporary folder while it is read: No space left") as caught:
        run(folders, uri)
    assert caught.value.metadata == {"file": "chat_template.jinja"}
