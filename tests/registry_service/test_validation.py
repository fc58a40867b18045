"""Files that change while they are read."""

import os
from pathlib import Path

import pytest

from registry_service import validation
from registry_service.validation import Limits, validate
from shared.errors import SourceUnavailable

LIMITS = Limits(config=1 << 20, weights=1 << 20)


def run(folders, uri):
    return validate(uri, {"main": Path(folders.root)}, "tiny", folders.model, LIMITS)


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
