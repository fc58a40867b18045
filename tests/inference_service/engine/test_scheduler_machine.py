"""Whatever happens in whatever order: nothing is lost, computed twice, or left behind, and every answer is exact."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.errors import AdapterUnloaded
from tests.inference_service.engine.engine_fakes import build_engine, expected_tokens, spec

CLIENTS = (b"api-0", b"api-1")
ADAPTERS = ("x", "y", "z", "broken")
MAX_MODEL_LEN = 36

clients = st.sampled_from(CLIENTS)
adapters = st.sampled_from((None, None, *ADAPTERS))


class Traffic(RuleBasedStateMachine):
    """Rules are what API processes, operators and the adapter process do; `step` is the engine's."""

    @initialize(
        num_blocks=st.integers(9, 16),
        budget=st.integers(3, 12),
        prefix_caching=st.booleans(),
        looks_ahead=st.booleans(),
        max_running=st.sampled_from((0, 0, 1, 2)),
        max_queued=st.sampled_from((0, 0, 3)),
        num_slots=st.integers(1, 3),
    )
    def start(self, num_blocks, budget, prefix_caching, looks_ahead, max_running, max_queued, num_slots):
        self.engine = build_engine(
            num_blocks=num_blocks, budget=budget, prefix_caching=prefix_caching, looks_ahead=looks_ahead,
            max_num_seqs=3, max_model_len=MAX_MODEL_LEN, max_running_per_tenant=max_running,
            max_queued_per_tenant=max_queued, adapter_age_limit=5.0,
        )  # fmt: skip
        self.adapters = self.engine.scheduler.adapters
        self.adapters.num_slots = num_slots
        self.adapters.broken = {"broken"}
        self.num_blocks, self.now, self.count = num_blocks, 0.0, 0
        self.open, self.tokens, self.reasons, self.ended = {}, {}, {}, {}
        self.cut = set()  # sequences that were aborted alone

    @rule(
        client=clients,
        tenant=st.sampled_from("ab"),
        adapter=adapters,
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(0, 12),
        n=st.integers(1, 3),
        priority=st.integers(0, 1),
        patience=st.one_of(st.none(), st.integers(1, 20)),
        scores=st.booleans(),
    )
    def submit(self, client, tenant, adapter, prompt, max_tokens, n, priority, patience, scores):
        self.count += 1
        more = {"prompt_logprobs": 0} if scores else {}
        if patience is not None:
            more["deadline"] = self.now + patience
        name = f"r{self.count}"
        request = spec(
            name, prompt, max_tokens, n=n, adapter=adapter, tenant=tenant, priority=priority, arrival=self.now, **more
        )
        self.open[client, name] = request
        self.engine.submit(client, request)

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.hear(self.engine.step(self.now))
            self.engine.scheduler.check_integrity()
            self.now += 1.0

    @rule(data=st.data(), index=st.one_of(st.none(), st.integers(0, 2)))
    def abort(self, data, index):
        if self.open:
            client, name = data.draw(st.sampled_from(sorted(self.open)))
            self.engine.abort(client, name, index)
            self.cut.add((client, name, index))
            if index is None:
                self.ended[client, name] = self.open.pop((client, name))

    @rule(client=clients)
    def lose_client(self, client):
        self.engine.drop_client(client)
        for key in [key for key in self.open if key[0] == client]:
            self.ended[key] = self.open.pop(key)

    @rule()
    def bring_adapter(self):
        self.adapters.arrive()

    @rule(digest=st.sampled_from(ADAPTERS[:3]))
    def unload_by_force(self, digest):
        self.engine.fail_adapter(digest, AdapterUnloaded("unloaded"))

    @rule(digest=st.sampled_from(ADAPTERS[:3]), is_held=st.booleans())
    def hold(self, digest, is_held):
        (self.engine.scheduler.held_adapters.add if is_held else self.engine.scheduler.held_adapters.discard)(digest)

    @rule()
    def explode(self):
        self.engine.runner.explode = True
        self.step(1)
        self.engine.runner.explode = False

    @invariant()
    def nothing_disagrees(self):
        if hasattr(self, "engine"):
            self.hear(self.engine.take_output())
            self.engine.scheduler.check_integrity()

    def hear(self, outputs):
        for client, output in outputs.items():
            for failure in output.failed:
                self.ended[client, failure.request_id] = self.open.pop((client, failure.request_id))
            for delta in output.deltas:
                key = client, delta.request_id, delta.index
                assert key not in self.reasons, "more tokens after the last one"
                self.tokens.setdefault(key, []).extend(delta.token_ids)
                if delta.finish_reason:
                    self.reasons[key] = delta.finish_reason

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.held_adapters.clear()
        for _ in range(3000):
            if not self.engine.scheduler.has_work and not self.engine.is_computing:
                break
            self.adapters.arrive()
            self.step(1)
        assert not self.engine.scheduler.has_work, "starved"
        assert not self.engine.scheduler.requests
        assert self.engine.scheduler.blocks.num_free == self.num_blocks
        assert not any(self.adapters.users.values())
        for (client, name), request in {**self.open, **self.ended}.items():
            for index in range(request.sampling.n):
                at_most = min(request.stop.max_tokens, MAX_MODEL_LEN - len(request.prompt_ids))
                expected = expected_tokens(request.prompt_ids, at_most, index)
                got = self.tokens.get((client, name, index), [])
                assert got == expected[: len(got)]
                if (client, name, index) in self.reasons:
                    assert got == expected
                elif (client, name) in self.open:
                    assert (client, name, index) in self.cut, "lost"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
