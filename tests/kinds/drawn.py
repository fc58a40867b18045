"""Adapters drawn at random: PEFT's options in any combination, saved in any layout that PEFT has had.

PEFT can not make all of them, nor load all that it makes; those prove nothing.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.config import BdLoraConfig, VeloraConfig

from tests.kinds import files
from tests.kinds.bases import LAYERS, VOCAB
from tests.kinds.cases import INVOCATION, LINEARS, Case

Keys = dict[str, Any]
ENDS = ["embed_tokens", "lm_head"]
NORMS = ["norm", "input_layernorm", "post_attention_layernorm", "layers.1.input_layernorm", "model.norm"]
HEAD_NORMS = ["q_norm", "k_norm", "layers.0.self_attn.k_norm"]
# Of module names, as rank_pattern and alpha_pattern take them.
PATTERNS = [
    "q_proj", "v_proj", "down_proj", "_proj", ".*", r".*\.1\..*", r"layers\.2\.mlp\.(up|gate)_proj", r"[kv]_proj",
    "model.layers.0.self_attn.q_proj", r".*layers\.[02]\..*proj", "embed_tokens", "lm_head", r"(self_attn|mlp)\.\w+",
]  # fmt: skip
TARGETS = [
    "all-linear", r".*\.[02]\.(self_attn\.[qk]|mlp\.up)_proj", r".*_proj", r"model\.layers\.\d+\.mlp\.\w+_proj",
    r".*(q_proj|lm_head)", r"(.*\.)?(embed_tokens|v_proj)", r"^(?!.*layers\.1\.).*(?<!k)_proj",
]  # fmt: skip
EXCLUDED = [
    ["k_proj", "up_proj"], ["model.layers.1.self_attn.q_proj"], r".*layers\.1\..*", r".*\.0\.mlp\.\w+", "lm_head",
]  # fmt: skip


def draw(seed: int, base: str) -> Case:
    """An adapter for the base model `base`, always the same for one seed."""
    chosen = random.Random(f"{base} {seed}")
    keys: Keys = {"r": chosen.randint(1, 20), "lora_alpha": chosen.choice([1, 3.5, 8, 16])}
    for add in (_targets, _scales, _layers, _variant, _biases, _tokens):
        add(chosen, keys)
    if _one_in(chosen, 3):
        options = NORMS + (HEAD_NORMS if base.startswith("qwen3") else [])
        keys["modules_to_save"] = _some(chosen, chosen.choice([ENDS, options, [*ENDS, *options]]))[:4]
    keys["ensure_weight_tying"] = _one_in(chosen, 3)
    extra = chosen.choice([0] * 5 + [1, 3])
    return Case("drawn", keys, (base,), extra, edit=_stored(chosen), moved=_moved(chosen, keys))


def _one_in(chosen: random.Random, count: int) -> bool:
    return chosen.randrange(count) == 0


def _some(chosen: random.Random, options: list[Any]) -> list[Any]:
    return chosen.sample(options, chosen.randint(1, len(options)))


def _targets(chosen: random.Random, keys: Keys) -> None:
    keys["target_modules"] = _some(chosen, LINEARS)
    if _one_in(chosen, 4):
        keys["target_modules"] = chosen.choice(TARGETS)
    elif _one_in(chosen, 3):
        keys["target_modules"] += _some(chosen, ENDS)
    elif _one_in(chosen, 6):
        keys["target_modules"] = ["model.layers.0.mlp.up_proj", "1.self_attn.v_proj"]
    if _one_in(chosen, 4):
        keys["exclude_modules"] = chosen.choice(EXCLUDED)


def _scales(chosen: random.Random, keys: Keys) -> None:
    keys["use_rslora"] = _one_in(chosen, 3)
    for key, values in (("rank_pattern", [1, 2, 6, 17]), ("alpha_pattern", [0, 0.5, 4, 11])):
        if _one_in(chosen, 3):
            patterns = chosen.sample(PATTERNS, chosen.randint(1, 4))
            keys[key] = {pattern: chosen.choice(values) for pattern in patterns}


def _layers(chosen: random.Random, keys: Keys) -> None:
    if isinstance(keys["target_modules"], list) and _one_in(chosen, 4):
        keys["layers_to_transform"] = chosen.choice([0, [1], [0, LAYERS - 1]])
        if _one_in(chosen, 2):
            keys["layers_pattern"] = chosen.choice(["layers", ["blocks", "layers"]])


def _variant(chosen: random.Random, keys: Keys) -> None:
    """One of PEFT's forward passes, and how A and B began."""
    kinds = ["plain"] * 3 + ["dora"] * 3 + ["blocks", "activated", "velora", "mica", "qalora"]
    match chosen.choice(kinds):
        case "dora":
            keys["use_dora"] = True
        case "blocks":
            sides = [LINEARS[:4], [*LINEARS[4:6], "lm_head"]]
            chosen.shuffle(sides)
            keys["use_bdlora"] = BdLoraConfig(*sides, nblocks=chosen.choice([1, 2, 4]), match_strict=False)
            keys["r"] = 4 * chosen.randint(1, 4)
            keys["rank_pattern"] = dict.fromkeys(keys.get("rank_pattern", ()), 4)
        case "activated":
            keys["alora_invocation_tokens"] = list(INVOCATION[: chosen.randint(1, 3)])
        case "velora":
            keys["velora_config"] = VeloraConfig()
        case "mica":
            keys["init_lora_weights"] = "mica"
        case "qalora":  # which means nothing on linears that are not quantised
            keys |= {"use_qalora": True, "qalora_group_size": chosen.choice([4, 16])}
        case "plain" if _one_in(chosen, 2):
            ranks = {keys["r"], *keys.get("rank_pattern", {}).values()}
            is_even = all(rank % 2 == 0 for rank in ranks)
            keys["init_lora_weights"] = chosen.choice([False, "gaussian", *["orthogonal"] * is_even])


def _biases(chosen: random.Random, keys: Keys) -> None:
    keys["bias"] = chosen.choice(["none", "none", "none", "lora_only", "all"])
    if not keys.get("use_dora") and "init_lora_weights" not in keys and _one_in(chosen, 4):
        keys["lora_bias"] = True


def _tokens(chosen: random.Random, keys: Keys) -> None:
    if _one_in(chosen, 4):
        ids, others = chosen.sample(range(VOCAB), 4), chosen.sample(range(VOCAB), 2)
        options = [ids, {"embed_tokens": ids}, {"lm_head": ids}, {"embed_tokens": ids, "lm_head": others}]
        options.append({"embed_tokens": ids, "lm_head": ids})
        keys["trainable_token_indices"] = chosen.choice(options)


def _stored(chosen: random.Random) -> Callable[[Path], Path]:
    """In which dtype: all tensors alike, or those of the layers by what they are."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    if _one_in(chosen, 2):
        return files.saved_as(chosen.choice(dtypes))
    of_each = {end: chosen.choice(dtypes) for end in ("lora_A.weight", "lora_B.weight", "norm.weight", "_vector")}

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        ends = [end for end in of_each if ".layers." in name and name.endswith(end)]
        return tensor.to(of_each[ends[0]]) if ends else tensor

    return files.every_tensor(change)


def _moved(chosen: random.Random, keys: Keys) -> Callable[[Path], Path]:
    """In which layout."""
    prefix = "base_model.model."
    layouts: list[Callable[[Path], Path]] = [
        files.renamed(prefix, "base_model."), files.renamed(prefix, ""), files.in_a_folder_below,
    ]  # fmt: skip
    names_whole = "model." in repr(keys).replace("\\", "") or keys["ensure_weight_tying"]
    if not names_whole:  # else it names modules as they are called in a model that lies in no other
        layouts.append(files.renamed(f"{prefix}model.", f"{prefix}model.language_model."))
    return chosen.choice(layouts) if _one_in(chosen, 3) else lambda folder: folder
