"""The slow, obvious reading of a BindingPlan: a model whose weights are what the plan says, to compare PEFT with."""

import copy

import torch
from safetensors.torch import load_file

from shared.adapter_format.bound import FINAL_NORM
from shared.base_model import module_path


def merged(model, bound, weights):
    """A copy of the base model `model` with the adapter of the plan `bound` merged in, its head untied from the rest.

    `weights`: the adapter's safetensors file.
    """
    tensors = {name: tensor.double() for name, tensor in load_file(weights).items()}
    result = copy.deepcopy(model).double()
    backbone = getattr(result, "model", result)
    if hasattr(result, "lm_head"):
        result.lm_head.weight = torch.nn.Parameter(result.lm_head.weight.detach().clone())
    vectors = {(vector.layer, vector.module, vector.kind): tensors[vector.tensor] for vector in bound.vectors}
    for module in bound.modules:
        a = _dense(tensors[module.a], module.blocks[0])
        b = _dense(tensors[module.b], module.blocks[1])
        linear = backbone.get_submodule(module.path.removeprefix("model."))
        _adapt(
            linear,
            module.scale * b @ a,
            vectors.get((module.layer, module.module, "magnitude")),
            vectors.get((module.layer, module.module, "lora_bias")),
            module.scale,
            vectors.get((module.layer, module.module, "bias")),
        )
    adapted = {(module.layer, module.module) for module in bound.modules}
    for (layer, module, kind), vector in vectors.items():
        if (layer, module) not in adapted:
            assert kind == "bias"
            backbone.get_submodule(module_path(layer, module).removeprefix("model.")).bias.data = vector
    if bound.embed is not None:
        table = _rows(backbone.embed_tokens.weight.data, bound.embed, bound.extra_vocab, tensors)
        if bound.embed.a is not None:
            table = table + bound.embed.scale * (tensors[bound.embed.b] @ tensors[bound.embed.a]).T
        if bound.embed.magnitude is not None:
            table = table * tensors[bound.embed.magnitude] / table.norm(dim=0)
        backbone.embed_tokens = torch.nn.Embedding.from_pretrained(table)
    if bound.head is not None:
        head = bound.head
        linear = torch.nn.Linear(1, 1, bias=False)
        linear.weight = torch.nn.Parameter(_rows(result.lm_head.weight.data, head, bound.extra_vocab, tensors))
        if head.a is not None:
            _adapt(
                linear,
                head.scale * _dense(tensors[head.b], head.blocks[1]) @ _dense(tensors[head.a], head.blocks[0]),
                tensors.get(head.magnitude),
                tensors.get(head.lora_bias),
                head.scale,
                tensors.get(head.bias),
            )
        result.lm_head = linear
    for norm in bound.norms:
        path = norm.name if norm.layer == FINAL_NORM else f"layers.{norm.layer}.{_parent(norm.name)}{norm.name}"
        backbone.get_submodule(path).weight.data = tensors[norm.tensor]
    return result.eval()


def _adapt(linear, delta, magnitude, lora_bias, scale, bias):
    weight = linear.weight.data + delta
    if magnitude is not None:
        weight = weight * (magnitude / weight.norm(dim=1))[:, None]
    linear.weight = torch.nn.Parameter(weight)
    own = linear.bias.data if bias is None and linear.bias is not None else bias
    parts = [part for part in (own, None if lora_bias is None else scale * lora_bias) if part is not None]
    linear.bias = torch.nn.Parameter(sum(parts)) if parts else None


def _dense(stacked, blocks):
    return torch.block_diag(*stacked.chunk(blocks, dim=0))


def _rows(table, side, extra, tensors):
    table = torch.cat([table, torch.full((extra, table.shape[1]), float("nan"), dtype=table.dtype)])
    for rows in (side.grown, side.rows):
        if rows is not None and rows.ids is None:
            table = tensors[rows.tensor].clone()
        elif rows is not None:
            table[list(rows.ids)] = tensors[rows.tensor]
    return table


def _parent(norm):
    return "self_attn." if norm in ("q_norm", "k_norm") else ""
