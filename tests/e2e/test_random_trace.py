"""Random steps of an adapter fleet's life, more adapters than fit in any tier: every answer is PEFT's.

Requests overlap with registrations, versions that come and go, aliases, loads, unloads, evictions, deletions and their
undoing. An answer names the version it was made with; its tokens must be that version's.
"""

import asyncio
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.stack import register, wait_for_base_model
from loraplex import Client, LoraplexError
from loraplex.inference.v1 import control_pb2
from loraplex.registry.v1 import registry_pb2, resources_pb2
from tests.e2e.oracle import LOGPROB_TOLERANCE, Comparison
from tests.e2e.streams import collect
from tests.e2e.tiny_stack import BASE, PROMPTS, TinyWorld

STEPS = [250, pytest.param(2_000, marks=pytest.mark.slow)]
NAMES = [f"adapter-{number}" for number in range(12)]
CONCURRENCY = 12
MEMORY_SECONDS = 10.0
STEP_WEIGHTS = {
    "generate": 77, "register": 8, "alias": 4, "load": 3, "unload": 3, "force": 1, "delete": 1.5, "undelete": 1.5,
    "delete_version": 1.5,
}  # fmt: skip


@dataclass
class Known:
    """One adapter as the test knows it. `found_since`: when it was last made or undeleted."""

    versions: dict[int, str] = field(default_factory=dict)  # number → content, also of deleted ones
    gone: set[int] = field(default_factory=set)  # versions that were deleted
    alias: int = 0  # what `prod` means
    is_deleted: bool = False
    found_since: float = math.inf

    @property
    def live(self) -> list[int]:
        return [number for number in self.versions if number not in self.gone]

    def may_be_unknown(self, since: float, reference: str) -> bool:
        """To a replica asked at `since` or later: it remembers for a moment that there was no such adapter."""
        is_gone = reference.rpartition("@")[2] in map(str, self.gone)
        return self.is_deleted or is_gone or since < self.found_since + MEMORY_SECONDS


class Trace:
    """Takes the steps and counts what came of them."""

    def __init__(self, world: TinyWorld, client: Client, seed: int) -> None:
        self.world = world
        self.client = client
        self.random = random.Random(seed)
        self.known = {name: Known() for name in NAMES}
        self.forced = 0  # odd while an unload by force is under way
        self.done: Counter[str] = Counter()
        self.compared = Comparison()
        self._changes = asyncio.Lock()  # one change at a time, or nobody could say which came first

    async def step(self, kind: str) -> None:
        if kind == "generate":
            return await self.generate()
        async with self._changes:
            await getattr(self, kind)()
        self.done[kind] += 1
        return None

    async def generate(self) -> None:
        """One request by name, version or alias, or to the base model."""
        live = [name for name, known in self.known.items() if known.versions and not known.is_deleted]
        name = self.random.choice([*live, ""] if self.random.random() < 0.9 else NAMES)
        prompt, length = self.random.randrange(len(PROMPTS)), self.random.choice((1, 6, 12))
        reference = self._reference(name)
        known = self.known.get(name)
        started, forced = time.monotonic(), self.forced
        try:
            answer = await collect(
                self.client, PROMPTS[prompt], reference, stop={"max_tokens": length, "ignore_eos": True}
            )
        except LoraplexError as error:
            is_unknown = error.reason == "ADAPTER_NOT_FOUND" and known and known.may_be_unknown(started, reference)
            is_forced = error.reason == "ADAPTER_UNLOADED" and (forced % 2 or self.forced != forced)
            if not (is_unknown or is_forced):
                raise
            self.done[error.reason] += 1
            return
        assert answer.started is not None
        content = ""
        if known is not None:
            content = known.versions[int(answer.started.adapter_version.rpartition("/")[2])]
        assert len(answer.token_ids) == length
        self.compared.add(self.world.compare(content, prompt, answer.token_ids, answer.logprobs))
        self.done["generate"] += 1

    def _reference(self, name: str) -> str:
        known = self.known.get(name)
        if known is None:
            return ""
        forms = [name, name]
        if known.live:
            forms.append(f"{name}@{self.random.choice(known.live)}")
        if known.alias:
            forms.append(f"{name}@prod")
        return self.random.choice(forms)

    async def register(self) -> None:
        """A new version; the same content again is the same version."""
        name = self.random.choice(NAMES)
        known, content = self.known[name], self.random.choice(self.world.contents)
        try:
            response = await register(self.client, name, f"file://store/{content}", BASE)
        except LoraplexError as error:
            if error.reason != "ADAPTER_DELETED" or not known.is_deleted:
                raise
            return
        number = int(response.version.name.rpartition("/")[2])
        assert response.created == (content not in [known.versions[live] for live in known.live])
        assert known.versions.setdefault(number, content) == content
        known.found_since = min(known.found_since, time.monotonic())

    async def alias(self) -> None:
        name, known = self._pick(lambda known: bool(known.versions) and not known.is_deleted)
        if name:
            number = self.random.choice(known.live)
            target = resources_pb2.AliasTarget(version=number, weight=1)
            request = registry_pb2.SetAdapterAliasRequest(
                name=f"namespaces/default/adapters/{name}/aliases/prod", targets=[target]
            )
            await self.client.call(self.client.registry.SetAdapterAlias(request))
            known.alias = number

    async def load(self) -> None:
        await self._control(lambda ref: self.client.control.LoadAdapter(control_pb2.LoadAdapterRequest(reference=ref)))

    async def unload(self) -> None:
        await self._control(
            lambda ref: self.client.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=ref))
        )

    async def force(self) -> None:
        self.forced += 1
        await self._control(
            lambda ref: self.client.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=ref, force=True))
        )
        self.forced += 1

    async def delete(self) -> None:
        name, known = self._pick(lambda known: bool(known.versions) and not known.is_deleted)
        if name:
            known.is_deleted = True
            request = registry_pb2.DeleteAdapterRequest(name=f"namespaces/default/adapters/{name}")
            await self.client.call(self.client.registry.DeleteAdapter(request))

    async def delete_version(self) -> None:
        """Neither the last one nor what the alias means. Its number never comes back; its content may."""
        name, known = self._pick(lambda known: len(known.live) > 1 and not known.is_deleted)
        numbers = [number for number in known.live if number != known.alias]
        if name:
            number = self.random.choice(numbers)
            known.gone.add(number)
            resource = f"namespaces/default/adapters/{name}/versions/{number}"
            request = registry_pb2.DeleteAdapterVersionRequest(name=resource)
            await self.client.call(self.client.registry.DeleteAdapterVersion(request))

    async def undelete(self) -> None:
        name, known = self._pick(lambda known: known.is_deleted)
        if name:
            request = registry_pb2.UndeleteAdapterRequest(name=f"namespaces/default/adapters/{name}")
            await self.client.call(self.client.registry.UndeleteAdapter(request))
            known.is_deleted, known.found_since = False, time.monotonic()

    async def _control(self, call: object) -> None:
        name, known = self._pick(lambda known: bool(known.versions) and not known.is_deleted)
        if name:
            reference, started = f"{name}@{self.random.choice(known.live)}", time.monotonic()
            try:
                await self.client.call(call(reference))  # type: ignore[operator]
            except LoraplexError as error:
                if error.reason != "ADAPTER_NOT_FOUND" or not known.may_be_unknown(started, reference):
                    raise

    def _pick(self, is_wanted: object) -> tuple[str, Known]:
        names = [name for name, known in self.known.items() if is_wanted(known)]  # type: ignore[operator]
        name = self.random.choice(names) if names else ""
        return name, self.known.get(name, Known())


@pytest.mark.timeout(280)
@pytest.mark.parametrize("num_steps", STEPS)
async def test_every_answer_is_that_of_the_version_it_names(world: TinyWorld, tmp_path: Path, num_steps: int) -> None:
    flags = ["--max-adapters=5", "--adapter-memory=6MiB", "--host-memory=9MiB", "--disk-bytes=24MB"]
    async with world.stack(tmp_path / "run", *flags) as stack, stack.client() as client:
        await wait_for_base_model(client, BASE)
        trace = Trace(world, client, seed=1)
        steps = iter(trace.random.choices(list(STEP_WEIGHTS), weights=list(STEP_WEIGHTS.values()), k=num_steps))

        async def worker() -> None:
            for kind in steps:
                await trace.step(kind)

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    print(dict(trace.done), f"{trace.compared.tokens} tokens, {trace.compared.ties} ties")
    assert not trace.compared.mismatches
    assert trace.compared.worst_logprob < LOGPROB_TOLERANCE
    assert trace.done["generate"] > num_steps // 2
    assert (stack.registry.process.returncode, stack.inference.process.returncode) == (0, 0)
