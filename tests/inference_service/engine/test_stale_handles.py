"""A handle of a slot that was given away never reaches a kernel."""

from tests.inference_service.engine.engine_fakes import build_engine, spec

API = b"api-0"


def ready_engine():
    """One request on an adapter that is there, and one on the base model."""
    engine = build_engine()
    engine.scheduler.adapters.require("a")
    engine.scheduler.adapters.arrive()
    engine.submit(API, spec("on a", [1, 2, 3], adapter="a"))
    engine.submit(API, spec("base", [4, 5, 6]))
    return engine


def run(engine, steps=30):
    """Deltas and errors by request."""
    answers = {}
    for now in range(steps):
        output = engine.step(float(now)).get(API)
        for part in (*output.deltas, *output.failed) if output else ():
            answers.setdefault(part.request_id, []).append(part)
    return answers


def test_every_handle_is_checked_before_the_step_that_uses_it():
    engine = ready_engine()
    checked = []
    engine.scheduler.adapters.check = checked.append
    run(engine)
    steps_with_adapter = [slots for slots in engine.runner.slots if any(slot >= 0 for slot in slots)]
    assert [handle.slot for handle in checked] == [0] * len(steps_with_adapter)
    assert steps_with_adapter


def test_a_stale_one_ends_the_requests_of_its_step_and_computes_nothing():
    engine = ready_engine()
    engine.scheduler.adapters.stale = True
    answers = run(engine)
    assert engine.runner.slots == []
    assert {name: parts[-1].error.reason for name, parts in answers.items()} == {"on a": "INTERNAL", "base": "INTERNAL"}
    engine.scheduler.adapters.stale = False
    engine.submit(API, spec("later", [1, 2, 3], adapter="a"))
    assert len(run(engine)["later"]) == 4
    engine.scheduler.check_integrity()
