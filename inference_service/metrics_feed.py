"""Keeps a `Snapshot` of the replica: asks the engine and the adapter process, hears the API processes' reports."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable

import msgspec

from inference_service.adapter_tokens import AdapterTokens
from inference_service.adapters.client import AdapterClient
from inference_service.engine.client import EngineClient
from inference_service.metrics import Snapshot
from inference_service.request_stats import ApiReport, RequestStats, add_up
from inference_service.stats import AdapterStats, EngineStats
from inference_service.types import EngineReady, ResidentAdapter, StagedAdapter
from shared.auth import DEFAULT_NAMESPACE
from shared.errors import EngineUnavailable, LoraplexError, SourceUnavailable
from shared.references import parse_version_name

log = logging.getLogger(__name__)

CLIENT_NAME = "supervisor"  # unlike any API process's
POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
RETRY_HELLO_SECONDS = 0.2
MOST_NAMES = 8  # of one adapter
FORGET_NAMES_SECONDS = 60.0  # a request names its adapter before the adapter is anywhere
MOST_PROCESSES = 256  # whose last reports are kept apart

_read_report = msgspec.json.Decoder(ApiReport).decode


class AdapterNames:
    """How clients have named adapters while these were on the device, or for a while before."""

    def __init__(self) -> None:
        self._names: dict[str, OrderedDict[str, float]] = {}  # by digest: name → when it was last said

    def add(self, digest: str, names: Iterable[str], now: float) -> None:
        """Clients asked for `digest` by `names`."""
        known = self._names.setdefault(digest, OrderedDict())
        for name in names:
            known.pop(name, None)
            known[name] = now
        while len(known) > MOST_NAMES:
            known.popitem(last=False)

    def forget(self, present: Collection[str], now: float) -> None:
        """Drop what is neither `present` nor was named lately."""
        for digest, known in list(self._names.items()):
            if digest not in present and now - max(known.values()) > FORGET_NAMES_SECONDS:
                del self._names[digest]

    def all(self, staged: Iterable[StagedAdapter]) -> dict[str, tuple[str, ...]]:
        """Names by digest. What nobody has asked for has the shortest reference of a version of it."""
        versions = {adapter.digest: (_shortest(adapter.version),) for adapter in staged if adapter.version}
        return versions | {digest: tuple(known) for digest, known in self._names.items()}


class ApiReports:
    """What the API processes have counted, those that have ended too, and how their clients name adapters."""

    def __init__(self) -> None:
        self.names = AdapterNames()
        self._latest: OrderedDict[int, RequestStats] = OrderedDict()  # by process, the longest silent first
        self._retired = RequestStats()

    def hear(self, line: str) -> None:
        """An `ApiReport` in JSON. One that is none is logged."""
        try:
            report = _read_report(line)
        except msgspec.MsgspecError as error:
            log.warning("ignored a malformed report of an API process: %s", error)
            return
        self._latest.pop(report.pid, None)
        self._latest[report.pid] = report.stats
        while len(self._latest) > MOST_PROCESSES:
            self._retired = add_up((self._retired, self._latest.popitem(last=False)[1]))
        for digest, names in report.references.items():
            self.names.add(digest, names, time.monotonic())

    def total(self) -> RequestStats:
        """Sums over all processes."""
        return add_up((self._retired, *self._latest.values()))


class ReplicaFeed:
    """The supervisor's observer. `snapshot` is replaced as a whole, so that any thread may read it.

    `restarts`: of processes, by what they are and why. `ask_api`: set by who can ask the API processes; whether all are
    up, once those have answered.
    """

    def __init__(self, model: str, max_adapters: int, engine_address: str, adapter_address: str) -> None:
        self.snapshot = Snapshot(model, max_adapters)
        self._addresses = engine_address, adapter_address
        self._engine: EngineClient | None = None
        self._adapters: AdapterClient | None = None
        self._ready: EngineReady | None = None
        self._reports = ApiReports()
        self._tokens = AdapterTokens()
        self._staged: list[StagedAdapter] = []  # as it was when `_listed` was true
        self._listed: tuple[AdapterStats, set[str]] | None = None
        self.restarts: Counter[tuple[str, str]] = Counter()
        self.ask_api: Callable[[], Awaitable[bool]] | None = None

    def on_report(self, line: str) -> None:
        """An API process says what it has counted."""
        self._reports.hear(line)

    def on_event(self, event: str) -> None:
        """A process has ended or was started again."""
        if event == "engine_down" and self._engine is not None:
            self._engine.engine_down()
        elif event == "adapters_down" and self._adapters is not None:
            self._adapters.adapters_down()

    def on_restart(self, role: str, *, was_hung: bool) -> None:
        """A process has ended and is started again."""
        self.restarts[role, "hang" if was_hung else "end"] += 1

    async def ask_engine(self) -> None:
        """Returns when the engine has answered; raises EngineUnavailable while it cannot be asked."""
        if self._engine is None:
            raise EngineUnavailable("the engine is not known yet")
        await self._engine.stats()

    async def ask_adapters(self) -> None:
        """Returns when the adapter process has answered; raises SourceUnavailable while it cannot be asked."""
        if self._adapters is None:
            raise SourceUnavailable("the adapter process is not known yet")
        await self._adapters.stats()

    async def run(self) -> None:
        """Ask every second, until cancelled."""
        engine_address, adapter_address = self._addresses
        engine = self._engine = EngineClient(engine_address, CLIENT_NAME)
        adapters = self._adapters = AdapterClient.start(adapter_address, CLIENT_NAME)
        following = asyncio.create_task(self._follow(engine))
        try:
            while True:
                try:
                    await self._poll(engine, adapters)
                except Exception:
                    log.exception("the metrics are not kept up to date")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            following.cancel()
            await engine.close()
            await adapters.close()

    async def _follow(self, engine: EngineClient) -> None:
        while True:
            try:
                self._ready = await engine.hello()
            except EngineUnavailable:
                await asyncio.sleep(RETRY_HELLO_SECONDS)
                continue
            except Exception:
                log.exception("the engine's memory is not known")
                await asyncio.sleep(POLL_SECONDS)
                continue
            await engine.wait_down()
            self._ready = None

    async def _poll(self, engine: EngineClient, adapters: AdapterClient) -> None:
        before, names = self.snapshot, self._reports.names
        (engine_stats, residents), is_api_up = await asyncio.gather(_ask_engine(engine), self._ask_api())
        wanted = {resident.digest for resident in residents}
        wanted.update(engine_stats.adapters_waiting if engine_stats else ())
        adapter_stats = await self._ask_adapters(adapters, wanted)
        names.forget(wanted, time.monotonic())
        if engine_stats is not None:
            self._tokens.update(engine_stats.tokens_by_adapter, canonical_names(self._staged), time.monotonic())
        self.snapshot = Snapshot(
            before.model,
            before.max_adapters,
            engine_stats,
            self._ready.memory if self._ready else None,
            residents,
            adapter_stats,
            frozenset(adapter.digest for adapter in self._staged if adapter.level == "HOST"),
            names.all(self._staged),
            self._reports.total(),
            self._tokens.totals(),
            dict(self.restarts),
            is_api_up,
        )

    async def _ask_api(self) -> bool:
        if self.ask_api is None:
            return False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self.ask_api()
        except TimeoutError:
            return False

    async def _ask_adapters(self, adapters: AdapterClient, wanted: set[str]) -> AdapterStats | None:
        """The list of what is staged may be long: it is asked for only if something has changed."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                stats = await adapters.stats()
                news = msgspec.structs.replace(stats, registry_heard_at=None), wanted
                if self._listed != news:
                    self._staged = await adapters.list_staged(tuple(wanted))
                    self._listed = news
                return stats
        except (LoraplexError, TimeoutError):
            self._staged, self._listed = [], None
            return None


async def _ask_engine(engine: EngineClient) -> tuple[EngineStats | None, tuple[ResidentAdapter, ...]]:
    if not engine.is_up:
        return None, ()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await engine.stats(), tuple(await engine.list_resident())
    except (LoraplexError, TimeoutError):
        return None, ()


def canonical_names(staged: Iterable[StagedAdapter]) -> dict[str, str]:
    """NAMESPACE/ADAPTER@VERSION by digest, of one of its versions."""
    found = {}
    for adapter in staged:
        if adapter.version:
            namespace, name, number = parse_version_name(adapter.version, "version")
            found[adapter.digest] = f"{namespace}/{name}@{number}"
    return found


def _shortest(version: str) -> str:
    """The shortest reference of a version's adapter, as a client of its own or the default namespace would write it."""
    namespace, adapter, _ = parse_version_name(version, "version")
    return adapter if namespace == DEFAULT_NAMESPACE else f"{namespace}/{adapter}"
