"""A replica with other weights under an id that the registry knows: it serves its base model, and no adapter."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from examples.stack import wait_for_base_model
from loraplex import Client
from loraplex.inference.v1 import control_pb2
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.base_weights import fingerprint_with_weights
from shared.errors import BaseModelConflict
from tests.e2e.test_residency import SECONDS, is_ready, set_residency, until
from tests.e2e.tiny_stack import BASE, PROMPTS, TinyWorld, register_content

STOP = {"max_tokens": 2, "ignore_eos": True}
FAILED = registry_pb2.ResidentState.LEVEL_FAILED


@pytest.fixture
def louder(world: TinyWorld, tmp_path: Path) -> TinyWorld:
    """The same model and adapters, but all weights of the model are a hundredth larger."""
    shutil.copytree(world.folder / "base", tmp_path / "base")
    (tmp_path / "store").symlink_to(world.folder / "store")
    weights = tmp_path / "base" / "model.safetensors"
    tensors = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    return TinyWorld(tmp_path, world.contents, world.oracle)


async def test_no_adapter_is_served_until_the_registry_has_this_base_model(
    world: TinyWorld, louder: TinyWorld, tmp_path: Path
) -> None:
    name, other = world.contents[:2]
    stack = louder.stack(tmp_path / "run", "--replica-name=one")
    try:
        await stack.registry.start()
        await stack.registry.ready(SECONDS)
        async with stack.client() as client:
            config = (world.folder / "base" / "config.json").read_text()
            theirs = fingerprint_with_weights(json.loads(config), world.folder / "base")
            ours = fingerprint_with_weights(json.loads(config), louder.folder / "base")
            request = registry_pb2.RegisterBaseModelRequest(id=BASE, config_json=config, weights_fingerprint=theirs)
            await client.call(client.registry.RegisterBaseModel(request))
            await _register_and_pin(client, name, other)

            await stack.inference.start()
            await stack.inference.ready(SECONDS)
            assert len([event async for event in client.generate(PROMPTS[0], stop=STOP)]) > 1
            await _check_refused(client, name, other, told=(theirs, ours, "--model-name"))
            for each in (name, other):  # pinned, and on demand
                await until(client, each, lambda s: [r.reason for r in s.not_ready] == ["BASE_MODEL_CONFLICT"])
            listed = await client.call(client.registry.ListReplicas(registry_pb2.ListReplicasRequest()))
            states = {(state.level, state.reason) for state in listed.replicas[0].resident}
            assert (len(listed.replicas), states) == (1, {(FAILED, "BASE_MODEL_CONFLICT")})
            status = await client.call(client.control.GetReplicaStatus(control_pb2.GetReplicaStatusRequest()))
            assert theirs in status.adapters.base_model_conflict

            await stack.registry.stop()
            (tmp_path / "run" / "registry.db").unlink()
            await stack.registry.start()  # another one, which does not know the base model yet
            await stack.registry.ready(SECONDS)
            await wait_for_base_model(client, BASE, SECONDS)
            await _register_and_pin(client, name, other)
            await until(client, name, is_ready)
            events = [event async for event in client.generate(PROMPTS[0], adapter=name, stop=STOP)]
            assert events[-1].finished.usage.completion_tokens == 2
    finally:
        assert await stack.stop() == (0, 0), stack.inference.log_tail(40)


async def _register_and_pin(client: Client, name: str, other: str) -> None:
    for content in (name, other):
        await register_content(client, content, content)
    await set_residency(client, name, resources_pb2.Adapter.RESIDENCY_PINNED)


async def _check_refused(client: Client, name: str, other: str, told: tuple[str, ...]) -> None:
    blend = [{"reference": reference, "weight": 0.5} for reference in (name, other)]
    load = control_pb2.LoadAdapterRequest(reference=other, pinned=True)
    for attempt in (
        _all(client.generate(PROMPTS[0], adapter=name, stop=STOP)),
        _all(client.generate(PROMPTS[0], blend=blend, stop=STOP)),
        client.call(client.control.LoadAdapter(load)),
    ):
        with pytest.raises(BaseModelConflict) as caught:
            await attempt
        assert all(text in caught.value.message for text in told)
    held = await client.call(client.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest()))
    assert list(held.adapters) == []


async def _all(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]
