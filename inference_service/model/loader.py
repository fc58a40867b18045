"""From a Hugging Face folder to a `Decoder`: config.json and safetensors files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inference_service.model.checkpoint import DTYPES, Source, read_tensors, unreadable
from inference_service.model.decoder import Decoder
from shared.adapter_format.header import TensorInfo, read_header_of
from shared.base_model import MODULES, ModelConfig, linear_shape, module_path, parse_config, tensor_shapes
from shared.errors import AdapterInvalid, BaseModelMismatch
from shared.model_folder import load_raw_config, read_json_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# packed projection of a layer ← the linears of the checkpoint that it holds, first rows first
PACKED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def load_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """config.json as it is, but with the end-of-sequence ids of generation_config.json added, and as parsed.

    Raises:
        InvalidArgument: a file is missing or no JSON object, or the model is not supported; names file, key or
            architecture.
    """
    raw = load_raw_config(folder)
    return raw, parse_config(raw)


def load_model(folder: Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """The decoder with the folder's weights, converted to `dtype` on `device`.

    Raises:
        BaseModelMismatch: a tensor is missing, unknown, or of another shape or dtype than `config` says, or a file is
            missing or broken; metadata names the `tensor` or `file`.
    """
    decoder = Decoder(config, device=torch.device(device), dtype=dtype)
    wanted = destinations(decoder)
    sources = [source for file in _weight_files(folder) for source in _take(file, config, wanted)]
    if wanted:
        names = ", ".join(list(wanted)[:5]) + (f" and {len(wanted) - 5} more" if len(wanted) > 5 else "")
        raise BaseModelMismatch(f"the checkpoint lacks {names}", metadata={"tensor": next(iter(wanted))})
    read_tensors(sources)
    return decoder


def init_random(config: ModelConfig, device: torch.device | str, dtype: torch.dtype, seed: int) -> Decoder:
    """A decoder of random weights (normal, deviation 0.02; norms near 1), for tests and benchmarks."""
    device = torch.device(device)
    decoder = Decoder(config, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.02, generator=generator)
    return decoder


def destinations(decoder: Decoder) -> dict[str, Tensor]:
    """For each tensor name of a checkpoint, the (part of a) parameter that it fills."""
    config = decoder.config
    places: dict[str, Tensor] = {"model.embed_tokens.weight": decoder.embed, "model.norm.weight": decoder.norm.weight}
    if not config.tie_word_embeddings:
        places["lm_head.weight"] = decoder.lm_head
    for number, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{number}."
        for projection, linears in PACKED.items():
            places.update(_linears(config, number, linears, layer.get_submodule(projection)))
        modules = dict(layer.named_modules())
        places.update({f"{prefix}{norm}.weight": modules[norm].weight for norm in NORMS if norm in modules})
    return {name: place.detach() for name, place in places.items()}


def _linears(
    config: ModelConfig, layer: int, linears: tuple[str, ...], packed: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    modules = [MODULES.index(name) for name in linears]
    rows = [linear_shape(config, module)[0] for module in modules]
    for kind, parameter in packed.named_parameters():
        for module, part in zip(modules, torch.split(parameter, rows), strict=True):
            yield f"{module_path(layer, module)}.{kind}", part


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise BaseModelMismatch(f"{folder} holds neither {WEIGHTS} nor {INDEX}", metadata={"file": WEIGHTS})
    names = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(names, Mapping) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise BaseModelMismatch(f"{INDEX}: weight_map must name files beside it", metadata={"file": INDEX})
    return [folder / name for name in dict.fromkeys(names.values())]


def _take(file: Path, config: ModelConfig, wanted: dict[str, Tensor]) -> Iterator[Source]:
    """The tensors of `file`, checked; they leave `wanted`."""
    shapes = tensor_shapes(config)
    try:
        header = read_header_of(file)
    except OSError as error:
        raise unreadable(file.name, error.strerror) from error
    except AdapterInvalid as error:  # the reader's usual files are adapters
        raise unreadable(file.name, error.message) from error
    for name, info in header.items():
        if not _is_ignored(name, config):
            _check(name, info, shapes, wanted)
            yield Source(file, info, wanted.pop(name))


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Buffers that old files carry, and the copy of a tied output layer."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _check(name: str, stored: TensorInfo, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor]) -> None:
    if name not in wanted:
        reason = "is there twice" if name in shapes else "is not part of this architecture"
    elif stored.shape != shapes[name]:
        reason = f"has shape {stored.shape}, config.json says {shapes[name]}"
    elif stored.dtype not in DTYPES:
        reason = f"has dtype {stored.dtype}; supported: {', '.join(DTYPES)}"
    else:
        return
    raise BaseModelMismatch(f"tensor {name} {reason}", metadata={"tensor": name})
