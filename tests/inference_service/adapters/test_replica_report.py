"""Reports: deltas of what was acknowledged, everything again after anything else."""

import pytest

from inference_service.adapters import replica_report
from inference_service.adapters.replica_report import ReplicaReporter
from inference_service.adapters.residency import HeldState
from loraplex.registry.v1 import registry_pb2
from shared.errors import EngineUnavailable, RegistryUnavailable

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


class _Residency:
    def __init__(self) -> None:
        self.observed_revision = 1
        self.held: dict[str, HeldState] = {}
        self.is_up = True

    async def states(self) -> dict[str, HeldState]:
        if not self.is_up:
            raise EngineUnavailable("down")
        return dict(self.held)


class _Registry:
    """Keeps what it is told as the real one does."""

    def __init__(self) -> None:
        self.known: dict[str, int] | None = None
        self.requests: list[registry_pb2.ReportReplicaStateRequest] = []
        self.loses = ""  # "request" or "answer"

    async def send(self, request: registry_pb2.ReportReplicaStateRequest) -> registry_pb2.ReportReplicaStateResponse:
        if self.loses == "request":
            raise RegistryUnavailable("down")
        self.requests.append(request)
        if self.known is None and not request.full:
            return registry_pb2.ReportReplicaStateResponse(needs_full=True)
        known = {} if request.full or self.known is None else self.known
        for digest in request.removed:
            del known[digest]
        known.update({state.digest: state.level for state in request.resident})
        self.known = known
        if self.loses == "answer":
            raise RegistryUnavailable("down")
        response = registry_pb2.ReportReplicaStateResponse()
        response.lease.FromSeconds(15)
        return response


@pytest.fixture
def residency() -> _Residency:
    return _Residency()


@pytest.fixture
def registry() -> _Registry:
    return _Registry()


@pytest.fixture
def reporter(residency: _Residency, registry: _Registry) -> ReplicaReporter:
    return ReplicaReporter("r", "tiny", residency, registry.send)  # type: ignore[arg-type]


async def test_everything_first_then_what_changes(
    residency: _Residency, registry: _Registry, reporter: ReplicaReporter
) -> None:
    residency.held = {A: HeldState("HOST"), "no digest": HeldState("HOST")}
    await reporter.report()
    await reporter.report()  # nothing has changed, and the lease is young
    residency.held = {A: HeldState("GPU", pinned=True), B: HeldState("FAILED", reason="FETCHING")}
    await reporter.report()
    residency.held = {B: HeldState("FAILED", reason="FETCHING")}
    residency.observed_revision = 2
    await reporter.report()
    first, second, third = registry.requests
    assert (first.full, first.replica, first.base_model, first.observed_revision) == (True, "r", "tiny", 1)
    assert [state.digest for state in first.resident] == [A]
    assert not second.full
    assert [(s.digest, s.level, s.pinned, s.reason) for s in second.resident] == [
        (A, 3, True, ""),
        (B, 4, False, "FETCHING"),
    ]
    assert (list(third.resident), list(third.removed), third.observed_revision) == ([], [A], 2)


@pytest.mark.parametrize("loses", ["request", "answer"])
async def test_a_report_that_is_not_acknowledged_is_made_again_in_full(
    residency: _Residency, registry: _Registry, reporter: ReplicaReporter, loses: str
) -> None:
    residency.held = {A: HeldState("HOST")}
    await reporter.report()
    residency.held = {B: HeldState("HOST")}
    registry.loses = loses
    with pytest.raises(RegistryUnavailable):
        await reporter.report()
    registry.loses = ""
    residency.held = {A: HeldState("HOST")}  # as it was acknowledged, and perhaps not as it is known
    await reporter.report()
    assert registry.requests[-1].full
    assert registry.known == {A: 2}


async def test_a_registry_that_forgot_is_told_everything(
    residency: _Residency, registry: _Registry, reporter: ReplicaReporter
) -> None:
    residency.held = {A: HeldState("HOST")}
    await reporter.report()
    registry.known = None
    residency.held = {A: HeldState("HOST"), B: HeldState("GPU")}
    await reporter.report()
    assert [request.full for request in registry.requests] == [True, False, True]
    assert registry.known == {A: 2, B: 3}


async def test_the_lease_is_kept(
    residency: _Residency, registry: _Registry, reporter: ReplicaReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reporter.report()
    monkeypatch.setattr(reporter, "_told_at", reporter._told_at - 6)
    await reporter.report()
    assert [request.full for request in registry.requests] == [True, False]


async def test_without_an_engine_nothing_is_held(
    residency: _Residency, registry: _Registry, reporter: ReplicaReporter
) -> None:
    residency.held = {A: HeldState("GPU")}
    await reporter.report()
    residency.is_up = False
    await reporter.report()
    assert registry.known == {}
    assert replica_report.LOOK_SECONDS < 15
