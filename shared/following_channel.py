"""A channel whose certificates follow their files: calls are made on one of the latest, those under way go on."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from shared.changing_file import ChangingFile

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Generation:
    """One channel, and the calls that are under way on it."""

    channel: grpc.aio.Channel
    num_calls: int = 0
    is_old: bool = False


class FollowingChannel(grpc.aio.Channel):
    """Create it inside a running event loop.

    gRPC's Python has no client credentials that change, so another set of files is another channel. The one before it
    is closed with its last call; a call that runs is never cut, for its connection was made with what counted then.

    Args:
        files: What a channel is made with, read again when it changes; ones that cannot be used leave the last good.
        open_channel: Makes one of it.
    """

    def __init__(
        self,
        files: ChangingFile[grpc.ChannelCredentials],
        open_channel: Callable[[grpc.ChannelCredentials], grpc.aio.Channel],
    ) -> None:
        self._files = files
        self._open_channel = open_channel
        self._credentials = files.value()
        self._latest = _Generation(open_channel(self._credentials))
        self._generations = [self._latest]
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *method: Any, **codecs: Any) -> Any:
        return self._multi_callable("unary_unary", method, codecs)

    def unary_stream(self, *method: Any, **codecs: Any) -> Any:
        return self._multi_callable("unary_stream", method, codecs)

    def stream_unary(self, *method: Any, **codecs: Any) -> Any:
        return self._multi_callable("stream_unary", method, codecs)

    def stream_stream(self, *method: Any, **codecs: Any) -> Any:
        return self._multi_callable("stream_stream", method, codecs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls, after `grace` seconds."""
        for generation in tuple(self._generations):
            await generation.channel.close(grace)
        await asyncio.gather(*self._closing)

    async def __aenter__(self) -> "FollowingChannel":
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def _multi_callable(self, kind: str, method: Any, codecs: Any) -> Callable[..., Any]:
        made: tuple[_Generation, Any] | None = None

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            generation = self._current()
            if made is None or made[0] is not generation:
                made = generation, getattr(generation.channel, kind)(*method, **codecs)
            started = made[1](*arguments, **options)
            generation.num_calls += 1
            started.add_done_callback(lambda _: self._done(generation))
            return started

        return call

    def _current(self) -> _Generation:
        credentials = self._files.value()
        if credentials is not self._credentials:
            self._credentials = credentials
            before, self._latest = self._latest, _Generation(self._open_channel(credentials))
            self._generations.append(self._latest)
            before.is_old = True
            self._close_if_idle(before)
            log.info("calls go over a new channel: its certificates are others")
        return self._latest

    def _done(self, generation: _Generation) -> None:
        generation.num_calls -= 1
        self._close_if_idle(generation)

    def _close_if_idle(self, generation: _Generation) -> None:
        if generation.is_old and not generation.num_calls and generation in self._generations:
            self._generations.remove(generation)
            task = asyncio.ensure_future(generation.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
