"""README's table of adapter kinds, from what the tests of this folder measured: `make kinds-table`."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.kinds.blends import BLENDS
from tests.kinds.blends import KIND as BLENDS_KIND
from tests.kinds.cases import CASES
from tests.kinds.report import PATH

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- kinds: written by `make kinds-table` -->", "<!-- kinds: end -->"

_VLLM_CONFIG = (
    "https://github.com/vllm-project/vllm/blob/02143692ba86a7ba6198a67e12982c5317c8bd2f/vllm/lora/peft_helper.py"
)
_LORAX = "https://github.com/predibase/lorax/blob/03679f33f7f9d9da7e99d5b6fd40b4548019a3c3/server/lorax_server/adapters/lora.py"
_SGLANG = "https://github.com/sgl-project/sglang/blob/0ceb81fe4868b3364267a661da67b5d88aa45fc3/python/sglang/srt/lora/lora_config.py"
_VLLM = "https://github.com/vllm-project/vllm"
# What their sources and maintainers say; a kind about which nothing was found has no entry. None of it was run.
ELSEWHERE: dict[str, str] = {
    "LoRA": f"[vLLM]({_VLLM_CONFIG}), [SGLang]({_SGLANG}), [LoRAX]({_LORAX})",
    "rsLoRA": f"[vLLM]({_VLLM_CONFIG}), [LoRAX]({_LORAX})",
    "rank_pattern, alpha_pattern": f"read by [SGLang]({_SGLANG}), not by [vLLM]({_VLLM_CONFIG}), [LoRAX]({_LORAX})",
    "DoRA": f"refused by [vLLM]({_VLLM_CONFIG}), [open]({_VLLM}/pull/47395)",
    "DoRA on embed_tokens": f"refused by [vLLM]({_VLLM_CONFIG})",
    "DoRA on lm_head": f"refused by [vLLM]({_VLLM_CONFIG})",
    "LoRA on embed_tokens": f"[vLLM]({_VLLM}/pull/28545)",
    "LoRA on lm_head": f"[vLLM]({_VLLM}/pull/28545)",
    "modules_to_save embed_tokens, lm_head": f"refused by [vLLM]({_VLLM_CONFIG})",
    "modules_to_save norms": f"refused by [vLLM]({_VLLM_CONFIG})",
    "trainable_token_indices": f"not read by [vLLM]({_VLLM_CONFIG})",
    "BD-LoRA": f"[open]({_VLLM}/pull/28136) in vLLM",
    "PiSSA, OLoRA, KaSA (converted)": f"init_lora_weights is not read by [vLLM]({_VLLM_CONFIG})",
    "blends": "[LoRAX](https://github.com/predibase/lorax/pull/212), of the factors",
    "added vocabulary": f"[removed from vLLM]({_VLLM}/pull/28382)",
    "aLoRA": (f"not [vLLM]({_VLLM}/pull/19710), not [SGLang](https://github.com/sgl-project/sglang/issues/16942)"),
}
# What `refusals.py` tests, in a word each.
REFUSED = (
    ("PiSSA, OLoRA, KaSA as saved", "no: `loraplex adapter convert`"),
    (
        "pissa_niter, CorDA, LoftQ, LoRA-GA as saved",
        "no: the error says what makes a plain LoRA of it, or a base model",
    ),
    ("experts (target_parameters)", "no"),
    ("Monte-CLoRA as saved", "no: PEFT's `save_as_lora`"),
    ("layer_replication, Arrow, saved linears", "no"),
)


def kinds() -> list[str]:
    """Every kind that is served, in the order of the cases."""
    return [*dict.fromkeys(case.kind for case in CASES.values()), BLENDS_KIND]


def cases_of(kind: str) -> set[str]:
    """The cases that are of a kind."""
    return set(BLENDS) if kind == BLENDS_KIND else {name for name, case in CASES.items() if case.kind == kind}


def table(worst: Mapping[str, float]) -> str:
    """The table, between its marks. `worst`: by kind, the greatest difference of a log-probability from PEFT."""
    lines = ["| kind | served | largest difference | who else |", "|---|---|---|---|"]
    for kind in kinds():
        lines.append(f"| {kind} | yes | {rounded_up(worst[kind])} | {ELSEWHERE.get(kind, '?')} |")
    lines += [f"| {kind} | {served} | | |" for kind, served in REFUSED]
    return "\n".join([BEGIN, *lines, END])


def rounded_up(value: float) -> str:
    """One digit: 2.4e-06 is 3e-6."""
    digit, exponent = f"{value:.0e}".split("e")
    if float(f"{digit}e{exponent}") < value:
        digit, exponent = f"{float(f'{int(digit) + 1}e{exponent}'):.0e}".split("e")
    return f"{digit}e{int(exponent)}"


def measured(entries: list[dict[str, object]]) -> dict[str, float]:
    """The worst difference of each kind.

    Raises:
        ValueError: not all cases were run.
    """
    worst: dict[str, float] = {}
    for kind in kinds():
        found = [entry for entry in entries if entry["kind"] == kind]
        if missing := cases_of(kind) - {str(entry["case"]) for entry in found}:
            raise ValueError(f"not measured: {', '.join(sorted(missing))}; run all tests of this folder")
        worst[kind] = max(float(str(entry["worst"])) for entry in found)
    return worst


def replaced(readme: str, new: str) -> str:
    """README with another table."""
    return readme[: readme.index(BEGIN)] + new + readme[readme.index(END) + len(END) :]


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(), table(measured(json.loads(PATH.read_text())))))
