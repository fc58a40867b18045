"""A base model's config.json as this project understands it: the architecture, the module names and all shapes.

Both services depend on this one reading: the registry validates adapters against it, the inference service loads the
model and its adapters by it. It needs no torch. `shared.base_weights` adds the fingerprint that covers weights.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from shared.errors import InvalidArgument
from shared.json_fields import JsonFields
from shared.json_text import as_json
from shared.rope import Rope, RopeScaling, parse_rope

__all__ = ["MODULES", "ModelConfig", "RopeScaling", "parse_config"]

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PARENTS = ("self_attn", "self_attn", "self_attn", "self_attn", "mlp", "mlp", "mlp")

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "float16", "bfloat16")

# Keys that do not change what the model computes, or that only say where it stops.
_NOT_IN_FINGERPRINT = ("dtype", "eos_token_ids", "bos_token_id", "max_position")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. `sliding_windows` has one entry per layer: tokens each position sees, None for all.

    `dtype` is what the checkpoint was saved in. `o_bias`, `qkv_bias`, `mlp_bias`: which linears carry a bias.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read config.json of a Llama, Mistral, Qwen2 or Qwen3 causal language model, in either generation of its keys.

    Defaults of absent keys are those of transformers' config classes; the sizes that define a model are required.

    Raises:
        InvalidArgument: names the architecture if it is not supported, else every wrong or missing key at once
            (fields `config.KEY`).
    """
    if not isinstance(raw, Mapping):
        raise InvalidArgument.of("config", "must be a JSON object")
    architecture = _architecture(raw)
    fields = JsonFields(raw, "config.")
    max_position = fields.integer("max_position_embeddings", _default_max_position(architecture))
    config = _build(fields, architecture, max_position, parse_rope(fields, max_position))
    fields.check()
    return config


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if name not in ARCHITECTURES:
        shown = repr(name if name else raw.get("model_type"))[:100]
        supported = ", ".join(ARCHITECTURES)
        raise InvalidArgument.of(
            "config.architectures", f"architecture {shown} is not supported; supported: {supported}"
        )
    return str(name)


def _build(fields: JsonFields, architecture: str, max_position: int, rope: Rope) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", high=1024)
    hidden_size = fields.integer("hidden_size", high=1 << 20)
    num_heads, num_kv_heads, head_dim = _heads(fields, architecture, hidden_size)
    _check_supported(fields)
    if fields.raw.get("rms_norm_eps", 1) is None:  # transformers has no default for a null
        fields.wrong("rms_norm_eps", "must be a number above zero, is null")
    attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", high=1 << 24),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", high=1 << 22),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        dtype=_dtype(fields),
        eos_token_ids=_token_ids(fields, "eos_token_id"),
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id")), None),
    )


def _default_max_position(architecture: str) -> int:
    return {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131072}.get(architecture, 32768)


def _heads(fields: JsonFields, architecture: str, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, KV heads and head size. KV heads default to the query heads (Mistral: 8), as in transformers."""
    num_heads = fields.integer("num_attention_heads", high=4096)
    absent_kv = 8 if architecture == "MistralForCausalLM" and "num_key_value_heads" not in fields.raw else num_heads
    if architecture.startswith("Qwen") and "num_key_value_heads" not in fields.raw:
        absent_kv = 32
    num_kv_heads = fields.integer("num_key_value_heads", absent_kv, high=4096)
    if num_heads % num_kv_heads:
        fields.wrong("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads ({num_heads})")
    absent_dim = hidden_size // num_heads
    if architecture == "Qwen3ForCausalLM" and "head_dim" not in fields.raw:
        absent_dim = 128
    head_dim = fields.integer("head_dim", max(absent_dim, 1), high=4096)
    is_stated = fields.raw.get("head_dim") is not None
    if head_dim % 2 and (is_stated or not fields.violations):  # else it follows from what is wrong already
        fields.wrong("head_dim", f"must be even for rotary embeddings, is {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _check_supported(fields: JsonFields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        fields.wrong("hidden_act", f"activation {as_json(activation):.80} is not supported; supported: silu")
    if fields.raw.get("quantization_config"):
        fields.wrong("quantization_config", "quantised checkpoints are not supported; use the unquantised one")


def _sliding_windows(fields: JsonFields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: every layer, unless null. Qwen: only with use_sliding_window, by layer_types or max_window_layers."""
    full = (None,) * num_layers
    if architecture == "LlamaForCausalLM":
        return full
    if fields.raw.get("sliding_window", 4096) is None:
        return full
    if architecture == "MistralForCausalLM":
        return (fields.integer("sliding_window", 4096),) * num_layers
    if not fields.flag("use_sliding_window", False):
        return full
    window = fields.integer("sliding_window", 4096)
    if (types := fields.raw.get("layer_types")) is None:
        first = fields.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(t not in allowed for t in types):
        fields.wrong("layer_types", f"must be a list of {num_layers} entries out of {', '.join(allowed)}")
        return full
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _dtype(fields: JsonFields) -> str:
    key = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(key, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        fields.wrong(key, f"dtype {as_json(dtype):.80} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _token_ids(fields: JsonFields, key: str) -> tuple[int, ...]:
    value = fields.raw.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        fields.wrong(key, f"must be a token id or a list of them, is {as_json(value):.80}")
        return ()
    return tuple(dict.fromkeys(ids))


def linear_shape(config: ModelConfig, module: int) -> tuple[int, int]:
    """(out, in) of the linear `MODULES[module]`."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv, mlp = config.num_kv_heads * config.head_dim, config.intermediate_size
    return ((heads, hidden), (kv, hidden), (kv, hidden), (hidden, heads), (mlp, hidden), (mlp, hidden), (hidden, mlp))[
        module
    ]


def module_path(layer: int, module: int) -> str:
    """Name of a linear in the checkpoint, without `.weight`: `model.layers.3.self_attn.q_proj`."""
    return f"model.layers.{layer}.{_PARENTS[module]}.{MODULES[module]}"


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the seven linears of every layer, by module path."""
    shapes = [linear_shape(config, module) for module in range(len(MODULES))]
    return {
        module_path(layer, module): shape for layer in range(config.num_layers) for module, shape in enumerate(shapes)
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint of this model must hold, by name."""
    hidden, vocab = config.hidden_size, config.vocab_size
    has_bias = (config.qkv_bias,) * 3 + (config.o_bias,) + (config.mlp_bias,) * 3
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config.num_layers):
        for module, bias in enumerate(has_bias):
            path, shape = module_path(layer, module), linear_shape(config, module)
            shapes[f"{path}.weight"] = shape
            if bias:
                shapes[f"{path}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                shapes[f"model.layers.{layer}.self_attn.{norm}.weight"] = (config.head_dim,)
    return shapes


def fingerprint(raw_config: Mapping[str, Any]) -> str:
    """`sha256:HEX` of what the model computes: the parsed config and its tensor table, as canonical JSON.

    Left out: dtype, eos and bos ids, the position limit, and every key that `parse_config` does not read
    (transformers_version, use_cache …). The two generations of config keys give the same fingerprint.
    """
    config = parse_config(raw_config)
    keys = {key: value for key, value in asdict(config).items() if key not in _NOT_IN_FINGERPRINT}
    canonical = json.dumps({"config": keys, "tensors": tensor_shapes(config)}, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def default_id(name_or_path: str) -> str:
    """The id a base model gets when none is given: its Hub id, or its folder's name, lowercased, `/` as `--`."""
    is_path = name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1
    name = PurePath(name_or_path).name if is_path else name_or_path.strip("/")
    return name.lower().replace("/", "--")
