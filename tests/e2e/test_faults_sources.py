"""The Hub and S3 going wrong under load, in every way a server can: who needs nothing of them notices nothing."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from examples.stack import register
from loraplex import Client
from tests.e2e.streams import Collected
from tests.e2e.tiny_stack import BASE, TinyWorld, register_content
from tests.e2e.traffic import PATIENCE_SECONDS, Traffic, ask, assert_is_of, at_last, refusal
from tests.shared.sources.fault_proxy import Fault, FaultProxy
from tests.shared.sources.store_fixtures import s3_url
from tests.shared.sources.stores import HubStore, S3Store, Store

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

__all__ = ["s3_url"]

RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RETRY_SECONDS = 60.0
NUM_HANGING = 40  # downloads from one server; more than the adapter process has threads


class Remote(NamedTuple):
    """The running services, and the stores that they read from."""

    client: Client
    stores: dict[str, Store]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote(world: TinyWorld, s3_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Remote]:
    hub, s3 = HubStore(), S3Store(s3_url)
    environment = {
        "HF_ENDPOINT": hub.proxy.url, "AWS_ENDPOINT_URL": s3.proxy.url, "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            run = tmp_path_factory.mktemp("sources")
            async with world.serving(run, names=["content-0", "content-1"]) as (_, client):
                yield Remote(client, {"hub": hub, "s3": s3})
    finally:
        hub.close()
        s3.close()


async def put(world: TinyWorld, remote: Remote, store: str, content: str) -> None:
    """Uploads the content to a store and registers it under its own name."""
    folder = world.folder / "store" / content
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
    uri = await asyncio.to_thread(remote.stores[store].put, content, files)
    await register(remote.client, content, uri, BASE)


def strike(store: Store, content: str, fault: Fault) -> None:
    """From now on, this happens to what is read of the content's weights."""
    if isinstance(store, HubStore):
        path = f"org/{content}/resolve/.*{WEIGHTS}" if fault.status else f"at=org/{content}/.*{WEIGHTS}"
        proxy: FaultProxy = store.proxy if fault.status else store.store
    else:
        assert isinstance(store, S3Store)
        path, proxy = f"/{content}/{WEIGHTS}", store.proxy
    proxy.faults.append(fault._replace(path=path))


def repair(store: Store, content: str) -> None:
    proxies = [store.proxy, store.store] if isinstance(store, HubStore) else [store.proxy]  # type: ignore[attr-defined]
    for proxy in proxies:
        proxy.faults = [fault for fault in proxy.faults if f"/{content}/" not in fault.path]


# What happens to reads of the weights, and the error of whoever asks for the adapter then.
LASTING: dict[str, tuple[Fault, str]] = {
    "403": (Fault(status=403), "SOURCE_FORBIDDEN"),
    "404": (Fault(status=404), "SOURCE_NOT_FOUND"),
    "500": (Fault(status=500), "SOURCE_UNAVAILABLE"),
    "429 for long": (Fault(status=429, headers=(("Retry-After", "100"),)), "SOURCE_UNAVAILABLE"),
    "reset before the first byte": (Fault(after=0), "SOURCE_UNAVAILABLE"),
    "closed before the first byte": (Fault(after=0, ending="close"), "SOURCE_UNAVAILABLE"),
    "a bit of the weights": (Fault(flip=True), "DIGEST_MISMATCH"),
}


# A default run takes one store for each of the next two tests; the tests of downloads take every store for all faults.
@pytest.mark.parametrize("where", ["hub", pytest.param("s3", marks=pytest.mark.slow)])
async def test_a_source_that_goes_wrong_fails_its_own_requests_until_it_is_right_again(
    world: TinyWorld, remote: Remote, where: str
) -> None:
    client, store = remote.client, remote.stores[where]
    first = {"hub": 2, "s3": 14}[where]

    async def suffer(content: str, what: str) -> float:
        fault, reason = LASTING[what]
        await put(world, remote, where, content)
        strike(store, content, fault)
        for error in await asyncio.gather(*(refusal(ask(client, prompt, content)) for prompt in range(4))):
            assert error.reason == reason, (what, error.summary)
            assert content in error.metadata["uri"], what
            assert (error.retry_after is not None) == (reason == "SOURCE_UNAVAILABLE"), what
        repair(store, content)
        answer, seconds = await at_last(lambda: ask(client, 0, content), RETRY_SECONDS)
        assert_is_of(world, content, 0, answer)
        return seconds

    async with Traffic(world, client, RESIDENT) as traffic:
        pairs = zip(world.contents[first:], LASTING, strict=False)
        seconds = await asyncio.gather(*(suffer(*pair) for pair in pairs))
        await traffic.answers(8)
    print(f"answered {min(seconds):.1f} to {max(seconds):.1f} s after the repair")


# What a download gets over.
PASSING: dict[str, Fault] = {
    "500, twice": Fault(status=500, times=2),
    "reset in the middle, twice": Fault(after=100_000, times=2),
    "closed in the middle": Fault(after=50_000, ending="close", times=1),
    "slow": Fault(rate=200_000),
}


@pytest.mark.parametrize("where", [pytest.param("hub", marks=pytest.mark.slow), "s3"])
async def test_downloads_get_over_what_passes(world: TinyWorld, remote: Remote, where: str) -> None:
    client, store = remote.client, remote.stores[where]
    first = {"hub": 10, "s3": 22}[where]

    async def suffer(content: str, what: str) -> float:
        await put(world, remote, where, content)
        strike(store, content, PASSING[what])
        started = time.monotonic()
        for answer in await asyncio.gather(*(ask(client, 0, content) for _ in range(3))):
            assert_is_of(world, content, 0, answer)
        return time.monotonic() - started

    async with Traffic(world, client, RESIDENT):
        pairs = zip(world.contents[first:], PASSING, strict=False)
        seconds = await asyncio.gather(*(suffer(*pair) for pair in pairs))
    print(", ".join(f"{what}: {taken:.1f} s" for what, taken in zip(PASSING, seconds, strict=True)))


@pytest.mark.slow
async def test_downloads_that_hang_keep_nobody_else_waiting(world: TinyWorld, remote: Remote) -> None:
    client, store, another = remote.client, remote.stores["s3"], remote.stores["hub"]
    hanging = [f"hanging-{number}" for number in range(NUM_HANGING)]

    async def new(name: str, number: int, store: Store) -> None:
        """The same weights under another digest."""
        folder = world.folder / "store" / "content-1"
        config = (folder / CONFIG).read_bytes() + b" " * (number + 1)
        files = {CONFIG: config, WEIGHTS: (folder / WEIGHTS).read_bytes()}
        await register(client, name, await asyncio.to_thread(store.put, name, files), BASE)

    await asyncio.gather(*(new(name, number, store) for number, name in enumerate(hanging)))
    await new("fine", NUM_HANGING, another)
    for name in hanging:
        strike(store, name, Fault(after=100_000, ending="stall"))
    waiting = [asyncio.create_task(ask(client, 0, name)) for name in hanging]
    async with Traffic(world, client, RESIDENT):
        try:
            await asyncio.sleep(1.0)
            started = time.monotonic()
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert_is_of(world, "content-1", 0, await ask(client, 0, "fine"))
                await register_content(client, "content-25", "content-25")
                assert_is_of(world, "content-25", 0, await ask(client, 0, "content-25"))
            seconds = time.monotonic() - started
            assert not any(task.done() for task in waiting)
        finally:
            for name in hanging:
                repair(store, name)
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            seconds_hung = time.monotonic() - started
    for answer in answers:
        assert isinstance(answer, Collected)
        assert_is_of(world, "content-1", 0, answer)
    print(f"others answered in {seconds:.1f} s, {NUM_HANGING} that hung after {seconds_hung:.1f} s")


async def test_what_was_loaded_outlives_a_source_that_is_down(world: TinyWorld, remote: Remote) -> None:
    """The last test here: the source stays down."""
    client, store = remote.client, remote.stores["s3"]
    loaded, never = world.contents[24], "never-loaded"
    await put(world, remote, "s3", loaded)
    await ask(client, 0, loaded)
    config = (world.folder / "store" / loaded / CONFIG).read_bytes() + b" " * 100
    weights = (world.folder / "store" / loaded / WEIGHTS).read_bytes()
    await register(client, never, await asyncio.to_thread(store.put, never, {CONFIG: config, WEIGHTS: weights}), BASE)
    async with Traffic(world, client, RESIDENT | {loaded: loaded}) as traffic:
        assert isinstance(store, S3Store)
        store.proxy.faults = [Fault(after=0)]  # for connections that live
        await asyncio.to_thread(store.proxy.close)
        uri = f"s3://{store.bucket}/adapters/{never}"
        for call in (ask(client, 0, never), register(client, "too-late", uri, BASE)):
            error = await refusal(call)
            assert error.reason == "SOURCE_UNAVAILABLE"
            assert error.retry_after is not None
        await traffic.answers(8)
