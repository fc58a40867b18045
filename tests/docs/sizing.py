"""`python -m tests.docs.sizing`: the table of bytes per adapter in docs/operate.md, from the packer's own layouts."""

from collections.abc import Iterator
from typing import Any

from inference_service.adapters.layout import plan_layout
from shared.adapter_format.bound import BindingPlan, ModuleBinding
from shared.base_model import MODULES, ModelConfig, parse_config
from tests.bench.shapes import SHAPES

RANKS = (8, 16, 64)
TARGETS = {"q, v": ("q_proj", "v_proj"), "all linears": MODULES}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **_LLAMA, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "Llama-3.1-8B": SHAPES["llama-3.1-8b"],
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960,
    },
}  # fmt: skip


def adapter_bytes(model: ModelConfig, rank: int, targets: tuple[str, ...]) -> int:
    """What plain LoRA of this rank on these linears of every layer takes in bfloat16, on the host and on the device."""
    indices = [MODULES.index(name) for name in targets]
    modules = tuple(
        ModuleBinding(layer, module, "", rank, 1.0, "", "")
        for layer in range(model.num_layers)
        for module in sorted(indices)
    )
    return plan_layout(BindingPlan(modules, rank, 2 * len(modules), ()), model, "bfloat16").nbytes


def table() -> Iterator[str]:
    """Lines of Markdown: megabytes (10⁶), and how many fit into a GiB."""
    yield "| bfloat16 | " + " | ".join(f"rank {rank}, {name}" for name in TARGETS for rank in RANKS) + " |"
    yield "|---" * (1 + len(TARGETS) * len(RANKS)) + "|"
    for name, config in MODELS.items():
        model = parse_config(config)
        sizes = [adapter_bytes(model, rank, targets) for targets in TARGETS.values() for rank in RANKS]
        yield f"| {name} | " + " | ".join(f"{size / 1e6:.1f} MB, {(1 << 30) // size}" for size in sizes) + " |"


if __name__ == "__main__":
    print("\n".join(table()))
