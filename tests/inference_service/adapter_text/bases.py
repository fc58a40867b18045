"""Base models' text, and what adapters bring beside it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from inference_service.chat_template import load_chat_template
from inference_service.served_model import ServedModel
from inference_service.tokenizer import load_tokenizer
from shared.adapter_format.texts import MAX_BYTES
from shared.base_model import parse_config
from shared.digest import FileEntry
from tests.inference_service.serving_fakes import CHAT, VOCAB, byte_tokenizer, raw_config

SHOUT = "{% for m in messages %}[{{ m.role | upper }}] {{ m.content }}\n{% endfor %}{{ eos_token }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
GREEDY = "{% set x = 'a' * 3000000000 %}{{ x }}"


def write_base(folder: Path) -> ServedModel:
    """The byte model (ids = bytes, <eos> 256, <bos> 257) with a chat template, in `folder`."""
    folder.mkdir()
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT, "eos_token": "<eos>"}))
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    config = parse_config(raw_config(max_position_embeddings=4096))
    return ServedModel("tiny", config, "", load_tokenizer(folder), load_chat_template(folder), folder, hashes)


def with_added(*tokens: AddedToken | str) -> bytes:
    """The byte tokenizer with further tokens, whose ids begin at 258. The model has ids up to VOCAB - 1."""
    backend = Tokenizer.from_str(byte_tokenizer().backend.to_str())
    backend.add_tokens(list(tokens))
    return backend.to_str().encode()


def changed(data: bytes, **parts: object) -> bytes:
    """A tokenizer.json with other parts."""
    return json.dumps({**json.loads(data), **parts}).encode()


def entries(files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    assert set(files) <= set(MAX_BYTES)
    return tuple(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items())


__all__ = ["ENDLESS", "GREEDY", "SHOUT", "VOCAB", "changed", "entries", "with_added", "write_base"]
