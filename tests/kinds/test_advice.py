"""What a refusal tells its user to do leaves an adapter, or a base model, that computes what was trained."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    LoraGAConfig,
    PeftConfig,
    get_peft_model,
    save_as_lora,
)
from peft.tuners.lora.config import CordaConfig, MontecloraConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.errors import UnsupportedAdapter
from tests.kinds.bases import build
from tests.kinds.in_process import Asked, prompt_logprobs
from tests.kinds.packed import empty, pack
from tests.kinds.peft_answers import PeftAnswers
from tests.kinds.world import PROMPTS

PROMPT = PROMPTS[1]
TOLERANCE = 1e-4
LORA = {"r": 6, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
Prepare = Callable[[PreTrainedModel, LoraConfig], object]

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of most of what is tried here


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("advice")
    build("llama", folder)
    return folder


def load(base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def trained(model: nn.Module, base: Path) -> torch.Tensor:
    """Moves what is trained, and returns what the model computes then."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.03 * torch.randn_like(parameter)
    return PeftAnswers(model.eval(), base).prompt_logprobs(PROMPT)


def check(base: Path, expected: torch.Tensor, adapter: Path | None = None) -> None:
    """The engine computes this with `adapter` on the base model, or with the base model alone."""
    packed = empty(base)
    digest = pack(packed, adapter) if adapter is not None else None
    (found,) = prompt_logprobs(packed, [Asked(digest, PROMPT)])
    assert (torch.tensor(found) - expected).abs().max() < TOLERANCE


def refused(base: Path, adapter: Path, advice: str) -> None:
    with pytest.raises(UnsupportedAdapter, match=advice):
        pack(empty(base), adapter)


def with_gradients(model: PreTrainedModel, config: LoraConfig) -> None:
    ids = torch.tensor([PROMPT])
    preprocess_loraga(model, config, lambda: model(input_ids=ids, labels=ids).loss.backward())


def with_data(model: PreTrainedModel, config: LoraConfig) -> None:
    @torch.no_grad()
    def run() -> None:
        torch.manual_seed(1)
        for _ in range(4):
            model(input_ids=torch.randint(3, 250, (1, 90)))

    preprocess_corda(model, config, run_model=run)


@pytest.mark.parametrize(
    ("keys", "prepare"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, lambda model, config: None),
        ({"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()}, with_gradients),
        ({"init_lora_weights": "corda", "corda_config": CordaConfig(corda_method="kpm")}, with_data),
    ],
)
def test_converted_by_peft_while_saving(keys: dict[str, object], prepare: Prepare, base: Path, tmp_path: Path) -> None:
    model, config = load(base), LoraConfig(**LORA, **keys)
    prepare(model, config)
    peft = get_peft_model(model, config)
    peft.save_pretrained(tmp_path / "before")
    expected = trained(peft, base)
    peft.save_pretrained(tmp_path / "as it is")
    peft.save_pretrained(tmp_path / "out", path_initial_model_for_weight_conversion=str(tmp_path / "before"))
    refused(base, tmp_path / "as it is", "path_initial_model_for_weight_conversion")
    check(base, expected, tmp_path / "out")


def test_sampled_adapters_saved_as_what_they_are_without_training(base: Path, tmp_path: Path) -> None:
    peft = get_peft_model(load(base), LoraConfig(**LORA, monteclora_config=MontecloraConfig()))
    expected = trained(peft, base)
    peft.save_pretrained(tmp_path / "as it is")
    save_as_lora(tmp_path / "out", peft, rank=LORA["r"])
    refused(base, tmp_path / "as it is", "save_as_lora")
    check(base, expected, tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "rank"),  # of LoHa's product of two matrices of rank 2, and of LoKr's of all four rows with rank 2
    [
        (LoHaConfig(r=2, alpha=3, target_modules=LORA["target_modules"], task_type="CAUSAL_LM"), 4),
        (LoKrConfig(r=2, alpha=3, target_modules=LORA["target_modules"], decompose_factor=4), 8),
    ],
)
def test_other_types_that_peft_converts(config: PeftConfig, rank: int, base: Path, tmp_path: Path) -> None:
    peft = get_peft_model(load(base), config)
    expected = trained(peft, base)
    peft.save_pretrained(tmp_path / "as it is")
    save_as_lora(tmp_path / "out", peft, rank=rank)
    refused(base, tmp_path / "as it is", "convert it with PEFT's save_as_lora")
    check(base, expected, tmp_path / "out")


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(**LORA, modules_to_save=["o_proj"]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    ],
)
def test_merged_into_the_base_model(config: PeftConfig, base: Path, tmp_path: Path) -> None:
    peft = get_peft_model(load(base), config)
    expected = trained(peft, base)
    peft.save_pretrained(tmp_path / "as it is")
    refused(base, tmp_path / "as it is", "merge")
    peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    check(tmp_path / "merged", expected)
