"""Sequences in steps: what one takes as it starts, how it goes on, what it gives back. `scheduler` says which ones."""

from typing import Protocol

from inference_service.engine.fairness import CACHED, OUTPUT, PROMPT, FairQueue
from inference_service.engine.kv_memory import KvMemory
from inference_service.engine.sequence import Sequence, State
from inference_service.engine.step import Chunk
from inference_service.lora.residents import Handle


class Adapters(Protocol):
    """What is asked of the slot pool for sequences in steps."""

    def acquire(self, digest: str) -> Handle:
        """Use a READY adapter: it keeps its slot until `release`."""
        ...

    def release(self, handle: Handle) -> None: ...


class RunningSet:
    """The running sequences, in the order in which they started, with their blocks and adapters.

    Args:
        queue: Where they come from; their tenants are charged there.
        memory: Their blocks.
        adapters: The slot pool.
    """

    def __init__(self, queue: FairQueue, memory: KvMemory, adapters: Adapters) -> None:
        self.sequences: dict[Sequence, None] = {}
        self._queue = queue
        self._memory = memory
        self._adapters = adapters

    def start(self, sequence: Sequence) -> None:
        """Out of the queue, with blocks for all its tokens and its adapter, both of which must be there."""
        flow = sequence.request.flow
        self._queue.leave(sequence)
        self._memory.admit(sequence)
        self._queue.charge(flow, CACHED * max(sequence.num_computed - sequence.num_charged, 0))
        sequence.num_charged = max(sequence.num_charged, sequence.num_computed)
        sequence.handle = None if flow.digest is None else self._adapters.acquire(flow.digest)
        sequence.state = State.RUNNING
        self.sequences[sequence] = None
        self._queue.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Give back what it holds. Its state is the caller's to set."""
        del self.sequences[sequence]
        self._queue.stop(sequence)
        self._memory.release(sequence)
        if sequence.handle is not None:
            self._adapters.release(sequence.handle)
            sequence.handle = None

    def decode(self, sequence: Sequence) -> Chunk:
        """`launch` of one token, for most of them."""
        if sequence.request.prompt_logprobs is not None:
            return self.launch(sequence, 1)
        start = sequence.num_computed
        self._charge(sequence, start + 1)
        sequence.num_computed = start + 1
        sequence.num_pending += 1
        return Chunk(sequence, start, 1, samples=True)

    def launch(self, sequence: Sequence, length: int) -> Chunk:
        """The sequence's next `length` tokens; it goes on behind them, and its tenant is charged."""
        start, end = sequence.num_computed, sequence.num_computed + length
        scored = range(0)
        if sequence.wants_prompt_logprobs:
            request = sequence.request
            scored = range(max(start, request.num_scored), min(end, sequence.num_prompt - 1))
            request.num_scored = max(request.num_scored, scored.stop)
        chunk = Chunk(sequence, start, length, samples=end == sequence.num_tokens, scored_positions=scored)
        self._charge(sequence, end)
        sequence.num_computed = end
        sequence.num_pending += chunk.samples
        return chunk

    def _charge(self, sequence: Sequence, end: int) -> None:
        """Its tokens up to `end` are computed now, some of them for the first time."""
        start = sequence.num_charged
        if start < end:
            of_prompt = max(min(end, sequence.num_prompt) - start, 0)
            self._queue.charge(sequence.request.flow, PROMPT * of_prompt + OUTPUT * (end - start - of_prompt))
            sequence.num_charged = end
