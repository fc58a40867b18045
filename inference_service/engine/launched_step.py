"""A step that the GPU has still to compute, and what came of it once it has."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import torch
from torch import Tensor

from inference_service.engine.device_scores import Wanted, read
from inference_service.engine.step import NOT_FINITE, StepResult
from inference_service.types import TokenLogprobs
from kernels import sampling


class LaunchedStep:
    """A step on its way. `tokens`, `scores`: page-locked copies, valid after `event`."""

    def __init__(
        self, tokens: Tensor, scores: sampling.TopLogprobs | None, wanted: Wanted, event: torch.cuda.Event
    ) -> None:
        self._tokens, self._scores, self._wanted, self._event = tokens, scores, wanted, event

    def result(self) -> StepResult:
        """Wait until the GPU is there, and read."""
        self._event.synchronize()
        ids: list[int] = self._tokens.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        prompts: list[list[TokenLogprobs]] = [[] for _ in self._wanted.prompts]
        if self._scores is not None:
            targets = [(token, num_top) for tokens, num_top in self._wanted.prompts for token in tokens]
            wanted = [(ids[row], num_top) for row, num_top in self._wanted.rows] + targets
            entries = iter(read(self._scores, *zip(*wanted, strict=True)))
            for (row, _), entry in zip(self._wanted.rows, entries, strict=False):
                logprobs[row] = None if ids[row] == NOT_FINITE else entry
            prompts = [[next(entries) for _ in tokens] for tokens, _ in self._wanted.prompts]
        return StepResult(ids, logprobs, prompts)
