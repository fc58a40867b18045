"""Microseconds of `Scheduler.schedule()`, 256 sequences running and 1,000 waiting: `python -m tests.bench.scheduler`.

No model, no GPU: the slot pool's policy is real, its copies arrive at once. The device computes a decode step in about
5 ms meanwhile, of which this must take little.
"""

import statistics
import time
from collections.abc import Sequence

from inference_service.engine.blocks import BlockAllocator, ChainSeed
from inference_service.engine.config import EngineLimits
from inference_service.engine.scheduler import Scheduler
from inference_service.engine.sequence import Request
from inference_service.lora.pool import AdapterPool
from inference_service.lora.residents import Move
from inference_service.lora.slots import SlotTable
from inference_service.types import Acquired, BlobLayout, ChunkLayout, GenerateSpec, Sampling, Stop

RUNNING, WAITING, STEPS = 256, 1000, 200
ADAPTER_BYTES = 1024
SEED = ChainSeed(b"bench")
LAYOUT = BlobLayout(ADAPTER_BYTES, 16, "bfloat16", (ChunkLayout(0, 0, ADAPTER_BYTES, ()),))


class Arrived:
    bytes_left = 0

    def is_done(self) -> bool:
        return True


class NoArena:
    def load(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int], host_offset: int) -> Arrived:
        return Arrived()

    def clear(self, slot: int) -> None: ...

    def move(self, moves: Sequence[Move]) -> None: ...

    def relocate(self, slot: int, layout: BlobLayout, chunk_offsets: Sequence[int]) -> None: ...


class Load:
    """`tenants` with requests for `adapters` (0: the base model), room for 32 of these."""

    def __init__(self, tenants: int, adapters: int) -> None:
        self.tenants, self.adapters, self.count = tenants, adapters, 0
        self.asked: list[str] = []
        self.pool = AdapterPool(
            SlotTable(128, 32 * ADAPTER_BYTES), NoArena(), self.asked.append, lambda _: None, time.monotonic
        )
        limits = EngineLimits(max_model_len=4096, max_num_seqs=RUNNING, max_batched_tokens=8192, max_queue=10_000)
        self.scheduler = Scheduler(limits, BlockAllocator(40_000, 16), self.pool)
        for number in range(RUNNING):
            self.submit(f"a{number % 16}" if adapters else None)
        while len(self.scheduler.running) < RUNNING:
            self.step()
        for number in range(WAITING):
            self.submit(f"a{number % adapters}" if adapters else None)

    def submit(self, digest: str | None) -> None:
        self.count += 1
        prompt = [(self.count + place) % 1000 for place in range(64)]
        tenant = f"t{self.count % self.tenants}"
        spec = GenerateSpec(
            str(self.count), prompt, Sampling(temperature=0.0), Stop(10**6), digest, tenant, arrival=time.monotonic()
        )
        self.scheduler.add(Request(spec, b"bench", SEED, self.count))

    def step(self) -> float:
        """Seconds that deciding one step took."""
        while self.asked:
            self.pool.on_acquired(Acquired(self.asked.pop(), 0, LAYOUT))
        self.pool.poll()
        began = time.perf_counter()
        schedule = self.scheduler.schedule(time.monotonic())
        seconds = time.perf_counter() - began
        for chunk in schedule.chunks:
            self.scheduler.advance(chunk)
            if chunk.samples:
                chunk.sequence.token_ids.append(1)
        return seconds


def main() -> None:
    print("tenants  adapters  µs: least  median  with an arrival for another adapter each step")
    for tenants, adapters in ((1, 0), (1, 1), (1, 32), (1, 1000), (10, 1000), (1000, 1000), (1000, 0)):
        load = Load(tenants, adapters)
        steady = [load.step() for _ in range(STEPS)]
        arriving = []
        for number in range(STEPS):
            load.submit(f"b{number}" if adapters else None)
            arriving.append(load.step())
        figures = (min(steady), statistics.median(steady), statistics.median(arriving))
        print(f"{tenants:7}  {adapters:8}  {'  '.join(f'{1e6 * figure:9.0f}' for figure in figures)}")


if __name__ == "__main__":
    main()
