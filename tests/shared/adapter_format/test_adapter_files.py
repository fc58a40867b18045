import pytest

from shared.adapter_format.files import adapter_files
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
