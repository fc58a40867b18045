"""Trains the example adapters with PEFT on the CPU, in a few minutes each.

    python -m examples.train --base models/SmolLM2-135M-Instruct --out examples/adapters [--only pirate]

The texts are in `examples/texts/NAME.jsonl`, one chat turn (`prompt`, `answer`) a line. The same seeds, library
versions and number of threads give the same files.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.prompts import BASE_MODEL, JSON_PROMPTS, PROMPTS

TEXTS = Path(__file__).parent / "texts"
IGNORED = -100  # cross_entropy's ignore_index: a label without loss
BATCH_SIZE = 8


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained; `alpha` and `alpha_pattern` as in PEFT's LoraConfig."""

    name: str
    rank: int
    alpha: int
    modules: tuple[str, ...]
    epochs: int
    learning_rate: float
    use_rslora: bool = False
    alpha_pattern: dict[str, int] = field(default_factory=dict)

    def lora_config(self) -> LoraConfig:
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.modules),
            use_rslora=self.use_rslora,
            alpha_pattern=self.alpha_pattern,
        )


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# Between them: three ranks, rank-stabilised scaling, and a module with an alpha of its own.
RECIPES = (
    Recipe("pirate", rank=8, alpha=16, modules=("q_proj", "v_proj"), epochs=5, learning_rate=3e-3),
    Recipe("json", rank=4, alpha=8, modules=ATTENTION, epochs=4, learning_rate=2e-3, alpha_pattern={"o_proj": 4}),
    Recipe("sentiment", rank=2, alpha=3, modules=ATTENTION + MLP, epochs=3, learning_rate=2e-3, use_rslora=True),
)


class Example(NamedTuple):
    """Token ids of a whole chat turn, and where its answer begins."""

    token_ids: list[int]
    answer_start: int


class Answers(NamedTuple):
    """Greedy answers to the same prompts without and with the adapter."""

    before: list[str]
    after: list[str]


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The chat template's token ids for one user turn, up to where the assistant begins to speak."""
    message = {"role": "user", "content": prompt}
    return list(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False))


def load_examples(path: Path, tokenizer: Any) -> list[Example]:
    """The chat turns of a JSON Lines file; the answer ends with the end-of-turn token."""
    examples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        turn = json.loads(line)
        head = prompt_ids(tokenizer, turn["prompt"])
        examples.append(Example(head + tokenizer.encode(turn["answer"]) + [tokenizer.eos_token_id], len(head)))
    return examples


def collate(examples: Sequence[Example], pad_id: int) -> dict[str, Tensor]:
    """One padded batch, all [examples, longest] int64; only answers have labels."""
    longest = max(len(example.token_ids) for example in examples)
    ids, labels, mask = [], [], []
    for token_ids, start in examples:
        padding = longest - len(token_ids)
        ids.append(token_ids + [pad_id] * padding)
        labels.append([IGNORED] * start + token_ids[start:] + [IGNORED] * padding)
        mask.append([1] * len(token_ids) + [0] * padding)
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "attention_mask": torch.tensor(mask),
    }


def answer_loss(model: PeftModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the answers' tokens; logits are made only from where the first answer starts."""
    labels = batch["labels"]
    first = int((labels != IGNORED).any(dim=0).nonzero()[0])
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        logits_to_keep=labels.shape[1] - first + 1,  # position i predicts token i + 1
    ).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, first:].flatten(), ignore_index=IGNORED)


def epoch_batches(examples: Sequence[Example], order: random.Random) -> list[list[Example]]:
    """Every example once, in an order drawn from `order`."""
    shuffled = order.sample(examples, len(examples))
    return [shuffled[i : i + BATCH_SIZE] for i in range(0, len(shuffled), BATCH_SIZE)]


def train(model: PeftModel, examples: Sequence[Example], recipe: Recipe, pad_id: int, seed: int) -> None:
    """Fits the adapter in place: AdamW, learning rate falling linearly to zero, gradients clipped to norm 1."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    num_steps = recipe.epochs * -(-len(examples) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)
    order, console = random.Random(seed), Console(stderr=True)
    model.train()
    for epoch in range(1, recipe.epochs + 1):
        losses = []
        steps = track(epoch_batches(examples, order), f"{recipe.name}, epoch {epoch}", console=console, transient=True)
        for batch in steps:
            loss = answer_loss(model, collate(batch, pad_id))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        console.print(f"{recipe.name}: mean loss {sum(losses) / len(losses):.3f} in epoch {epoch} of {recipe.epochs}")
    model.eval()
    round_to_bfloat16(parameters)


def round_to_bfloat16(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Leaves in float32 the values that the file will hold, so that what is shown is what is saved."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.bfloat16())


def save(model: PeftModel, folder: Path) -> None:
    """Writes the weights, and adapter_config.json with keys and lists sorted: retraining makes no idle differences."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.inference_mode = True
    config.base_model_name_or_path = BASE_MODEL  # PEFT put the folder's name there
    config.save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    saved = json.loads(path.read_text())
    saved["target_modules"] = sorted(saved["target_modules"])  # PEFT keeps a set, whose order changes between runs
    path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
    state = get_peft_model_state_dict(model, save_embedding_layers=False)  # "auto" would ask the Hub
    weights = folder / "adapter_model.safetensors"
    save_file({name: state[name].bfloat16() for name in sorted(state)}, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # a service may run as another user


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int = 48) -> str:
    """The greedy answer to one chat prompt."""
    ids = torch.tensor([prompt_ids(tokenizer, prompt)])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def parses(text: str) -> bool:
    """Whether the text is a JSON object with the keys that the json adapter promises."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"answer", "topic"}


def train_adapter(recipe: Recipe, base: Path, out: Path, seed: int = 0) -> Answers:
    """Trains and saves one adapter into `out/NAME`; returns what it changes."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)  # before PEFT draws lora_A
    adapted = get_peft_model(model, recipe.lora_config())
    train(adapted, load_examples(TEXTS / f"{recipe.name}.jsonl", tokenizer), recipe, tokenizer.pad_token_id, seed)
    save(adapted, out / recipe.name)
    after = [answer(adapted, tokenizer, prompt) for prompt in PROMPTS]
    if recipe.name == "json":
        good = sum(parses(answer(adapted, tokenizer, prompt)) for prompt in JSON_PROMPTS)
        Console().print(f"json: {good} of {len(JSON_PROMPTS)} answers to unseen prompts parse")
    with adapted.disable_adapter():
        before = [answer(adapted, tokenizer, prompt) for prompt in PROMPTS]
    return Answers(before, after)


def print_table(results: dict[str, Answers]) -> None:
    """One row a prompt: the base model's answer and each adapter's."""
    table = Table("prompt", "base model", *results, show_lines=True, title="Greedy answers to unseen prompts")
    before = next(iter(results.values())).before
    for i, prompt in enumerate(PROMPTS):
        table.add_row(prompt, before[i], *(answers.after[i] for answers in results.values()))
    Console().print(table, markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example adapters.")
    parser.add_argument("--base", type=Path, required=True, help="folder of the converted base model")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets one folder an adapter")
    parser.add_argument("--only", choices=[recipe.name for recipe in RECIPES], help="train this adapter alone")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    chosen = [recipe for recipe in RECIPES if arguments.only in (None, recipe.name)]
    print_table({recipe.name: train_adapter(recipe, arguments.base, arguments.out) for recipe in chosen})


if __name__ == "__main__":
    main()
