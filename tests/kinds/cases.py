"""Every kind of adapter that PEFT saves, as cases: what PEFT is asked for, and what is done to the files after it.

A new kind is a new entry here, or, as long as the engine does not compute it, in `refusals.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import KasaConfig, PeftModel
from peft.tuners.lora.config import BdLoraConfig

from tests.kinds import files
from tests.kinds.bases import BASES, VOCAB

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
ALL = tuple(BASES)
TIED = tuple(name for name, base in BASES.items() if base.is_tied)
UNTIED = tuple(name for name, base in BASES.items() if not base.is_tied)
INVOCATION = (17, 90, 41)


@dataclass(frozen=True)
class Case:
    """One adapter.

    Attributes:
        kind: The row of README's table it belongs to.
        lora: Keys of PEFT's LoraConfig; q_proj and v_proj at rank 8 and alpha 16 without.
        bases: The base models that it is made for.
        extra_vocab: Tokens that the base model's vocabulary grows by before training.
        train: Changes the weights further, after all that PEFT trains has been made random.
        edit: Changes the saved folder.
        moved: Changes a copy of it to what PEFT does not read, and returns the folder to register.
        repaired: It is refused, and registered after `loraplex adapter convert`.
    """

    kind: str
    lora: dict[str, Any] = field(default_factory=dict)
    bases: Sequence[str] = ALL
    extra_vocab: int = 0
    train: Callable[[PeftModel], None] = lambda model: None
    edit: Callable[[Path], Path] = lambda folder: folder
    moved: Callable[[Path], Path] = lambda folder: folder
    repaired: bool = False


def rank(value: int) -> Case:
    return Case("rank 1 to 512", {"r": value, "lora_alpha": 2 * value, "target_modules": LINEARS})


def few_rows(model: PeftModel) -> None:
    """Only rows 5 and 90 to 99 of the saved embedding and head keep what training did to them."""
    base = model.get_base_model()
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        saved = getattr(module, "modules_to_save", None)
        if saved is None:
            continue
        with torch.no_grad():
            kept = module.original_module.weight.clone()
            kept[[5, *range(90, 100)]] = saved["default"].weight[[5, *range(90, 100)]]
            saved["default"].weight.copy_(kept)


DTYPES = "saved in float64, float16, bfloat16, float8"
SAVED, TOKENS = "modules_to_save", "trainable_token_indices"
PATTERNS = {
    "target_modules": LINEARS, "r": 5, "lora_alpha": 11,
    "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 9, "up_proj": 2, "model.layers.2.mlp.down_proj": 1},
    "alpha_pattern": {r".*\.[02]\.mlp\..*": 6, "v_proj": 3.5, "_proj": 99, r"(self_attn|mlp)\.gate_proj": 13},
}  # fmt: skip

CASES: dict[str, Case] = {
    # ---- LoRA on linears
    "plain": Case("LoRA"),
    "defaults": Case("LoRA", {"target_modules": None}),
    "all seven": Case("LoRA", {"target_modules": LINEARS}),
    "initialised orthogonally": Case("LoRA", {"init_lora_weights": "orthogonal"}),
    "rank 1": rank(1),
    "rank 3": rank(3),
    "rank 7": rank(7),
    "rank 33": rank(33),
    "rank 512": rank(512),
    "rslora": Case("rsLoRA", {"use_rslora": True, "r": 6}),
    "rank pattern": Case("rank_pattern, alpha_pattern", {"rank_pattern": {"q_proj": 3, r".*\.1\..*v_proj": 12}}),
    "alpha pattern": Case("rank_pattern, alpha_pattern", {"alpha_pattern": {"v_proj": 3, r"layers\.2\..*": 40}}),
    "patterns in the saved order": Case(
        # As saved, `.*` comes first and counts for all; in the order of training it counts for nothing.
        "rank_pattern, alpha_pattern", {"alpha_pattern": {"v_proj": 4, "q_proj": 8, r".*_proj": 24}}
    ),
    "patterns and rslora": Case("rank_pattern, alpha_pattern", {**PATTERNS, "use_rslora": True}),
    "some layers": Case("target and layer rules", {"layers_to_transform": [0, 2]}),
    "one layer by pattern": Case("target and layer rules", {"layers_to_transform": 1, "layers_pattern": "layers"}),
    "excluded": Case("target and layer rules", {"target_modules": LINEARS, "exclude_modules": ["k_proj", "up_proj"]}),
    "excluded by regex": Case("target and layer rules", {"exclude_modules": r".*layers\.1\..*q_proj"}),
    "targets by regex": Case("target and layer rules", {"target_modules": r".*\.[02]\.(self_attn\.[qk]|mlp\.up)_proj"}),
    "all-linear": Case("target and layer rules", {"target_modules": "all-linear"}),
    "saved in float16": Case(DTYPES, edit=files.saved_as(torch.float16)),
    "saved in bfloat16": Case(DTYPES, edit=files.saved_as(torch.bfloat16)),
    "saved in float64": Case(DTYPES, {"use_dora": True, "bias": "all"}, edit=files.saved_as(torch.float64)),
    "saved in float8": Case(DTYPES, edit=files.saved_as(torch.float8_e4m3fn)),
    # ---- DoRA
    "dora": Case("DoRA", {"use_dora": True}),
    "dora on all-linear": Case("DoRA", {"use_dora": True, "target_modules": "all-linear"}),
    "dora, rslora, patterns": Case("DoRA", {**PATTERNS, "use_dora": True, "use_rslora": True}),
    "dora and biases": Case(
        "DoRA", {"use_dora": True, "bias": "all", "target_modules": LINEARS}, ("qwen2-tied", "qwen2", "llama-tied"),
    ),
    "dora saved in bfloat16": Case("DoRA", {"use_dora": True}, edit=files.saved_as(torch.bfloat16)),
    "dora on the embedding": Case(
        "DoRA on embed_tokens", {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}
    ),
    "dora on lm_head": Case("DoRA on lm_head", {"use_dora": True, "target_modules": ["lm_head"]}),
    # ---- biases
    "lora_bias": Case("lora_bias", {"lora_bias": True, "target_modules": LINEARS}),
    "lora_bias and rslora": Case("lora_bias", {"lora_bias": True, "use_rslora": True}),
    "bias lora_only": Case("bias lora_only, all", {"bias": "lora_only"}, ("qwen2-tied", "qwen2")),
    "bias all": Case(
        "bias lora_only, all", {"bias": "all", "target_modules": ["v_proj", "up_proj"]},
        ("qwen2-tied", "qwen2", "llama-tied"),
    ),
    # ---- embedding and head
    "embed_tokens": Case("LoRA on embed_tokens", {"target_modules": ["embed_tokens", "v_proj"]}),
    "embed_tokens alone": Case("LoRA on embed_tokens", {"target_modules": ["embed_tokens"]}),
    "lm_head": Case("LoRA on lm_head", {"target_modules": ["lm_head", "q_proj"]}),
    "lm_head with lora_bias": Case(
        "LoRA on lm_head", {"target_modules": ["lm_head"], "lora_bias": True}
    ),
    "embed_tokens and lm_head": Case(
        "LoRA on embed_tokens", {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "use_rslora": True},
    ),
    "embed_tokens and lm_head, tied": Case(
        "LoRA on embed_tokens",
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "ensure_weight_tying": True}, TIED,
    ),
    "embed_tokens and lm_head, tied and parted": Case(
        "LoRA on embed_tokens",
        {
            "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True,
            "init_lora_weights": "orthogonal",
        }, TIED,
    ),
    # ---- weights that are saved whole
    "saved embed_tokens": Case("modules_to_save embed_tokens, lm_head", {SAVED: ["embed_tokens"]}),
    "saved lm_head": Case("modules_to_save embed_tokens, lm_head", {SAVED: ["lm_head"]}),
    "saved embed_tokens and lm_head": Case(
        "modules_to_save embed_tokens, lm_head", {SAVED: ["embed_tokens", "lm_head"]}, UNTIED
    ),
    "saved, of which few rows differ": Case(
        "modules_to_save embed_tokens, lm_head", {SAVED: ["embed_tokens", "lm_head"]}, UNTIED, train=few_rows,
    ),
    "saved and tied": Case(
        "modules_to_save embed_tokens, lm_head", {SAVED: ["embed_tokens"], "ensure_weight_tying": True}, TIED,
    ),
    "saved norms": Case("modules_to_save norms", {SAVED: NORMS}, ("llama", "llama-tied", "qwen2", "qwen2-tied")),
    "saved norms of q and k": Case(
        "modules_to_save norms", {SAVED: [*NORMS, "q_norm", "k_norm"]}, ("qwen3-tied", "qwen3")
    ),
    # ---- tokens
    "trained tokens": Case("trainable_token_indices", {TOKENS: [3, 17, 200]}),
    "trained tokens by module": Case(
        "trainable_token_indices", {TOKENS: {"embed_tokens": [5, 9], "lm_head": [9, 31, 60]}}, UNTIED,
    ),
    "added tokens, saved": Case(
        "added vocabulary", {SAVED: ["embed_tokens", "lm_head"]}, UNTIED, extra_vocab=3
    ),
    "added tokens, trained": Case(
        "added vocabulary", {TOKENS: [VOCAB, VOCAB + 1]}, extra_vocab=2
    ),
    # ---- other forms of A and B
    "block-diagonal": Case(
        "BD-LoRA",
        {
            "target_modules": ["q_proj", "o_proj", "down_proj"],
            "use_bdlora": BdLoraConfig(["o_proj", "down_proj"], ["q_proj"], nblocks=4),
        },
    ),
    "block-diagonal in part": Case(
        "BD-LoRA",
        {"use_bdlora": BdLoraConfig(None, ["q_proj"], nblocks=2, match_strict=False)},
    ),
    "lm_head in blocks": Case(
        "BD-LoRA",
        {"target_modules": ["lm_head", "o_proj"], "use_bdlora": BdLoraConfig(["o_proj"], ["lm_head"], nblocks=4)},
    ),
    "pissa": Case("PiSSA, OLoRA, KaSA (converted)", {"init_lora_weights": "pissa"}, repaired=True),
    "olora": Case("PiSSA, OLoRA, KaSA (converted)", {"init_lora_weights": "olora", "use_rslora": True}, repaired=True),
    "kasa": Case("PiSSA, OLoRA, KaSA (converted)", {"kasa_config": KasaConfig()}, repaired=True),
    "activated": Case("aLoRA", {"alora_invocation_tokens": list(INVOCATION), "target_modules": LINEARS}),
    # ---- older files
    "a folder below": Case("older layouts", moved=files.in_a_folder_below),
    "prefix base_model": Case("older layouts", moved=files.renamed("base_model.model.", "base_model.")),
    "no prefix": Case("older layouts", moved=files.renamed("base_model.model.", "")),
    "bare backbone": Case("older layouts", moved=files.renamed("base_model.model.model.", "base_model.model.")),
    "language_model": Case(
        "older layouts", moved=files.renamed("base_model.model.model.", "base_model.model.language_model.model.")
    ),
    "model.language_model": Case(
        "older layouts", moved=files.renamed("base_model.model.model.", "base_model.model.model.language_model.")
    ),
}  # fmt: skip


def default_cases(base: str) -> set[str]:
    """The first case of each kind that the base model has, which every run serves if the base model is a default."""
    first: dict[str, str] = {}
    for name, case in CASES.items():
        if base in case.bases:
            first.setdefault(case.kind, name)
    return set(first.values())


# Tried on SmolLM2 too.
SMOLLM2 = (
    "plain", "rank 33", "patterns and rslora", "all-linear", "saved in bfloat16", "dora on all-linear", "lora_bias",
    "embed_tokens and lm_head", "saved norms", "trained tokens", "block-diagonal", "olora", "activated",
)  # fmt: skip
