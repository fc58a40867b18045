"""What serves while the registry is away is never what the watch has said is gone, across watches and processes."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_service.adapters.answers import Answer, Answers
from inference_service.adapters.resolution import Resolution, ResolvedVersion
from inference_service.adapters.saved_answers import SavedAnswers
from inference_service.adapters.snapshot import Snapshot
from loraplex.registry.v1 import registry_pb2

NAMES = ["default/a", "default/b", "default/c"]
Change = tuple[str, int | None]  # adapter, and what it is since


def _resource(name: str) -> str:
    return f"namespaces/default/adapters/{name[-1]}/versions/1"


def _resolution(name: str, content: int) -> Resolution:
    version = ResolvedVersion(_resource(name), 1, "u", f"sha256:{content}", (), (), rank=1)
    return Resolution("u", "latest", ((version, 1.0),), ttl=10.0)


def _response(name: str, content: int) -> bytes:
    response = registry_pb2.ResolveAdapterResponse()
    response.version.name, response.version.digest = _resource(name), f"sha256:{content}"
    return response.SerializeToString()


@dataclass
class World:
    """A registry, and one replica's adapter process after the other. Every registration has new content."""

    path: Path
    loop: asyncio.AbstractEventLoop
    now: float = 1000.0
    contents: int = 0
    live: dict[str, int] = field(default_factory=dict)
    log: list[Change] = field(default_factory=lambda: [("default/none", None)])  # its length is the revision
    told: int | None = None  # how far the watch has told; None: it must begin with a snapshot
    gone: set[int] = field(default_factory=set)  # contents of which the watch has said so
    under_way: tuple[str, int, Answer] | None = None

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.saved = SavedAnswers(self.path, lambda: self.now)
        self.answers = Answers(1e9, lambda: self.now, self.saved)
        self.told, self.under_way = None, None

    def register(self, name: str) -> None:
        self.contents += 1
        self.live[name] = self.contents
        self.log.append((name, self.contents))

    def delete(self, name: str) -> None:
        if self.live.pop(name, None) is not None:
            self.log.append((name, None))

    def ask(self, name: str) -> None:
        if name in self.live:
            content = self.live[name]
            self.under_way = name, content, Answer(_resolution(name, content), self.now, len(self.log))

    def answer(self) -> None:
        if self.under_way is not None:
            name, content, answer = self.under_way
            self.answers.put(name, answer, _response(name, content))
            self.under_way = None

    def hear(self) -> None:
        if self.told is None:
            return
        for revision in range(self.told + 1, len(self.log) + 1):
            name, content = self.log[revision - 1]
            self.answers.changed(name, revision, is_deleted=content is None)
            if content is None:
                self.gone |= {c for n, c in self.log[:revision] if n == name and c is not None}
        self.told = len(self.log)
        self.answers.confirmed(self.told)

    def snapshot(self, deleted_meanwhile: str) -> None:
        """Has all that is live when it is read; what changes after its revision is told later."""
        if self.told is not None:
            return
        self.told = len(self.log)
        self.answers.watching(self.told)
        held = {content for name, content in self.live.items() if self.offline(name) == content}
        self.delete(deleted_meanwhile)
        snapshot = Snapshot()
        for name, content in self.live.items():
            snapshot.add(_resource(name), f"sha256:{content}")
        self.answers.snapshot_ended(snapshot)
        self.gone |= set(range(1, self.contents + 1)) - set(self.live.values())
        for name, content in self.live.items():
            assert self.offline(name) == content or content not in held  # what is confirmed is kept

    def another_database(self) -> None:
        """Its revisions begin anew, and it may not have what the last one had."""
        self.log = [("default/none", None), *((name, content) for name, content in self.live.items())]
        self.answers.start_over()
        self.told = None

    def restart(self) -> None:
        self.saved.close()
        self.start()

    def offline(self, name: str) -> int | None:
        """What a request gets while the registry is away, as `registry_client` does it."""
        if (answer := self.answers.find(name)) is not None:
            return int(answer.resolution.choose("").digest.partition(":")[2])
        found = self.loop.run_until_complete(self.saved.find(name))
        if found is None:
            return None
        digest = registry_pb2.ResolveAdapterResponse.FromString(found.response).version.digest
        content = int(digest.partition(":")[2])
        self.answers.put_earlier(name, _resolution(name, content), found.age)
        answer = self.answers.find(name)
        return None if answer is None else content


@contextmanager
def _world() -> Iterator[World]:
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "answers.sqlite", loop)
        try:
            yield world
        finally:
            world.saved.close()
            loop.close()


NAME = st.sampled_from(NAMES)
STEP = st.one_of(
    st.tuples(st.sampled_from(["register", "delete", "ask", "ask", "snapshot"]), NAME),
    st.tuples(st.sampled_from(["answer", "answer", "hear", "another_database", "restart"])),
)
_A = NAMES[0]
_KNOWN = [("snapshot", NAMES[2]), ("register", _A), ("hear",), ("ask", _A), ("answer",)]


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=40))
@example([*_KNOWN, ("delete", _A), ("hear",), ("another_database",), ("snapshot", NAMES[2])])
@example([*_KNOWN, ("delete", _A), ("another_database",), ("snapshot", NAMES[2]), ("restart",)])
@example([*_KNOWN, ("another_database",), ("snapshot", NAMES[2]), ("restart",), ("snapshot", _A)])
@example([*_KNOWN, ("delete", _A), ("register", _A), ("hear",)])
@example([*_KNOWN, ("ask", _A), ("delete", _A), ("another_database",), ("snapshot", NAMES[2]), ("answer",)])
def test_nothing_that_was_said_to_be_gone_is_served(steps: list[tuple[str, ...]]) -> None:
    with _world() as world:
        for step, *names in steps:
            world.now += 1.0
            getattr(world, step)(*names)
            for name in NAMES:
                assert world.offline(name) not in world.gone
