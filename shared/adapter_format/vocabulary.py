"""Which tokens a tokenizer.json has, and whether their ids can be those of a model with an adapter."""

import json
from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from shared.adapter_format.mistaken import mistaken
from shared.adapter_format.reasons import COPY_AGAIN, file_invalid
from shared.adapter_format.texts import TOKENIZER
from shared.adapter_format.tokenizer_model import missing_of_merges
from shared.errors import AdapterInvalid

MAX_TOKENS = 1 << 20  # more are not counted: a few hundred bytes each
SAVE_TOKENIZER = "save the tokenizer that the adapter was trained with"

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Model(msgspec.Struct):
    vocab: msgspec.Raw
    merges: msgspec.Raw = msgspec.Raw(b"[]")
    continuing_subword_prefix: Any = None
    unk_id: Any = None
    type: Literal["BPE", "WordPiece", "WordLevel", "Unigram"] | None = None


class _AddedToken(msgspec.Struct):
    id: _Id
    content: str
    special: bool = False


class _File(msgspec.Struct):
    """What of a tokenizer.json says which tokens there are. The rest is skipped: it takes no memory."""

    model: _Model
    added_tokens: list[_AddedToken] = []


_FILE = msgspec.json.Decoder(_File)
_BY_TOKEN = msgspec.json.Decoder(dict[str, _Id])
_SCORES = msgspec.json.Decoder(list[tuple[str, float]])


class Vocabulary(NamedTuple):
    """Tokens of a tokenizer.json.

    `ids`: of its model's tokens. `added`: those that the model does not have, in their order: they get the ids behind,
    whatever the file says. `special`: which of all are special.
    """

    ids: Mapping[str, int]
    added: tuple[str, ...]
    special: Set[str]

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + len(self.added)

    def last(self) -> tuple[int, str]:
        """The largest id, or one that is not larger, and its token; (-1, "") without any."""
        largest = max(((token_id, token) for token, token_id in self.ids.items()), default=(-1, ""))
        return max(largest, (self.num_tokens - 1, self.added[-1])) if self.added else largest

    def token(self, token_id: int) -> str | None:
        """The token with this id."""
        if 0 <= token_id - len(self.ids) < len(self.added):
            return self.added[token_id - len(self.ids)]
        return next((token for token, known in self.ids.items() if known == token_id), None)


def read_vocabulary(data: bytes) -> Vocabulary | None:
    """The vocabulary in the bytes of a tokenizer.json. None: it is too large to be looked into.

    Raises:
        AdapterInvalid: it is no such file (metadata `file`). Not all that a tokenizer can be wrong in is looked at.
    """
    try:
        file = _FILE.decode(data)
        tokens = bytes(file.model.vocab)
        if tokens.count(b",") + len(file.added_tokens) > MAX_TOKENS:
            return None
        ids = _ids(tokens)
        problem = _problem(file.model, ids)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise mistaken(data[:64], TOKENIZER, is_json=True) or file_invalid(
            TOKENIZER, f"is not a tokenizer: {problem:.200}", COPY_AGAIN
        ) from None
    if problem is not None:
        raise file_invalid(TOKENIZER, problem, SAVE_TOKENIZER)
    added = dict.fromkeys(token.content for token in file.added_tokens if token.content not in ids)
    return Vocabulary(ids, tuple(added), {token.content for token in file.added_tokens if token.special})


def _ids(tokens: bytes) -> Mapping[str, int]:
    """Of a list of tokens and their scores, as Unigram has it, or of an object."""
    if tokens.lstrip().startswith(b"["):
        return {token: token_id for token_id, (token, _) in enumerate(_SCORES.decode(tokens))}
    return _BY_TOKEN.decode(tokens)


def _problem(model: _Model, ids: Mapping[str, int]) -> str | None:
    """Why the library reads no such model, as far as that is looked at. Raises msgspec.DecodeError."""
    merges = bytes(model.merges)
    if model.type == "BPE" and merges.count(b",") <= 2 * MAX_TOKENS:
        prefix = model.continuing_subword_prefix
        return missing_of_merges(merges, ids, prefix if isinstance(prefix, str) else "")
    if model.type == "Unigram" and isinstance(model.unk_id, int) and not 0 <= model.unk_id < len(ids):
        return f"unk_id is {model.unk_id}, which is none of its {len(ids)} tokens"
    return None


def beyond(token: str, token_id: int, vocab_size: int) -> str:
    """That a model which has `vocab_size` ids with the adapter lacks this one."""
    return f"{_shown(token)} has the id {token_id}; {no_id_of_model(vocab_size)}"


def no_id_of_model(vocab_size: int) -> str:
    """Why an id that large is none."""
    return f"with this adapter the model has {vocab_size} token ids"


def check_vocabulary(own: Mapping[str, int], base: Mapping[str, int], vocab_size: int) -> None:
    """The model was trained with the base model's ids: they must mean what they meant; further ones are the adapter's.

    Raises:
        AdapterInvalid: naming the first id that does not, or one that the model does not have.
    """
    wrong = min(((token_id, token) for token, token_id in base.items() if own.get(token) != token_id), default=None)
    if wrong is not None:
        token_id, token = wrong
        found = f"has the id {own[token]}" if token in own else "is missing"
        raise _contradiction(f"{_shown(token)} {found}; in the base model's vocabulary it is {token_id}", token_id)
    ids = set(base.values())
    for token, token_id in own.items():
        if token_id in ids and base.get(token) != token_id:
            raise _contradiction(f"id {token_id} is also {_shown(token)}, which the base model does not know", token_id)
        if token_id >= vocab_size:
            raise _contradiction(beyond(token, token_id, vocab_size), token_id)


def _contradiction(problem: str, token_id: int) -> AdapterInvalid:
    error = file_invalid(TOKENIZER, problem, SAVE_TOKENIZER)
    error.metadata["token_id"] = str(token_id)
    return error


def _shown(token: str) -> str:
    return json.dumps(token[:60], ensure_ascii=False)
