"""Adapters of every kind that PEFT saves, on tiny random base models, and PEFT's own word on each answer."""

import copy
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.packer import open_adapter
from inference_service.model.loader import load_config
from inference_service.types import Acquired
from shared.digest import FileEntry, manifest_digest

VOCAB, ADDED = 96, 3
QV, MLP = ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", *MLP]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


class Family(NamedTuple):
    """A base model; `is_tied`: its head is its embedding. `has_biases`: of some linears."""

    build: Callable[[], PreTrainedModel]
    is_tied: bool
    has_biases: bool


def _llama(**options: Any) -> Callable[[], PreTrainedModel]:
    return lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **options))


FAMILIES = {
    "llama": Family(_llama(tie_word_embeddings=False), is_tied=False, has_biases=False),
    "llama-tied": Family(_llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True), True, True),
    "qwen2": Family(lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)), False, True),
    "qwen2-tied": Family(lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)), True, True),
    "qwen3": Family(
        lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)), False, False
    ),
}


class Case(NamedTuple):
    """What to ask PEFT for. `kind`: the one that the case is about, as `served.KINDS` names it.

    `added`: tokens that the base model is resized by before PEFT sees it.
    """

    kind: str
    options: dict[str, Any]
    added: int = 0
    needs_biases: bool = False
    needs_tied: bool | None = None
    needs_family: str = ""

    def fits(self, name: str) -> bool:
        """Whether PEFT can do it on a family."""
        family = FAMILIES[name]
        return (
            (family.has_biases or not self.needs_biases)
            and self.needs_tied in (None, family.is_tied)
            and name.startswith(self.needs_family)
        )


def _bd(**options: Any) -> dict[str, Any]:
    from peft.tuners.lora.config import BdLoraConfig

    return {"use_bdlora": BdLoraConfig(**options)}


CASES: dict[str, Case] = {
    "plain": Case("lora", {"r": 4, "lora_alpha": 8, "target_modules": QV}),
    "rslora": Case(
        "lora",
        {"r": 3, "lora_alpha": 5, "target_modules": LINEARS, "use_rslora": True, "rank_pattern": {"q_proj": 7}},
    ),
    "block-diagonal": Case(
        "block_diagonal",
        {
            "r": 4, "lora_alpha": 8, "target_modules": LINEARS,
            **_bd(
                target_modules_bd_a=["o_proj", "down_proj"], target_modules_bd_b=["q_proj", "up_proj"], nblocks=2,
                match_strict=False,
            ),
        },
    ),
    "lora-bias": Case("lora_bias", {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "lora_bias": True}),
    "bias-all": Case("bias", {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "all"}, 0, True),
    "bias-lora-only": Case("bias", {"r": 4, "target_modules": QV, "bias": "lora_only"}, 0, True),
    "dora": Case("dora", {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "use_dora": True}),
    "dora-some": Case(
        "dora",
        {
            "r": 5, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], "use_dora": True, "use_rslora": True,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 9},
        },
    ),
    "dora-bias": Case(
        "dora", {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "use_dora": True, "bias": "all"}, 0, True
    ),
    "norms": Case(
        "norms",
        {
            "r": 4, "target_modules": QV,
            "modules_to_save": ["input_layernorm", "post_attention_layernorm", "model.norm"],
        },
    ),
    "head-norms": Case(
        "norms", {"r": 4, "target_modules": QV, "modules_to_save": ["q_norm", "k_norm"]}, needs_family="qwen3"
    ),
    "embedding": Case("embedding", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens"]}),
    "head": Case("lm_head", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}),
    "embedding-and-head": Case(
        "lm_head", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "v_proj"]}
    ),
    "tokens": Case(
        "trainable_tokens", {"r": 4, "target_modules": QV, "trainable_token_indices": [90, 5, 17, 3]}
    ),
    "save-both": Case(
        "modules_to_save", {"r": 4, "target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
        needs_tied=False,
    ),
    "save-embedding": Case("modules_to_save", {"r": 4, "target_modules": QV, "modules_to_save": ["embed_tokens"]}),
    "save-head": Case("modules_to_save", {"r": 4, "target_modules": QV, "modules_to_save": ["lm_head"]}),
    "save-tied": Case(
        "modules_to_save",
        {"r": 4, "target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        needs_tied=True,
    ),
    "added-saved": Case(
        "added_vocabulary",
        {"r": 4, "target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}, ADDED, needs_tied=False,
    ),
    "added-saved-tied": Case(
        "added_vocabulary",
        {"r": 4, "target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        ADDED, needs_tied=True,
    ),
    "added-lora": Case(
        "added_vocabulary", {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}, ADDED, needs_tied=False
    ),
    "tokens-of-both": Case(
        "trainable_tokens",
        {
            "r": 4, "target_modules": QV,
            "trainable_token_indices": {"embed_tokens": [11, 4], "lm_head": [95, 4, 30]},
        },
        needs_tied=False,
    ),
    "added-tokens": Case(
        "added_vocabulary",
        {"r": 4, "target_modules": QV, "trainable_token_indices": [7, VOCAB, VOCAB + 1, VOCAB + 2]},
        ADDED, needs_tied=True,  # of an untied one PEFT saves no rows of the head
    ),
    "added-dora": Case(
        "added_vocabulary",
        {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True}, ADDED, needs_tied=False,
    ),
    "everything": Case(
        "dora",
        {
            "r": 4, "lora_alpha": 12, "target_modules": [*LINEARS, "embed_tokens"], "use_dora": True, "bias": "all",
            "modules_to_save": ["input_layernorm", "norm", "lm_head"],
        },
        needs_tied=False,
    ),
    "embedding-dora": Case(
        "embedding_dora", {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "embed_tokens"], "use_dora": True}
    ),
    "head-dora": Case(
        "embedding_dora", {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "lm_head"], "use_dora": True}
    ),
}  # fmt: skip


class World(NamedTuple):
    """A base model in `folder`, adapters in a host arena, and what PEFT makes of them, by digest."""

    folder: Path
    host: torch.Tensor
    acquired: dict[str, Acquired]
    oracles: dict[str | None, PreTrainedModel | PeftModel]
    extra_vocab: dict[str | None, int]


def build(folder: Path, family: str, cases: list[str]) -> World:
    """Make, save, pack and load what of `cases` fits `family`. A case's digest is that of its files."""
    torch.manual_seed(0)
    base = FAMILIES[family].build().eval()
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.2)
    base.save_pretrained(folder / "base")
    world = World(folder / "base", torch.zeros(4 << 20, dtype=torch.uint8), {}, {None: base}, {None: 0})
    end = 4096
    for name in cases:
        if CASES[name].fits(family):
            _save(base, CASES[name], folder / name)
            end = _add(world, CASES[name], folder / name, end)
    return world


def _save(base: PreTrainedModel, case: Case, folder: Path) -> None:
    """An adapter whose every trained number is random."""
    model = _resized(base, case.added)
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **case.options))
    for name, parameter in peft.named_parameters():
        if not parameter.requires_grad:
            continue
        with torch.no_grad():
            if "lora_magnitude_vector" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
            elif "lora_" in name:
                nn.init.normal_(parameter, std=0.2)
            else:
                _perturb(parameter)
    peft.save_pretrained(folder)


def _perturb(parameter: torch.Tensor) -> None:
    """Some rows of a matrix; all of a vector."""
    changed = torch.randn_like(parameter) * 0.3
    if parameter.dim() == 2:
        changed[::3] = 0
    parameter.add_(changed)


def _resized(base: PreTrainedModel, added: int) -> PreTrainedModel:
    model = copy.deepcopy(base)
    if added:
        model.resize_token_embeddings(VOCAB + added)
    return model


def _add(world: World, case: Case, folder: Path, begin: int) -> int:
    files = [
        FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
        if path.name.startswith("adapter_")
    ]
    digest, (_, model) = manifest_digest(files), load_config(world.folder)
    base = BaseTensors(world.folder, model, "float32")
    with open_adapter(folder, files, model, "float32", base) as adapter, ThreadPoolExecutor(2) as workers:
        adapter.fill(memoryview(world.host.numpy())[begin : begin + adapter.layout.nbytes], workers)
    world.acquired[digest] = Acquired(digest, begin, adapter.layout)
    world.extra_vocab[digest] = adapter.layout.extra_vocab
    resized = _resized(world.oracles[None], case.added)  # type: ignore[arg-type]
    world.oracles[digest] = PeftModel.from_pretrained(resized, folder).eval()
    return begin + -(-adapter.layout.nbytes // 4096) * 4096


@torch.inference_mode()
def oracle_logits(world: World, token_ids: list[int], digest: str | None) -> torch.Tensor:
    """`[len(token_ids), vocab + extra]` float32."""
    return world.oracles[digest](torch.tensor([token_ids])).logits[0]
