"""What an API process and its text workers say to each other: msgpack, each message behind its length in 4 bytes."""

import msgspec

from shared.errors import ErrorRecord

MAX_REPLY_BYTES = 64 << 20  # a longer one is not sent
MEMORY_BYTES = 1536 << 20  # that a worker may take beyond what it has after its start


class Load(msgspec.Struct, tag=True, frozen=True):
    """Read an adapter's files, by name; answered by `Loaded`.

    `vocab_size`: token ids that the model has with this adapter. `drop`: digests that are not needed any more.
    """

    digest: str
    files: dict[str, bytes]
    vocab_size: int
    drop: tuple[str, ...] = ()


class Compile(msgspec.Struct, tag=True, frozen=True):
    """Make the adapter's chat template ready to render; answered by `Ready`."""

    digest: str


class Encode(msgspec.Struct, tag=True, frozen=True):
    """Token ids of a text; answered by `Encoded`."""

    digest: str
    text: str
    add_special_tokens: bool


class Render(msgspec.Struct, tag=True, frozen=True):
    """The prompt of a conversation, of at most `max_bytes`, of a compiled template; answered by `Texts` with one."""

    digest: str
    messages: list[dict[str, str]]
    max_bytes: int


class Decode(msgspec.Struct, tag=True, frozen=True):
    """The text of each list of ids; answered by `Texts`."""

    digest: str
    batch: list[list[int]]
    skip_special_tokens: bool


class StreamState(msgspec.Struct, frozen=True, array_like=True):
    """Where a stream of tokens is: those of the last text that was given out, and those that have given none yet."""

    context: list[int] = []
    held: list[int] = []


class StreamTokens(msgspec.Struct, frozen=True, array_like=True):
    """A stream's next tokens. `is_last`: the text of what is held back behind them is wanted too."""

    state: StreamState
    token_ids: list[int]
    is_last: bool


class StreamText(msgspec.Struct, frozen=True, array_like=True):
    """The text that each token completes, the state behind them, and the text of what was held back (`is_last`)."""

    texts: list[str]
    state: StreamState
    rest: str


class Continue(msgspec.Struct, tag=True, frozen=True):
    """Text of the next tokens of several streams; answered by `Continued`."""

    digest: str
    streams: list[StreamTokens]


Request = Load | Compile | Encode | Render | Decode | Continue


class Ready(msgspec.Struct, tag=True, frozen=True):
    """First message of a worker; and a template is compiled."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """What of an adapter's text differs from the base model's. `longest_token`: see `Tokenizer`.

    `template_file`: the one with its own chat template; empty without. `eos_ids`: the id of its `eos_token`; none where
    that is the base model's, or no token.
    """

    own_tokenizer: bool
    template_file: str
    longest_token: int
    eos_ids: tuple[int, ...] = ()


class Encoded(msgspec.Struct, tag=True, frozen=True):
    token_ids: list[int]


class Texts(msgspec.Struct, tag=True, frozen=True):
    texts: list[str]


class Continued(msgspec.Struct, tag=True, frozen=True):
    streams: list[StreamText]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """What is wrong with the request, or with a file that the error names."""

    error: ErrorRecord


class Broken(msgspec.Struct, tag=True, frozen=True):
    """What the adapter brings cannot do it. `problem`: a library's words."""

    problem: str


Response = Ready | Loaded | Encoded | Texts | Continued | Failed | Broken


def cpu_seconds(request: Request) -> float:
    """Processor time that a request may take. A core reads several MB of text or files a second."""
    match request:
        case Load():
            return 5.0 + 2.0 * _megabytes(sum(map(len, request.files.values())))
        case Compile():
            return 8.0  # a file has at most a megabyte, which takes five
        case Encode():
            return 1.0 + _megabytes(len(request.text))
        case Render():
            return 1.0 + _megabytes(sum(len(message["content"]) for message in request.messages))
        case Decode():
            return 1.0 + _megabytes(16 * sum(map(len, request.batch)))
        case Continue():
            return 1.0 + 0.01 * sum(1 + len(stream.token_ids) for stream in request.streams)


def _megabytes(count: int) -> float:
    return count / (1 << 20)


decode_request = msgspec.msgpack.Decoder(Request).decode
decode_response = msgspec.msgpack.Decoder(Response).decode
