"""An engine of this process over adapters that are packed already, for measurements: no services, no processes."""

import time
from collections.abc import Callable, Sequence

from inference_service.engine.blocks import BlockAllocator
from inference_service.engine.config import DtypeName, EngineConfig
from inference_service.engine.engine import Engine
from inference_service.engine.runner import ModelRunner
from inference_service.engine.scheduler import Scheduler
from inference_service.lora.pool import AdapterPool
from inference_service.lora.slots import SlotTable
from inference_service.types import GenerateSpec, TokenLogprobs
from tests.kinds.packed import Packed

KV_CACHE_BYTES = 64 << 20


class PackedEngine:
    """An engine of one device, warmed up, into whose `slots` the adapters of `packed` go when they are asked for.

    Args:
        packed: The base model and the adapters, in pinned memory for a GPU.
        runner: What runs the steps.
        device: cpu or cuda.
        dtype: Of the model, and of the adapters as they were packed.
        slots: Adapters at once.
    """

    def __init__(
        self, packed: Packed, runner: type[ModelRunner], device: str, dtype: DtypeName, slots: int, num_seqs: int = 32
    ) -> None:
        config = EngineConfig(
            model=str(packed.folder), device="cuda" if device == "cuda" else "cpu", dtype=dtype, max_num_seqs=num_seqs,
            kv_cache_bytes=KV_CACHE_BYTES, max_batched_tokens=512, max_model_len=128, prefix_caching=False,
            adapter_memory_bytes=packed.host.numel(), max_adapters=slots,
        )  # fmt: skip
        made = runner(config, packed.host)
        made.warm_up()
        self._packed = packed
        self._asked: list[str] = []
        table = SlotTable(slots, made.arena_bytes)
        self._pool = AdapterPool(table, made.arena, self._asked.append, lambda digest: None, time.monotonic)
        blocks = BlockAllocator(made.num_blocks, made.block_size, config.prefix_caching)
        self.engine = Engine(made, Scheduler(made.limits, blocks, self._pool), "measured")

    def run(
        self, specs: Sequence[GenerateSpec]
    ) -> tuple[dict[str, tuple[list[int], list[float]]], dict[str, list[TokenLogprobs]]]:
        """Tokens and their log-probabilities by request, and prompt log-probabilities by request."""
        answers: dict[str, tuple[list[int], list[float]]] = {}
        scores: dict[str, list[TokenLogprobs]] = {}
        self.submit(specs)
        while self.is_busy:
            self._answer_adapters()
            for output in self.engine.step(time.monotonic()).values():
                assert not output.failed, output.failed
                for delta in output.deltas:
                    tokens, logprobs = answers.setdefault(delta.request_id, ([], []))
                    tokens += delta.token_ids
                    logprobs += [entry.logprob for entry in delta.logprobs or ()]
                scores |= {scored.request_id: list(scored.tokens) for scored in output.prompt_logprobs}
        return answers, scores

    def submit(self, specs: Sequence[GenerateSpec]) -> None:
        for spec in specs:
            self.engine.submit(b"", spec)

    @property
    def is_busy(self) -> bool:
        return self.engine.scheduler.has_work

    def step_seconds(self, clock: Callable[[], float]) -> float:
        """Of one step, by `clock`."""
        self._answer_adapters()
        started = clock()
        for output in self.engine.step(time.monotonic()).values():
            assert not output.failed, output.failed
        return clock() - started

    def _answer_adapters(self) -> None:
        while self._asked:
            self._pool.on_acquired(self._packed.acquired[self._asked.pop(0)])
        self._pool.poll()
