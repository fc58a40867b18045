"""A random Llama on disk with PEFT adapters, the same as blobs in a host arena, and what transformers makes of them."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from inference_service.adapters.packer import open_adapter
from inference_service.model.loader import load_config
from inference_service.types import Acquired
from shared.digest import FileEntry

VOCAB = 128
ADAPTERS = {
    "sha256:qv": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "sha256:attention": {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "sha256:all": {
        "r": 2, "lora_alpha": 8, "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
}  # fmt: skip


class Tiny(NamedTuple):
    """`host`: the arena's bytes. `acquired`: by digest, what the adapter process would say."""

    folder: Path
    host: torch.Tensor
    acquired: dict[str, Acquired]
    oracle: PeftModel


def build_tiny(folder: Path) -> Tiny:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    base.save_pretrained(folder / "base")
    model = None
    for name, options in ADAPTERS.items():
        adapter = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        short = name.split(":")[1]
        if model is None:
            model = get_peft_model(base, adapter, adapter_name=short)
        else:
            model.add_adapter(short, adapter)
    assert model is not None
    model.save_pretrained(folder / "adapters")
    return Tiny(folder / "base", *pack(folder), model.eval())


def pack(folder: Path, digests: Iterable[str] = ADAPTERS) -> tuple[torch.Tensor, dict[str, Acquired]]:
    host, offset, acquired = torch.zeros(1 << 20, dtype=torch.uint8), 4096, {}
    _, config = load_config(folder / "base")
    for digest in digests:
        place = folder / "adapters" / digest.split(":")[1]
        files = [
            FileEntry(name, len(data := (place / name).read_bytes()), hashlib.sha256(data).hexdigest())
            for name in ("adapter_config.json", "adapter_model.safetensors")
        ]
        with open_adapter(place, files, config, "float32") as adapter:
            with ThreadPoolExecutor(1) as workers:
                adapter.fill(memoryview(host.numpy())[offset : offset + adapter.layout.nbytes], workers)
            acquired[digest] = Acquired(digest, offset, adapter.layout)
            offset += -(-adapter.layout.nbytes // 4096) * 4096
    return host, acquired


@torch.inference_mode()
def oracle_logits(tiny: Tiny, token_ids: list[int], digest: str | None) -> torch.Tensor:
    """`[len(token_ids), vocab]` float32."""
    inputs = torch.tensor([token_ids])
    if digest is None:
        with tiny.oracle.disable_adapter():
            return tiny.oracle(inputs).logits[0]
    tiny.oracle.set_adapter(digest.split(":")[1])
    return tiny.oracle(inputs).logits[0]
