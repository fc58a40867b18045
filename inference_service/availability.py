"""Whether this API process takes requests now, and how many it is working on."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from inference_service.types import EngineReady
from shared.errors import Draining, EngineUnavailable


class Availability:
    """`engine` is what the engine said when it became warm; None while there is no engine."""

    def __init__(self) -> None:
        self.engine: EngineReady | None = None
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._active = 0

    def require_engine(self) -> EngineReady:
        """The engine's facts. Raises EngineUnavailable while there is none, so that the caller tries elsewhere."""
        if self.engine is None:
            raise EngineUnavailable("the engine is not ready yet", retry_after=1.0)
        return self.engine

    @contextmanager
    def request(self) -> Iterator[EngineReady]:
        """Counts one request. Raises Draining or EngineUnavailable instead of taking it.

        An EngineUnavailable out of the block says that the replica ends, if it does.
        """
        if self.is_draining:
            raise Draining("this replica is shutting down; another one will answer", retry_after=1.0)
        ready = self.require_engine()
        self._active += 1
        self.idle.clear()
        try:
            yield ready
        except EngineUnavailable as error:
            if self.is_draining:  # nobody starts it again
                raise EngineUnavailable("the replica is shutting down", retry_after=1.0) from error
            raise
        finally:
            self._active -= 1
            if self._active == 0:
                self.idle.set()
