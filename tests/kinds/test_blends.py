"""Blends of what PEFT saved: the sum of the parts' own changes, or which part cannot be blended and why."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft.tuners.lora.config import BdLoraConfig
from transformers import AutoModelForCausalLM

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.blend import blend_of, open_blend
from inference_service.adapters.fetcher import Fetched
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.model.loader import load_config
from inference_service.types import Acquired
from shared.adapter_format.binding import plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.header import read_header_of
from shared.digest import manifest_digest
from shared.errors import UnsupportedAdapter
from tests.kinds import files
from tests.kinds.bases import build
from tests.kinds.cases import CASES, LINEARS, PATTERNS, Case
from tests.kinds.in_process import Asked, prompt_logprobs
from tests.kinds.packed import Packed, empty, manifest
from tests.kinds.peft_answers import PeftAnswers, save_trained
from tests.kinds.world import PROMPTS, one_thread
from tests.shared.adapter_format.merging import merged

BASE = "qwen2-tied"
PARTS = {
    "some": Case("", {"r": 5, "lora_alpha": 9, "target_modules": LINEARS[2:]}),
    "patterns": Case("", {**PATTERNS, "use_rslora": True}),
    "blocks": Case(
        "", {"target_modules": ["q_proj", "o_proj"], "use_bdlora": BdLoraConfig(["o_proj"], ["q_proj"], nblocks=4)}
    ),
    "one layer": Case("", {"layers_to_transform": [1], "target_modules": LINEARS, "use_rslora": True}),
    "in bfloat16": Case("", {"target_modules": "all-linear"}, edit=files.saved_as(torch.bfloat16)),
    "embedding and head": Case("", {"r": 3, "target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "embedding": Case("", {"r": 6, "use_rslora": True, "target_modules": ["embed_tokens", "down_proj"]}),
    "biases on B": Case("", {"r": 4, "lora_bias": True, "target_modules": [*LINEARS[1:4], "lm_head"]}),
    "a bias on B": Case("", {"lora_bias": True, "lora_alpha": 5, "target_modules": ["v_proj"]}),
}  # fmt: skip
# A case of each kind that no sum is of, and what is said of it.
ALONE = {
    "dora": "dora", "bias all": "bias", "dora on the embedding": "embedding_dora",
    "saved embed_tokens": "modules_to_save", "saved norms": "norms", "trained tokens": "trainable_tokens",
    "added tokens, trained": "added_vocabulary", "activated": "activated",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of most of what is tried here


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base model and all adapters."""
    folder = tmp_path_factory.mktemp("blends")
    build(BASE, folder / "base")
    for name, case in (PARTS | {name: CASES[name] for name in ALONE}).items():
        one_thread(lambda name=name, case=case: save_trained(name, case, folder / "base", folder / name, 0.15))
    return folder


def packed_blend(packed: Packed, folder: Path, parts: dict[str, float]) -> str:
    """The digest of the blend, once it is in the arena."""
    _, model = load_config(packed.folder)
    entries = {name: tuple(manifest(folder / name)) for name in parts}
    versions = [ResolvedVersion(name, 1, name, manifest_digest(entries[name]), entries[name], (), 8) for name in parts]
    blend = blend_of(versions, list(parts.values()))
    found = [Fetched(folder / part.version.name, False) for part in blend.parts]
    base = BaseTensors(packed.folder, model, "float32")
    with open_blend(blend, found, model, "float32", base) as opened, ThreadPoolExecutor(1) as workers:
        opened.fill(memoryview(packed.host.numpy())[: opened.layout.nbytes], workers)
        packed.acquired[blend.digest] = Acquired(blend.digest, 0, opened.layout)
    return blend.digest


def summed(folder: Path, parts: dict[str, float]) -> PeftAnswers:
    """The base model in float64 with a bias on every linear, and weight · (merged − base) of every part."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    for linear in base.modules():
        if isinstance(linear, torch.nn.Linear) and linear.bias is None:
            linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features, dtype=torch.float64))
    _, config = load_config(folder / "base")
    own = base.state_dict()
    total = {name: tensor.clone() for name, tensor in own.items()}
    for name, weight in parts.items():
        weights = folder / name / files.WEIGHTS
        settings = parse_adapter_config((folder / name / files.CONFIG).read_bytes())
        found = merged(base, plan(settings, read_header_of(weights), config), weights).state_dict()
        for key, tensor in found.items():
            total[key] += weight * (tensor - own[key])
    base.load_state_dict(total)
    return PeftAnswers(base.eval(), folder / "base")


@pytest.mark.parametrize("seed", range(4))
def test_the_sum_of_the_parts(seed: int, saved: Path) -> None:
    chosen = random.Random(seed)
    names = chosen.sample(list(PARTS), chosen.randint(3, len(PARTS)))
    check_sum({name: chosen.choice([-1.5, -0.3, 0.25, 1, 2]) for name in names}, saved)


def test_the_sum_of_all_kinds_that_have_one(saved: Path) -> None:
    check_sum({name: 0.2 + 0.1 * number for number, name in enumerate(PARTS)}, saved)


def check_sum(parts: dict[str, float], saved: Path) -> None:
    packed = empty(saved / "base")
    digest = packed_blend(packed, saved, parts)
    found = prompt_logprobs(packed, [Asked(digest, prompt) for prompt in PROMPTS])
    oracle = summed(saved, parts)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert (torch.tensor(answer) - oracle.prompt_logprobs(prompt)).abs().max() < 1e-4, parts


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_blended(name: str, saved: Path) -> None:
    with pytest.raises(UnsupportedAdapter) as caught:
        packed_blend(empty(saved / "base"), saved, {"some": 1.0, name: 0.5})
    assert caught.value.metadata["field"] == "blend[1]"
    assert caught.value.metadata["adapter"] == name
    assert ALONE[name] in caught.value.metadata["kinds"].split(",")
    assert ALONE[name] in caught.value.message


def test_a_copy_of_the_base_model_that_is_none_cannot_be_blended(saved: Path, tmp_path: Path) -> None:
    """Beside LoRA on the embedding lies what PEFT takes for the base model's rows: a sum would lose them."""
    shutil.copytree(saved / "base", tmp_path / "base")
    for name in ("some", "embedding"):
        shutil.copytree(saved / name, tmp_path / name)
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    files.tensors(lambda tensors: tensors[key][7].add_(0.5))(tmp_path / "embedding")
    with pytest.raises(UnsupportedAdapter) as caught:
        packed_blend(empty(tmp_path / "base"), tmp_path, {"some": 1.0, "embedding": 0.5})
    assert caught.value.metadata["adapter"] == "embedding"
    assert "modules_to_save" in caught.value.message
