"""Checks a request against the contract, and tells everything that is wrong with it at once.

What depends on who answers, the base model or an adapter with a vocabulary of its own, is told in a second go.
"""

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from google.protobuf.message import Message

from inference_service.types import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS
from loraplex.inference.v1 import inference_pb2 as pb
from shared.errors import FieldViolation, InvalidArgument

MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_ID_CHARACTERS = 256  # of request_id, cache_salt and session_id
MAX_LOGIT_BIAS = 100.0
MAX_MESSAGES = 1024
MAX_BLEND_PARTS = 8
MAX_BLEND_WEIGHT = 1000.0
MAX_ROUND_TRIP_TOKENS = 131_072  # of Tokenize and Detokenize
ROLES = ("system", "user", "assistant")


class Limits(NamedTuple):
    """What bounds a request on this replica."""

    max_model_len: int
    max_n: int


class TextLimits(NamedTuple):
    """What bounds the text and the token ids of a request, by who answers it.

    `max_text_bytes`: a longer text has too many tokens.
    """

    vocab_size: int
    max_model_len: int
    has_tokenizer: bool
    has_chat_template: bool
    max_text_bytes: int


class _Range(NamedTuple):
    """What a number must be. A comparison with NaN is false, so NaN is never right."""

    field: str
    is_right: Callable[[float], bool]
    expected: str


_SAMPLING = (
    _Range("temperature", lambda v: 0 <= v <= 1000, "in [0, 1000]"),
    _Range("top_p", lambda v: 0 < v <= 1, "in (0, 1]"),
    _Range("top_k", lambda v: v >= 0, "0 or more"),
    _Range("min_p", lambda v: 0 <= v <= 1, "in [0, 1]"),
    _Range("seed", lambda v: v >= 0, "0 or more"),
    _Range("repetition_penalty", lambda v: 0.001 <= v <= 1000, "in [0.001, 1000]"),
    _Range("presence_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]"),
    _Range("frequency_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]"),
)
_STOP = (
    _Range("max_tokens", lambda v: v >= 0, "0 or more"),
    _Range("min_tokens", lambda v: v >= 0, "0 or more"),
)
_OUTPUT = (
    _Range("logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
    _Range("prompt_logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
)


class Violations:
    """Collects what is wrong with a request, to be told at once."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def add(self, field: str, description: str) -> None:
        self._found.append(FieldViolation(field, description))

    def include(self, error: InvalidArgument) -> None:
        self._found.extend(error.violations)

    def check(self) -> None:
        """Raise InvalidArgument if anything was added."""
        if self._found:
            raise InvalidArgument(self._found)


def check_generate(request: pb.GenerateRequest, limits: Limits, violations: Violations) -> None:
    """Add what can be seen wrong before it is known who answers."""
    for name in ("request_id", "cache_salt", "session_id"):
        if len(getattr(request, name)) > MAX_ID_CHARACTERS:
            violations.add(name, f"must have at most {MAX_ID_CHARACTERS} characters")
    _check_prompt(request, limits, violations)
    _check_sampling(request.sampling, limits, violations)
    _check_stop(request.stop, violations)
    _check_ranges(request.output, "output", _OUTPUT, violations)
    _check_blend(request, violations)


def check_vocabulary(request: pb.GenerateRequest, limits: TextLimits, violations: Violations) -> None:
    """Add what does not fit the tokenizer, chat template and token ids of who answers."""
    match request.WhichOneof("prompt"):
        case "text":
            check_text(request.text, limits, violations)
        case "chat":
            check_chat_text(request.chat, limits, violations)
        case "token_ids":
            ids = request.token_ids.ids[: limits.max_model_len]  # more are refused anyway
            check_token_ids(ids, "prompt.token_ids", limits.vocab_size, violations)
    for token in islice(request.sampling.logit_bias, MAX_LOGIT_BIASES):
        if not 0 <= token < limits.vocab_size:
            violations.add(f"sampling.logit_bias[{token}]", "is not a token id of the model")
    if request.stop.strings and not limits.has_tokenizer:
        violations.add("stop.strings", "this model has no tokenizer: use stop.token_ids")
    check_token_ids(request.stop.token_ids[:MAX_STOP_TOKENS], "stop.token_ids", limits.vocab_size, violations)


def _check_blend(request: pb.GenerateRequest, violations: Violations) -> None:
    """Parts that name nothing, or weigh nothing; that they are different adapters is known when they are resolved."""
    if not request.blend:
        return
    if request.adapter:
        violations.add("blend", "is instead of adapter: set one of them")
    if len(request.blend) > MAX_BLEND_PARTS:
        violations.add("blend", f"must have at most {MAX_BLEND_PARTS} parts, has {len(request.blend)}")
        return
    for position, part in enumerate(request.blend):
        if not part.reference:
            violations.add(f"blend[{position}].reference", "is empty: a part names an adapter")
        if not math.isfinite(part.weight) or not 0 < abs(part.weight) <= MAX_BLEND_WEIGHT:
            expected = f"must be a number other than 0 in [-{MAX_BLEND_WEIGHT:g}, {MAX_BLEND_WEIGHT:g}]"
            violations.add(f"blend[{position}].weight", f"{expected}, is {part.weight}")


def _check_ranges(message: Message, path: str, ranges: Iterable[_Range], violations: Violations) -> None:
    for field, is_right, expected in ranges:
        if message.HasField(field):
            value = getattr(message, field)
            if not is_right(value):
                violations.add(f"{path}.{field}", f"must be {expected}, is {value}")


def _check_prompt(request: pb.GenerateRequest, limits: Limits, violations: Violations) -> None:
    match request.WhichOneof("prompt"):
        case None:
            violations.add("prompt", "is missing: set text, token_ids or chat")
        case "text" if not request.text:
            violations.add("prompt.text", "is empty")
        case "chat":
            check_chat(request.chat, violations)
        case "token_ids" if not request.token_ids.ids:
            violations.add("prompt.token_ids", "is empty")
        case "token_ids":
            check_length(len(request.token_ids.ids), request, limits, violations)


def too_long(nbytes: int, max_bytes: int) -> str:
    """What is wrong with a text that was not even tokenized."""
    return f"has {nbytes} bytes; no text of more than {max_bytes} fits into this replica's context"


def check_text(text: str, limits: TextLimits, violations: Violations) -> None:
    """Add that the text is too long to be tokenized, or cannot be."""
    if not limits.has_tokenizer:
        violations.add("prompt.text", "this model has no tokenizer: send token_ids")
    elif (nbytes := len(text.encode())) > limits.max_text_bytes:
        violations.add("prompt.text", too_long(nbytes, limits.max_text_bytes))


def check_chat(chat: pb.Chat, violations: Violations) -> None:
    """Add what is wrong with the messages."""
    if not chat.messages:
        violations.add("prompt.chat.messages", "is empty")
    if len(chat.messages) > MAX_MESSAGES:
        violations.add("prompt.chat.messages", f"must have at most {MAX_MESSAGES} entries, has {len(chat.messages)}")
        return
    for position, message in enumerate(chat.messages):
        if message.role not in ROLES:
            expected = f"must be one of {', '.join(ROLES)}, is {message.role!r:.60}"
            violations.add(f"prompt.chat.messages[{position}].role", expected)


def check_chat_text(chat: pb.Chat, limits: TextLimits, violations: Violations) -> None:
    """Add that the messages are too long to be tokenized, or cannot be, or that there is no chat template."""
    if not limits.has_tokenizer:
        violations.add("prompt.chat", "this model has no tokenizer: send token_ids")
    elif not limits.has_chat_template:
        violations.add("prompt.chat", "this model has no chat template: send text")
    nbytes = sum(len(message.content.encode()) for message in chat.messages)
    if limits.has_tokenizer and nbytes > limits.max_text_bytes:
        violations.add("prompt.chat.messages", too_long(nbytes, limits.max_text_bytes))


def check_token_ids(ids: Iterable[int], field: str, vocab_size: int, violations: Violations) -> None:
    """Add the first id that is none of the model's."""
    wrong = next(((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        violations.add(f"{field}[{wrong[0]}]", f"{wrong[1]} is not a token id: the model has 0 to {vocab_size - 1}")


def check_round_trip(num_tokens: int, field: str, violations: Violations) -> None:
    """Add that there are too many tokens for one answer of Tokenize or Detokenize."""
    if num_tokens > MAX_ROUND_TRIP_TOKENS:
        violations.add(field, f"has {num_tokens} tokens; at most {MAX_ROUND_TRIP_TOKENS} are converted at once")


def check_length(num_tokens: int, request: pb.GenerateRequest, limits: Limits, violations: Violations) -> None:
    """Add that the prompt is too long; unless it is only scored, there must be room for one more token."""
    field = f"prompt.{request.WhichOneof('prompt')}"
    room = limits.max_model_len - (0 if _only_scores(request) else 1)
    if num_tokens > room:
        violations.add(field, f"has {num_tokens} tokens; this replica takes at most {room}")
    if num_tokens == 0:
        violations.add(field, "has no tokens")


def _only_scores(request: pb.GenerateRequest) -> bool:
    return request.stop.HasField("max_tokens") and request.stop.max_tokens == 0


def _check_sampling(sampling: pb.Sampling, limits: Limits, violations: Violations) -> None:
    _check_ranges(sampling, "sampling", _SAMPLING, violations)
    if sampling.HasField("n") and not 1 <= sampling.n <= limits.max_n:
        violations.add("sampling.n", f"must be in [1, {limits.max_n}], is {sampling.n}")
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        violations.add("sampling.logit_bias", f"must have at most {MAX_LOGIT_BIASES} entries")
        return
    for token, bias in sampling.logit_bias.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            expected = f"must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], is {bias}"
            violations.add(f"sampling.logit_bias[{token}]", expected)


def _check_stop(stop: pb.Stop, violations: Violations) -> None:
    _check_ranges(stop, "stop", _STOP, violations)
    if stop.HasField("max_tokens") and 0 <= stop.max_tokens < stop.min_tokens:
        violations.add("stop.min_tokens", f"is {stop.min_tokens}, more than max_tokens ({stop.max_tokens})")
    if len(stop.strings) > MAX_STOP_STRINGS:
        violations.add("stop.strings", f"must have at most {MAX_STOP_STRINGS} entries, has {len(stop.strings)}")
    for position, string in enumerate(stop.strings[:MAX_STOP_STRINGS]):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARACTERS:
            expected = f"must have 1 to {MAX_STOP_STRING_CHARACTERS} characters, has {len(string)}"
            violations.add(f"stop.strings[{position}]", expected)
    if len(stop.token_ids) > MAX_STOP_TOKENS:
        violations.add("stop.token_ids", f"must have at most {MAX_STOP_TOKENS} entries, has {len(stop.token_ids)}")
