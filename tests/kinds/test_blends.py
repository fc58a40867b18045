"""Blends of what PEFT saved: the sum of the parts' own changes, or which part cannot be blended and why."""

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.config import BdLoraConfig
from transformers import AutoModelForCausalLM

from inference_service.adapters.blend import blend_of, open_blend
from inference_service.adapters.fetcher import Fetched
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.model.loader import load_config
from inference_service.types import Acquired
from shared.digest import manifest_digest
from shared.errors import UnsupportedAdapter
from tests.kinds import files
from tests.kinds.bases import build
from tests.kinds.cases import CASES, LINEARS, PATTERNS, Case
from tests.kinds.in_process import Asked, Packed, empty, manifest, prompt_logprobs
from tests.kinds.peft_answers import PeftAnswers, save_trained
from tests.kinds.world import PROMPTS, one_thread

BASE = "qwen2-tied"
PARTS = {
    "some": Case("", {"r": 5, "lora_alpha": 9, "target_modules": LINEARS[2:]}),
    "patterns": Case("", {**PATTERNS, "use_rslora": True}),
    "blocks": Case(
        "", {"target_modules": ["q_proj", "o_proj"], "use_bdlora": BdLoraConfig(["o_proj"], ["q_proj"], nblocks=4)}
    ),
    "one layer": Case("", {"layers_to_transform": [1], "target_modules": LINEARS, "use_rslora": True}),
    "in bfloat16": Case("", {"target_modules": "all-linear"}, edit=files.saved_as(torch.bfloat16)),
}  # fmt: skip
# A case of each kind that no sum is of, and what is said of it.
ALONE = {
    "dora": "dora", "lora_bias": "lora_bias", "bias all": "bias", "embed_tokens": "embedding", "lm_head": "lm_head",
    "dora on the embedding": "embedding_dora", "saved embed_tokens": "modules_to_save", "saved norms": "norms",
    "trained tokens": "trainable_tokens", "added tokens, trained": "added_vocabulary", "activated": "activated",
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
    with open_blend(blend, found, model, "float32") as opened, ThreadPoolExecutor(1) as workers:
        opened.fill(memoryview(packed.host.numpy())[: opened.layout.nbytes], workers)
        packed.acquired[blend.digest] = Acquired(blend.digest, 0, opened.layout)
    return blend.digest


def summed(folder: Path, parts: dict[str, float]) -> PeftAnswers:
    """The base model in float64, and weight · (merged − base) of every part."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    total = copy.deepcopy(base)
    for name, weight in parts.items():
        merged = PeftModel.from_pretrained(copy.deepcopy(base), folder / name).double().merge_and_unload()
        for own, other, sum_of in zip(base.parameters(), merged.parameters(), total.parameters(), strict=True):
            sum_of.data += weight * (other.data - own.data)
    return PeftAnswers(total.eval(), folder / "base")


@pytest.mark.parametrize("seed", range(3))
def test_the_sum_of_the_parts(seed: int, saved: Path) -> None:
    chosen = random.Random(seed)
    names = chosen.sample(list(PARTS), chosen.randint(2, len(PARTS)))
    parts = {name: chosen.choice([-1.5, -0.3, 0.25, 1, 2]) for name in names}
    packed = empty(saved / "base")
    digest = packed_blend(packed, saved, parts)
    found = prompt_logprobs(packed, [Asked(digest, prompt) for prompt in PROMPTS])
    for prompt, answer in zip(PROMPTS, found, strict=True):
        expected = summed(saved, parts).prompt_logprobs(prompt)
        assert (torch.tensor(answer) - expected).abs().max() < 1e-4, parts


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_blended(name: str, saved: Path) -> None:
    with pytest.raises(UnsupportedAdapter) as caught:
        packed_blend(empty(saved / "base"), saved, {"some": 1.0, name: 0.5})
    assert caught.value.metadata["field"] == "blend[1]"
    assert caught.value.metadata["adapter"] == name
    assert ALONE[name] in caught.value.metadata["kinds"].split(",")
    assert ALONE[name] in caught.value.message
