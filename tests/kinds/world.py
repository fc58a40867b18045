"""All cases of one base model, made with PEFT, registered and served by both services, alone and in one batch."""

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examples.stack import Stack, register, wait_for_base_model
from loraplex import Client, LoraplexError
from loraplex.convert.conversion import convert
from tests.e2e.oracle import Comparison
from tests.kinds.bases import VOCAB
from tests.kinds.blends import BLENDS
from tests.kinds.cases import CASES, Case
from tests.kinds.peft_answers import PeftAnswers, save_trained

# The first holds aLoRA's invocation and trained tokens; the second neither.
PROMPTS = ([250, 3, 200, 17, 90, 41, 5, 9, 31, 60, 7, 8], list(range(100, 133)))
MAX_TOKENS = 6
NUM_REQUESTS = 3  # of every case
FLAGS = (
    "--dtype=float32", "--device=cpu", "--threads=1", "--max-num-seqs=128", "--max-adapters=128", "--max-model-len=128",
)  # fmt: skip


class Answer(NamedTuple):
    """What the API said to one request."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]


@dataclass
class Outcome:
    """What became of one case. `refused` is the error of its registration, `failed` those of requests.

    `effect`: by how much PEFT's log-probabilities with and without the adapter differ.
    """

    refused: LoraplexError | None = None
    failed: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    found: Comparison = field(default_factory=Comparison)
    effect: float = 0.0


class World:
    """One base model and its adapters; `outcomes` by case once `run` is done.

    Args:
        name: Of the base model.
        base: Folder of the base model.
        cases: Names of cases and of blends, whose parts are made too.
        folder: Where adapters, caches and logs go.
        flags: More flags of the inference service.
        strength: How far A and B are from zero.
    """

    def __init__(
        self, name: str, base: Path, cases: Sequence[str], folder: Path, flags: Sequence[str], strength: float
    ) -> None:
        parts = [part for name in cases if name in BLENDS for part in BLENDS[name].parts]
        self._blends = [name for name in cases if name in BLENDS]
        self._cases = list(dict.fromkeys(name for name in (*cases, *parts) if name not in BLENDS))
        self.outcomes = {name: Outcome() for name in (*self._cases, *self._blends)}
        self._name = name
        self._base = base
        self._store = folder / "store"
        self._run = folder / "run"
        self._flags = flags
        self._strength = strength
        self._requests: dict[str, dict[str, Any]] = {}  # by case, how a request names it

    def run(self) -> None:
        """Makes, registers and serves everything, and compares it with PEFT."""
        oracles = {case: self._made(case) for case in self._cases}
        asyncio.run(self._serve(oracles))
        for name, outcome in self.outcomes.items():
            if outcome.answers:
                self._compare(outcome, self._blend(name) if name in BLENDS else oracles[name][1]())

    def _made(self, name: str) -> tuple[Path, Callable[[], PeftAnswers]]:
        """The folder to register, and PEFT with what it saved."""
        case, folder = CASES[name], self._store / slug(name)
        save_trained(name, case, self._base, folder, self._strength)
        if case.repaired:
            plain = folder.with_name(f"{folder.name}-converted")
            convert(folder, self._base, plain, lambda done, of: None)
            return plain, lambda: PeftAnswers.load(self._base, folder, case)
        moved = shutil.copytree(folder, folder.with_name(f"{folder.name}-moved"))
        return case.moved(moved), lambda: PeftAnswers.load(self._base, folder, case)

    def _blend(self, name: str) -> PeftAnswers:
        parts = {self._store / slug(part): weight for part, weight in BLENDS[name].parts.items()}
        return PeftAnswers.blend(self._base, parts)

    def _compare(self, outcome: Outcome, peft: PeftAnswers) -> None:
        for answer in outcome.answers:
            found, effect = peft.compare(*answer)
            outcome.found.add(found)
            outcome.effect = max(outcome.effect, effect)

    async def _serve(self, made: dict[str, tuple[Path, Callable[[], PeftAnswers]]]) -> None:
        flags = [*FLAGS, *self._flags, f"--model-name={self._name}"]
        stack = Stack(self._run, flags=flags, model=self._base, roots={"store": self._store})
        async with stack, stack.client() as client:
            await wait_for_base_model(client, self._name)
            for case, (folder, _) in made.items():
                await self._register(client, case, folder)
            for name in self._blends:
                weights = BLENDS[name].parts.items()
                parts = [{"reference": slug(part), "weight": weight} for part, weight in weights]
                self._requests[name] = {"request": {"blend": parts}}
            for name in self._requests:
                await self._request(client, name, 0, with_prompt=True)
            for number in (1, 0):  # the second finds the first prompt's keys and values in the cache
                names = random.Random(number).sample(list(self._requests), len(self._requests))
                await asyncio.gather(*(self._request(client, name, number) for name in names))
        assert (stack.registry.process.returncode, stack.inference.process.returncode) == (0, 0)

    async def _register(self, client: Client, case: str, folder: Path) -> None:
        try:
            await register(client, slug(case), f"file://store/{folder.relative_to(self._store)}", self._name)
            self._requests[case] = {"adapter": slug(case)}
        except LoraplexError as error:
            self.outcomes[case].refused = error

    async def _request(self, client: Client, name: str, number: int, with_prompt: bool = False) -> None:
        answer = Answer(prompt_of(CASES.get(name, CASES["plain"]), number), [], [], [])
        output = {"token_ids": True, "logprobs": 0} | ({"prompt_logprobs": 0} if with_prompt else {})
        stop = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        stream = client.generate(
            answer.prompt, timeout=120, temperature=0, stop=stop, output=output, **self._requests[name]
        )
        try:
            async for event in stream:
                answer.prompt_logprobs.extend(token.logprob for token in event.prompt_logprobs.tokens)
                answer.ids.extend(event.delta.token_ids)
                answer.logprobs.extend(token.logprob for token in event.delta.logprobs)
        except LoraplexError as error:
            self.outcomes[name].failed.append(error.summary)
            return
        assert len(answer.ids) == len(answer.logprobs) == MAX_TOKENS, name
        assert len(answer.prompt_logprobs) == (len(answer.prompt) - 1) * with_prompt, name
        self.outcomes[name].answers.append(answer)


def prompt_of(case: Case, number: int) -> list[int]:
    """A prompt, with the tokens that the case adds in the middle."""
    ids = PROMPTS[number]
    return [*ids[:5], *range(VOCAB, VOCAB + case.extra_vocab), *ids[5:]]


def slug(name: str) -> str:
    """A case's name as an adapter's."""
    return name.lower().replace(",", "").replace(" ", "-").replace("_", "-").replace(".", "-")


def one_thread(work: Callable[[], None]) -> None:
    """Does `work` on one thread of torch: more wait for each other longer than these matrices take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work()
    finally:
        torch.set_num_threads(threads)
