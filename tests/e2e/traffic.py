"""Requests that must not notice what happens beside them: answered, as PEFT would, and in time."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from types import TracebackType
from typing import Any, TypeVar

import pytest

from loraplex import Client, LoraplexError
from tests.e2e.oracle import LOGPROB_TOLERANCE, Comparison
from tests.e2e.streams import Collected, collect
from tests.e2e.tiny_stack import PROMPTS, TinyWorld

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 0.2  # between two requests of a line of traffic; set by `--pause`
LONG = 400  # tokens of a stream that is under way when something happens


class Traffic:
    """Greedy requests, one after another on each of `lines` lines, from the beginning of an `async with` to its end.

    The beginning waits until every adapter has answered once. The end waits for what is in flight, compares every
    answer with PEFT's, and asserts that nothing was lost (ended with an error), stuck (not answered within
    `PATIENCE_SECONDS`) or wrong.

    Args:
        contents: What a reference must answer like; `{"": ""}` is the base model.
        tokens: Of an answer.
        tolerated: Reasons with which requests may end, for the processes that are killed. They count as `failed`, and
            as `truncated` if they had been accepted: their stream had begun.
    """

    def __init__(
        self,
        world: TinyWorld,
        client: Client,
        contents: Mapping[str, str],
        *,
        lines: int = 4,
        tokens: int = 16,
        tolerated: Set[str] = frozenset(),
    ) -> None:
        self.num_answers = 0
        self.slowest_seconds = 0.0
        self.failed: Counter[str] = Counter()
        self.truncated = 0
        self._world = world
        self._client = client
        self._num_contents = len(contents)
        self._turns = itertools.cycle(itertools.product(range(len(PROMPTS)), contents.items()))
        self._lines = lines
        self._tokens = tokens
        self._tolerated = tolerated
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._answers: list[tuple[str, int, Collected]] = []

    async def __aenter__(self) -> "Traffic":
        self._tasks = [asyncio.create_task(self._line()) for _ in range(self._lines)]
        await self.answers(max(self._lines, self._num_contents))  # so that every adapter is known
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping = True
        if error is not None:
            for task in self._tasks:
                task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        if error is None:
            self._check(outcomes)

    async def answers(self, more: int) -> None:
        """Returns when `more` further requests were answered."""
        target = self.num_answers + more
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.num_answers < target and not self._has_failed():  # noqa: ASYNC110 - either ends it
                await asyncio.sleep(0.01)

    def _has_failed(self) -> bool:
        return all(task.done() for task in self._tasks)

    async def _line(self) -> None:
        while not self._is_stopping:
            prompt, (reference, content) = next(self._turns)
            started, answer = time.monotonic(), Collected()
            try:
                await ask(self._client, prompt, reference, self._tokens, answer)
            except LoraplexError as error:
                if error.reason not in self._tolerated:
                    raise AssertionError(f"{reference or 'the base model'} was lost: {error.summary}") from error
                self.failed[error.reason] += 1
                self.truncated += answer.started is not None
                await asyncio.sleep(0.05)
                continue
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - started)
            self.num_answers += 1
            self._answers.append((content, prompt, answer))
            await asyncio.sleep(PAUSE_SECONDS)

    def _check(self, outcomes: list[BaseException | None]) -> None:
        found = Comparison()
        for content, prompt, answer in self._answers:
            assert len(answer.token_ids) == self._tokens
            found.add(self._world.compare(content, prompt, answer.token_ids, answer.logprobs))
        lost = [outcome for outcome in outcomes if outcome is not None]
        print(
            f"{self.num_answers} answers beside it, {len(lost)} lost, {len(found.mismatches)} wrong tokens,"
            f" {dict(self.failed)} tolerated ({self.truncated} of them cut), slowest {self.slowest_seconds:.2f} s"
        )
        assert not lost, lost
        assert not found.mismatches
        assert found.worst_logprob < LOGPROB_TOLERANCE


async def ask(
    client: Client, prompt: int, reference: str = "", tokens: int = 12, into: Collected | None = None
) -> Collected:
    """One request, as traffic has them: exactly `tokens` tokens after `PROMPTS[prompt]`."""
    stop = {"max_tokens": tokens, "ignore_eos": True}
    return await collect(client, PROMPTS[prompt], reference, into, stop=stop, timeout=PATIENCE_SECONDS)


class LongStream:
    """A greedy stream of `tokens` tokens. `so_far`: what has come of it."""

    def __init__(self, client: Client, content: str, reference: str, prompt: int, tokens: int) -> None:
        self.so_far = Collected()
        self._content, self._prompt, self._tokens = content, prompt, tokens
        stop = {"max_tokens": tokens, "ignore_eos": True}
        self.task = asyncio.create_task(
            collect(client, PROMPTS[prompt], reference, self.so_far, stop=stop, timeout=PATIENCE_SECONDS)
        )

    async def check(self, world: TinyWorld) -> None:
        """Waits for its end: all of it is there, and PEFT's."""
        answer = await self.task
        assert len(answer.token_ids) == self._tokens
        assert_is_of(world, self._content, self._prompt, answer)


async def long_stream(
    client: Client, content: str, reference: str | None = None, prompt: int = 0, tokens: int = LONG
) -> LongStream:
    """A stream that is under way. Where this process was not given time to see that, it is another one."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            stream = LongStream(client, content, content if reference is None else reference, prompt, tokens)
            while not stream.so_far.token_ids and not stream.task.done():  # noqa: ASYNC110 - either ends it
                await asyncio.sleep(0.005)
            if not stream.task.done():
                return stream
            await stream.task


async def long_streams(client: Client, contents: Iterable[str]) -> list[LongStream]:
    """A stream of each content, all begun."""
    return list(await asyncio.gather(*(long_stream(client, content) for content in contents)))


async def refusal(call: Awaitable[Any]) -> LoraplexError:
    """The error that `call` must end with."""
    with pytest.raises(LoraplexError) as caught:
        await call
    return caught.value


def assert_is_of(world: TinyWorld, content: str, prompt: int, answer: Collected) -> None:
    """The answer is PEFT's with this content."""
    found = world.compare(content, prompt, answer.token_ids, answer.logprobs)
    assert not found.mismatches
    assert found.worst_logprob < LOGPROB_TOLERANCE


async def at_last(attempt: Callable[[], Awaitable[T]], seconds: float) -> tuple[T, float]:
    """The first success of `attempt`, once whatever it fails of is over, and how many seconds that took."""
    started = time.monotonic()
    while True:
        try:
            return await attempt(), time.monotonic() - started
        except LoraplexError:
            if time.monotonic() > started + seconds:
                raise
            await asyncio.sleep(0.05)
