"""The tokenizer in a GGUF file, written as a Hugging Face folder's tokenizer.json and tokenizer_config.json."""

from collections.abc import Mapping
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.errors import FailedPrecondition


def build_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE whose pre-tokenizer first takes every digit alone, which is what `smollm` means in llama.cpp.

    Raises:
        FailedPrecondition: The file names another pre-tokenizer.
    """
    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise FailedPrecondition(f"pre-tokenizer {meta['tokenizer.ggml.pre']!r} is not smollm")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens(meta)])
    return tokenizer


def special_tokens(meta: Mapping[str, Any]) -> list[str]:
    """The control tokens, in the order of their ids."""
    pairs = zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in pairs if kind == TokenType.CONTROL]


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json, with the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    special = special_tokens(meta)
    added = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    return {
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": meta["tokenizer.ggml.add_space_prefix"],
        "added_tokens_decoder": {str(tokens.index(token)): {"content": token, **added} for token in special},
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
    }
