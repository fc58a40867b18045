"""What the merged model computes for an adapter, in float64 or rounded, by transformers."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference_service.model.loader import load_config
from shared.adapter_format.binding import plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.header import read_header_of
from tests.shared.adapter_format.merging import merged


class MergedModel:
    """The base model in `base` with the adapter in `adapter` merged in, in float64, of the numbers in the files."""

    def __init__(self, base: Path, adapter: Path, device: str) -> None:
        _, config = load_config(base)
        weights = adapter / "adapter_model.safetensors"
        settings = parse_adapter_config((adapter / "adapter_config.json").read_bytes())
        self._before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        self._after = merged(self._before, plan(settings, read_header_of(weights), config), weights)
        self._to(device)

    def round(self) -> None:
        """Weights in bfloat16 from now on."""
        self._to(torch.bfloat16)

    def _to(self, what: str | torch.dtype) -> None:
        self._before, self._after = self._before.to(what), self._after.to(what)

    @torch.inference_mode()
    def logprobs(self, ids: list[int], start: int) -> Tensor:
        """`[len(ids), vocabulary]` float64 on the CPU. Up to `start` the base model runs, without the adapter.

        Its vocabulary is the smaller one where the adapter adds tokens; such an adapter acts everywhere.
        """
        if not start:
            return _logprobs(self._after, ids, None)
        before = self._before(input_ids=_ids(self._before, ids[:start]), use_cache=True)
        return torch.cat([_normed(before.logits), _logprobs(self._after, ids[start:], before.past_key_values)])


def _logprobs(model: PreTrainedModel, ids: list[int], cache: object) -> Tensor:
    return _normed(model(input_ids=_ids(model, ids), past_key_values=cache).logits)


def _ids(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return torch.tensor([ids], device=model.device)


def _normed(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits[0].double(), -1).cpu()
