"""One text worker from outside: started, asked one thing at a time, ended."""

import asyncio
import contextlib
import os
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from inference_service.adapter_text.messages import (
    MAX_REPLY_BYTES,
    Ready,
    Request,
    Response,
    cpu_seconds,
    decode_response,
)

_START_SECONDS = 60.0
# Its own timer counts processor time. On a busy machine that takes longer; past this it is ended from outside.
_WALL_PER_CPU_SECOND = 10.0
# Of this process's environment: what finds Python and its libraries, and nothing that is secret.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL")
_NOT_PARALLEL = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


class WorkerEnded(Exception):
    """The worker ended, or was ended, over a request: it took too much time or memory."""


class WorkerProcess:
    """A started worker. Use `start`.

    For whoever asks it to keep: `loaded`, bytes of the files of each digest that it holds, least recently used first;
    `compiled`, the digests of which it has compiled the chat template.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self.loaded: OrderedDict[str, int] = OrderedDict()
        self.compiled: set[str] = set()

    @classmethod
    async def start(cls, model_folder: Path) -> "WorkerProcess":
        """Raises WorkerEnded if it does not get ready."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inference_service.adapter_text.worker", str(model_folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # where libraries may print what tenants wrote
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _NOT_PARALLEL,
            start_new_session=True,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                if not isinstance(await worker._receive(), Ready):
                    raise WorkerEnded
        except BaseException as error:
            await worker.end()
            if isinstance(error, (TimeoutError, WorkerEnded)):
                raise WorkerEnded(f"exit code {process.returncode}") from None
            raise
        return worker

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: Request) -> Response:
        """One request at a time. Cancelled in the middle of one, the worker is ended.

        Raises:
            WorkerEnded: there is no answer, and the worker is gone.
        """
        data = msgspec.msgpack.encode(request)
        try:
            async with asyncio.timeout(_WALL_PER_CPU_SECOND * cpu_seconds(request)):
                self._stdin.write(len(data).to_bytes(4, "little") + data)
                await self._stdin.drain()
                return await self._receive()
        except BaseException as error:
            await self.end()
            raise WorkerEnded if isinstance(error, (TimeoutError, OSError)) else error from None

    async def _receive(self) -> Response:
        try:
            size = int.from_bytes(await self._stdout.readexactly(4), "little")
            if size > MAX_REPLY_BYTES:
                raise WorkerEnded
            return decode_response(await self._stdout.readexactly(size))
        except (asyncio.IncompleteReadError, msgspec.MsgspecError):
            raise WorkerEnded from None

    async def end(self) -> None:
        """Kill it; it holds nothing that would be lost."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()
        await asyncio.shield(self._process.wait())
