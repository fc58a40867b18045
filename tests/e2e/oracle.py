"""PEFT + transformers in float32: what every answer must be."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

TIE_GAP = 1e-3  # below this gap of the two top logits, either token is right
LOGPROB_TOLERANCE = 1e-3


@dataclass
class Comparison:
    """What a comparison found. `ties` are positions where the oracle's own choice is a coin toss."""

    tokens: int = 0
    ties: int = 0
    worst_logprob: float = 0.0
    mismatches: list[str] = field(default_factory=list)

    def add(self, other: "Comparison") -> None:
        self.tokens += other.tokens
        self.ties += other.ties
        self.worst_logprob = max(self.worst_logprob, other.worst_logprob)
        self.mismatches += other.mismatches


class Oracle:
    """The base model and adapters, each loaded when it is first asked for; one forward pass scores a whole answer."""

    def __init__(self, base: Path, adapters: Mapping[str, Path]) -> None:
        self._folders = adapters
        self._scored: dict[str, tuple[list[int], torch.Tensor]] = {}  # by adapter, the last ids and their logits
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    def logits(self, ids: Sequence[int], adapter: str) -> torch.Tensor:
        """Logits `[len(ids), vocab]` in float32 with `adapter`, or the base model's if it is empty."""
        known, logits = self._scored.get(adapter, ([], torch.empty(0)))
        if known[: len(ids)] != list(ids):
            logits = self._computed(ids, adapter)
            self._scored[adapter] = list(ids), logits
        return logits[: len(ids)]

    def _computed(self, ids: Sequence[int], adapter: str) -> torch.Tensor:
        if adapter:
            self._load(adapter)
            self._model.set_adapter(adapter)
        must_disable = not adapter and isinstance(self._model, PeftModel)
        with torch.inference_mode(), self._model.disable_adapter() if must_disable else nullcontext():
            return self._model(torch.tensor([list(ids)])).logits[0]

    def _load(self, adapter: str) -> None:
        if not isinstance(self._model, PeftModel):
            self._model = PeftModel.from_pretrained(self._model, self._folders[adapter], adapter_name=adapter).eval()
        elif adapter not in self._model.peft_config:
            self._model.load_adapter(self._folders[adapter], adapter_name=adapter)
            self._model.eval()

    def compare(
        self, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], adapter: str
    ) -> Comparison:
        """Scores a greedy answer: each token must be the oracle's choice after the same tokens, ties apart."""
        logits = self.logits([*prompt, *answer], adapter)[len(prompt) - 1 : -1]
        top = logits.topk(2).values
        gaps = (top[:, 0] - top[:, 1]).tolist()
        chosen = logits.argmax(-1).tolist()
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(list(answer))[:, None])[:, 0].tolist()
        found = Comparison(tokens=len(answer))
        for position, token in enumerate(answer):
            found.worst_logprob = max(found.worst_logprob, abs(expected[position] - logprobs[position]))
            found.ties += gaps[position] < TIE_GAP
            if token != chosen[position] and gaps[position] >= TIE_GAP:
                found.mismatches.append(f"{adapter or 'base'}[{position}]: {token}, not {chosen[position]}")
        return found
