"""Follows the registry's changes, so that answers need not be asked for again, and wrong ones are known at once."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import grpc

from inference_service.adapters.adapter_change import read_change
from inference_service.adapters.answers import Answers
from inference_service.adapters.registry_errors import error_of, unreachable
from loraplex.registry.v1 import registry_pb2
from loraplex.registry.v1.registry_pb2_grpc import AdapterRegistryServiceStub
from shared.errors import Draining, InvalidArgument, LoraplexError, RegistryUnavailable, WatchCompacted

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.05, 5.0
SILENCE_SECONDS = 30.0  # the registry says something every five


class Listener(Protocol):
    """What is needed of `residency.Residency`: it hears every change, after a snapshot of what is wanted here."""

    def start_over(self) -> None: ...
    def changed(self, change: registry_pb2.AdapterChange) -> None: ...
    def complete(self, revision: int) -> None: ...
    def failed(self) -> None: ...


class AdapterWatch:
    """One WatchAdapters stream after another, told to `answers` and, if there is one, to `listener`.

    `answers` remembers nothing of adapters that nobody asked for: the snapshot has only those that the listener wants,
    and without a listener there is none. The listener waits for nothing else: a replica's start depends on it.
    `has_caught_up` is set whenever a stream has told all that it had to tell.
    """

    def __init__(
        self, stub: AdapterRegistryServiceStub, base_model: str, answers: Answers, listener: Listener | None = None
    ) -> None:
        self._stub = stub
        self._base_model = base_model
        self._answers = answers
        self._listener = listener
        self._token = ""
        self.has_caught_up = asyncio.Event()
        self._is_in_snapshot = True
        self._is_resuming = False  # the watch of the process before is continued, and has not caught up
        self._delay = FIRST_DELAY
        self._is_live = False  # the stream has caught up

    async def run(self) -> None:
        """Until cancelled. A stream that ends is resumed; where that cannot be, everything is forgotten."""
        while True:
            try:
                await self._follow()
            except WatchCompacted as error:
                log.warning("adapters are watched anew: %s", error.message)
                self._start_over()
            except InvalidArgument as error:
                log.error("the registry's watch cannot be read: %s", error.message)
                self._start_over()
            except Draining as error:  # in order, and another registry is there
                log.info("the watched registry ends, and another one is asked: %s", error.message)
                self._delay = FIRST_DELAY / 2  # so that it is reported if there is none
            except LoraplexError as error:
                self._report(error)
            except Exception:
                log.exception("the watch failed for a reason that nobody foresaw")
                self._start_over()
            self._is_live = False
            if self._listener is not None:
                self._listener.failed()
            await asyncio.sleep(self._delay * random.uniform(0.5, 1.5))
            self._delay = min(2 * self._delay, LONGEST_DELAY)

    async def _follow(self) -> None:
        if self._token:
            request = self._request(resume_token=self._token)
        else:
            request = await self._first_request()
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                self._take(response)

    async def _first_request(self) -> registry_pb2.WatchAdaptersRequest:
        """Of a watch that continues none of this process's."""
        saved = await self._answers.saved_token()
        self._is_resuming, self._is_in_snapshot = bool(saved), not saved
        if not saved:
            return self._request(skip_snapshot=self._listener is None, snapshot_wanted_only=self._listener is not None)
        if self._listener is not None:
            await self._tell_wanted(self._listener)
        return self._request(resume_token=saved)

    async def _tell_wanted(self, listener: Listener) -> None:
        request = self._request(snapshot_wanted_only=True)
        listener.start_over()
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                for change in response.changes:
                    listener.changed(change)
                if response.snapshot_complete:
                    listener.complete(response.registry_revision)
                    return

    def _request(
        self, *, resume_token: str = "", skip_snapshot: bool = False, snapshot_wanted_only: bool = False
    ) -> registry_pb2.WatchAdaptersRequest:
        return registry_pb2.WatchAdaptersRequest(
            parent="namespaces/-",
            base_model=self._base_model,
            resume_token=resume_token,
            skip_snapshot=skip_snapshot,
            snapshot_wanted_only=snapshot_wanted_only,
        )

    async def _responses(
        self, request: registry_pb2.WatchAdaptersRequest
    ) -> AsyncGenerator[registry_pb2.WatchAdaptersResponse, None]:
        """Of one stream. Raises LoraplexError when it ends."""
        call = self._stub.WatchAdapters(request)
        responses = aiter(call)
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    response = await anext(responses, None)
                if response is None:
                    raise RegistryUnavailable("the watch ended")
                yield response
        except grpc.aio.AioRpcError as rpc_error:
            raise error_of(rpc_error) from None
        except TimeoutError:
            raise RegistryUnavailable(f"the watch was silent for {SILENCE_SECONDS:g} s") from None
        finally:
            call.cancel()

    def _take(self, response: registry_pb2.WatchAdaptersResponse) -> None:
        if not self._token:
            self._answers.watching(response.registry_revision)
        for change in response.changes:
            told = read_change(change)
            if not self._is_in_snapshot:
                self._answers.changed(told)
            if self._listener is not None:
                self._listener.changed(change)
        self._token = response.resume_token
        self._delay = FIRST_DELAY
        if response.snapshot_complete and not self._is_live:
            self._is_live = True
            if self._is_resuming:
                self._answers.resumed()
                self._is_resuming = False
            elif self._is_in_snapshot:
                self._answers.begun_anew()
                self._is_in_snapshot = False
            self.has_caught_up.set()
            log.info("adapters are watched", extra={"revision": response.registry_revision})
        if self._is_live:
            self._answers.confirmed(response.registry_revision, response.resume_token)
            if self._listener is not None:
                self._listener.complete(response.registry_revision)

    def _start_over(self) -> None:
        self._token = ""
        self._answers.start_over()
        if self._listener is not None:
            self._listener.start_over()

    def _report(self, error: LoraplexError) -> None:
        if self._is_live or self._delay == FIRST_DELAY:
            log.warning("adapters are not watched, answers are asked for again after their ttl: %s", unreachable(error))
