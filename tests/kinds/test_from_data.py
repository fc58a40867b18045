"""An initialisation from data may give every module a rank and a scale of its own: what PEFT then saves is served."""

from pathlib import Path

import pytest
import torch
from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from transformers import AutoModelForCausalLM

from tests.kinds.bases import build
from tests.kinds.in_process import Asked, prompt_logprobs
from tests.kinds.packed import empty, pack
from tests.kinds.peft_answers import PeftAnswers
from tests.kinds.world import PROMPTS, one_thread

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of layers that converge early


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        pytest.param({"target_modules": "all-linear"}, marks=pytest.mark.slow),
    ],
)
def test_eva(keys: dict[str, object], tmp_path: Path) -> None:
    one_thread(lambda: check(keys, tmp_path))


def check(keys: dict[str, object], folder: Path) -> None:
    build("qwen2", folder / "base")
    config = LoraConfig(r=6, lora_alpha=9, init_lora_weights="eva", eva_config=EvaConfig(), **keys)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    peft = get_peft_model(model, config)
    torch.manual_seed(1)
    batches = [{"input_ids": torch.randint(3, 250, (4, 40)), "attention_mask": torch.ones(4, 40)} for _ in range(3)]
    initialize_lora_eva_weights(peft, batches, show_progress_bar=False)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if ".lora_B." in name:
                parameter += 0.1 * torch.randn_like(parameter)
    peft.save_pretrained(folder / "adapter")
    assert peft.peft_config["default"].rank_pattern, "no module has another rank: the case proves nothing"
    packed = empty(folder / "base")
    (found,) = prompt_logprobs(packed, [Asked(pack(packed, folder / "adapter"), PROMPTS[1])])
    expected = PeftAnswers(peft.eval(), folder / "base").prompt_logprobs(PROMPTS[1])
    assert (torch.tensor(found) - expected).abs().max() < 1e-4
