"""Starts the processes of one replica, tells them of each other's deaths, restarts them, and stops them in order."""

import asyncio
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from inference_service.child import Child, ChildSpec, Outlets, stop_in_stages
from inference_service.types import EXIT_CONFIG
from inference_service.watchdog import Ask, watch
from shared.errors import one_line

log = logging.getLogger(__name__)


class RestartPolicy(NamedTuple):
    """A process that ended before it was ready is a failed start; `max_failed_starts` in a row end the replica.

    A restart waits `first_delay` seconds, twice as long after each further end within `quick_seconds`, at most
    `max_delay`.
    """

    quick_seconds: float = 60.0
    max_failed_starts: int = 3
    first_delay: float = 0.25
    max_delay: float = 10.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after `failures` quick ends in a row."""
        return float(min(self.first_delay * 2 ** max(failures - 1, 0), self.max_delay))


class Observer(Protocol):
    """Hears what the processes report, and of what happens to them. `was_hung`: it was killed because of that."""

    def on_report(self, line: str) -> None: ...
    def on_event(self, event: str) -> None: ...
    def on_restart(self, role: str, *, was_hung: bool) -> None: ...
    async def run(self) -> None: ...


class HangPolicy(NamedTuple):
    """A process that is up and does not answer for `timeout` seconds is killed; 0: never.

    `asks`: what is asked of the process of a role. Others are asked as a child that hears events, and if they hear none
    they are not watched.
    """

    timeout: float
    asks: Mapping[str, Ask]


class Supervisor:
    """Keeps the processes of `specs` running. `observer` runs beside them, if there is one."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        outlets: Outlets,
        policy: RestartPolicy | None = None,
        observer: Observer | None = None,
        hangs: HangPolicy | None = None,
    ) -> None:
        self.failure: str | None = None  # one line
        self._hangs = hangs or HangPolicy(0.0, {})
        self._observer = observer
        self._children = [Child(spec, outlets, observer.on_report if observer else None) for spec in specs]
        self._policy = policy or RestartPolicy()
        self._ended = asyncio.Event()
        self._exit_code = 1

    async def run(self) -> int:
        """Run until SIGTERM, SIGINT or a failure that no restart mends; all children have ended when it returns.

        Returns the exit code: 0 after a signal; else `failure` says why, and it is 2 (`EXIT_CONFIG`)
        if a child ended with that, and else 1.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._ended.set)
        keeping = [asyncio.create_task(self._keep(child)) for child in self._children]
        if self._observer is not None:
            keeping.append(asyncio.create_task(self._observer.run()))
        keeping.extend(self._watch_for_hangs())
        for task in keeping:
            task.add_done_callback(self._on_end)
        try:
            await self._ended.wait()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await stop_in_stages(self._children)
        return 0 if self.failure is None else self._exit_code

    async def answers(self, role: str) -> bool:
        """False if a process of this role is not up; else True, once all of them, which hear events, have answered."""
        children = [child for child in self._children if child.spec.role == role]
        if not all(child.is_up for child in children):
            return False
        await asyncio.gather(*(child.answer() for child in children))
        return True

    def _watch_for_hangs(self) -> list[asyncio.Task[None]]:
        """Until a drain begins: a process that ends in order answers less and less."""
        timeout, asks = self._hangs
        if timeout <= 0:
            return []
        watched = [child for child in self._children if child.spec.role in asks or child.spec.hears_events]
        return [
            asyncio.create_task(watch(child.spec.role, child, asks.get(child.spec.role, child.answer), timeout))
            for child in watched
        ]

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Nothing is kept running by a task that has failed, so the replica ends, and whoever started it hears why."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the supervisor cannot go on", exc_info=error)
            if not self._ended.is_set():
                self._fail(f"the supervisor cannot go on: {type(error).__name__}: {error}")

    async def _keep(self, child: Child) -> None:
        """Start a child, and again whenever it ends."""
        role, quick_ends, failed_starts = child.spec.role, 0, 0
        was_ready = is_restart = False
        while not self._ended.is_set():
            started = time.monotonic()
            try:
                await child.spawn(is_restart=is_restart)
            except OSError as error:
                self._fail(f"the {role} process cannot be started: {error}")
                return
            if is_restart:
                self._tell_others(child, f"{role}_up")
            code = await child.wait()
            self._tell_others(child, f"{role}_down")  # at once: streams hang until they hear it
            await child.finish_output()
            is_quick = time.monotonic() - started < self._policy.quick_seconds
            quick_ends = quick_ends + 1 if is_quick else 0
            failed_starts = 0 if child.is_ready else failed_starts + 1
            was_ready = was_ready or child.is_ready
            reason = _reason(child, code)
            if failed_starts >= self._policy.max_failed_starts or (code == EXIT_CONFIG and not was_ready):
                self._exit_code = EXIT_CONFIG if code == EXIT_CONFIG else self._exit_code
                self._fail(reason)
                return
            log.warning("%s; starting it again", reason)
            if self._observer is not None:
                self._observer.on_restart(role, was_hung=child.was_hung)
            await asyncio.sleep(self._policy.delay(quick_ends))
            is_restart = True

    def _tell_others(self, child: Child, event: str) -> None:
        if self._observer is not None:
            self._observer.on_event(event)
        for other in self._children:
            if other is not child:
                other.tell(event)

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or one_line(reason)
        self._ended.set()


def _reason(child: Child, code: int) -> str:
    ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    words = f": {child.last_words}" if child.last_words else ""
    return f"the {child.spec.role} process {ending}{words}"
