"""What an adapter touches and costs, in a few lines: its binding with the layers of like modules folded together."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shared.adapter_format.bound import BindingPlan, EmbedBinding, HeadBinding, RowsBinding
from shared.base_model import MODULES, ModelConfig, linear_shape

PARAMETER_BYTES = 2
VECTOR_BYTES = 4  # gains and offsets are float32 in every blob
ID_BYTES = 8


class ModuleSummary(NamedTuple):
    """Modules of one name that are adapted alike.

    layers: their layers as ranges, `0-3,5`; empty outside the layers.
    rank, scale: of LoRA; 0 without.
    kinds: what acts on them: lora, block_diagonal, dora, lora_bias, bias, modules_to_save, trainable_tokens,
        added_vocabulary.
    num_tensors: tensors of the file that are bound there.
    device_bytes: at most, at 2 bytes a parameter. Of matrices only rows that differ from the base model's are kept.
    """

    module: str
    layers: str
    rank: int
    scale: float
    kinds: tuple[str, ...]
    num_tensors: int
    device_bytes: int


class _Part(NamedTuple):
    """One module, before it is folded."""

    module: str
    layer: int | None
    rank: int
    scale: float
    kinds: tuple[str, ...]
    num_tensors: int
    device_bytes: int


def summarise(binding: BindingPlan, model: ModelConfig) -> tuple[ModuleSummary, ...]:
    """Fold a binding: linears in the order of `MODULES`, then norms, the embedding and the head."""
    parts = [*_linears(binding, model), *_norms(binding, model)]
    if binding.embed is not None:
        parts.append(_embedding(binding.embed, binding.extra_vocab, model))
    if binding.head is not None:
        parts.append(_head(binding.head, binding.extra_vocab, model))
    folded: dict[_Part, list[_Part]] = {}
    for part in parts:
        folded.setdefault(part._replace(layer=None), []).append(part)
    return tuple(
        ModuleSummary(
            module=alike.module,
            layers=_ranges(part.layer for part in members if part.layer is not None),
            rank=alike.rank,
            scale=alike.scale,
            kinds=alike.kinds,
            num_tensors=alike.num_tensors * len(members),
            device_bytes=alike.device_bytes * len(members),
        )
        for alike, members in folded.items()
    )


def _linears(binding: BindingPlan, model: ModelConfig) -> Iterator[_Part]:
    pairs = {(module.module, module.layer): module for module in binding.modules}
    vectors: dict[tuple[int, int], set[str]] = {}
    for vector in binding.vectors:
        vectors.setdefault((vector.module, vector.layer), set()).add(vector.kind)
    has_bias = (model.qkv_bias,) * 3 + (model.o_bias,) + (model.mlp_bias,) * 3
    for module, layer in sorted({*pairs, *vectors}):
        pair, kinds = pairs.get((module, layer)), vectors.get((module, layer), set())
        rows, columns = linear_shape(model, module)
        num_bytes = _affine_bytes(kinds, rows, has_bias[module])
        if pair is not None:
            num_bytes += PARAMETER_BYTES * pair.rank * (rows + columns)
        yield _Part(
            MODULES[module],
            layer,
            pair.rank if pair else 0,
            pair.scale if pair else 0.0,
            _kinds(pair.blocks if pair else None, kinds),
            2 * (pair is not None) + len(kinds),
            num_bytes,
        )


def _norms(binding: BindingPlan, model: ModelConfig) -> Iterator[_Part]:
    for norm in sorted(binding.norms, key=lambda norm: (norm.name, norm.layer)):
        size = model.head_dim if norm.name in ("q_norm", "k_norm") else model.hidden_size
        layer = norm.layer if norm.name != "norm" else None
        yield _Part(norm.name, layer, 0, 0.0, ("modules_to_save",), 1, PARAMETER_BYTES * size)


def _embedding(embed: EmbedBinding, extra: int, model: ModelConfig) -> _Part:
    vectors = {"magnitude"} if embed.magnitude else set()
    num_bytes = PARAMETER_BYTES * embed.rank * (model.vocab_size + extra + model.hidden_size)
    num_bytes += VECTOR_BYTES * model.hidden_size * len(vectors) + _row_bytes(embed, extra, model)
    return _side("embed_tokens", embed, vectors, num_bytes)


def _head(head: HeadBinding, extra: int, model: ModelConfig) -> _Part:
    given = {"magnitude": head.magnitude, "lora_bias": head.lora_bias, "bias": head.bias}
    vectors = {kind for kind, tensor in given.items() if tensor}
    rows = model.vocab_size + extra
    num_bytes = PARAMETER_BYTES * head.rank * (rows + model.hidden_size)
    num_bytes += _affine_bytes(vectors, rows, has_bias=False) + _row_bytes(head, extra, model)
    return _side("lm_head", head, vectors, num_bytes)


def _side(name: str, side: EmbedBinding | HeadBinding, vectors: set[str], num_bytes: int) -> _Part:
    rows = [found for found in (side.rows, side.grown) if found is not None]
    sources = {"added": "added_vocabulary"}
    blocks = side.blocks if isinstance(side, HeadBinding) else (1, 1)
    kinds = _kinds(blocks if side.a is not None else None, vectors)
    kinds += tuple(sources.get(found.source, found.source) for found in rows if found.source != "copy")
    num_tensors = 2 * (side.a is not None) + len(vectors) + len(rows)
    return _Part(name, None, side.rank, side.scale, kinds, num_tensors, num_bytes)


def _kinds(blocks: tuple[int, int] | None, vectors: set[str]) -> tuple[str, ...]:
    """`blocks`: of A and B; None without LoRA."""
    names = {"magnitude": "dora"}
    lora = ("lora",) * (blocks is not None) + ("block_diagonal",) * (blocks not in (None, (1, 1)))
    return lora + tuple(names.get(kind, kind) for kind in sorted(vectors, reverse=True))


def _affine_bytes(vectors: set[str], rows: int, has_bias: bool) -> int:
    """A gain with a magnitude; an offset with any bias, or where a gain acts on the base model's."""
    has_gain = "magnitude" in vectors
    has_offset = bool(vectors - {"magnitude"}) or (has_gain and has_bias)
    return VECTOR_BYTES * rows * (has_gain + has_offset)


def _row_bytes(side: EmbedBinding | HeadBinding, extra: int, model: ModelConfig) -> int:
    num_rows = sum(_num_rows(rows, extra, model) for rows in (side.rows, side.grown) if rows is not None)
    return num_rows * (PARAMETER_BYTES * model.hidden_size + ID_BYTES)


def _num_rows(rows: RowsBinding, extra: int, model: ModelConfig) -> int:
    if rows.ids is not None:
        return len(rows.ids)
    return model.vocab_size + extra if rows.source == "modules_to_save" else extra


def _ranges(layers: Iterable[int]) -> str:
    """`0-3,5`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(_range(run) for run in runs)


def _range(run: Sequence[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
