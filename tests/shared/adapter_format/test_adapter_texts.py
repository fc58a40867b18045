import pytest

from shared.adapter_format.texts import text_warnings

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
