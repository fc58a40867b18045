"""`make bench`: eight gRPC streams over four adapters beside transformers + PEFT on the same threads and prompts.

Both sides run in turn, five times; the medians are compared. PEFT answers all eight prompts as one padded batch with
`adapter_names`; Loraplex answers eight separate streams. The adapters are random, rank 8 on all seven linears.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.stack import MODEL, Stack, register, wait_for_base_model
from loraplex import Client

THREADS = 2
REPEATS = 5
TOKENS = 48
NAMES = ["one", "two", "three", "four"]
PROMPTS = [
    "Explain why the sky is blue.",
    "Write a short story about a fox.",
    "What is the capital of France?",
    "List three uses of a paper clip.",
    "How do I boil an egg?",
    "Describe the sea to a child.",
    "Why do leaves fall in autumn?",
    "Give me advice on learning to swim.",
]


def make_adapters(folder: Path) -> PeftModel:
    """Four random adapters in `folder`, and the PEFT model that holds them."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=linears, task_type="CAUSAL_LM")
    model = get_peft_model(base, config, adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.add_adapter(name, config)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.02)
    for name in NAMES:
        model.save_pretrained(folder, selected_adapters=[name])
    return model.eval()


def peft_batch(model: PeftModel, tokenizer: Any, prompts: list[str], adapters: list[str]) -> float:
    """Tokens per second of one padded batch through `generate`."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            **inputs, adapter_names=adapters, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    return len(prompts) * TOKENS / (time.perf_counter() - started)


async def one_stream(client: Client, prompt: str, adapter: str) -> float:
    """Runs one greedy stream of TOKENS tokens; returns the seconds to its first token."""
    started = time.perf_counter()
    first = 0.0
    stop = {"max_tokens": TOKENS, "ignore_eos": True}
    async for event in client.generate(prompt, adapter=adapter, temperature=0, stop=stop):
        if event.HasField("delta") and not first:
            first = time.perf_counter() - started
    return first


async def loraplex_batch(client: Client, prompts: list[str], adapters: list[str]) -> float:
    """Tokens per second of as many concurrent streams as prompts."""
    started = time.perf_counter()
    await asyncio.gather(*(one_stream(client, p, a) for p, a in zip(prompts, adapters, strict=True)))
    return len(prompts) * TOKENS / (time.perf_counter() - started)


async def cached_first_token(client: Client, length: int) -> float:
    """Median seconds to the first token of a cached prompt of `length` tokens."""
    prompt = [100 + (i * 7919 + length) % 40_000 for i in range(length)]
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        async for event in client.generate(prompt, temperature=0, stop={"max_tokens": 1, "ignore_eos": True}):
            if event.HasField("delta"):
                seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


async def measure(folder: Path, model: PeftModel, tokenizer: Any) -> dict[str, list[float]]:
    adapters = [NAMES[i % len(NAMES)] for i in range(len(PROMPTS))]
    figures: dict[str, list[float]] = {}
    flags = ["--dtype=float32", f"--threads={THREADS}"]
    async with Stack(folder, flags=flags, roots={"bench": folder}) as stack, stack.client() as client:
        await wait_for_base_model(client)
        for name in NAMES:
            await register(client, name, f"file://bench/{name}")
        await loraplex_batch(client, PROMPTS, adapters)
        sides: dict[str, Callable[[], Any]] = {
            "peft 8": lambda: asyncio.to_thread(peft_batch, model, tokenizer, PROMPTS, adapters),
            "loraplex 8": lambda: loraplex_batch(client, PROMPTS, adapters),
            "generate 1": lambda: asyncio.to_thread(peft_batch, model, tokenizer, PROMPTS[:1], ["__base__"]),
            "loraplex 1": lambda: loraplex_batch(client, PROMPTS[:1], [""]),
        }
        for _ in track(range(REPEATS), description="measuring"):
            for name, side in sides.items():
                figures.setdefault(name, []).append(await side())
        figures["cached 100"] = [await cached_first_token(client, 100)]
        figures["cached 2000"] = [await cached_first_token(client, 2000)]
    return figures


def report(figures: dict[str, list[float]]) -> dict[str, float]:
    """The ratios that matter."""
    median = {name: statistics.median(values) for name, values in figures.items()}
    return {
        "eight streams, four adapters: Loraplex tok/s": median["loraplex 8"],
        "eight streams, four adapters: PEFT tok/s": median["peft 8"],
        "ratio (target 2.0, aim 2.5)": median["loraplex 8"] / median["peft 8"],
        "one stream, base: Loraplex tok/s": median["loraplex 1"],
        "one stream, base: generate tok/s": median["generate 1"],
        "ratio (target 1.0)": median["loraplex 1"] / median["generate 1"],
        "first token, cached 2,000 / cached 100 (target 1.5)": median["cached 2000"] / median["cached 100"],
        "first token, cached 100, ms": 1e3 * median["cached 100"],
    }


def main() -> None:
    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as name:
        model = make_adapters(Path(name))
        figures = asyncio.run(measure(Path(name), model, tokenizer))
    table = Table("figure", "value")
    for key, value in report(figures).items():
        table.add_row(key, f"{value:.2f}")
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
