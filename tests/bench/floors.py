"""The least that a step of an engine can take: bytes that must be read, at copy bandwidth, and prefill's products."""

from math import prod
from typing import NamedTuple

import torch

from inference_service.engine.runner import kv_bytes_per_token
from kernels.bench.ops import FLOPS
from shared.base_model import ModelConfig, tensor_shapes

DTYPE = torch.bfloat16
EMBEDDING = "model.embed_tokens.weight"


class Floors(NamedTuple):
    """Seconds, for a model in bfloat16.

    Attributes:
        weights: Bytes that every step reads: all but the embedding, of which a token reads one row.
        layers: Of these, what every token of a prompt is multiplied with: all but the head.
        adapter: Bytes of one adapter.
        kv_token: Bytes of keys and values of one token.
        bandwidth: Bytes read and written a second by a large copy.
    """

    weights: int
    layers: int
    adapter: int
    kv_token: int
    bandwidth: float

    def decode(self, requests: int, context: float, adapters: int) -> float:
        """A step in which `requests` decode, with `context` tokens each on the average and `adapters` in use."""
        nbytes = self.weights + min(adapters, requests) * self.adapter + requests * context * self.kv_token
        return nbytes / self.bandwidth

    def prefill(self, tokens: int) -> float:
        """The products of so many tokens with the base model's layers."""
        return 2 * tokens * self.layers / DTYPE.itemsize / FLOPS

    def load(self, requests: int, prompt: int, output: int, adapters: int) -> float:
        """All requests at once, from the first step to the last token. The prompts' last tokens give the first ones."""
        steps = self.decode(requests, prompt + output / 2, adapters) * (output - 1)
        return self.prefill(requests * prompt) + steps


def floors(model: ModelConfig, adapter: int, bandwidth: float) -> Floors:
    """Of a model's shape; `adapter`: bytes of one."""
    read = (shape for name, shape in tensor_shapes(model).items() if name != EMBEDDING or model.tie_word_embeddings)
    weights = sum(map(prod, read)) * DTYPE.itemsize
    head = model.vocab_size * model.hidden_size * DTYPE.itemsize
    return Floors(weights, weights - head, adapter, kv_bytes_per_token(model, DTYPE), bandwidth)
