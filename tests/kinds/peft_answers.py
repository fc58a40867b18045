"""The cases as PEFT makes and saves them, and what PEFT computes with what it saved."""

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.e2e.oracle import TIE_GAP, Comparison
from tests.kinds.cases import Case


@cache
def _base(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def base_logprobs(folder: Path, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [len(ids), vocabulary] of the base model. Tokens that an adapter adds are taken for 0."""
    model = _base(folder)
    known = [token if token < model.config.vocab_size else 0 for token in ids]
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=torch.tensor([known])).logits[0], -1)


def load_base(folder: Path, case: Case) -> PreTrainedModel:
    """The base model, with as many tokens more as the case adds. What becomes of it is nobody else's."""
    model = copy.deepcopy(_base(folder))
    if case.extra_vocab:
        torch.manual_seed(0)
        model.resize_token_embeddings(model.config.vocab_size + case.extra_vocab, mean_resizing=False)
    return model


def save_trained(name: str, case: Case, base: Path, folder: Path, strength: float) -> None:
    """Writes the adapter of a case, with weights as training might have left them; A and B as large as `strength`."""
    torch.manual_seed(zlib.crc32(name.encode()))
    keys = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **case.lora}
    model = get_peft_model(load_base(base, case), LoraConfig(task_type="CAUSAL_LM", **keys))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                _train(key, parameter, strength, counts_from_start=case.repaired)
    case.train(model)
    model.create_or_update_model_card = lambda folder: None  # nobody reads it, and it takes a third of the time
    model.save_pretrained(folder, save_embedding_layers=True if case.extra_vocab else "auto")
    case.edit(folder)


def _train(key: str, parameter: torch.nn.Parameter, strength: float, counts_from_start: bool) -> None:
    """Random A and B whose product matters as much at every rank; everything else moves from where it began."""
    is_factor = ".lora_A." in key or ".lora_B." in key or ".lora_embedding_" in key
    noise = torch.randn_like(parameter)
    if counts_from_start:
        parameter += 0.2 * strength * noise
    elif is_factor and not key.endswith(".bias"):
        rank = min(parameter.shape)
        parameter.copy_(strength * noise / rank**0.25)
    else:
        parameter += 0.1 * parameter * noise + 0.05 * torch.randn_like(parameter)


@dataclass
class PeftAnswers:
    """PEFT with one adapter, or with a blend of several, in float32, on the base model in `base`."""

    model: PeftModel
    base: Path
    _logits: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def load(cls, base: Path, folder: Path, case: Case) -> "PeftAnswers":
        """PEFT's reading of what it saved."""
        return cls(PeftModel.from_pretrained(load_base(base, case), folder).eval(), base)

    @classmethod
    def blend(cls, base: Path, parts: Mapping[Path, float]) -> "PeftAnswers":
        """The exact sum of weighted adapters: PEFT's combination by concatenation."""
        first, *others = parts
        model = PeftModel.from_pretrained(load_base(base, Case("blend")), first, adapter_name="0")
        for number, folder in enumerate(others, start=1):
            model.load_adapter(folder, adapter_name=str(number))
        names = [str(number) for number in range(len(parts))]
        model.add_weighted_adapter(names, list(parts.values()), "blend", combination_type="cat")
        model.set_adapter("blend")
        return cls(model.eval(), base)

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """Of the tokens from the second on, and of the best one behind the last: `[len(prompt)]`."""
        logprobs = torch.log_softmax(self.model(input_ids=torch.tensor([prompt])).logits[0], -1)
        following = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        return torch.cat([following, logprobs[-1:].amax(1)])

    def compare(
        self, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], prompt_logprobs: Sequence[float]
    ) -> tuple[Comparison, float]:
        """A greedy answer, and the prompt's log-probabilities from the second token on unless there are none.

        Returns also by how much the adapter moves any log-probability of the base model.
        """
        ids = (*prompt, *answer)
        if ids not in self._logits:  # the same prompt is asked more than once
            with torch.inference_mode():
                self._logits[ids] = self.model(input_ids=torch.tensor([ids])).logits[0]
        logits = self._logits[ids]  # [tokens, vocabulary]
        all_logprobs = torch.log_softmax(logits, -1)
        got = torch.tensor([*prompt_logprobs, *logprobs])
        expected = all_logprobs[:-1].gather(1, torch.tensor([*prompt[1:], *answer])[:, None])[:, 0][-len(got) :]
        top = logits[len(prompt) - 1 : -1].topk(2)
        gaps = top.values[:, 0] - top.values[:, 1]
        found = Comparison(
            tokens=len(answer), ties=int((gaps < TIE_GAP).sum()), worst_logprob=float((got - expected).abs().max())
        )
        for position, (token, chosen) in enumerate(zip(answer, top.indices[:, 0].tolist(), strict=True)):
            if token != chosen and gaps[position] >= TIE_GAP:
                found.mismatches.append(f"[{position}]: {token}, not {chosen}")
        before = base_logprobs(self.base, tuple(prompt))
        moved = (all_logprobs[: len(prompt), : before.shape[1]] - before).abs().max()
        return found, float(moved)
