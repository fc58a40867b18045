"""What serves while the registry is away is never what the watch has said is gone, across watches and processes."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_service.adapters.adapter_change import AdapterChange
from inference_service.adapters.answers import Answer, Answers
from inference_service.adapters.resolution import Resolution, ResolvedVersion
from inference_service.adapters.saved_answers import SavedAnswers
from loraplex.registry.v1 import registry_pb2

NAMES = ["default/a", "default/b", "default/c"]


class Change(NamedTuple):
    """What happened to an adapter: a version came or was deleted, or all of it was."""

    name: str
    added: int = 0
    deleted: int = 0
    is_deleted: bool = False


def _resource(name: str, number: int) -> str:
    return f"namespaces/default/adapters/{name[-1]}/versions/{number}"


def _resolution(name: str, number: int) -> Resolution:
    version = ResolvedVersion(_resource(name, number), number, "u", f"sha256:{number}", (), (), rank=1)
    return Resolution("u", "latest", ((version, 1.0),), ttl=10.0)


def _response(name: str, number: int) -> bytes:
    response = registry_pb2.ResolveAdapterResponse()
    response.version.name, response.version.digest = _resource(name, number), f"sha256:{number}"
    return response.SerializeToString()


@dataclass
class World:
    """A registry, and one replica's adapter process after the other. Every version's number is new everywhere."""

    path: Path
    loop: asyncio.AbstractEventLoop
    now: float = 1000.0
    versions: int = 0
    live: dict[str, list[int]] = field(default_factory=dict)
    epoch: int = 0
    log: list[Change] = field(default_factory=lambda: [Change("default/none")])  # its length is the revision
    told: int | None = None  # how far the watch has told; None: it must begin
    gone: set[int] = field(default_factory=set)  # versions of which the watch has said so
    under_way: tuple[str, int, Answer] | None = None
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.saved = SavedAnswers(self.path, lambda: self.now)
        self.answers = Answers(1e9, lambda: self.now, self.saved)
        self.told, self.under_way = None, None

    def register(self, name: str) -> None:
        self.versions += 1
        self.live.setdefault(name, []).append(self.versions)
        self.log.append(Change(name, added=self.versions))

    def delete(self, name: str) -> None:
        if self.live.pop(name, None) is not None:
            self.log.append(Change(name, is_deleted=True))

    def delete_oldest(self, name: str) -> None:
        if self.live.get(name):
            self.log.append(Change(name, deleted=self.live[name].pop(0)))

    def ask(self, name: str) -> None:
        if self.live.get(name):
            self._ask(name, name, self.live[name][-1])

    def ask_oldest(self, name: str) -> None:
        if self.live.get(name):
            self._ask(f"{name}@{self.live[name][0]}", name, self.live[name][0])

    def _ask(self, reference: str, name: str, number: int) -> None:
        self.asked.add(reference)
        self.under_way = reference, number, Answer(_resolution(name, number), self.now, len(self.log))

    def answer(self) -> None:
        if self.under_way is not None:
            reference, number, answer = self.under_way
            self.answers.put(reference, answer, _response(reference.partition("@")[0], number))
            self.under_way = None

    def hear(self) -> None:
        if self.told is not None:
            self._hear()
            self.answers.confirmed(self.told, f"{self.epoch} {self.told}")

    def _hear(self) -> None:
        for revision in range((self.told or 0) + 1, len(self.log) + 1):
            change = self.log[revision - 1]
            deleted = frozenset([change.deleted] if change.deleted else ())
            self.answers.changed(AdapterChange(change.name, revision, change.is_deleted, deleted))
            self.gone |= deleted
            if change.is_deleted:
                self.gone |= {c.added for c in self.log[:revision] if c.name == change.name and c.added}
        self.told = len(self.log)

    def begin(self, is_looked_at: bool = False) -> None:
        """A watch that continues that of the process before, or begins anew."""
        if self.told is not None:
            return
        held = self.held() if is_looked_at else {}
        token = self.loop.run_until_complete(self.answers.saved_token())
        epoch, _, revision = token.partition(" ")
        if token and int(epoch) == self.epoch:
            self.told = int(revision)
            self.answers.watching(self.told)
            self._hear()
            self.answers.resumed()
        else:
            if token:
                self.answers.start_over()  # it is compacted
            self.told = len(self.log)
            self.answers.watching(self.told)
            self.answers.begun_anew()
        self.check_kept(held)

    def confirm(self, is_looked_at: bool = False) -> None:
        """The registry is asked again for all that the watch cannot tell of."""
        if self.told is None:
            return
        held = self.held() if is_looked_at else {}
        for reference in self.loop.run_until_complete(self.answers.unconfirmed()):
            name, _, number = reference.partition("@")
            live = self.live.get(name, [])
            if live and (not number or int(number) in live):
                self._ask(reference, name, int(number or live[-1]))
                self.answer()
            else:
                self.answers.drop(reference)
        assert not self.loop.run_until_complete(self.answers.unconfirmed())
        self.gone |= set(range(1, self.versions + 1)) - self._live_at(self.told)
        self.check_kept(held)

    def _live_at(self, revision: int) -> set[int]:
        live = dict[int, str]()
        for change in self.log[:revision]:
            if change.added:
                live[change.added] = change.name
            live.pop(change.deleted, None)
            if change.is_deleted:
                live = {number: name for number, name in live.items() if name != change.name}
        return set(live)

    def held(self) -> dict[str, int]:
        """What references mean here that mean the same at the registry."""
        right = {name: numbers[-1] for name, numbers in self.live.items() if numbers}
        right |= {f"{name}@{number}": number for name, numbers in self.live.items() for number in numbers}
        asked = self.asked & right.keys()
        return {reference: right[reference] for reference in asked if self.offline(reference) == right[reference]}

    def check_kept(self, held: dict[str, int]) -> None:
        for reference, number in held.items():
            assert self.offline(reference) == number

    def another_database(self) -> None:
        """Its revisions begin anew, and it may not have what the last one had."""
        self._restore()
        self.answers.start_over()
        self.told = None

    def another_database_between_processes(self) -> None:
        self._restore()
        self.restart()

    def _restore(self) -> None:
        self.epoch += 1
        added = [Change(name, added=number) for name, numbers in self.live.items() for number in numbers]
        self.log = [Change("default/none"), *added]

    def restart(self) -> None:
        self.saved.close()
        self.start()

    def offline(self, reference: str) -> int | None:
        """What a request gets while the registry is away, as `registry_client` does it, which leaves its traces."""
        if (answer := self.answers.find(reference)) is not None:
            return answer.resolution.choose("").number
        found = self.loop.run_until_complete(self.saved.find(reference))
        if found is None:
            return None
        name = registry_pb2.ResolveAdapterResponse.FromString(found.response).version.name
        number = int(name.rpartition("/")[2])
        self.answers.put_earlier(reference, _resolution(reference.partition("@")[0], number), found.age)
        return None if self.answers.find(reference) is None else number


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
    st.tuples(st.sampled_from(["register", "delete", "delete_oldest", "ask", "ask_oldest"]), NAME),
    st.tuples(st.sampled_from(["answer", "answer", "hear", "restart"])),
    st.tuples(st.sampled_from(["begin", "confirm"]), st.booleans()),
    st.tuples(st.just("offline"), NAME),
    st.tuples(st.sampled_from(["another_database", "another_database_between_processes"])),
)
_A = NAMES[0]
_KNOWN = [("begin",), ("confirm",), ("register", _A), ("hear",), ("ask", _A), ("answer",)]


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=40))
@example([*_KNOWN, ("delete", _A), ("hear",), ("another_database",), ("begin",), ("confirm",)])
@example([*_KNOWN, ("delete", _A), ("another_database",), ("begin",), ("confirm",), ("restart",)])
@example([*_KNOWN, ("another_database",), ("begin",), ("confirm",), ("restart",), ("begin",), ("confirm",)])
@example([*_KNOWN, ("delete", _A), ("register", _A), ("hear",)])
@example([*_KNOWN, ("hear",), ("restart",), ("delete", _A), ("begin",), ("confirm",)])
@example([*_KNOWN, ("register", _A), ("ask_oldest", _A), ("answer",), ("delete_oldest", _A), ("hear",)])
@example([*_KNOWN, ("hear",), ("restart",), ("delete_oldest", _A), ("register", _A), ("begin",), ("confirm",)])
@example([*_KNOWN, ("hear",), ("delete", _A), ("another_database_between_processes",), ("begin",), ("confirm",)])
@example([*_KNOWN, ("hear",), ("delete", _A), ("another_database",), ("restart",), ("begin",), ("confirm",)])
@example([*_KNOWN, ("ask", _A), ("delete", _A), ("another_database",), ("begin",), ("confirm",), ("answer",)])
def test_nothing_that_was_said_to_be_gone_is_served(steps: list[tuple[Any, ...]]) -> None:
    with _world() as world:
        for step, *arguments in steps:
            world.now += 1.0
            getattr(world, step)(*arguments)
        for reference in world.asked:
            assert world.offline(reference) not in world.gone
