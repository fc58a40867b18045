"""How an API process talks to the adapter process."""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from inference_service.types import (
    Acquired,
    AcquireFailed,
    DropStaged,
    ListStaged,
    Prepare,
    PreparedAdapter,
    Reply,
    Resolve,
    StagedAdapter,
    decode_adapter_response,
    encode,
)
from shared.errors import Internal, SourceUnavailable, from_record

log = logging.getLogger(__name__)


class AdapterClient:
    """One DEALER socket to the adapter process. Use `start`, inside the event loop that will use it.

    Calls wait as long as it takes: a caller's deadline is its cancellation. While the adapter process restarts, calls
    queue; the supervisor's word that it died must become `adapters_down`, for ZeroMQ reports no dead peer.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._call_ids = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
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
        reply = await self._call(call_id, Prepare(call_id, reference, choice_key))
        if reply.adapter is None:
            raise Internal("internal error", metadata={"reference": reference})
        return reply.adapter

    async def resolve(self, reference: str) -> str:
        """The digest that a canonical reference means now; nothing is fetched.

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

    def adapters_down(self) -> None:
        """The adapter process died: every call in flight fails with SourceUnavailable."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(SourceUnavailable("the adapter process restarts", retry_after=1.0))

    async def close(self) -> None:
        """Fail what is in flight and close the socket."""
        self.adapters_down()
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._socket.close()

    async def _call(self, call_id: int, message: msgspec.Struct) -> Reply:
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
