import pytest

from shared.adapter_format.files import adapter_files, named_folder
from shared.errors import AdapterInvalid, UnsupportedAdapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.mark.parametrize(
    "others", [[], ["README.md", "tokenizer.json"], ["adapter_model.bin"], ["x/adapter_config.json"]]
)
def test_what_makes_an_adapter(others):
    assert adapter_files([*others, WEIGHTS, CONFIG]) == (CONFIG, WEIGHTS)


@pytest.mark.parametrize(
    ("names", "error", "file", "match"),
    [
        ([], AdapterInvalid, CONFIG, "is missing"),
        ([WEIGHTS], AdapterInvalid, CONFIG, "is missing"),
        (["pirate/adapter_config.json"], AdapterInvalid, CONFIG, "pirate/adapter_config.json exists"),
        ([CONFIG], AdapterInvalid, WEIGHTS, "is missing"),
        ([CONFIG, f"{WEIGHTS}/{WEIGHTS}"], AdapterInvalid, WEIGHTS, "is a folder, not a file; put the file itself"),
        ([f"{CONFIG}/x", WEIGHTS], AdapterInvalid, CONFIG, "is a folder, not a file; put the file itself"),
        ([CONFIG, "x/adapter_model.safetensors"], AdapterInvalid, WEIGHTS, "is missing"),
        ([CONFIG, "adapter_model.bin"], UnsupportedAdapter, "adapter_model.bin", "safe_serialization"),
        (
            [CONFIG, "adapter_model.safetensors.index.json"],
            UnsupportedAdapter,
            "adapter_model.safetensors.index.json",
            "several files",
        ),
        (
            [CONFIG, "adapter_model-00001-of-00002.safetensors"],
            UnsupportedAdapter,
            "adapter_model-00001-of-00002.safetensors",
            "several files",
        ),
    ],
)
def test_what_does_not(names, error, file, match):
    with pytest.raises(error, match=match) as caught:
        adapter_files(names)
    assert caught.value.metadata == {"file": file}


@pytest.mark.parametrize(("names", "file"), [([CONFIG], WEIGHTS), ([WEIGHTS], CONFIG)])
def test_a_folder_in_place_of_a_file(names, file):
    with pytest.raises(AdapterInvalid, match=f"{file}: is a folder, not a file; put the file itself in its place"):
        adapter_files(names, lambda: [file])
    with pytest.raises(AdapterInvalid, match=f"{file}: is missing"):
        adapter_files(names, lambda: ["checkpoint-10"])


def test_of_many_folders_the_first_are_named_and_the_rest_counted():
    folders = [f"f{number}" for number in range(7)]
    with pytest.raises(AdapterInvalid, match=r"which holds others; name one of f0, f1, f2, f3, f4 and 2 more$"):
        named_folder([], folders)
    with pytest.raises(AdapterInvalid, match=r"name one of f0, f1$"):
        named_folder([], folders[:2])
