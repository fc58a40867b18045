"""The supervisor with children of a few lines: restarts, events, order of the end, and what a failure says."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

from inference_service import watchdog
from inference_service.child import ChildSpec, Outlets
from inference_service.supervisor import HangPolicy, RestartPolicy, Supervisor
from shared.errors import EngineUnavailable
from shared.line_writer import LineWriter

FAST = RestartPolicy(quick_seconds=0.0, max_failed_starts=3, first_delay=0.01, max_delay=0.05)

# Appends its start line, its events and its end to the file argv[1]; ends with argv[2] when told to by a file.
CHILD = """
import os, signal, sys, threading, time
path, code = sys.argv[1], int(sys.argv[2])
def note(text):
    with open(path, "a") as file: file.write(f"{text}\\n")
def end(*_):
    note("term"); os._exit(0)
signal.signal(signal.SIGTERM, end)
note(f"{os.getpid()} {sys.stdin.readline().strip()}")
def events():
    for line in sys.stdin: note(line.strip())
    note("orphan"); os._exit(3)
threading.Thread(target=events, daemon=True).start()
while not os.path.exists(path + ".die"): time.sleep(0.01)
os.unlink(path + ".die"); os._exit(code)
"""


@pytest.fixture
def outlets(tmp_path: Path) -> Iterator[Outlets]:
    """Into the files `out` and `err`."""
    with (
        (tmp_path / "out").open("w") as out,
        (tmp_path / "err").open("w") as err,
        LineWriter(out.fileno(), "{} lost\n".format) as output,
        LineWriter(err.fileno(), "{} lost\n".format) as error,
    ):
        yield Outlets(output, error)


def spec(role: str, log: Path, *, code: int = 1, stage: int = 1, hears: bool = False, grace: float = 5.0) -> ChildSpec:
    argv = (sys.executable, "-S", "-c", CHILD, str(log), str(code))
    return ChildSpec(role, argv, b'"start"', b'"restart"', stage=stage, grace=grace, hears_events=hears)


def written(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


async def lines(log: Path, count: int) -> list[str]:
    """The first `count` lines of a child's file, when they are there."""
    async with asyncio.timeout(60):
        while len(written(log)) < count:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
    return written(log)


async def test_a_dead_engine_is_told_and_restarted_and_sigterm_ends_all_in_order(
    tmp_path: Path, outlets: Outlets
) -> None:
    engine, api = tmp_path / "engine", tmp_path / "api"
    supervisor = Supervisor([spec("engine", engine), spec("api", api, stage=0, hears=True)], outlets, FAST)
    running = asyncio.create_task(supervisor.run())
    assert (await lines(engine, 1))[0].endswith('"start"')
    await lines(api, 1)
    (tmp_path / "engine.die").touch()
    assert (await lines(engine, 2))[1].endswith('"restart"')
    assert (await lines(api, 3))[1:] == ['{"event": "engine_down"}', '{"event": "engine_up"}']
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    assert (await lines(engine, 3))[-1] == (await lines(api, 4))[-1] == "term"
    assert api.stat().st_mtime_ns <= engine.stat().st_mtime_ns  # the API processes end first
    assert supervisor.failure is None


async def test_children_that_fail_again_and_again_end_the_replica_with_their_reason(
    tmp_path: Path, outlets: Outlets
) -> None:
    code = "import sys; sys.stdin.readline(); print('error: ADAPTER_INVALID: no', file=sys.stderr); sys.exit(1)"
    bad = ChildSpec("engine", (sys.executable, "-S", "-c", code), b"", b"", stage=1, grace=5.0)
    supervisor = Supervisor([bad, spec("api", tmp_path / "api", stage=0)], outlets, FAST)
    assert await asyncio.wait_for(supervisor.run(), 60) == 1
    assert supervisor.failure == "the engine process ended with exit code 1: ADAPTER_INVALID: no"
    outlets.error.drain()
    assert "error: ADAPTER_INVALID" not in (tmp_path / "err").read_text()  # left to whoever reports the failure


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("print(json.dumps(dict(level='error', message='no cache')), file=sys.stderr)", "no cache"),
        ("print(json.dumps(dict(level='error', message='ends', exception='a\\nb')), file=sys.stderr)", "ends: b"),
        ("print(json.dumps(dict(level='error', message='no model:\\n  away')), file=sys.stderr)", "no model: away"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("os.kill(os.getpid(), 9)", ""),
        ("print('x' * (3 << 20), file=sys.stderr); print('error: long', file=sys.stderr)", "long"),
    ],
)
async def test_a_child_s_last_words_are_repeated(words: str, said: str, outlets: Outlets) -> None:
    code = f"import json, os, sys; {words}; sys.exit(1)"
    bad = ChildSpec("adapters", (sys.executable, "-S", "-c", code), b"", b"", stage=1, grace=5.0)
    supervisor = Supervisor([bad], outlets, FAST._replace(max_failed_starts=1))
    assert await asyncio.wait_for(supervisor.run(), 60) == 1
    assert supervisor.failure.endswith(f": {said}" if said else "was killed by SIGKILL")


async def test_a_wrong_configuration_is_not_tried_twice(outlets: Outlets) -> None:
    bad = ChildSpec("api", (sys.executable, "-S", "-c", "raise SystemExit(2)"), b"", b"", stage=0, grace=5.0)
    supervisor = Supervisor([bad], outlets, RestartPolicy(first_delay=300.0))
    assert await asyncio.wait_for(supervisor.run(), 60) == 2
    assert supervisor.failure == "the api process ended with exit code 2"


@pytest.mark.parametrize("code", [1, 2])
async def test_a_process_that_was_ready_is_started_again_however_often_it_ends(
    tmp_path: Path, code: int, outlets: Outlets
) -> None:
    """It is ready in its first four lives, and never again."""
    lives = tmp_path / "lives"
    program = f"""
import pathlib, sys
lives = pathlib.Path({str(lives)!r})
with lives.open("a") as file: file.write("life\\n")
print("ready" if len(lives.read_text().splitlines()) <= 4 else "not yet", flush=True)
sys.exit({code})
"""
    child = ChildSpec("engine", (sys.executable, "-S", "-c", program), b"", b"", stage=1, grace=5.0)
    supervisor = Supervisor([child], outlets, FAST._replace(quick_seconds=60.0))
    assert await asyncio.wait_for(supervisor.run(), 60) == code
    assert len(written(lives)) == 4 + FAST.max_failed_starts
    assert supervisor.failure == f"the engine process ended with exit code {code}"


async def test_only_the_ready_line_of_standard_output_is_kept_back(tmp_path: Path, outlets: Outlets) -> None:
    program = "print('a result'); print('ready'); raise SystemExit(1)"
    child = ChildSpec("engine", (sys.executable, "-S", "-c", program), b"", b"", stage=1, grace=5.0)
    running = asyncio.create_task(Supervisor([child], outlets, RestartPolicy(first_delay=30.0)).run())
    await lines(tmp_path / "out", 1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    outlets.output.drain()
    assert (tmp_path / "out").read_text() == "a result\n"


class Ears:
    """An observer that remembers what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.is_running = False

    def on_report(self, line: str) -> None:
        self.heard.append(f"report {line.strip()}")

    def on_event(self, event: str) -> None:
        self.heard.append(event)

    def on_restart(self, role: str, *, was_hung: bool) -> None:
        self.heard.append(f"{role} again, {'hung' if was_hung else 'ended'}")

    async def run(self) -> None:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False


async def test_an_observer_hears_reports_and_events(tmp_path: Path, outlets: Outlets) -> None:
    program = "import os; print('report ' + os.environ['SAID'], flush=True); print('ready'); raise SystemExit(1)"
    argv = (sys.executable, "-S", "-c", program)
    child = ChildSpec("api", argv, b"", b"", stage=1, grace=5.0, environment={"SAID": "7"})
    ears = Ears()
    running = asyncio.create_task(Supervisor([child], outlets, FAST, ears).run())
    async with asyncio.timeout(60):
        while "api_up" not in ears.heard:  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(0.01)
    assert ears.is_running
    assert set(ears.heard) == {"report 7", "api_down", "api again, ended", "api_up"}
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    assert not ears.is_running
    outlets.output.drain()
    assert "report" not in (tmp_path / "out").read_text()


# Once it is ready, answers each SIGUSR1 with a line.
ANSWERING = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
def note(text):
    with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()} {text}\\n")
note("starts")
time.sleep(6.0)
signal.signal(signal.SIGUSR1, lambda *_: note("answers"))
print("ready", flush=True)
while True: signal.pause()
"""


async def test_a_process_that_stands_still_is_replaced_and_one_that_starts_is_not(
    tmp_path: Path, outlets: Outlets, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "ASK_SECONDS", 0.1)
    log = tmp_path / "engine"

    async def ask() -> None:
        before = await lines(log, 1)
        try:
            os.kill(int(before[-1].split()[0]), signal.SIGUSR1)
        except ProcessLookupError:
            raise EngineUnavailable("it has ended") from None
        await lines(log, len(before) + 1)

    engine = ChildSpec("engine", (sys.executable, "-S", "-c", ANSWERING, str(log)), b"", b"", stage=1, grace=5.0)
    ears, hangs = Ears(), HangPolicy(5.0, {"engine": ask})
    running = asyncio.create_task(Supervisor([engine], outlets, FAST, ears, hangs).run())
    first = (await lines(log, 2))[0].split()[0]
    os.kill(int(first), signal.SIGSTOP)
    num_lines = len(written(log))
    said = await lines(log, num_lines + 2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    assert [line.split()[1] for line in said[:2]] == ["starts", "answers"]
    second = said[-1].split()[0]
    assert said[-2:] == [f"{second} starts", f"{second} answers"]
    assert second != first
    assert ears.heard == ["engine_down", "engine again, hung", "engine_up"]
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["the engine process has not answered for 5 seconds; it is killed"]


# Answers what it is asked, and has heard it.
HEARING = """
import os, sys
sys.stdin.readline()
print("ready", flush=True)
for line in sys.stdin:
    with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()} {line}")
    if "answer" in line: print("alive", flush=True)
"""


async def test_of_processes_of_one_role_the_one_that_hears_nothing_is_replaced(
    tmp_path: Path, outlets: Outlets, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "ASK_SECONDS", 0.1)
    logs = [tmp_path / "first", tmp_path / "second"]
    api = [
        ChildSpec(
            "api", (sys.executable, "-S", "-c", HEARING, str(log)), b"", b"", stage=0, grace=5.0, hears_events=True
        )
        for log in logs
    ]
    ears = Ears()
    running = asyncio.create_task(Supervisor(api, outlets, FAST, ears, HangPolicy(5.0, {})).run())
    before = [(await lines(log, 2))[0].split()[0] for log in logs]
    os.kill(int(before[0]), signal.SIGSTOP)
    async with asyncio.timeout(60):
        while written(logs[0])[-1].split()[0] == before[0]:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    assert ears.heard == ["api_down", "api again, hung", "api_up"]
    assert {line.split()[0] for line in written(logs[1])} == {before[1]}
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["the api process has not answered for 5 seconds; it is killed"]


async def _is_true_soon(answer: Awaitable[bool]) -> bool:
    try:
        return await asyncio.wait_for(answer, 1.0)
    except TimeoutError:
        return False


async def test_processes_of_a_role_answer_if_all_do(tmp_path: Path, outlets: Outlets) -> None:
    logs = [tmp_path / "first", tmp_path / "second"]
    argv = (sys.executable, "-S", "-c", HEARING)
    api = [ChildSpec("api", (*argv, str(log)), b"", b"", stage=0, grace=5.0, hears_events=True) for log in logs]
    supervisor = Supervisor(api, outlets, FAST)
    assert not await supervisor.answers("api"), "none is there yet"
    running = asyncio.create_task(supervisor.run())

    async def all_answer() -> None:
        """What a process was asked that ends meanwhile is lost."""
        async with asyncio.timeout(60):
            while not await _is_true_soon(supervisor.answers("api")):  # noqa: ASYNC110 - other processes start
                await asyncio.sleep(0.01)

    await all_answer()
    first = int(written(logs[0])[0].split()[0])
    os.kill(first, signal.SIGSTOP)
    assert not await _is_true_soon(supervisor.answers("api"))
    os.kill(first, signal.SIGKILL)
    await all_answer()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0


async def test_a_program_that_is_missing_ends_the_replica(outlets: Outlets) -> None:
    missing = ChildSpec("engine", ("/no/such/program",), b"", b"", stage=1, grace=5.0)
    supervisor = Supervisor([missing], outlets)
    assert await asyncio.wait_for(supervisor.run(), 60) == 1
    assert supervisor.failure.startswith("the engine process cannot be started")


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(
    tmp_path: Path, outlets: Outlets, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "deaf"
    code = "import signal, sys, time; signal.signal(15, 1); open(sys.argv[1], 'w').write('up\\n'); time.sleep(60)"
    deaf = ChildSpec("engine", (sys.executable, "-S", "-c", code, str(log)), b"", b"", stage=1, grace=0.2)
    running = asyncio.create_task(Supervisor([deaf], outlets).run())
    await lines(log, 1)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, 60) == 0
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["the engine process has not ended within 0.2 seconds; it is killed"]


async def test_children_hear_when_the_supervisor_dies(tmp_path: Path) -> None:
    log, child = tmp_path / "child", json.dumps(CHILD)
    code = f"""
import asyncio, sys
from inference_service.child import ChildSpec, Outlets
from inference_service.supervisor import Supervisor
from shared.log import open_lines
outlets = Outlets(open_lines("x", 1), open_lines("x", 2))
argv = (sys.executable, "-S", "-c", {child}, {str(log)!r}, "1")
asyncio.run(Supervisor([ChildSpec("engine", argv, b"x", b"y", stage=1, grace=5.0)], outlets).run())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await lines(log, 1)
    supervisor.kill()
    await supervisor.wait()
    assert (await lines(log, 2))[1] == "orphan"


def test_delays_grow_to_their_limit() -> None:
    policy = RestartPolicy(first_delay=0.25, max_delay=2.0)
    assert [policy.delay(n) for n in range(6)] == [0.25, 0.25, 0.5, 1.0, 2.0, 2.0]


# Says more than a pipe and the queue behind it hold, and that it has said it; the next life is the same.
TALKER = """
import os, pathlib, sys, time
sys.stdin.readline()
for number in range(30): print(f"line {number}" + "." * 10_000, file=sys.stderr)
print("ready", flush=True)
with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


class Counting(LineWriter):
    """Knows how many lines it was given."""

    num_written = 0

    def write(self, line: str) -> None:
        super().write(line)
        self.num_written += 1


@pytest.mark.parametrize("trouble", ["full disk", "no reader", "a reader that does not read"])
async def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path, outlets: Outlets, trouble: str) -> None:
    lives, log = tmp_path / "lives", tmp_path / "log"
    log.touch()
    reader, writer = os.pipe()
    if trouble == "full disk":
        become(writer, "/dev/full", os.O_WRONLY)
    elif trouble == "no reader":
        become(reader, os.devnull, os.O_RDONLY)
    error = Counting(writer, "{} lost\n".format, most_bytes=20_000)
    child = ChildSpec("engine", (sys.executable, "-S", "-c", TALKER, str(lives)), b"", b"", stage=1, grace=5.0)
    running = asyncio.create_task(Supervisor([child], Outlets(outlets.output, error), FAST).run())
    os.kill(int((await lines(lives, 1))[0]), signal.SIGKILL)  # it was held up by nobody
    await lines(lives, 2)
    async with asyncio.timeout(60):
        while error.num_written < 60:  # noqa: ASYNC110 - another process writes them
            await asyncio.sleep(0.01)
    if trouble == "a reader that does not read":
        reading = asyncio.create_task(asyncio.to_thread(read_until_again, reader))
    else:
        become(writer, str(log), os.O_WRONLY)
    error.write("again\n")
    said = await reading if trouble == "a reader that does not read" else await lines(log, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    error.close()
    os.close(writer)
    os.close(reader)
    assert said[-1] == "again"
    num_lost = sum(int(line.split()[0]) for line in said if line.endswith(" lost"))
    num_written = sum(line.startswith("line ") for line in said)
    assert num_lost + num_written == 60
    assert num_lost > 40


def become(fd: int, path: str, flags: int) -> None:
    """From now on the descriptor is that of this file."""
    file = os.open(path, flags)
    os.dup2(file, fd)
    os.close(file)


def read_until_again(reader: int) -> list[str]:
    said = b""
    while not said.endswith(b"again\n"):
        said += os.read(reader, 1 << 20)
    return said.decode().splitlines()


async def test_a_process_that_is_not_read_any_more_is_replaced(outlets: Outlets) -> None:
    """Else it would stand still at the next line that finds its pipe full."""

    class Deaf(Ears):
        def on_report(self, line: str) -> None:
            super().on_report(line)
            if len(self.heard) == 1:
                raise KeyError(line)

    program = "import sys, time; print('report 1', flush=True); print('ready', flush=True); time.sleep(600)"
    child = ChildSpec("api", (sys.executable, "-S", "-c", program), b"", b"", stage=1, grace=5.0)
    ears = Deaf()
    running = asyncio.create_task(Supervisor([child], outlets, FAST, ears).run())
    async with asyncio.timeout(60):
        while ears.heard.count("report 1") < 2:  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0


async def test_a_task_of_the_supervisor_that_fails_ends_the_replica(tmp_path: Path, outlets: Outlets) -> None:
    class Failing(Ears):
        async def run(self) -> None:
            await lines(tmp_path / "api", 1)
            raise ValueError("no more")

    supervisor = Supervisor([spec("api", tmp_path / "api")], outlets, FAST, Failing())
    assert await asyncio.wait_for(supervisor.run(), 60) == 1
    assert supervisor.failure == "the supervisor cannot go on: ValueError: no more"
    assert (await lines(tmp_path / "api", 2))[1] == "term"
