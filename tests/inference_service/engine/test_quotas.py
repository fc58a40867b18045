import pytest

from inference_service.engine.quotas import TenantLimits
from shared.errors import TenantQuota
from tests.inference_service.engine.engine_fakes import build_engine, expected_tokens, spec

API = b"api-0"


def test_queued_requests_of_one_tenant_are_bounded():
    engine = build_engine(max_queued_per_tenant=3, max_num_seqs=1)
    for number in range(5):
        engine.submit(API, spec(f"a{number}", [1], tenant="a"))
    engine.submit(API, spec("b", [1], tenant="b"))
    failed = engine.take_output()[API].failed
    assert [(f.request_id, f.error.reason) for f in failed] == [("a3", "TENANT_QUOTA"), ("a4", "TENANT_QUOTA")]
    assert all(f.error.retry_after for f in failed)
    assert failed[0].error.metadata == {"limit": "queued_requests", "value": "3"}
    engine.step(0.0)  # a0 runs now
    engine.submit(API, spec("a5", [1], tenant="a"))
    engine.submit(API, spec("a6", [1], tenant="a"))
    assert [f.request_id for f in engine.take_output()[API].failed] == ["a6"]
    engine.scheduler.check_integrity()


def test_a_request_alone_may_have_more_sequences_than_the_limit():
    limits = TenantLimits(max_queued=2)
    limits.check_queued(0, 5, 1.0)
    with pytest.raises(TenantQuota):
        limits.check_queued(1, 2, 1.0)
    TenantLimits().check_queued(10**6, 1, 1.0)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_running_requests_of_one_tenant_are_bounded_and_the_others_wait(looks_ahead):
    engine = build_engine(max_running_per_tenant=2, looks_ahead=looks_ahead)
    for number in range(5):
        engine.submit(API, spec(f"a{number}", [number, 1], 6, tenant="a"))
    engine.submit(API, spec("b", [1, 2], 6, tenant="b"))
    tokens, most = {}, 0
    while engine.scheduler.has_work:
        for output in engine.step(0.0).values():
            for delta in output.deltas:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        running = [sequence.request.spec.tenant for sequence in engine.scheduler.running]
        most = max(most, running.count("a"))
        engine.scheduler.check_integrity()
    assert most == 2
    assert tokens["b"] == expected_tokens([1, 2], 6)
    assert all(tokens[f"a{number}"] == expected_tokens([number, 1], 6) for number in range(5))


def test_a_tenant_at_its_limit_holds_nobody_up():
    engine = build_engine(max_running_per_tenant=1)
    for number in range(4):
        engine.submit(API, spec(f"a{number}", [1], 50, tenant="a"))
    engine.step(0.0)
    engine.submit(API, spec("b", [1], 1, tenant="b"))
    outputs = engine.step(1.0)
    assert [s.request_id for s in outputs[API].started] == ["b"]
