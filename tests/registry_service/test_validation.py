"""Files that change while they are read."""

import os
import threading

import pytest

from registry_service import validation
from registry_service.validation import Limits, Origin, validate
from shared.adapter_format.texts import MAX_BYTES
from shared.errors import AdapterInvalid, SourceUnavailable
from shared.sources.policy import SourcePolicy

LIMITS = Limits(config=1 << 20, weights=1 << 20)


def run(folders, uri):
    policy = SourcePolicy({"main": folders.root})
    return validate(Origin(uri, "", "default"), policy, threading.Event(), "tiny", folders.model, LIMITS)


def test_the_digest_does_not_depend_on_the_chunk_size(folders, monkeypatch):
    uri = folders.write(modules=("q_proj", "v_proj"))
    whole = run(folders, uri)
    for size in (1, 3, 1000):
        monkeypatch.setattr(validation, "CHUNK_BYTES", size)
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
    for name in MAX_BYTES:
        (folders.root / "a" / name).write_text(name)
        found = run(folders, uri)
        digests.add(found.digest)
        assert name in {file.path for file in found.files}
    (folders.root / "a" / "chat_template.jinja").write_text("another")
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
