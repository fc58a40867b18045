"""A few text workers, and who may use them: one call of an adapter at a time, so that none keeps others waiting."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from inference_service.adapter_text.blame import failed, took_too_much
from inference_service.adapter_text.messages import (
    Broken,
    Compile,
    Continue,
    Continued,
    Failed,
    Load,
    Loaded,
    Ready,
    Render,
    Request,
    Response,
    StreamText,
    StreamTokens,
)
from inference_service.adapter_text.process import WorkerEnded, WorkerProcess
from shared.adapter_format.texts import TOKENIZER
from shared.errors import AdapterInvalid, Internal, LoraplexError, from_record

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Response)

MAX_WORKERS = 3
MAX_LOADED_BYTES = 64 << 20  # of files, per worker; in memory a tokenizer takes about ten times as much
MAX_LOADED = 32  # adapters per worker
FAILURE_MEMORY = 10.0  # seconds for which what ended a worker gets none
MAX_FAILURES = 1000
_ANY_FILE = ""  # an adapter whose files cannot be loaded gets none for any of them

ReadTexts = Callable[[str], Awaitable[Mapping[str, bytes]]]


class TextSandbox:
    """Runs adapters' tokenizers and templates in workers, which are started when they are needed.

    Args:
        model_folder: Of the base model.
        read_texts: The files of an adapter by its digest.
    """

    def __init__(self, model_folder: Path, read_texts: ReadTexts) -> None:
        self._model_folder = model_folder
        self._read_texts = read_texts
        self._idle: list[WorkerProcess] = []
        self._num_workers = 0
        self._given = asyncio.Condition()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._calls: set[asyncio.Task[Any]] = set()
        self._streams: dict[str, list[tuple[StreamTokens, asyncio.Future[StreamText]]]] = {}
        # By digest and file: until when, in order of failing.
        self._failures: dict[tuple[str, str], tuple[float, AdapterInvalid]] = {}

    async def load(self, digest: str, vocab_size: int) -> Loaded:
        """Have a worker read the adapter's files, wherever else they were read before.

        Raises:
            AdapterInvalid: a file is wrong, contradicts the base model, or took too much time or memory to read.
        """
        return await self._in_turn(digest, TOKENIZER, lambda worker: self._load(worker, digest, vocab_size))

    async def call(self, digest: str, vocab_size: int, request: Request, kind: type[R], file: str) -> R:
        """A worker's answer, of type `kind`. `file` is to blame if the worker ends over it.

        Raises:
            AdapterInvalid: it did, now or a moment ago.
            LoraplexError: what the adapter's files say to the request.
        """

        async def ask(worker: WorkerProcess) -> R:
            await self._have_loaded(worker, digest, vocab_size)
            if isinstance(request, Render) and digest not in worker.compiled:
                await self._ask(worker, digest, Compile(digest), Ready, file)
                worker.compiled.add(digest)
            return await self._ask(worker, digest, request, kind, file)

        return await self._in_turn(digest, file, ask)

    async def advance(self, digest: str, vocab_size: int, tokens: StreamTokens) -> StreamText:
        """Text of a stream's next tokens. What other streams of the adapter want meanwhile goes in the same message.

        Raises:
            AdapterInvalid: as `call`.
        """
        read: asyncio.Future[StreamText] = asyncio.get_running_loop().create_future()
        waiting = self._streams.setdefault(digest, [])
        waiting.append((tokens, read))
        if len(waiting) == 1:
            sending = asyncio.get_running_loop().create_task(self._advance(digest, vocab_size))
            self._calls.add(sending)
            sending.add_done_callback(self._forget)
        return await read

    async def _advance(self, digest: str, vocab_size: int) -> None:
        """Send what waits by the time that it is the adapter's turn."""
        taken: list[tuple[StreamTokens, asyncio.Future[StreamText]]] = []

        async def send(worker: WorkerProcess) -> Continued:
            await self._have_loaded(worker, digest, vocab_size)
            taken.extend(self._streams.pop(digest))
            request = Continue(digest, [tokens for tokens, _ in taken])
            return await self._ask(worker, digest, request, Continued, TOKENIZER)

        try:
            answer = await self._call(digest, TOKENIZER, send)
            for (_, read), text in zip(taken, answer.streams, strict=True):
                if not read.done():
                    read.set_result(text)
        except BaseException as error:
            for _, read in taken or self._streams.pop(digest, []):
                if not read.done():
                    read.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            raise

    async def close(self) -> None:
        """End the workers, and with them the calls that they work on."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        workers, self._idle = self._idle, []
        await asyncio.gather(*(worker.end() for worker in workers))

    async def _in_turn(self, digest: str, file: str, use: Callable[[WorkerProcess], Awaitable[R]]) -> R:
        """A call goes on when its caller is cancelled, for in the middle of one its worker would have to be ended."""
        call = asyncio.get_running_loop().create_task(self._call(digest, file, use))
        self._calls.add(call)
        call.add_done_callback(self._forget)
        return await asyncio.shield(call)

    def _forget(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # heard, if only by nobody

    async def _call(self, digest: str, file: str, use: Callable[[WorkerProcess], Awaitable[R]]) -> R:
        turn = self._turns.setdefault(digest, asyncio.Lock())
        async with turn:
            self._raise_remembered(digest, file)
            worker = await self._take(digest)
            try:
                return await use(worker)
            finally:
                await self._give(worker)

    async def _have_loaded(self, worker: WorkerProcess, digest: str, vocab_size: int) -> None:
        if digest not in worker.loaded:
            await self._load(worker, digest, vocab_size)
        worker.loaded.move_to_end(digest)

    async def _load(self, worker: WorkerProcess, digest: str, vocab_size: int) -> Loaded:
        files = dict(await self._read_texts(digest))
        size = sum(map(len, files.values()))
        drop = []
        worker.loaded.pop(digest, None)
        worker.compiled.discard(digest)
        while worker.loaded and (
            len(worker.loaded) >= MAX_LOADED or sum(worker.loaded.values()) + size > MAX_LOADED_BYTES
        ):
            drop.append(worker.loaded.popitem(last=False)[0])
        worker.compiled.difference_update(drop)
        request = Load(digest, files, vocab_size, tuple(drop))
        read = TOKENIZER if TOKENIZER in files else max(files, key=lambda name: len(files[name]))
        loaded = await self._ask(worker, digest, request, Loaded, read)
        worker.loaded[digest] = size
        return loaded

    async def _ask(self, worker: WorkerProcess, digest: str, request: Request, kind: type[R], file: str) -> R:
        part = _ANY_FILE if isinstance(request, Load) else file
        try:
            response = await worker.ask(request)
        except WorkerEnded:
            log.warning("a text worker ended over %s of %s", file, digest)
            ended = took_too_much(request, file)
            ended.metadata["digest"] = digest
            raise self._remember(digest, part, ended) from None
        if isinstance(response, (Failed, Broken)):
            error = _error(response, request, file)
            if isinstance(error, AdapterInvalid):
                error.metadata = {"file": file, **error.metadata, "digest": digest}
                if isinstance(request, (Load, Compile)):
                    self._remember(digest, part, error)
            raise error
        if not isinstance(response, kind):
            raise Internal("internal error", metadata={"digest": digest})
        return response

    # ---- workers

    async def _take(self, digest: str) -> WorkerProcess:
        """An idle worker, one that has loaded the adapter if there is such; a new one while there are few."""
        async with self._given:
            while True:
                self._drop_dead()
                if self._idle:
                    worker = next((w for w in self._idle if digest in w.loaded), self._idle[-1])
                    self._idle.remove(worker)
                    return worker
                if self._num_workers < MAX_WORKERS:
                    self._num_workers += 1
                    break
                await self._given.wait()
        try:
            return await WorkerProcess.start(self._model_folder)
        except BaseException as error:
            self._num_workers -= 1
            if isinstance(error, WorkerEnded):
                log.error("a text worker does not start: %s", error)
                raise Internal("internal error (a text worker does not start)") from None
            raise

    async def _give(self, worker: WorkerProcess) -> None:
        async with self._given:
            if worker.is_alive:
                self._idle.append(worker)
            else:
                self._num_workers -= 1
            self._given.notify()

    def _drop_dead(self) -> None:
        dead = [worker for worker in self._idle if not worker.is_alive]
        self._num_workers -= len(dead)
        self._idle = [worker for worker in self._idle if worker.is_alive]

    # ---- failures

    def _remember(self, digest: str, file: str, error: AdapterInvalid) -> AdapterInvalid:
        now = time.monotonic()
        self._failures.pop((digest, file), None)
        for other, (until, _) in list(self._failures.items()):
            if until > now and len(self._failures) < MAX_FAILURES:
                break
            del self._failures[other]
        self._failures[digest, file] = (now + FAILURE_MEMORY, error)
        return error

    def _raise_remembered(self, digest: str, file: str) -> None:
        for part in (_ANY_FILE, file):
            until, error = self._failures.get((digest, part), (0.0, None))
            if error is not None and time.monotonic() < until:
                raise AdapterInvalid(error.message, metadata=error.metadata)


def _error(response: Failed | Broken, request: Request, file: str) -> LoraplexError:
    return from_record(response.error) if isinstance(response, Failed) else failed(request, file, response.problem)
