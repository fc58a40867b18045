"""A process that the supervisor starts: its start line, its events, its output, its last words."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from inference_service.types import ALIVE_LINE, READY_LINE, REPORT_PREFIX
from shared.errors import LoraplexError
from shared.line_writer import LineWriter

log = logging.getLogger(__name__)

_ERROR = "error: "
_MAX_LINE_BYTES = 1 << 20


def failure_line(error: LoraplexError) -> str:
    """The line of standard error with which a process says why it could not start."""
    return f"{_ERROR}{error.summary}"


class ChildSpec(NamedTuple):
    """How to start a process.

    `role` names it in events (`engine_down`) and messages. `start` is its first line of standard input, `restart` that
    of a process that replaces one which died. `stage`: those of stage 0 are stopped first. `grace`: seconds it has to
    end after SIGTERM. `environment`: variables that it gets beside ours.
    """

    role: str
    argv: tuple[str, ...]
    start: bytes
    restart: bytes
    stage: int
    grace: float
    pass_fds: tuple[int, ...] = ()
    hears_events: bool = False
    environment: Mapping[str, str] = MappingProxyType({})


class Outlets(NamedTuple):
    """Where the standard output and the standard error of processes go. Neither is ever waited for."""

    output: LineWriter
    error: LineWriter


class Child:
    """One process at a time of one spec. Its standard input stays open as long as the supervisor lives.

    Its output is read as long as it lives, so that it never waits for a pipe, whatever becomes of `outlets`.
    `on_report`: takes what it reports (`REPORT_PREFIX`). `is_ready`: it has said that its start is over. `was_hung`: it
    was killed because it hung.
    `last_words`: what its last line of standard error tells.
    """

    def __init__(self, spec: ChildSpec, outlets: Outlets, on_report: Callable[[str], None] | None = None) -> None:
        self.spec = spec
        self._outlets = outlets
        self._on_report = on_report
        self.is_ready = False
        self.was_hung = False
        self.last_words = ""
        self._process: asyncio.subprocess.Process | None = None
        self._relays: list[asyncio.Task[None]] = []
        self._is_alive = asyncio.Event()  # it has answered since it was last asked

    @property
    def is_up(self) -> bool:
        """Whether its start is over and it has not ended since."""
        return self.is_ready and self._process is not None and self._process.returncode is None

    async def spawn(self, *, is_restart: bool) -> None:
        """Start the process. Its own process group keeps a terminal's Ctrl-C from it."""
        self.is_ready, self.was_hung, self.last_words = False, False, ""
        process = await asyncio.create_subprocess_exec(
            *self.spec.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.spec.environment},
            pass_fds=self.spec.pass_fds,
            process_group=0,
            limit=_MAX_LINE_BYTES,
        )
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        streams = ((process.stdout, self._hear_output), (process.stderr, self._hear_error))
        self._relays = [asyncio.create_task(_for_each_line(*each)) for each in streams]
        for relay in self._relays:
            relay.add_done_callback(partial(self._on_relay_end, process))
        self._write((self.spec.restart if is_restart else self.spec.start) + b"\n")

    async def wait(self) -> int:
        """Its exit code, when it has ended; negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def finish_output(self) -> None:
        """Returns when all it wrote is relayed, so that `is_ready` and `last_words` are known."""
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipes open
            async with asyncio.timeout(1.0):  # `wait_for` loses a cancellation that comes as they end
                await asyncio.gather(*self._relays, return_exceptions=True)

    def tell(self, event: str) -> None:
        """Send it an event, if it listens to events."""
        if self.spec.hears_events:
            self._write(json.dumps({"event": event}).encode() + b"\n")

    async def answer(self) -> None:
        """Ask it whether it still hears events; returns when it has said so."""
        self._is_alive.clear()
        self.tell("answer")
        await self._is_alive.wait()

    def kill(self) -> None:
        """SIGKILL at once, for it hangs; who waits for its end sees to the rest. Not if it has ended meanwhile."""
        if self._process is not None and self._process.returncode is None:
            self.was_hung = True
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        """SIGTERM; SIGKILL if it has not ended within its grace."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.spec.grace)
        except TimeoutError:
            log.warning("the %s process has not ended within %g seconds; it is killed", self.spec.role, self.spec.grace)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _on_relay_end(self, process: asyncio.subprocess.Process, relay: asyncio.Task[None]) -> None:
        """A process that nobody reads would stand still at its next line: it is replaced."""
        if relay.cancelled() or (error := relay.exception()) is None:
            return
        log.error("cannot read on what the %s process says; it is killed", self.spec.role, exc_info=error)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def _write(self, line: bytes) -> None:
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(line)

    def _hear_output(self, line: str) -> None:
        """Pass its standard output on, but for the lines that are meant for the supervisor."""
        if line.strip() == READY_LINE:
            self.is_ready = True
        elif line.strip() == ALIVE_LINE:
            self._is_alive.set()
        elif line.startswith(REPORT_PREFIX):
            if self._on_report is not None:
                self._on_report(line.removeprefix(REPORT_PREFIX))
        else:
            self._outlets.output.write(line)

    def _hear_error(self, line: str) -> None:
        """Pass its standard error on, and keep its last words. The supervisor reports a line `error: …` itself."""
        self.last_words = _words(line) or self.last_words
        if not line.startswith(_ERROR):
            self._outlets.error.write(line)


async def _for_each_line(stream: asyncio.StreamReader, hear: Callable[[str], None]) -> None:
    """Until the stream ends. A line that is longer than the limit is dropped."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        hear(line.decode(errors="replace"))


def _words(line: str) -> str:
    """What a line of standard error tells of a failure: an error of the log, `error: …`, or any other plain line."""
    if not line.startswith("{"):
        return line.removeprefix(_ERROR).strip()
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    if entry.get("level") not in ("error", "critical"):
        return ""
    exception = str(entry.get("exception", "")).strip().rpartition("\n")[2]
    return ": ".join(part for part in (str(entry.get("message", "")), exception) if part)


async def stop_in_stages(children: Sequence[Child]) -> None:
    """Stop all children, one stage after the other."""
    for stage in sorted({child.spec.stage for child in children}):
        await asyncio.gather(*(child.stop() for child in children if child.spec.stage == stage))
