"""Both services over a random base model small enough for thousands of requests, and PEFT's word on each answer."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from examples.stack import Stack, register, wait_for_base_model
from loraplex import Client
from loraplex.registry.v1 import registry_pb2
from tests.e2e.oracle import Comparison, Oracle

BASE = "tiny"
VOCAB = 256
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[5, 9, 200, 31], [7] * 9, [250, 3, 3, 17, 90, 41], list(range(20, 60))]


@dataclass
class TinyWorld:
    """A base model, adapters in `store` by name, and the oracle of both.

    Attributes:
        folder: With `base` and `store` in it.
        contents: Names of the adapter folders in `store`.
    """

    folder: Path
    contents: Sequence[str]
    oracle: Oracle
    _compared: dict[tuple[str, int, tuple[int, ...]], Comparison] = field(default_factory=dict)

    def stack(self, run: Path, *flags: str, **others: Any) -> Stack:
        """Both services, with `file://store/…` and, to be spoiled, `file://copies/…` in `run`. `others`: of `Stack`."""
        fixed = (
            f"--model-name={BASE}", "--dtype=float32", "--device=cpu", "--threads=1", "--kv-cache-memory=64MiB",
            "--adapter-memory=64MiB",
        )  # fmt: skip
        (run / "copies").mkdir(parents=True)
        roots = {"store": self.folder / "store", "copies": run / "copies"}
        return Stack(run, flags=[*fixed, *flags], model=self.folder / "base", roots=roots, **others)

    @asynccontextmanager
    async def serving(
        self, run: Path, *flags: str, names: Sequence[str] = (), **others: Any
    ) -> AsyncIterator[tuple[Stack, Client]]:
        """As `stack`, up, with the contents `names` registered under their own names; both must end well."""
        stack = self.stack(run, *flags, **others)
        async with stack, stack.client() as client:
            await wait_for_base_model(client, BASE)
            for name in names:
                await register_content(client, name, name)
            yield stack, client
        codes = [service.process and service.process.returncode for service in (stack.registry, stack.inference)]
        assert codes == [0, 0], stack.inference.log_tail(40)

    def copy(self, content: str, run: Path) -> Path:
        """A copy of the adapter's folder, as `file://copies/CONTENT` of a stack in `run`."""
        return Path(shutil.copytree(self.folder / "store" / content, run / "copies" / content))

    def compare(self, content: str, prompt: int, answer: Sequence[int], logprobs: Sequence[float]) -> Comparison:
        """As `Oracle.compare`; `content` is empty for the base model. Equal answers are scored once."""
        key = content, prompt, tuple(answer)
        if key not in self._compared:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # more would only wait for each other over a model as small as this
            try:
                self._compared[key] = self.oracle.compare(PROMPTS[prompt], answer, logprobs, content)
            finally:
                torch.set_num_threads(threads)
        return self._compared[key]


async def register_content(
    client: Client, adapter: str, content: str, root: str = "store"
) -> registry_pb2.RegisterAdapterResponse:
    """Registers `file://ROOT/CONTENT` as a version of `adapter`."""
    return await register(client, adapter, f"file://{root}/{content}", BASE)


def build(folder: Path, num_contents: int) -> TinyWorld:
    """Random weights whose adapters matter: 0.5 to 2 MB each, of different ranks and targets."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, initializer_range=0.12, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    base.save_pretrained(folder / "base")
    contents = [f"content-{number}" for number in range(num_contents)]
    model: PeftModel | None = None
    for number, name in enumerate(contents):
        rank = (128, 32, 66, 96)[number % 4]
        targets = LINEARS if number % 3 else LINEARS[:4]
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=False)
        if model is None:
            model = get_peft_model(base, lora, adapter_name=name)
        else:
            model.add_adapter(name, lora)
    assert model is not None
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder / "store")
    return TinyWorld(folder, contents, Oracle(folder / "base", {name: folder / "store" / name for name in contents}))
