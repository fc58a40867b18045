import pytest

from shared.adapter_format.texts import MAX_BYTES, check_texts_are_files, text_warnings
from shared.errors import AdapterInvalid

CONFIG = "adapter_config.json"


@pytest.mark.parametrize(
    ("beside", "above", "extra", "said"),
    [
        ([CONFIG, "tokenizer.json"], [], 3, []),
        ([CONFIG], [], 0, []),
        ([CONFIG], [], 3, ["adds 3 tokens and brings no tokenizer.json"]),
        ([CONFIG, "tokenizer.model"], [], 0, ["tokenizer.model is not read; save the fast tokenizer"]),
        ([CONFIG, "tokenizer.model", "tokenizer.json"], [], 0, []),
        (
            [CONFIG, "chat_template.jinja"], ["README.md", "chat_template.jinja", "tokenizer.json"], 0,
            ["tokenizer.json lies in the folder above the adapter's and is not used; put it beside"],
        ),
    ],
)  # fmt: skip
def test_what_is_not_used_is_said(beside, above, extra, said):
    found = text_warnings(beside, above, extra)
    assert len(found) == len(said)
    assert all(words in warning for words, warning in zip(said, found, strict=True))


@pytest.mark.parametrize("name", MAX_BYTES)
def test_a_folder_in_place_of_a_text_file_is_refused_however_the_source_tells_of_it(name):
    for names, folders in (([CONFIG], [name, "x"]), ([CONFIG, f"{name}/{name}"], [])):  # as a disk or S3; as the Hub
        with pytest.raises(AdapterInvalid, match="is a folder, not a file; put the file itself in its place") as caught:
            check_texts_are_files(names, lambda folders=folders: folders)
        assert caught.value.metadata == {"file": name}
    check_texts_are_files([CONFIG, name], lambda: ["tokenizer", f"old-{name}"])
