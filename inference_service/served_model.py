"""What an API process knows of the base model: its config and its tokenizer, not its weights."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inference_service.chat_template import ChatTemplate, load_chat_template
from inference_service.tokenizer import Tokenizer, load_tokenizer
from shared.adapter_format.texts import MAX_BYTES
from shared.base_model import ModelConfig, fingerprint, parse_config
from shared.model_folder import load_raw_config, read_files


@dataclass(frozen=True)
class ServedModel:
    """The base model of this replica. Without a tokenizer it serves token ids only.

    `folder` is where it lies, `text_sha256` the hash of each of its tokenizer and chat-template files.
    """

    model_id: str
    config: ModelConfig
    fingerprint: str
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    folder: Path | None = None
    text_sha256: Mapping[str, str] = field(default_factory=dict)


def load_served_model(folder: Path, model_id: str) -> ServedModel:
    """Read config, tokenizer and chat template of a model folder.

    Raises:
        InvalidArgument: a file is wrong, or the architecture is not supported.
    """
    raw = load_raw_config(folder)
    config = parse_config(raw)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in read_files(folder, MAX_BYTES).items()}
    tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
    return ServedModel(model_id, config, fingerprint(raw), tokenizer, template, folder, hashes)
