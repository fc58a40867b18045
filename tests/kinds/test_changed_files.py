"""Adapters whose files were changed after PEFT saved them: they compute what PEFT makes of them now, or are refused."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.kinds import files
from tests.kinds.bases import BASES, build
from tests.kinds.cases import CASES
from tests.kinds.in_process import Asked, prompt_logprobs
from tests.kinds.packed import Packed, empty, pack
from tests.kinds.peft_answers import PeftAnswers, save_trained
from tests.kinds.world import one_thread, prompt_of

TOLERANCE = 1e-4
AT_ONCE = 30
# By key of adapter_config.json, what may stand there.
VALUES: dict[str, list[Any]] = {
    "use_rslora": [True, False], "use_dora": [True, False], "ensure_weight_tying": [True, False],
    "lora_alpha": [1, 7, 32], "bias": ["none", "all", "lora_only"], "rank_pattern": [{}, {"v_proj": 3}],
    "alpha_pattern": [{}, {".*mlp.*": 2}, {"v_proj": 5, "q_proj": 3}, {"layers.0.*": 2}],
    "modules_to_save": [None, ["norm"], ["embed_tokens"], ["lm_head"], ["q_proj"]],
    "target_modules": [["q_proj", "v_proj"], "all-linear", None, ["embed_tokens", "q_proj", "v_proj"], ["proj"]],
    "exclude_modules": [["v_proj"], ".*layers.1.*", ["lm_head"]], "layers_to_transform": [[0], 1, [0, 1, 2]],
    "trainable_token_indices": [None, [3], {"embed_tokens": [3, 17, 200]}, {"lm_head": [9]}, [200, 17, 3]],
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of most of what is tried here


class Changed(NamedTuple):
    """One that was packed. `what` was changed; `peft`: PEFT with the same files."""

    what: str
    digest: str
    prompt: list[int]
    peft: PeftAnswers


@pytest.mark.parametrize("base", ["llama-tied", *(pytest.param(base, marks=pytest.mark.slow) for base in BASES)])
def test_changed_at_random(base: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seeds = range(1000, 1250) if request.node.get_closest_marker("slow") else range(14)
    one_thread(lambda: check(base, seeds, tmp_path))


def check(base: str, seeds: range, folder: Path) -> None:
    build(base, folder / "base")
    packed = empty(folder / "base")
    accepted = [found for seed in seeds if (found := _changed(base, seed, packed, folder / f"{seed}")) is not None]
    assert len(accepted) > len(seeds) // 6, "hardly anything was compared"
    for start in range(0, len(accepted), AT_ONCE):
        some = accepted[start : start + AT_ONCE]
        answers = prompt_logprobs(packed, [Asked(one.digest, one.prompt) for one in some])
        for one, answer in zip(some, answers, strict=True):
            found, expected = torch.tensor(answer), one.peft.prompt_logprobs(one.prompt)
            if (found - expected).abs().max() >= TOLERANCE:  # which may be PEFT's own rounding
                exact = PeftAnswers(copy.deepcopy(one.peft.model).double(), packed.folder).prompt_logprobs(one.prompt)
                slack = TOLERANCE + 4 * (exact - expected).abs().max()
                assert (found - exact).abs().max() < slack, one.what


def _changed(base: str, seed: int, packed: Packed, folder: Path) -> Changed | None:
    """None if it is refused."""
    chosen = random.Random(f"{base} {seed}")
    name = chosen.choice([name for name, case in CASES.items() if base in case.bases and not case.repaired])
    save_trained(name, CASES[name], packed.folder, folder, strength=0.15)
    what = f"{base} {seed}: {name}, {chosen.choice([_change_config, _change_config, _change_tensors])(chosen, folder)}"
    try:
        digest = pack(packed, folder)
    except (AdapterInvalid, UnsupportedAdapter):
        return None
    torch.manual_seed(5)  # PEFT makes up what the file lacks
    return Changed(what, digest, prompt_of(CASES[name], 0), PeftAnswers.load(packed.folder, folder, CASES[name]))


def _change_config(chosen: random.Random, folder: Path) -> str:
    config = json.loads((folder / files.CONFIG).read_text())
    key = chosen.choice([*VALUES])
    config[key] = chosen.choice([value for value in VALUES[key] if value != config.get(key)])
    (folder / files.CONFIG).write_text(json.dumps(config))
    return f"{key} {config[key]!r}"


def _change_tensors(chosen: random.Random, folder: Path) -> str:
    tensors = load_file(folder / files.WEIGHTS)
    name = chosen.choice(sorted(tensors))
    other = chosen.choice([None, f"{name}x", name.replace("layers.0", "layers.1").replace("q_proj", "k_proj")])
    if other is None:
        del tensors[name]
    else:
        tensors[other] = tensors[name].clone()
    save_file(tensors, folder / files.WEIGHTS, metadata={"format": "pt"})
    return f"{name} → {other}"


@pytest.mark.parametrize(
    ("case", "edit", "says"),
    [
        # PEFT would take the head's factors for both, or the embedding's, by the order in which it loads them.
        ("embed_tokens and lm_head", files.changed(ensure_weight_tying=True), "set ensure_weight_tying as in training"),
        ("embed_tokens alone", files.changed(modules_to_save=["q_proj"]), "fully trained linears are not served"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contradictions(case: str, edit: Callable[[Path], Path], says: str, dtype: str, tmp_path: Path) -> None:
    build("llama-tied", tmp_path / "base")
    save_trained(case, CASES[case], tmp_path / "base", tmp_path / "adapter", strength=0.15)
    with pytest.raises((AdapterInvalid, UnsupportedAdapter), match=says):
        pack(empty(tmp_path / "base"), edit(tmp_path / "adapter"), dtype)


def test_tied_factors_are_as_peft_saves_them_in_any_dtype(tmp_path: Path) -> None:
    case = "embed_tokens and lm_head, tied"
    build("llama-tied", tmp_path / "base")
    save_trained(case, CASES[case], tmp_path / "base", tmp_path / "adapter", strength=0.15)
    packed = empty(tmp_path / "base")
    assert len({pack(packed, tmp_path / "adapter", dtype) for dtype in ("float32", "bfloat16", "float16")}) == 1
