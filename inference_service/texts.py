"""Which tokenizer and chat template a request uses: the base model's, or its adapter's where that brings its own."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from inference_service.adapter_text.messages import Loaded
from inference_service.adapter_text.sandbox import ReadTexts, TextSandbox
from inference_service.adapter_text.text import Own, OwnTemplate, OwnTokenizer
from inference_service.output import TextStream
from inference_service.served_model import ServedModel
from inference_service.types import PreparedAdapter

MAX_REMEMBERED = 10_000  # adapters of which it is known what they bring


class RequestTokenizer(Protocol):
    """Text to token ids and back. `longest_token`: bytes of text that one token can stand for."""

    longest_token: int

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    async def decode_any(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    async def pieces(self, ids: Sequence[int]) -> list[str]: ...
    def detokenizer(self) -> TextStream: ...


class RequestTemplate(Protocol):
    """Conversations to prompts, of at most `max_bytes`."""

    async def prompt(self, messages: Sequence[Mapping[str, str]], max_bytes: int) -> str: ...


class RequestText(NamedTuple):
    """The text side of a request.

    `vocab_size`: token ids that it may name. `eos_ids`: ids that end its sequences beside the base model's.
    `tokenizer_of`, `template_of`: version name of the adapter whose own they are; empty for the base model's.
    """

    tokenizer: RequestTokenizer | None
    template: RequestTemplate | None
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    tokenizer_of: str = ""
    template_of: str = ""


class AdapterTexts:
    """The text of each adapter, as far as it differs from the base model's.

    Args:
        model: The base model.
        read_texts: The files of an adapter by its digest.
    """

    def __init__(self, model: ServedModel, read_texts: ReadTexts) -> None:
        self._model = model
        self._sandbox = None if model.folder is None else TextSandbox(model.folder, read_texts)
        self._known: OrderedDict[str, Loaded] = OrderedDict()

    @property
    def base(self) -> RequestText:
        """What the base model's requests use."""
        return RequestText(self._model.tokenizer, self._model.chat_template, self._model.config.vocab_size)

    async def of(self, adapter: PreparedAdapter | None) -> RequestText:
        """What the requests of `adapter` use; None is the base model.

        Raises:
            AdapterInvalid: its files are wrong, contradict the base model, or take too much time or memory.
        """
        model = self._model
        if adapter is None:
            return self.base
        vocab_size = model.config.vocab_size + adapter.extra_vocab
        base = RequestText(model.tokenizer, model.chat_template, vocab_size)
        if self._sandbox is None or all(model.text_sha256.get(file.path) == file.sha256 for file in adapter.texts):
            return base
        own = Own(self._sandbox, adapter.digest, vocab_size)
        loaded = await self._load(own)
        return RequestText(
            OwnTokenizer(own, loaded.longest_token) if loaded.own_tokenizer else base.tokenizer,
            OwnTemplate(own, loaded.template_file) if loaded.template_file else base.template,
            vocab_size,
            tuple(token_id for token_id in loaded.eos_ids if token_id not in model.config.eos_token_ids),
            tokenizer_of=adapter.version if loaded.own_tokenizer else "",
            template_of=adapter.version if loaded.template_file else "",
        )

    async def close(self) -> None:
        """End the processes that adapters' text is handled in."""
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _load(self, own: Own) -> Loaded:
        loaded = self._known.get(own.digest)
        if loaded is None:
            loaded = self._known[own.digest] = await own.sandbox.load(own.digest, own.vocab_size)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(own.digest)
        return loaded
