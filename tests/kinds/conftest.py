"""One world per base model, made when a test first asks for it."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from examples.stack import MODEL
from tests.kinds.bases import build
from tests.kinds.cases import CASES, SMOLLM2
from tests.kinds.report import Report
from tests.kinds.world import World, one_thread

TINY_FLAGS = ("--adapter-memory=128MiB", "--host-memory=256MiB", "--kv-cache-memory=64MiB")
MODEL_FLAGS = ("--adapter-memory=768MiB", "--host-memory=1GiB", "--kv-cache-memory=256MiB")
Worlds = Callable[[str], World]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """The world of a base model, after everything has been served. What broke it breaks every test that asks."""

    @cache
    def made(name: str) -> tuple[World, Exception | None]:
        folder = tmp_path_factory.mktemp(name)
        if name == "smollm2":
            world = World(name, MODEL, SMOLLM2, folder, MODEL_FLAGS, strength=0.06)
            return world, _broken(lambda: one_thread(world.run))
        build(name, folder / "base")
        cases = [case for case in CASES if name in CASES[case].bases]
        world = World(name, folder / "base", cases, folder, TINY_FLAGS, strength=0.15)
        return world, _broken(lambda: one_thread(world.run))

    def get(name: str) -> World:
        world, broken = made(name)
        if broken is not None:
            raise broken
        return world

    return get


def _broken(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    report = Report()
    yield report
    report.write()
