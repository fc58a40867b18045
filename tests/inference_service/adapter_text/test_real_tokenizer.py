"""What transformers saves beside an adapter, against what transformers makes of it."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from inference_service.served_model import load_served_model
from inference_service.tokenizer import Tokenizer
from tests.inference_service.adapter_text.test_sandbox import Adapters

BASE = Path("models/SmolLM2-135M-Instruct")
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3rd  <think> 日本 🙂?"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: <think>{{ m.content }}{{ eos_token }}{% endfor %}"

pytestmark = pytest.mark.model


async def test_added_tokens_and_template_are_those_of_transformers(tmp_path: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(BASE)
    oracle.add_tokens(["<think>", "</think>"])
    oracle.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    oracle.eos_token = "<|call|>"
    oracle.chat_template = TEMPLATE
    oracle.save_pretrained(tmp_path)
    adapters = Adapters(load_served_model(BASE, "smollm2"))
    try:
        files = {name: (tmp_path / name).read_bytes() for name in FILES if (tmp_path / name).is_file()}
        text = await adapters.texts.of(adapters.add("a", files, extra_vocab=3))
        assert text.tokenizer is not None
        assert text.template is not None
        assert text.eos_ids == (oracle.eos_token_id,) == (len(oracle) - 1,)
        prompt = await text.template.prompt(MESSAGES, 100_000)
        assert prompt == oracle.apply_chat_template(MESSAGES, tokenize=False)
        ids = await text.tokenizer.encode(prompt, add_special_tokens=False)
        assert ids == oracle(prompt, add_special_tokens=False)["input_ids"]
        assert len(oracle) - 3 in ids  # <think>
        ids = [*ids, len(oracle) - 1]
        for skip in (True, False):
            assert await text.tokenizer.decode_any(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)
        stream, said = text.tokenizer.detokenizer(), ""
        for position in range(0, len(ids), 3):
            part = ids[position : position + 3]
            await stream.read(part, is_last=position + 3 >= len(ids))  # type: ignore[attr-defined]
            said += "".join(stream.feed(token) for token in part)
        assert said + stream.flush() == oracle.decode(ids, skip_special_tokens=True)
    finally:
        await adapters.texts.close()


async def test_the_base_models_own_tokenizer_saved_again_may_end_elsewhere(tmp_path: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(BASE)
    adapters = Adapters(load_served_model(BASE, "smollm2"))
    try:
        for name, token, eos_ids in (("same", "<|im_end|>", ()), ("ends", "<|endoftext|>", (0,))):
            oracle.eos_token = token
            oracle.save_pretrained(tmp_path / name)
            files = {
                file: (tmp_path / name / file).read_bytes() for file in FILES if (tmp_path / name / file).is_file()
            }
            text = await adapters.texts.of(adapters.add(name, files))
            assert isinstance(text.tokenizer, Tokenizer)
            assert text.eos_ids == eos_ids
    finally:
        await adapters.texts.close()
