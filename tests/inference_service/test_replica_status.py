"""GetReplicaStatus: what both processes say, to callers who may see different adapters."""

import pytest

from inference_service import control_servicer
from inference_service.replica_status import digests_of, replica_status, visible_name
from inference_service.stats import SECONDS_BOUNDS, AdapterStats, EngineStats, LoadInFlight, Seconds, TokenCounts, Usage
from inference_service.types import MemoryBudget
from loraplex.inference.v1 import control_pb2 as pb
from loraplex.inference.v1.control_pb2_grpc import AdapterControlServiceStub
from tests.inference_service.serving_fakes import FakeAdapters, FakeEngine, serving

MINE = "namespaces/default/adapters/mine/versions/1"
OTHERS = "namespaces/others/adapters/theirs/versions/1"


def seconds(*durations: float) -> Seconds:
    histogram = Seconds()
    for duration in durations:
        histogram.add(duration)
    return histogram


ENGINE = EngineStats(
    num_running=3, num_waiting=4, num_waiting_for_adapter=2, requests_running={"": 1, "d1": 2},
    requests_waiting={"d2": 1, "d3": 5}, kv_blocks=Usage(7, 40), block_size=16, arena=Usage(600, 1000),
    arena_pinned_bytes=100, arena_free_in_gaps=50, slots=Usage(2, 8), prefix_tokens_queried=100, prefix_tokens_hit=64,
    num_preemptions=1, tokens=TokenCounts(200, 300), tokens_by_adapter={}, hits={"gpu": 9, "source": 1},
    load_seconds={"copy": seconds(0.002, 0.004, 0.004)}, evictions={"bytes": 2}, needless_reloads=0, moves=3,
    moved_bytes=4096,
    loads_in_flight=[LoadInFlight("d2", "ACQUIRING", 0.0, 1.0), LoadInFlight("d3", "COPYING", 0.5, 2.0, 64, 128)],
    load_failures={"ADAPTER_INVALID": 1}, adapters_waiting=["d3", "d2"], waited_longest=2.5,
)  # fmt: skip
ADAPTERS = AdapterStats(
    host=Usage(500, 2000), host_held_bytes=128, host_adapters=4, disk=Usage(9000, 10_000), disk_adapters=6,
    loads_in_flight=[LoadInFlight("d2", "FETCHING", 0.25, 1.5, 25, 100)], load_seconds={"fetch": seconds(1.0)},
    fetched_bytes=9000, failures={"SOURCE_UNAVAILABLE": 2}, evictions={"host": 3, "disk": 0}, registry_revision=17,
    base_model_conflict="another tiny",
)  # fmt: skip


async def test_everything_that_both_processes_say() -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    engine.said, adapters.said = ENGINE, ADAPTERS
    adapters.resolved = {"d2": MINE, "d3": OTHERS}
    async with serving(engine, adapters) as (_, channel):
        status = await AdapterControlServiceStub(channel).GetReplicaStatus(pb.GetReplicaStatusRequest())
    assert status.engine.gpu == pb.TierUsage(used_bytes=600, budget_bytes=1000, held_bytes=100, num_adapters=2)
    assert status.adapters.host == pb.TierUsage(used_bytes=500, budget_bytes=2000, held_bytes=128, num_adapters=4)
    assert status.adapters.disk == pb.TierUsage(used_bytes=9000, budget_bytes=10_000, num_adapters=6)
    assert (status.engine.slots_used, status.engine.slots_total, status.engine.scattered_bytes) == (2, 8, 50)
    assert (status.engine.running_sequences, status.engine.waiting_sequences) == (3, 4)
    assert (status.engine.waiting_for_adapter, status.engine.longest_wait_seconds) == (2, 2.5)
    assert dict(status.engine.hits) == {"gpu": 9, "source": 1}
    assert dict(status.engine.evictions) == {"bytes": 2}
    assert dict(status.engine.load_failures) == {"ADAPTER_INVALID": 1}
    copy = status.engine.load_seconds["copy"]
    assert (copy.count, copy.sum_seconds) == (3, pytest.approx(0.010))
    assert 0.001 < copy.median_seconds < 0.005
    assert status.adapters.registry_revision == 17
    assert status.adapters.base_model_conflict == "another tiny"
    assert dict(status.adapters.evictions) == {"host": 3, "disk": 0}
    assert (status.engine.prompt_tokens, status.engine.generated_tokens) == (200, 300)
    assert (status.engine.kv_blocks_used, status.engine.kv_blocks_total, status.engine.kv_block_size) == (7, 40, 16)
    # Of another namespace's adapter, nothing but its share of the sums.
    (load,) = status.loads_in_flight
    assert (load.adapter_version, load.digest, load.phase) == (MINE, "d2", pb.LoadInFlight.PHASE_FETCHING)
    assert (load.progress, load.elapsed_seconds, load.bytes_done, load.bytes_total) == (0.25, 1.5, 25, 100)
    assert [(a.adapter_version, a.waiting_requests) for a in status.waiting_adapters] == [(MINE, 1)]


async def test_what_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_servicer, "STATS_SECONDS", 0.05)
    engine, adapters = FakeEngine(), FakeAdapters()
    async with serving(engine, adapters) as (_, channel):
        stub = AdapterControlServiceStub(channel)
        neither = await stub.GetReplicaStatus(pb.GetReplicaStatusRequest())
        adapters.said = ADAPTERS
        only_adapters = await stub.GetReplicaStatus(pb.GetReplicaStatusRequest())
        engine.said, adapters.said = ENGINE, None
        only_engine = await stub.GetReplicaStatus(pb.GetReplicaStatusRequest())
    assert neither == pb.GetReplicaStatusResponse()
    assert (only_adapters.HasField("engine"), only_adapters.HasField("adapters")) == (False, True)
    assert not only_adapters.HasField("memory")
    assert (only_engine.HasField("engine"), only_engine.HasField("adapters")) == (True, False)
    assert only_engine.HasField("memory")


def test_the_memory_budget_is_the_engines() -> None:
    budget = MemoryBudget(
        total=100, other=1, weights=40, activations=5, reserve=2, adapter_arena=20, kv_cache=30, host_arena=50
    )
    shown = replica_status(ENGINE, None, budget, lambda digest: "").memory
    assert {name: getattr(shown, name) for name in shown.DESCRIPTOR.fields_by_name} == {
        "total": 100, "other": 1, "weights": 40, "activations": 5, "reserve": 2, "adapter_arena": 20, "kv_cache": 30,
        "host_arena": 50,
    }  # fmt: skip


def test_names_are_asked_for_once_and_shown_to_those_who_may_see_them() -> None:
    assert digests_of(ENGINE, ADAPTERS) == ["d2", "d3"]
    assert digests_of(None, None) == []
    assert visible_name([], lambda version: False) == ""
    assert visible_name([""], lambda version: False) == ""
    assert visible_name([OTHERS, MINE], lambda version: version == MINE) == MINE
    assert visible_name([OTHERS], lambda version: version == MINE) is None


@pytest.mark.parametrize("share", [0.5, 0.99])
@pytest.mark.parametrize("durations", [[0.003] * 10, [0.0, 0.2, 7.0], [0.004, 0.004, 100.0], [31.0]])
def test_quantiles_lie_in_the_bucket_of_the_true_one_and_exceed_nothing_that_happened(
    share: float, durations: list[float]
) -> None:
    true = sorted(durations)[min(int(share * len(durations)), len(durations) - 1)]
    bounds = [0.0, *SECONDS_BOUNDS]
    lower = max(bound for bound in bounds if bound <= true)
    upper = min([bound for bound in bounds if bound >= true] + [max(durations)])
    assert lower <= seconds(*durations).quantile(share) <= upper
    assert Seconds().quantile(share) == 0.0
