"""A text worker: loads and runs what adapters bring, one request at a time, within limits that end it.

`python -m inference_service.adapter_text.worker MODEL_FOLDER`; requests on standard input, answers on standard output.
Processor time is limited for each request by a timer whose signal ends the process, even inside a regular expression;
memory by the kernel. Whoever it worked for is then to blame.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from inference_service.adapter_text.loaded import BaseText, LoadedText, read_base_text
from inference_service.adapter_text.messages import (
    MAX_REPLY_BYTES,
    MEMORY_BYTES,
    Broken,
    Compile,
    Continue,
    Continued,
    Decode,
    Encode,
    Encoded,
    Failed,
    Load,
    Ready,
    Render,
    Request,
    Response,
    Texts,
    cpu_seconds,
    decode_request,
)
from inference_service.chat_template import check_prompt_size
from shared.errors import LoraplexError

_NICENESS = 5  # whatever it does is less urgent than tokens


class Worker:
    """What one worker has loaded, by digest."""

    def __init__(self, model_folder: Path) -> None:
        self._model_folder = model_folder
        self._base: BaseText | None = None
        self._loaded: dict[str, LoadedText] = {}

    def answer(self, request: Request) -> Response:
        """Never raises but when memory ends in the middle of it."""
        try:
            return self._answer(request)
        except LoraplexError as error:
            return Failed(error.record())
        except MemoryError:
            raise
        except BaseException as error:  # a panic of tokenizers' Rust code is no Exception
            return Broken(f"{str(error) or type(error).__name__:.200}")

    def _answer(self, request: Request) -> Response:
        match request:
            case Load():
                return self._load(request)
            case Compile():
                self._loaded[request.digest].compile()
                return Ready()
            case Encode():
                return Encoded(self._loaded[request.digest].encode(request.text, request.add_special_tokens))
            case Render():
                text = self._loaded[request.digest].render(request.messages)
                check_prompt_size(text, request.max_bytes)
                return Texts([text])
            case Decode():
                return Texts(self._loaded[request.digest].decode(request.batch, request.skip_special_tokens))
            case Continue():
                advance = self._loaded[request.digest].advance
                return Continued([advance(stream) for stream in request.streams])

    def _load(self, request: Load) -> Response:
        for digest in request.drop:
            self._loaded.pop(digest, None)
        if self._base is None:
            self._base = read_base_text(self._model_folder)
        text = self._loaded[request.digest] = LoadedText(request.files, self._base, request.vocab_size)
        return text.facts()


def _limit() -> None:
    """Bound memory, and forbid to write files and to dump core."""
    with Path("/proc/self/statm").open() as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)


def _receive(stream: BinaryIO) -> Request | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    return decode_request(stream.read(int.from_bytes(head, "little")))


def _send(stream: BinaryIO, response: Response) -> None:
    data = msgspec.msgpack.encode(response)
    if len(data) > MAX_REPLY_BYTES:
        problem = f"the answer has {len(data)} bytes; at most {MAX_REPLY_BYTES} are taken"
        data = msgspec.msgpack.encode(Broken(problem))
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    requests, responses = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints may come between answers
    worker = Worker(Path(sys.argv[1]))
    _limit()
    _send(responses, Ready())
    while (request := _receive(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds(request))
        response = worker.answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _send(responses, response)
    return 0


if __name__ == "__main__":
    sys.exit(main())
