"""Finding a base model and reading its configuration."""

import json
from pathlib import Path

import pytest

from shared.errors import InvalidArgument
from shared.model_folder import load_raw_config, resolve_model


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "a/b/c", "nowhere", "~nobody/x"])
def test_what_is_no_folder_and_no_hub_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="model"):
        resolve_model(name)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_eos_ids_of_both_files_are_merged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "x": 1}))
    assert load_raw_config(tmp_path) == {"eos_token_id": 2, "x": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert load_raw_config(tmp_path)["eos_token_id"] == [2, 3]
    (tmp_path / "config.json").write_text("{}")
    assert load_raw_config(tmp_path)["eos_token_id"] == [3, 2]


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100000])
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        load_raw_config(tmp_path)
