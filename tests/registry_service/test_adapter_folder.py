"""An adapter that lies deeper than one folder down is refused, and the folder named by its whole path."""

import threading

import pytest

from registry_service import adapter_folder as module
from registry_service.adapter_folder import Origin, adapter_folder
from shared.errors import AdapterInvalid
from shared.sources.policy import SourcePolicy
from tests.shared.sources.store_fixtures import hub, s3, s3_url

__all__ = ["hub", "s3", "s3_url"]

CONFIG = "adapter_config.json"


@pytest.fixture(params=["file", "hub", "s3"])
def put(request, tmp_path):
    """Stores files under a name; the source's URI, its policy and its credential."""

    def store(name, files):
        if request.param != "file":
            remote = request.getfixturevalue(request.param)
            return remote.put(name, files), remote.policy, "test"
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(content)
        return f"file://main/{name}", SourcePolicy({"main": tmp_path}), ""

    return store


def found_in(put, *paths):
    uri, policy, credential = put("a", dict.fromkeys(paths, b"{}"))
    return adapter_folder(Origin(uri, credential, "default"), policy, threading.Event())


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        (["sub/dir/adapter_config.json"], "sub/dir/adapter_config.json"),
        (["sub/dir/deeper/adapter_config.json", "sub/x.txt"], "sub/dir/deeper/adapter_config.json"),
        (["adapter_model.safetensors", "one/x", "two/adapter_config.json"], "two/adapter_config.json"),
        (["docs/x.txt", "runs/last/adapter_config.json"], "runs/last/adapter_config.json"),
        (["a/b/c/adapter_config.json", "x/y/adapter_config.json"], "x/y/adapter_config.json"),
    ],
)
def test_the_folder_to_name_is_named(put, paths, named):
    with pytest.raises(AdapterInvalid, match=f"{named} exists: name that folder") as caught:
        found_in(put, *paths)
    assert caught.value.metadata == {"file": CONFIG}


def test_several_folders_that_could_be_it_are_named(put):
    with pytest.raises(AdapterInvalid, match="name one of one, two"):
        found_in(put, "one/adapter_config.json", "two/adapter_config.json", "two/deep/adapter_config.json")


def test_one_folder_down_is_the_adapters(put):
    _, names, above = found_in(put, "named/adapter_config.json", "README.md")
    assert (names, above[0]) == ([CONFIG], "README.md")


def test_what_is_nowhere_is_left_to_others(put):
    assert CONFIG not in found_in(put, "named/x", "README.md").names


def test_only_so_many_folders_are_looked_into(put, monkeypatch):
    monkeypatch.setattr(module, "MAX_LOOKED_INTO", 0)
    assert found_in(put, "sub/dir/x").names in ([], ["dir/x"])
