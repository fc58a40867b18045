"""What a scrape of a running registry says of its calls, watches, cache and database."""

import asyncio
import dataclasses
import urllib.request
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest
import yaml
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.k8s.builds import K8S
from loraplex.registry.v1 import registry_pb2
from registry_service import adapter_cache, change_log
from registry_service.adapter_cache import AdapterCache
from registry_service.metrics import RegistryState
from registry_service.purging import Purger
from registry_service.watch import Watches, WatchRequest
from shared.auth import ANONYMOUS
from shared.errors import AdapterNotFound, InvalidArgument
from tests.registry_service.watching import Watch, add_adapters

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["AdapterRegistryService"]
EVERYTHING = WatchRequest("", "", None, skip_snapshot=False)


@pytest.fixture
def database_url(tmp_path):
    return f"sqlite:///{tmp_path}/registry.db"  # SQLAlchemy's pools are the same on Postgres


@pytest.fixture
def config(config):
    return dataclasses.replace(config, metrics_listen="127.0.0.1:0")


class Samples:
    """One scrape; `samples[name, label value, …]`, labels in their order."""

    def __init__(self, text):
        self._found = {
            (sample.name.removeprefix("loraplex_registry_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __getitem__(self, key):
        return self._found[key if isinstance(key, tuple) else (key,)]

    def has(self, key):
        return key in self._found

    def of(self, name):
        return {key[1:]: value for key, value in self._found.items() if key[0] == name}


@pytest.fixture
def scrape(running):
    def read():
        with urllib.request.urlopen(f"http://127.0.0.1:{running.metrics_port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            return answer.read().decode()

    async def scrape():
        return Samples(await asyncio.to_thread(read))

    return scrape


async def until(scrape, condition):
    """The first scrape that the condition holds of."""
    while not condition(samples := await scrape()):  # noqa: ASYNC110 - it is seen from outside only
        await asyncio.sleep(0.01)
    return samples


async def test_calls_are_counted_by_rpc_and_code(registry, folders, scrape):
    await registry.register(uri=folders.write())
    await registry.refused(InvalidArgument, "GetAdapter", name="UPPER")
    await registry.refused(AdapterNotFound, "ResolveAdapter", reference="nobody")
    watch = Watch(registry.stub)
    await watch.complete()
    during = await scrape()
    assert during["watchers"] == during["requests_running", "WatchAdapters"] == 1
    watch.cancel()
    cancelled = ("requests_total", "CANCELLED", "WatchAdapters")  # a moment after the watch has ended
    samples = await until(scrape, lambda samples: not samples["watchers"] and samples.has(cancelled))
    assert {labels: count for labels, count in samples.of("requests_total").items() if count} == {
        ("OK", "RegisterBaseModel"): 1,
        ("OK", "RegisterAdapter"): 1,
        ("INVALID_ARGUMENT", "GetAdapter"): 1,
        ("NOT_FOUND", "ResolveAdapter"): 1,
        ("CANCELLED", "WatchAdapters"): 1,
    }
    assert samples["request_seconds_count", "OK", "RegisterAdapter"] == 1
    assert not any("WatchAdapters" in key for key in samples.of("request_seconds_count"))
    assert samples["revision"] == 2


async def test_what_alerts_look_at_begins_at_0(scrape):
    """So that the first failure is growth, which `rate` sees."""
    told = (await scrape()).of("requests_total")
    assert {rpc for _, rpc in told} == {method.name for method in SERVICE.methods}
    assert {code for code, _ in told} == {"OK", "UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
    assert set(told.values()) == {0}


async def test_lookups_are_hits_misses_and_known_absences(registry, folders, scrape, monkeypatch):
    monkeypatch.setattr(adapter_cache, "ABSENT_SECONDS", 3600.0)
    monkeypatch.setattr(change_log, "MAX_LAG_SECONDS", 3600.0)
    await registry.register(uri=folders.write())
    before = (await scrape()).of("cache_lookups_total")
    for _ in range(2):
        await registry.resolve("a")
        await registry.refused(AdapterNotFound, "ResolveAdapter", reference="nobody")
    after = await scrape()
    found = {outcome: value - before[outcome] for outcome, value in after.of("cache_lookups_total").items()}
    assert found == {("hit",): 1, ("absent",): 1, ("miss",): 2}
    assert after["cached_adapters"] == 1


@pytest.fixture
def state(running):
    """Of the running registry's database and log, with watches and a purger of the test's own."""
    database = running.database
    watches = Watches(database, running.log, 0.02)
    return RegistryState(database, running.log, AdapterCache(database, 1), watches, Purger(database, timedelta(0)))


def samples_of(state):
    return Samples(generate_latest(state).decode())


async def test_a_watch_that_does_not_take_what_it_is_sent_lags(registry, running, state):
    batches = state.watches.watch(ANONYMOUS, EVERYTHING)
    await anext(batches)  # and does not come back for the next
    await add_adapters(running.database, ["b", "c"])
    assert await running.log.reaches(3, 30)
    samples = samples_of(state)
    assert (samples["watchers"], samples["watch_lag_revisions"]) == (1, 2)
    assert samples["watch_lag_seconds"] > 0
    while (samples := samples_of(state))["watch_lag_revisions"]:
        await anext(batches)
    await batches.aclose()
    samples = samples_of(state)
    assert (samples["watchers"], samples["watch_lag_seconds"]) == (0, 0)


async def test_connections_and_waits_for_them(registry, running, state, scrape):
    before = await scrape()
    async with running.database.engine.connect():
        during = samples_of(state)
    assert during["pool_in_use", "transactions"] >= 1
    assert during["pool_size", "lookups"] >= 1
    await add_adapters(running.database, ["b"])
    after = await scrape()
    assert after["pool_wait_seconds_count"] > before["pool_wait_seconds_count"]
    assert after["pool_size", "transactions"] >= after["pool_idle", "transactions"] >= 1
    assert (after["pool_overflow", "lookups"], after["database_up"]) == (0, 1)


async def test_the_alert_of_a_full_pool_counts_what_may_be_opened_beyond_its_size(running, state):
    alerts = yaml.safe_load((K8S / "components" / "monitoring" / "alerts.yaml").read_text())
    rules = {rule["alert"]: rule for group in alerts["spec"]["groups"] for rule in group["rules"]}
    left, right = rules["LoraplexRegistryPoolFull"]["expr"].split(" >= ")

    def firing():
        samples = samples_of(state)
        used, bound = (samples.of(name.removeprefix("loraplex_registry_")) for name in (left, right))
        return {purpose for (purpose,), value in used.items() if value >= bound[purpose,]}

    await running.log.close()  # which takes a connection now and then
    engine, capacity = running.database.engine, int(samples_of(state)["pool_capacity", "transactions"])
    async with AsyncExitStack() as held:
        for number in range(capacity):
            assert firing() == set(), number
            await held.enter_async_context(engine.connect())
        assert samples_of(state)["pool_in_use", "transactions"] > samples_of(state)["pool_size", "transactions"]
        assert firing() == {"transactions"}
        with pytest.raises(TimeoutError):  # so it is full
            async with asyncio.timeout(0.1):
                await held.enter_async_context(engine.connect())
    assert firing() == set()


async def test_what_was_purged_is_counted(registry, folders, state):
    await registry.register(uri=folders.write())
    await registry.register(uri=folders.write(seed=1))
    await registry("DeleteAdapterVersion", name="namespaces/default/adapters/a/versions/1")
    async with state.database.engine.begin() as connection:
        await connection.exec_driver_sql("UPDATE adapter_versions SET purge_time = '2000-01-01 00:00:00.000000'")
    await state.purger.purge()
    assert samples_of(state).of("purged_total") == {("adapters",): 0, ("versions",): 1, ("replicas",): 0}
