"""Chat templates: where they are found, what they may do, and that they equal transformers'."""

import json
from pathlib import Path

import pytest

from inference_service.chat_template import ChatTemplate, load_chat_template
from inference_service.tokenizer import load_tokenizer
from shared.adapter_format.texts import MAX_BYTES
from shared.chat_template import special_tokens
from shared.errors import InvalidArgument
from shared.model_folder import read_files
from tests.inference_service.serving_fakes import byte_tokenizer

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
USER = [{"role": "user", "content": 'a<b & "c" é'}]


def render(source: str, **special: str) -> str:
    return ChatTemplate(source, special).render(USER)


def test_environment_is_that_of_transformers() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"  # trim_blocks, lstrip_blocks
    assert render("{{ messages[0].content | tojson }}") == '"a<b & \\"c\\" é"'
    assert render('{{ {"b": 1, "a": 2} | tojson(indent=1, sort_keys=True) }}') == '{\n "a": 2,\n "b": 1\n}'
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}!") == "user!"
    assert render("{{ bos_token }}{{ tools is none }}{{ add_generation_prompt }}", bos_token="<s>") == "<s>TrueTrue"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ missing.thing }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[5].role }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_refuses_the_chat(source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(source)
    assert [v.field for v in caught.value.violations] == ["prompt.chat"]


def test_a_template_that_is_none_is_refused_when_loaded() -> None:
    with pytest.raises(InvalidArgument, match="chat_template"):
        ChatTemplate("{% if %}", {})


def test_a_template_cannot_change_the_caller_s_messages() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidArgument):
        ChatTemplate("{{ messages[0].update({'content': 'y'}) }}", {}).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def write(folder: Path, config: object, jinja: str | None = None) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def test_places_of_a_template(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    assert load_chat_template(write(tmp_path, {"bos_token": "<s>"})) is None
    assert load_chat_template(write(tmp_path, {"chat_template": "one"})).render(USER) == "one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}"}]
    listed = write(tmp_path, {"chat_template": named, "eos_token": {"content": "</s>", "lstrip": False}})
    assert load_chat_template(listed).render(USER) == "</s>"
    file = write(
        tmp_path, {"chat_template": "one", "bos_token": "<s>", "pad_token": None}, "{{ bos_token }}{{ pad_token }}file"
    )
    assert load_chat_template(file).render(USER) == "<s>file"


@pytest.mark.parametrize("config", [{}, {"eos_token": "<b>"}, {"eos_token": "<b>", "added_tokens_decoder": {}}])
@pytest.mark.parametrize("listed", [None, {}, {"eos_token": "<c>"}, {"eos_token": {"content": "<c>"}}])
def test_special_tokens_are_those_that_transformers_finds(
    tmp_path: Path, config: dict[str, object], listed: dict[str, object] | None
) -> None:
    from transformers import AutoTokenizer

    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<b>", "<c>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    if listed is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(listed))
    found = special_tokens(read_files(tmp_path, MAX_BYTES))
    assert found.get("eos_token") == AutoTokenizer.from_pretrained(tmp_path).eos_token


@pytest.mark.parametrize("template", [5, {"a": 1}, [{"name": "default", "template": 5}]])
def test_a_template_of_another_type_is_refused(tmp_path: Path, template: object) -> None:
    with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json"):
        load_chat_template(write(tmp_path, {"chat_template": template}))


def test_malformed_tokenizer_files_are_refused(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path)


CHATS = [
    [("user", "Hello!")],
    [("system", "Be brief."), ("user", "3rd  42 <b>&</b>"), ("assistant", "ok\n"), ("user", "漢字 👩‍👩‍👧")],
    [("user", ""), ("assistant", ""), ("user", " x ")],
]


@pytest.mark.model
async def test_prompts_equal_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(MODEL)
    tokenizer, template = load_tokenizer(MODEL), load_chat_template(MODEL)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == text
        ids = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert await tokenizer.encode(text, add_special_tokens=False) == list(ids)
    for text in ("3rd  42", "a\tb\n\n c", "漢字 👩‍👩‍👧", "<|im_end|> x", "x" * 5000):
        assert await tokenizer.encode(text) == oracle(text)["input_ids"]
        assert tokenizer.decode(oracle(text)["input_ids"], skip_special_tokens=False) == text
        assert await tokenizer.decode_any(oracle(text)["input_ids"], False) == text
