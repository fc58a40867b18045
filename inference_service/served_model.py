"""What an API process knows of the base model: its config and its tokenizer, not its weights."""

from dataclasses import dataclass
from pathlib import Path

from inference_service.chat_template import ChatTemplate, load_chat_template
from inference_service.tokenizer import Tokenizer, load_tokenizer
from shared.base_model import ModelConfig, fingerprint, parse_config
from shared.model_folder import load_raw_config


@dataclass(frozen=True)
class ServedModel:
    """The base model of this replica. Without a tokenizer it serves token ids only."""

    model_id: str
    config: ModelConfig
    fingerprint: str
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None


def load_served_model(folder: Path, model_id: str) -> ServedModel:
    """Read config, tokenizer and chat template of a model folder.

    Raises:
        InvalidArgument: a file is wrong, or the architecture is not supported.
    """
    raw = load_raw_config(folder)
    config = parse_config(raw)
    return ServedModel(model_id, config, fingerprint(raw), load_tokenizer(folder), load_chat_template(folder))
