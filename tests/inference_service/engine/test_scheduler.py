import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.types import Stop
from shared.errors import AdapterUnloaded
from tests.inference_service.engine.engine_fakes import build_engine, expected_tokens, spec

API = b"api-0"


class Heard:
    """What an API process heard, by (request, index)."""

    def __init__(self):
        self.tokens, self.reasons, self.matched, self.failed, self.started, self.scores = {}, {}, {}, {}, {}, {}

    def hear(self, outputs):
        for output in outputs.values():
            for started in output.started:
                assert started.request_id not in self.started
                self.started[started.request_id] = started
            for scores in output.prompt_logprobs:
                assert scores.request_id not in self.scores
                self.scores[scores.request_id] = scores.tokens
            for delta in output.deltas:
                key = delta.request_id, delta.index
                assert key not in self.reasons
                self.tokens.setdefault(key, []).extend(delta.token_ids)
                if delta.finish_reason:
                    self.reasons[key] = delta.finish_reason
                    self.matched[key] = delta.matched_token
            for failure in output.failed:
                assert failure.request_id not in self.failed
                self.failed[failure.request_id] = failure.error


def run(engine, heard=None, *, max_steps=2000, now=0.0):
    heard = heard or Heard()
    for _ in range(max_steps):
        heard.hear(engine.step(now))
        engine.scheduler.check_integrity()
        if not engine.scheduler.has_work:
            return heard
    raise AssertionError("still busy")


def test_prompt_in_chunks_then_one_token_a_step():
    engine = build_engine(budget=5)
    engine.submit(API, spec("a", range(12), 3))
    heard = run(engine)
    assert [[c.length for c in s.chunks] for s in engine.runner.steps] == [[5], [5], [2], [1], [1]]
    assert heard.tokens["a", 0] == expected_tokens(range(12), 3)
    assert heard.reasons["a", 0] == "length"
    assert engine.scheduler.blocks.num_free == 16


def test_decodes_go_first_and_prefill_takes_the_rest():
    engine = build_engine(budget=4)
    engine.submit(API, spec("a", [1], 6))
    engine.step(0)
    engine.submit(API, spec("b", range(20), 1))
    engine.step(0)
    step = engine.runner.steps[-1]
    assert [(c.sequence.request.spec.request_id, c.length) for c in step.chunks] == [("a", 1), ("b", 3)]
    assert step.num_decodes == 1


def test_batch_is_sorted_by_adapter_slot():
    engine = build_engine(budget=64)
    adapters = engine.scheduler.adapters
    adapters.resident = {"x": 2, "y": 0}
    for i, adapter in enumerate(["x", "y", None, "x"]):
        engine.submit(API, spec(f"r{i}", [1, 2, i], 2, adapter=adapter))
    engine.step(0)
    engine.step(0)
    assert engine.runner.slots == [[-1, 0, 2, 2]] * 2


def test_waiting_for_an_adapter_lets_others_pass():
    engine = build_engine()
    engine.submit(API, spec("slow", [1, 2], adapter="late", arrival=1.0))
    engine.submit(API, spec("fast", [1, 2], arrival=2.0))
    heard = Heard()
    for step in range(6):
        heard.hear(engine.step(3.0 + step))
    assert heard.reasons.keys() == {("fast", 0)}
    assert engine.scheduler.adapters.wanted == ["late"]
    engine.scheduler.adapters.arrive()
    run(engine, heard, now=11.0)
    assert heard.tokens["slow", 0] == expected_tokens([1, 2], 4)
    assert heard.started["slow"].adapter_seconds == 10.0
    assert heard.started["fast"].adapter_seconds == 0.0


def test_a_failed_adapter_fails_only_its_own_requests():
    engine = build_engine()
    engine.scheduler.adapters.broken.add("bad")
    engine.submit(API, spec("a", [1], adapter="bad", n=2))
    engine.submit(API, spec("b", [1]))
    heard = run(engine)
    assert heard.failed["a"].reason == "ADAPTER_INVALID"
    assert ("b", 0) in heard.reasons


def test_priority_then_arrival():
    engine = build_engine(max_num_seqs=1)
    for name, priority, arrival in [("late", 0, 3.0), ("early", 0, 1.0), ("urgent", 5, 9.0)]:
        engine.submit(API, spec(name, [1], 1, priority=priority, arrival=arrival))
    assert list(run(engine).started) == ["urgent", "early", "late"]


def test_preemption_loses_and_repeats_nothing():
    engine = build_engine(num_blocks=6, budget=16, prefix_caching=False)
    prompts = {f"r{i}": [i, 2, 3, 4, 5] for i in range(3)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.submit(API, spec(name, prompt, 10, arrival=float(i)))
    heard = run(engine)
    starts = [c.sequence.request.spec.request_id for s in engine.runner.steps for c in s.chunks if c.start == 0]
    assert len(starts) > 3, "nothing was preempted"
    assert starts.count("r0") == 1, "the oldest is never the victim"
    for name, prompt in prompts.items():
        assert heard.tokens[name, 0] == expected_tokens(prompt, 10)


def test_siblings_share_the_prompt_through_the_prefix_cache():
    engine = build_engine(budget=32, num_blocks=32)
    engine.submit(API, spec("a", range(17), 3, n=3))
    heard = run(engine)
    lengths = [[(c.sequence.index, c.length) for c in s.chunks] for s in engine.runner.steps[:2]]
    assert lengths == [[(0, 17)], [(0, 1), (1, 1), (2, 1)]]
    for index in range(3):
        assert heard.tokens["a", index] == expected_tokens(range(17), 3, index)


def test_siblings_follow_when_the_first_is_aborted_early():
    engine = build_engine(budget=4)
    engine.submit(API, spec("a", range(10), 2, n=2))
    engine.step(0)
    engine.abort(API, "a", 0)
    heard = run(engine)
    assert heard.tokens == {("a", 1): expected_tokens(range(10), 2, 1)}


def test_cached_prefix_is_not_computed_again_unless_anything_differs():
    engine = build_engine(budget=32, num_blocks=64)
    base = spec("a", range(16), 1)
    engine.submit(API, base)
    assert run(engine).started["a"].cached_tokens == 0
    engine.submit(API, spec("b", range(16), 1))
    assert (
        run(engine).started["b"].cached_tokens == 16
    )  # the last is computed again for its logits, and written nowhere
    engine.submit(API, spec("c", range(17), 1))
    assert run(engine).started["c"].cached_tokens == 16
    engine.scheduler.adapters.resident = {"x": 0}
    for i, more in enumerate([{"tenant": "other"}, {"cache_salt": "s"}, {"adapter": "x"}, {"prompt_logprobs": 0}]):
        engine.submit(API, spec(f"d{i}", range(16), 1, **more))
        assert run(engine).started[f"d{i}"].cached_tokens == 0


def test_prompt_logprobs_come_once_complete_and_in_order():
    engine = build_engine(budget=5)
    engine.submit(API, spec("a", range(12), 2, prompt_logprobs=0))
    engine.submit(API, spec("one", [7], 1, prompt_logprobs=0))
    heard = run(engine)
    assert [(t.token_id, t.logprob) for t in heard.scores["a"]] == [(p + 1, -float(p)) for p in range(11)]
    assert heard.scores["one"] == []


def test_max_tokens_zero_scores_the_prompt():
    engine = build_engine()
    engine.submit(API, spec("a", range(64), 0, prompt_logprobs=0, n=2))
    heard = run(engine)
    assert heard.tokens == {("a", 0): [], ("a", 1): []}
    assert heard.reasons == {("a", 0): "length", ("a", 1): "length"}
    assert len(heard.scores["a"]) == 63


def test_stop_ids_eos_and_context_end():
    engine = build_engine(max_model_len=16)
    first, second, third = expected_tokens([1, 2], 3)
    engine.runner.eos_ids = (second,)
    engine.submit(API, spec("eos", [1, 2], 9))
    engine.submit(API, spec("stop", [1, 2], stop=Stop(9, token_ids=(first,))))
    engine.submit(API, spec("ignored", [1, 2], stop=Stop(3, ignore_eos=True)))
    engine.submit(API, spec("context", range(14), stop=Stop(99, ignore_eos=True)))
    heard = run(engine)
    assert (heard.tokens["eos", 0], heard.reasons["eos", 0], heard.matched["eos", 0]) == (
        [first, second], "stop", None,
    )  # fmt: skip
    assert (heard.tokens["stop", 0], heard.matched["stop", 0]) == ([first], first)
    assert heard.tokens["ignored", 0] == [first, second, third]
    assert (len(heard.tokens["context", 0]), heard.reasons["context", 0]) == (2, "length")


def test_an_adapters_own_eos_ends_its_requests_alone():
    engine = build_engine(max_num_seqs=8)
    first, second, third = expected_tokens([1, 2], 3)
    engine.runner.eos_ids = (third,)
    engine.scheduler.adapters.resident = {"x": 0}
    own = {"adapter": "x", "prompt": [1, 2]}
    engine.submit(API, spec("own", n=2, stop=Stop(9, eos_ids=(second,)), **own))
    engine.submit(API, spec("ignored", stop=Stop(4, ignore_eos=True, eos_ids=(second,)), **own))
    engine.submit(API, spec("asked", stop=Stop(9, token_ids=(second,), eos_ids=(second,)), **own))
    engine.submit(API, spec("base's too", stop=Stop(9, eos_ids=(96,)), **own))
    engine.submit(API, spec("another", [1, 2], stop=Stop(9)))
    heard = run(engine)
    ended = {
        request: (tokens, heard.reasons[request, 0]) for (request, index), tokens in heard.tokens.items() if not index
    }
    assert ended == {
        "own": ([first, second], "stop"),
        "ignored": (expected_tokens([1, 2], 4), "length"),
        "asked": ([first, second], "stop"),
        "base's too": ([first, second, third], "stop"),
        "another": ([first, second, third], "stop"),
    }
    assert {key: matched for key, matched in heard.matched.items() if matched is not None} == {("asked", 0): second}
    for index in (0, 1):
        tokens = expected_tokens([1, 2], 9, index)
        ends = [tokens.index(token) for token in (second, third) if token in tokens]
        assert heard.tokens["own", index] == tokens[: min(ends, default=8) + 1]


def test_deadline_and_abort_free_everything_at_once():
    engine = build_engine()
    engine.scheduler.adapters.resident = {"x": 0}
    engine.submit(API, spec("a", range(9), 50, adapter="x", deadline=5.0))
    engine.submit(API, spec("b", range(9), 50, adapter="x", n=2))
    engine.submit(API, spec("c", [1], adapter="never", deadline=6.0))
    heard = Heard()
    heard.hear(engine.step(0.0))
    assert engine.scheduler.next_deadline() == 5.0
    heard.hear(engine.step(5.0))
    assert heard.failed["a"].reason == "DEADLINE_UNREACHABLE"
    engine.abort(API, "b")
    engine.abort(API, "unknown")
    engine.abort(b"other", "c")
    assert engine.scheduler.adapters.users == {"x": 0}
    assert engine.scheduler.blocks.num_free == 16
    run(engine, heard, now=6.0)
    assert heard.failed.keys() == {"a", "c"}


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (spec("r", []), "prompt"),
        (spec("r", range(64)), "prompt"),
        (spec("r", [97]), "prompt.token_ids"),
        (spec("r", [-1]), "prompt.token_ids"),
        (spec("r", [1], n=0), "sampling.n"),
        (spec("r", [1], stop=Stop(1, token_ids=(97,))), "stop.token_ids"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_field(bad, field):
    engine = build_engine()
    engine.submit(API, bad)
    (failure,) = engine.take_output()[API].failed
    assert [v.field for v in failure.error.violations] == [field]
    assert not engine.scheduler.has_work


def test_queue_is_bounded_and_ids_are_unique_per_client():
    engine = build_engine(max_queue=2)
    for name in ("a", "b", "c"):
        engine.submit(API, spec(name, [1]))
    engine.submit(API, spec("a", [1]))
    engine.submit(b"api-1", spec("a", [1]))
    outputs = engine.take_output()
    assert [(f.request_id, f.error.reason) for f in outputs[API].failed] == [
        ("c", "QUEUE_FULL"), ("a", "REQUEST_ID_REUSED"),
    ]  # fmt: skip
    assert outputs[API].failed[0].error.retry_after
    assert outputs[b"api-1"].failed[0].error.reason == "QUEUE_FULL"


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_missed_deadline_is_told_in_the_step_that_sees_it(looks_ahead):
    """Later there may be another client of that name."""
    engine = build_engine(looks_ahead=looks_ahead)
    engine.submit(API, spec("runs", [1], 20))
    engine.submit(API, spec("waits", [2], adapter="never", deadline=1.0))
    engine.step(0.0)
    assert [failure.request_id for failure in engine.step(1.0)[API].failed] == ["waits"]
    engine.drop_client(API)
    assert not any(output.failed for output in engine.step(2.0).values())


def test_an_exception_in_a_step_fails_that_step_only():
    engine = build_engine(max_num_seqs=1)
    engine.submit(API, spec("a", range(6), arrival=1.0))
    engine.submit(API, spec("b", range(6), arrival=2.0))
    engine.step(0)
    engine.runner.explode = True
    heard = Heard()
    heard.hear(engine.step(0))
    engine.runner.explode = False
    assert heard.failed["a"].reason == "INTERNAL"
    assert "boom" not in heard.failed["a"].message
    run(engine, heard)
    assert heard.tokens["b", 0] == expected_tokens(range(6), 4)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_an_output_that_is_not_finite_fails_its_request_only(looks_ahead):
    engine = build_engine(looks_ahead=looks_ahead)
    engine.scheduler.adapters.resident = {"x": 0, "y": 1}
    for name, adapter, n in (("a", "x", 2), ("b", "y", 1), ("c", None, 1)):
        engine.submit(API, spec(name, range(6), adapter=adapter, n=n))
    engine.runner.overflows = {"x", None}
    heard = run(engine)
    assert heard.failed["a"].reason == "ADAPTER_INVALID"
    assert heard.failed["a"].metadata == {"digest": "x"}
    assert "not finite" in heard.failed["a"].message
    assert "lora_alpha" in heard.failed["a"].message.rpartition("; ")[2]
    assert heard.failed["c"].message.startswith("internal error (id ")
    assert heard.tokens == {("b", 0): expected_tokens(range(6), 4)}
    assert engine.scheduler.adapters.users == {"x": 0, "y": 0}


def test_a_gone_client_and_a_forced_adapter_leave_nothing():
    engine = build_engine()
    engine.scheduler.adapters.resident = {"x": 0}
    engine.submit(API, spec("a", range(6)))
    engine.submit(b"api-1", spec("a", range(6), adapter="x"))
    engine.step(0)
    engine.drop_client(API)
    engine.fail_adapter("x", AdapterUnloaded("unloaded"))
    outputs = engine.take_output()
    assert outputs.keys() == {b"api-1"}
    assert not engine.scheduler.has_work
    engine.scheduler.check_integrity()


requests = st.lists(
    st.tuples(
        st.integers(0, 6),  # step of arrival
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.integers(0, 12),  # max_tokens
        st.integers(1, 3),  # n
        st.sampled_from([None, None, "x", "y", "z"]),
        st.integers(0, 1),  # priority
        st.one_of(st.none(), st.integers(1, 30)),  # aborted after so many steps
        st.booleans(),  # prompt logprobs
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=120, deadline=None)
@given(
    requests,
    st.integers(9, 14),
    st.integers(3, 12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), range(0, 97, 9)]),
)
def test_any_traffic_keeps_the_invariants(arrivals, num_blocks, budget, prefix_caching, looks_ahead, eos_ids):
    engine = build_engine(
        num_blocks=num_blocks, max_num_seqs=3, budget=budget, max_model_len=36, prefix_caching=prefix_caching,
        looks_ahead=looks_ahead,
    )  # fmt: skip
    engine.runner.eos_ids = tuple(eos_ids)
    engine.scheduler.adapters.num_slots = 2
    heard, aborted = Heard(), set()
    for step in range(1500):
        for number, (at, prompt, max_tokens, n, adapter, priority, abort_at, scores) in enumerate(arrivals):
            if at == step:
                more = {"prompt_logprobs": 0} if scores else {}
                request = spec(f"r{number}", prompt, max_tokens, n=n, adapter=adapter, priority=priority,
                               arrival=float(step), **more)  # fmt: skip
                engine.submit(API, request)
            if abort_at is not None and step == at + abort_at:
                aborted.add(f"r{number}")
                engine.abort(API, f"r{number}")
        if step % 3 == 0:
            engine.scheduler.adapters.arrive()
        heard.hear(engine.step(float(step)))
        engine.scheduler.check_integrity()
        if step > 40 and not engine.scheduler.has_work:
            break
    assert not engine.scheduler.has_work, "starved"
    assert engine.scheduler.blocks.num_free == num_blocks
    assert not any(engine.scheduler.adapters.users.values())
    assert not heard.failed
    assert all(sum(c.length for c in s.chunks) <= budget and len(s.chunks) <= 3 for s in engine.runner.steps)
    for number, (_, prompt, max_tokens, n, *_) in enumerate(arrivals):
        for index in range(n):
            expected = expected_tokens(prompt, min(max_tokens, 36 - len(prompt)), index)
            end = next((i for i, token in enumerate(expected, 1) if token in eos_ids), None)
            expected = expected[:end]
            got = heard.tokens.get((f"r{number}", index), [])
            assert got == expected[: len(got)]
            if f"r{number}" not in aborted:
                assert got == expected
                assert heard.reasons[f"r{number}", index] == ("stop" if end else "length")
