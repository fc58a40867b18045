"""The files by which an adapter brings a tokenizer or a chat template of its own. They count in its digest."""

from collections.abc import Callable, Iterable

from shared.adapter_format.files import CONFIG, check_no_folder

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"

# Largest sizes in bytes. Llama 3's tokenizer.json has 17 MB, Gemma 3's 33 MB.
MAX_BYTES = {TOKENIZER: 48 << 20, TOKENIZER_CONFIG: 8 << 20, SPECIAL_TOKENS: 1 << 20, CHAT_TEMPLATE: 1 << 20}
_SLOW = ("tokenizer.model", "vocab.json")  # what a tokenizer is saved as that has no fast form


def check_texts_are_files(names: Iterable[str], folders: Callable[[], Iterable[str]]) -> None:
    """That no folder stands where a text file would be read, for the base model's would be taken in silence.

    `names`: of the files beside the config; `folders`: gives the folders there, if `names` does not tell.

    Raises:
        AdapterInvalid: one does (metadata `file`).
    """
    listing, beside = set(names), set(folders())
    for name in MAX_BYTES.keys() - listing:
        check_no_folder(name, listing, lambda: beside)


def text_files(names: Iterable[str], config: str = CONFIG) -> tuple[str, ...]:
    """Which of a folder's files say how text becomes tokens, and back: those beside the adapter's config, sorted."""
    folder = config.removesuffix(CONFIG)
    listing = set(names)
    return tuple(sorted(f"{folder}{name}" for name in MAX_BYTES if f"{folder}{name}" in listing))


def text_warnings(beside: Iterable[str], above: Iterable[str], extra_vocab: int) -> tuple[str, ...]:
    """What of an adapter's text is not used, and what to do about it.

    Args:
        beside: Names of the files beside its config.
        above: Names of the files in the folder that was named, if the adapter lies one below.
        extra_vocab: Token ids that it adds.
    """
    found = set(beside)
    warnings = [
        f"{name} lies in the folder above the adapter's and is not used; put it beside {CONFIG}"
        for name in text_files(above)
        if name not in found
    ]
    if TOKENIZER not in found:
        warnings += [
            f"{name} is not read; save the fast tokenizer, {TOKENIZER}, beside it" for name in _SLOW if name in found
        ]
        if extra_vocab:
            warnings.append(
                f"the adapter adds {extra_vocab} tokens and brings no {TOKENIZER}: they have no text, and requests can "
                "only name their ids; save the tokenizer with the adapter"
            )
    return tuple(warnings)
