"""How many adapters of mixed ranks are resident at once in an arena of 1 GiB: `python -m tests.bench.density`.

Ranks 8, 16 and 64 on all linears of SmolLM2-135M-Instruct, in float32 on the CPU, drawn at random and loaded one after
the other until twice as many have come as fit, so that most loads evict others and the arena is in pieces. Beside it,
what the residents' tensors take by themselves.
"""

import asyncio
import json
import random
import tempfile
from pathlib import Path

from examples.stack import MODEL
from loraplex import Client
from loraplex.inference.v1 import control_pb2
from shared.base_model import MODULES, ModelConfig, linear_shape, parse_config
from shared.model_folder import load_raw_config
from tests.bench.churn import Setting, load, register_all, service, status
from tests.bench.random_adapters import write_adapters

RANKS = (8, 16, 64)
ARENA_BYTES = 1 << 30
LOADS = 60


def tensor_bytes(model: ModelConfig, rank: int) -> int:
    """Of A and B of every linear, in float32."""
    per_layer = sum(sum(linear_shape(model, module)) for module in range(len(MODULES)))
    return 4 * rank * per_layer * model.num_layers


async def resident_ranks(client: Client) -> list[int]:
    """Ranks of what is on the device."""
    request = control_pb2.ListLoadedAdaptersRequest(page_size=1000)
    found = (await client.call(client.control.ListLoadedAdapters(request))).adapters
    return [adapter.rank for adapter in found if adapter.level == control_pb2.LoadedAdapter.LEVEL_GPU]


async def measure(folder: Path) -> dict[str, float]:
    model = parse_config(load_raw_config(MODEL))
    chooser = random.Random(0)
    names = {f"a-{number}": chooser.choice(RANKS) for number in range(LOADS)}
    for rank in RANKS:
        write_adapters(folder, [name for name in names if names[name] == rank], model, rank, MODULES)
    flags = ("--device=cpu", "--dtype=float32", "--max-model-len=512", f"--adapter-memory={ARENA_BYTES}")
    setting = Setting(model, MODEL, flags, max(RANKS), MODULES, 1, 1, 1.0)
    async with service(setting, folder, 1, 4, flags[-1]) as (client, _):
        await register_all(client, list(names))
        shares = []
        for name in names:
            await load(client, name)
            ranks = await resident_ranks(client)
            shares.append(sum(tensor_bytes(model, rank) for rank in ranks) / ARENA_BYTES)
        engine = (await status(client)).engine
    by_bytes = ARENA_BYTES / (sum(tensor_bytes(model, rank) for rank in ranks) / len(ranks))
    full = shares[LOADS // 2 :]
    return {
        "resident at the end": len(ranks),
        "as many as their bytes allow": by_bytes,
        "arena filled with tensors, mean": sum(full) / len(full),
        "loads": engine.load_seconds["total"].count,
        "moved MB a load": engine.moved_bytes / 1e6 / LOADS,
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="loraplex-density-") as folder:
        print(json.dumps(asyncio.run(measure(Path(folder))), indent=2))


if __name__ == "__main__":
    main()
