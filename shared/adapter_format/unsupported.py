"""Tensors that no kind of adapter took: what they are, and what to do about it."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from shared.adapter_format.kinds.experts import ADVICE as EXPERTS_ADVICE
from shared.adapter_format.kinds.saved_modules import LINEARS_ADVICE
from shared.adapter_format.reasons import OTHER_BASE, tensor_invalid, tensor_unsupported
from shared.errors import LoraplexError


class _LeftOver(NamedTuple):
    """Tensors whose name `pattern` finds. `advice`: PEFT knows them and we do not serve them; else they are wrong."""

    pattern: str
    key: str
    advice: str = ""


def _unasked(pattern: str, key: str) -> _LeftOver:
    return _LeftOver(pattern, key)


_KINDS = (
    _LeftOver(r"\.experts\.(base_layer\.)?lora_[AB]\.weight$", "target_parameters", EXPERTS_ADVICE),
    _LeftOver(r"\.experts\.[0-9]+\.\w+\.lora_[AB]\.weight$", "target_modules", EXPERTS_ADVICE),
    _LeftOver(
        r"\.lora_diag$", "kasa_config", "KaSA trains against a truncated base model; `loraplex adapter convert` it"
    ),
    _LeftOver(
        r"(^|\.)([qkvo]_proj|gate_proj|up_proj|down_proj)(\.base_layer)?\.weight$",
        "modules_to_save",
        LINEARS_ADVICE,
    ),
    _LeftOver(
        r"(^|\.)(score|classifier|qa_outputs|v_head)\..*$",
        "modules_to_save",
        "only causal language models are served; train with task_type CAUSAL_LM",
    ),
    _unasked(r"\.lora_magnitude_vector(\.weight)?$", "use_dora"),
    _unasked(r"\.lora_B\.bias$", "lora_bias"),
    _unasked(r"(_proj|\.base_layer)\.bias$", "bias"),
    _unasked(r"\.trainable_tokens_delta$", "trainable_token_indices"),
    _unasked(r"\.lora_velora_embed$", "velora_config"),
    _unasked(
        r"(^|\.)(embed_tokens|lm_head|[a-z_]*norm)\.((base_layer|original_module|modules_to_save)\.)?weight$",
        "modules_to_save",
    ),
)
# Names that no loader knows: pattern, what is wrong, what to do.
_MISNAMED = (
    (
        r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.",
        "its name has in it what wrapped the model in training",
        "unwrap the model, and save it with save_pretrained",
    ),
    (
        r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.(?!weight$|bias$)[^.]+(\.weight|\.bias)?$",
        "its name has the adapter's in it, which PEFT would not find",
        "save it with save_pretrained, which leaves that out",
    ),
)
# How other tools name a LoRA's tensors: pattern, what they are, what to do.
_FOREIGN = (
    (
        r"^lora_(unet|te[0-9]?|transformer|prior)_",
        "has a name as kohya's scripts write it, for a part of an image model (lora_unet_, lora_te_)",
        "if it adapts this base model, convert it to PEFT's format",
    ),
    (
        r"(^|\.)lora_(down|up|mid)\.(\w+\.)?weight$|([._]lora|\.lora_linear_layer)\.(down|up)\.weight$",
        "has a name as diffusers and kohya's scripts write it (lora_down, lora_up)",
        "convert it to PEFT's format, which has lora_A for lora_down and lora_B for lora_up",
    ),
)
_NOT_OURS = "remove the tensor if the adapter does without, or train one with PEFT"
_OF_PEFT = (".lora_A.weight", ".lora_B.weight")  # most tensors
_PART = re.compile(r"(?:^|\.)(lora_[A-Za-z0-9_]+)(?:\.|$)")
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def check_format(tensors: Iterable[str]) -> None:
    """Raises AdapterInvalid for a name that another tool than PEFT wrote, which says nothing about the base model."""
    for tensor in tensors:
        if not tensor.endswith(_OF_PEFT):
            for pattern, problem, advice in _FOREIGN:
                if re.search(pattern, tensor):
                    raise tensor_invalid(tensor, problem, advice)


def left_over(tensor: str, role: str = "") -> LoraplexError:
    """The error for a tensor that nothing of the config asks for. `role`: what it is of a module that there is."""
    for pattern, problem, advice in _MISNAMED:
        if re.search(pattern, tensor):
            return tensor_invalid(tensor, problem, advice)
    for kind in _KINDS:
        if re.search(kind.pattern, tensor):
            if kind.advice:
                return tensor_unsupported(tensor, kind.key, kind.advice)
            problem = f"{kind.key} of adapter_config.json does not ask for it on this base model"
            return tensor_invalid(tensor, problem, f"set {kind.key} as in training, or remove the tensor")
    found = _PART.search(tensor)
    part = found[1] if found is not None and found[1] not in _PARTS else role
    if part:
        return tensor_invalid(tensor, f"{part:.60} is no part of a LoRA as PEFT saves it", _NOT_OURS)
    return tensor_invalid(tensor, "belongs to no module of this base model", f"{OTHER_BASE}, or remove the tensor")
