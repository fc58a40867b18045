"""One world per base model, made of what the chosen tests ask for when the first of them does."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from examples.stack import MODEL
from tests.kinds.bases import build
from tests.kinds.report import Report
from tests.kinds.world import World, one_thread

TINY_FLAGS = ("--adapter-memory=128MiB", "--host-memory=256MiB", "--kv-cache-memory=64MiB")
MODEL_FLAGS = ("--adapter-memory=768MiB", "--host-memory=1GiB", "--kv-cache-memory=256MiB")
Worlds = Callable[[str], World]


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """The world of a base model, after everything has been served. What broke it breaks every test that asks."""

    def asked(base: str) -> list[str]:
        asking = [item for item in request.session.items if "world" in getattr(item, "fixturenames", ())]
        params = [item.callspec.params for item in asking if hasattr(item, "callspec")]
        return [found["case"] for found in params if "case" in found and found.get("base", "smollm2") == base]

    @cache
    def made(name: str) -> tuple[World, Exception | None]:
        folder = tmp_path_factory.mktemp(name)
        if name == "smollm2":
            world = World(name, MODEL, asked(name), folder, MODEL_FLAGS, strength=0.06)
        else:
            build(name, folder / "base")
            world = World(name, folder / "base", asked(name), folder, TINY_FLAGS, strength=0.15)
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
