"""The files by which an adapter brings a tokenizer or a chat template of its own. They count in its digest."""

from collections.abc import Iterable

from shared.adapter_format.files import CONFIG

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

# Largest sizes in bytes. Llama 3's tokenizer.json has 17 MB, Gemma 3's 33 MB.
MAX_BYTES = {TOKENIZER: 48 << 20, TOKENIZER_CONFIG: 8 << 20, CHAT_TEMPLATE: 1 << 20}


def text_files(names: Iterable[str], config: str = CONFIG) -> tuple[str, ...]:
    """Which of a folder's files say how text becomes tokens, and back: those beside the adapter's config, sorted."""
    folder = config.removesuffix(CONFIG)
    listing = set(names)
    return tuple(sorted(f"{folder}{name}" for name in MAX_BYTES if f"{folder}{name}" in listing))
