"""How an API process talks to the adapter process."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from inference_service.stats import AdapterStats
from inference_service.types import (
    Acquired,
    AcquireFailed,
    AwaitResidency,
    BlendPart,
    DropStaged,
    GetStats,
    ListStaged,
    Prepare,
    PrepareBlend,
    PreparedAdapter,
    ReadTexts,
    Reply,
    Resolve,
    StagedAdapter,
    decode_adapter_response,
    encode,
)
from shared.errors import Internal, SourceUnavailable, from_record

log = logging.getLogger(__name__)

_ATTEMPTS = 2  # no more: what kills the adapter process may be this very call


class _ProcessDied(Exception):
    """The adapter process ended before it answered."""


class AdapterClient:
    """One DEALER socket to the adapter process. Use `start`, inside the event loop that will use it.

    Calls wait as long as it takes: a caller's deadline is its cancellation. While the adapter process restarts, calls
    queue, and those that it had not answered are made once more; the supervisor's word that it died must become
    `adapters_down`, for ZeroMQ reports no dead peer.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._call_ids = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self.traceparent: Callable[[], str] = str  # of the current trace, for calls that are made for a request
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    @classmethod
    def start(cls, address: str, identity: str) -> "AdapterClient":
        """Connect to `address` under a name that no other process of this replica has."""
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(address)
        return cls(socket)

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter:
        """Resolve a canonical reference (`shared.references`) and have its files on this machine.

        Raises:
            LoraplexError: the reason why not.
        """
        call_id = next(self._call_ids)
        reply = await self._call(call_id, Prepare(call_id, reference, choice_key, self.traceparent()))
        if reply.adapter is None:
            raise Internal("internal error", metadata={"reference": reference})
        return reply.adapter

    async def prepare_blend(self, parts: Sequence[BlendPart], choice_key: str = "") -> PreparedAdapter:
        """As `prepare`, of the weighted sum of several adapters.

        Raises:
            LoraplexError: the reason why not; InvalidArgument and UnsupportedAdapter name the part.
        """
        call_id = next(self._call_ids)
        reply = await self._call(call_id, PrepareBlend(call_id, tuple(parts), choice_key, self.traceparent()))
        if reply.adapter is None:
            raise Internal("internal error (the blend is missing)")
        return reply.adapter

    async def read_texts(self, digest: str) -> dict[str, bytes]:
        """The tokenizer and chat-template files of an adapter that was prepared, by name.

        Raises:
            LoraplexError: the reason why not.
        """
        call_id = next(self._call_ids)
        return (await self._call(call_id, ReadTexts(call_id, digest))).texts

    async def resolve(self, reference: str) -> str:
        """The digest that a canonical reference means now; nothing is fetched, and no unknown adapter registered.

        A version that the registry does not have any more, or cannot be asked for, is the one resolved here before.

        Raises:
            LoraplexError: the reason why there is none.
        """
        call_id = next(self._call_ids)
        return (await self._call(call_id, Resolve(call_id, reference))).digest

    async def drop(self, digest: str) -> int:
        """Forget the adapter's blob in host memory; its files stay on disk. The bytes that this frees."""
        call_id = next(self._call_ids)
        return (await self._call(call_id, DropStaged(call_id, digest))).freed_bytes

    async def list_staged(self, digests: Sequence[str] = ()) -> list[StagedAdapter]:
        """What the host and disk tiers hold, and the names that are known of further `digests`."""
        call_id = next(self._call_ids)
        return (await self._call(call_id, ListStaged(call_id, tuple(digests)))).staged

    async def names(self, digests: Sequence[str]) -> dict[str, list[str]]:
        """The versions that each of `digests` was resolved from on this machine, in resource names; none is one too."""
        call_id = next(self._call_ids)
        found: dict[str, list[str]] = {digest: [] for digest in digests}
        for adapter in (await self._call(call_id, ListStaged(call_id, tuple(digests), names_only=True))).staged:
            found[adapter.digest].append(adapter.version)
        return found

    async def stats(self) -> AdapterStats:
        """How the adapter process is doing."""
        call_id = next(self._call_ids)
        stats = (await self._call(call_id, GetStats(call_id))).adapter_stats
        if stats is None:
            raise Internal("internal error (the adapter process's statistics are missing)")
        return stats

    async def await_residency(self, seconds: float) -> None:
        """Returns when the adapters that the registry wants here are here, at the latest after some seconds.

        Raises:
            SourceUnavailable: the adapter process died twice meanwhile.
        """
        call_id = next(self._call_ids)
        await self._call(call_id, AwaitResidency(call_id, seconds))

    def adapters_down(self) -> None:
        """The adapter process died: calls in flight are made again; those for the second time fail."""
        self._fail_waiting(_ProcessDied())

    def _fail_waiting(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def close(self) -> None:
        """Fail what is in flight and close the socket."""
        self._fail_waiting(SourceUnavailable("the replica is stopping", retry_after=1.0))
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._socket.close()

    async def _call(self, call_id: int, message: msgspec.Struct) -> Reply:
        for _ in range(_ATTEMPTS):
            with suppress(_ProcessDied):
                return await self._ask(call_id, message)
        raise SourceUnavailable("the adapter process restarts", retry_after=1.0)

    async def _ask(self, call_id: int, message: msgspec.Struct) -> Reply:
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = waiting
        try:
            await self._socket.send(encode(message))
            reply = await waiting
        finally:
            del self._waiting[call_id]
        if reply.error is not None:
            raise from_record(reply.error)
        return reply

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message: Reply | Acquired | AcquireFailed = decode_adapter_response(frames[-1])
            except msgspec.MsgspecError as error:
                log.warning("ignored a malformed message of the adapter process: %s", error)
                continue
            if not isinstance(message, Reply):
                continue
            waiting = self._waiting.get(message.call_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
