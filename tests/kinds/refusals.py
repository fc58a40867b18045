"""Adapters that must be refused: what PEFT saves and cannot be served, and files that contradict themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import IA3Config, KasaConfig, LoKrConfig, PromptTuningConfig

from tests.kinds import files

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
CONVERT = "loraplex adapter convert"
UNSUPPORTED, INVALID = "UNSUPPORTED_ADAPTER", "ADAPTER_INVALID"


class Refusal(NamedTuple):
    """PEFT saves an adapter with the keys `config` of LoraConfig (or another config), `edit` changes its folder.

    Registering it fails with `reason`. The message or what comes with it says all
    of `says`: what is wrong and what can be done.
    """

    reason: str
    says: tuple[str, ...]
    config: Any = {}  # noqa: RUF012 - never changed
    edit: Callable[[Path], object] = lambda folder: folder


def by_key(key: str, value: object, *says: str, reason: str = UNSUPPORTED) -> Refusal:
    """A good adapter whose adapter_config.json has another value."""
    return Refusal(reason, (key, *says), edit=files.changed(**{key: value}))


def by_tensors(change: Callable[[dict[str, torch.Tensor]], object], *says: str, reason: str = INVALID) -> Refusal:
    """A good adapter whose tensors are changed in place."""
    return Refusal(reason, says, edit=files.tensors(change))


def _stack_of_experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.mlp.experts.lora_A.weight"] = torch.ones(8, 64)


def _not_promised(tensors: dict[str, torch.Tensor]) -> None:
    name = Q0.replace("q_proj", "k_proj")
    tensors |= {f"{name}.lora_A.weight": torch.ones(8, 64), f"{name}.lora_B.weight": torch.ones(32, 8)}


def _pickled(folder: Path) -> None:
    (folder / files.WEIGHTS).unlink()
    torch.save({f"{Q0}.lora_A.weight": torch.ones(8, 64)}, folder / "adapter_model.bin")


def _in_shards(folder: Path) -> None:
    (folder / files.WEIGHTS).rename(folder / "adapter_model-00001-of-00002.safetensors")


def _with_file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _moved(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def _set(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name: tensor.T.contiguous() for name, tensor in tensors.items()}


def _as_diffusers(tensors: dict[str, torch.Tensor]) -> None:
    for name in [*tensors]:
        tensors[name.replace("lora_A", "lora_down").replace("lora_B", "lora_up")] = tensors.pop(name)


def _as_kohya(tensors: dict[str, torch.Tensor]) -> None:
    for name in [*tensors]:
        tensors[f"lora_te_{name.replace('.', '_')}"] = tensors.pop(name)


def _in_a_folder(folder: Path) -> None:
    weights = (folder / files.WEIGHTS).rename(folder / "weights")
    (folder / files.WEIGHTS).mkdir()
    weights.rename(folder / files.WEIGHTS / files.WEIGHTS)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1024\n"
NAN = torch.full((8, 64), torch.nan)

REFUSALS: dict[str, Refusal] = {
    # ---- against a modified base model
    "pissa": Refusal(UNSUPPORTED, ("init_lora_weights", "pissa", CONVERT), {"init_lora_weights": "pissa"}),
    "olora": Refusal(UNSUPPORTED, ("init_lora_weights", "olora", CONVERT), {"init_lora_weights": "olora"}),
    "kasa": Refusal(UNSUPPORTED, ("kasa_config", CONVERT), {"kasa_config": KasaConfig()}),
    "pissa_niter": Refusal(
        UNSUPPORTED, ("init_lora_weights", "path_initial_model_for_weight_conversion"),
        {"init_lora_weights": "pissa_niter_4"},
    ),
    "corda": by_key("init_lora_weights", "corda", "path_initial_model_for_weight_conversion"),
    "loftq": by_key("init_lora_weights", "loftq", "merge_and_unload"),
    "converted from loftq": by_key("loftq_config", {"loftq_bits": 4}, "merge_and_unload"),
    "lora_ga": by_key("init_lora_weights", "lora_ga", "path_initial_model_for_weight_conversion"),
    "an unknown initialisation": by_key("init_lora_weights", "better", "gaussian"),
    # ---- what is no LoRA on this model
    "ia3": Refusal(
        UNSUPPORTED, ("peft_type", "IA3", "LORA"),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "prompt tuning": Refusal(
        UNSUPPORTED, ("peft_type", "PROMPT_TUNING", "only LORA is; train a LoRA"),
        PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    ),
    "lokr": Refusal(
        UNSUPPORTED, ("peft_type", "LOKR", "save_as_lora"), LoKrConfig(target_modules=["q_proj", "v_proj"])
    ),
    "monteclora": by_key("monteclora_config", {"num_samples": 4}, "save_as_lora"),
    "arrow": by_key("arrow_config", {"top_k": 2}, "routes"),
    "layer_replication": by_key("layer_replication", [[0, 2], [1, 3]], "without"),
    "target_parameters": by_key("target_parameters", ["mlp.experts.gate_up_proj"], "target_modules"),
    "target_parameters alone": Refusal(
        UNSUPPORTED, ("target_parameters", "; target the linears"),
        edit=files.changed(target_modules=[], target_parameters=["q_proj.weight"]),
    ),
    "experts": by_tensors(_stack_of_experts, "experts.lora_A", reason=UNSUPPORTED),
    "fan_in_fan_out": by_key("fan_in_fan_out", True, "false"),
    "an unknown key": by_key("frobnicate", {"a": 1}, "remove"),
    "a saved linear": Refusal(UNSUPPORTED, ("modules_to_save", "o_proj"), {"modules_to_save": ["o_proj"]}),
    "rank above the limit": Refusal(UNSUPPORTED, ("rank 600", "512"), {"r": 600}),
    "pickle": Refusal(UNSUPPORTED, ("adapter_model.bin", "safe_serialization"), edit=_pickled),
    "in shards": Refusal(UNSUPPORTED, ("00001-of-00002", files.WEIGHTS), edit=_in_shards),
    "whole numbers": by_tensors(
        lambda tensors: tensors.update({name: tensor.int() for name, tensor in tensors.items()}),
        "I32", "save it as", "BF16",
    ),
    "a classifier": by_tensors(
        _set("base_model.model.score.weight", torch.ones(2, 64)), "score", "CAUSAL_LM", reason=UNSUPPORTED
    ),
    "means over groups of inputs": Refusal(
        UNSUPPORTED, ("use_qalora", "unquantised"), {"use_qalora": True, "qalora_group_size": 4},
        files.tensors(_set(f"{Q0}.lora_A.weight", torch.ones(8, 16))),
    ),
    "activated, with biases": Refusal(
        UNSUPPORTED, ("modules_to_save", "train an activated LoRA without"),
        {"alora_invocation_tokens": [7], "task_type": "CAUSAL_LM", "modules_to_save": ["norm"]},
    ),
    # ---- files that contradict themselves or the model
    "rank by pattern": by_key(
        "rank_pattern", {"q_proj": 4}, "lora_A", "has rank 8", "says 4", "correct", reason=INVALID
    ),
    "halves of two checkpoints": by_tensors(
        _set(f"{Q0}.lora_B.weight", torch.ones(64, 9)), Q0, "[64, 9]", "its lora_A has rank 8", "the same checkpoint"
    ),
    "transposed": by_tensors(_transposed, "q_proj.lora_A", "is transposed", "[r, 64]", "transpose it"),
    "names of diffusers": by_tensors(
        _as_diffusers, "q_proj.lora_", "diffusers", "convert it to PEFT's format"
    ),
    "names of kohya": by_tensors(
        _as_kohya, "lora_te_", "kohya", "convert it to PEFT's format"
    ),
    "a part that no lora has": by_tensors(
        _set(f"{Q0}.lora_C.weight", torch.ones(8, 8)), "q_proj.lora_C.weight", "no part of a LoRA", "remove the tensor"
    ),
    "a tensor left over": by_tensors(
        _set("base_model.model.model.layers.0.mlp.router.weight", torch.ones(2, 64)), "router.weight", "remove"
    ),
    "named by the adapter": by_tensors(
        lambda tensors: [tensors.update({k.replace(".weight", ".mine.weight"): tensors.pop(k)}) for k in [*tensors]],
        "lora_A.mine.weight", "the adapter's", "save_pretrained",
    ),
    "saved in its wrapping": by_tensors(
        _moved(f"{Q0}.lora_A.weight", f"{Q0.replace('.layers', '._orig_mod.layers')}.lora_A.weight"),
        "_orig_mod", "wrapped", "unwrap",
    ),
    "a module that is not promised": by_tensors(_not_promised, "k_proj", "target_modules", "save it again"),
    "a module that is missing": by_tensors(
        lambda tensors: [tensors.pop(f"{Q0}.lora_{side}.weight") for side in "AB"], "q_proj", "missing", "save it again"
    ),
    "no lora_B": by_tensors(_without(f"{Q0}.lora_B.weight"), "q_proj", "lora_B", "save it again"),
    "an empty tensor": by_tensors(_set(f"{Q0}.lora_A.weight", torch.ones(0)), Q0, "gather"),
    "a tensor without rows": by_tensors(_set(f"{Q0}.lora_A.weight", torch.ones(0, 64)), Q0, "gather"),
    "a flat tensor": by_tensors(_set(f"{Q0}.lora_B.weight", torch.ones(512)), Q0, "gather"),
    "a layer too many": by_tensors(
        _moved(f"{Q0}.lora_A.weight", f"{Q0.replace('layers.0', 'layers.3')}.lora_A.weight"),
        "layers.3", "0 to 2", "trained on",
    ),
    "a wider base model": by_tensors(_set(f"{Q0}.lora_A.weight", torch.ones(8, 65)), Q0, "[8, 65]", "trained on"),
    "a taller base model": by_tensors(_set(f"{Q0}.lora_B.weight", torch.ones(65, 8)), Q0, "[65, 8]", "trained on"),
    "fewer tokens": Refusal(
        INVALID, ("embed_tokens.weight", "[250, 64]", "trained on"), {"modules_to_save": ["embed_tokens"]},
        files.tensors(_set("base_model.model.model.embed_tokens.weight", torch.ones(250, 64))),
    ),
    "named in two ways": by_tensors(
        _moved(f"{Q0}.lora_A.weight", f"{Q0.removeprefix('base_model.model.')}.lora_A.weight"),
        "q_proj", "save it again",
    ),
    "nan": by_tensors(_set(f"{Q0}.lora_A.weight", NAN), Q0, "NaN", "checkpoint"),
    "alpha of zero": by_key("lora_alpha", 0, "must be", "other than zero", reason=INVALID),
    "alpha without bounds": by_key("lora_alpha", 1e300, "lora_alpha", "above -1e+12 and below 1e+12", reason=INVALID),
    "null": by_key("lora_alpha", None, "is null", "PEFT cannot load", "set it as in training", reason=INVALID),
    "no trained tokens": by_key("trainable_token_indices", [], "trainable_token_indices", "empty", reason=INVALID),
    "a trained token twice": by_key(
        "trainable_token_indices", [3, 3], "trainable_token_indices", "names token 3 twice", reason=INVALID
    ),
    "no task": by_key("task_type", [1, 2], "task_type must be null or one of", "set it as in training", reason=INVALID),
    "dropout of all and more": by_key("lora_dropout", 1.5, "lora_dropout must be", "0 to 1", reason=INVALID),
    "flags in a pattern": by_key("alpha_pattern", {"(?i)Q_PROJ": 8}, "flags", "a prefix", "[Qq]", reason=INVALID),
    "lora in small letters": by_key("peft_type", "lora", '"lora"', 'write "LORA"', reason=INVALID),
    "targets that are nowhere": by_key("target_modules", ["qproj"], "names no module", "correct it", reason=INVALID),
    "nothing but exclusions": by_key("exclude_modules", ["q_proj", "v_proj"], "leaves none", "correct", reason=INVALID),
    # ---- what is none of the files
    "a pointer to the weights": Refusal(
        INVALID, (files.WEIGHTS, "Git LFS pointer", "git lfs pull"), edit=_with_file(files.WEIGHTS, POINTER)
    ),
    "weights for llama.cpp": Refusal(
        INVALID, (files.WEIGHTS, "GGUF", "as PEFT saved it"),
        edit=_with_file(files.WEIGHTS, b"GGUF\3\0\0\0" + b"\0" * 64),
    ),
    "a folder for the weights": Refusal(INVALID, (files.WEIGHTS, "is a folder", "in its place"), edit=_in_a_folder),
    "a byte order mark": Refusal(
        INVALID, (files.CONFIG, "byte order mark", "without"),
        edit=_with_file(files.CONFIG, b'\xef\xbb\xbf{"peft_type": "LORA"}'),
    ),
    "half a character": Refusal(
        INVALID, (files.CONFIG, "\\ud800", "half of a character", "write the whole"),
        edit=_with_file(files.CONFIG, b'{"peft_type": "LORA", "revision": "\\ud800"}'),
    ),
    "a number for a special token": Refusal(
        INVALID, ("tokenizer_config.json", "eos_token is 5", "a correct file"),
        edit=_with_file("tokenizer_config.json", b'{"eos_token": 5}'),
    ),
    "a page for the config": Refusal(
        INVALID, (files.CONFIG, "web page", "download"), edit=_with_file(files.CONFIG, b"<!DOCTYPE html><html></html>")
    ),
    "a truncated tokenizer": Refusal(
        INVALID, ("tokenizer.json", "truncated", "again"),
        edit=_with_file("tokenizer.json", b'{"model": {"vocab": {"a": '),
    ),
    "a template that is none": Refusal(
        INVALID, ("chat_template.jinja", "line 2", "base model's"),
        edit=_with_file("chat_template.jinja", b"{% for m in messages %}\n{{ m.content }"),
    ),
    "an empty template": Refusal(
        INVALID, ("tokenizer_config.json", "empty", "base model's"),
        edit=_with_file("tokenizer_config.json", b'{"chat_template": ""}'),
    ),
    "dora without magnitudes": by_key("use_dora", True, "lora_magnitude_vector", "remove use_dora", reason=INVALID),
    "magnitudes without dora": Refusal(
        INVALID, ("lora_magnitude_vector", "set use_dora"), {"use_dora": True}, files.changed(use_dora=False)
    ),
    "biases that are not there": by_key("lora_bias", True, "lora_B.bias", "remove lora_bias", reason=INVALID),
    "tokens that are not there": by_key(
        "trainable_token_indices", [3, 4], "trainable_tokens_delta", "remove", reason=INVALID
    ),
}  # fmt: skip
