"""Two tenants on one replica, with tokens: the same names, different adapters, and nothing of one for the other."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from examples.stack import Stack, register, wait_for_base_model
from loraplex import Client, ClientIdentity
from loraplex.inference.v1 import control_pb2, inference_pb2
from loraplex.registry.v1 import registry_pb2
from shared.errors import AdapterNotFound, PermissionDenied, Unauthenticated
from tests.e2e.tiny_stack import BASE, PROMPTS, TinyWorld
from tests.shared.auth.token_files import entry, token

SUBJECTS = {"anna": ("a", ["writer"]), "ben": ("b", ["admin"]), "reader": ("a", ["reader"])}


def client_of(stack: Stack, subject: str) -> Client:
    identity = ClientIdentity(token=token(subject)) if subject else ClientIdentity()
    return Client(stack.inference.address, stack.registry.address, identity)


async def greedy(client: Client, adapter: str) -> tuple[list[int], str]:
    """The tokens of an answer, and the version that gave it."""
    ids: list[int] = []
    version = ""
    stop, output = {"max_tokens": 12, "ignore_eos": True}, {"token_ids": True}
    async for event in client.generate(PROMPTS[0], adapter=adapter, temperature=0, stop=stop, output=output):
        ids += event.delta.token_ids
        version = version or event.started.adapter_version
    return ids, version


async def test_two_tenants_on_one_replica(world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, own = tmp_path / "tokens.toml", tmp_path / "replica-token"
    known = [entry(subject, roles, [namespace]) for subject, (namespace, roles) in SUBJECTS.items()]
    tokens.write_text("\n".join([*known, entry("replica", ["replica"])]))
    own.write_text(token("replica"))
    monkeypatch.setenv("LORAPLEX_REGISTRY_AUTH_TOKEN_FILE", str(tokens))
    stack = world.stack(tmp_path / "run", f"--auth-token-file={tokens}", f"--registry-token-file={own}")
    async with (
        stack,
        client_of(stack, "anna") as anna,
        client_of(stack, "ben") as ben,
        client_of(stack, "reader") as reader,
        client_of(stack, "") as nobody,
    ):
        await wait_for_base_model(anna, BASE)
        await register(anna, "style", "file://store/content-0", BASE)
        await register(ben, "style", "file://store/content-1", BASE)
        await register(ben, "secret", "file://store/content-0", BASE)

        first, version = await greedy(anna, "style")
        assert version == "namespaces/a/adapters/style/versions/1"
        second, version = await greedy(ben, "style")
        assert version == "namespaces/b/adapters/style/versions/1"
        assert first != second
        assert (await greedy(reader, "a/style"))[0] == first
        await greedy(ben, "secret")

        # It is in memory, for ben; for anna it is not there, in the words for what is not there.
        for theirs, missing in (("b/secret", "a/secret"), ("b/secret@1", "a/secret@1")):
            with pytest.raises(AdapterNotFound) as hidden:
                await greedy(anna, theirs)
            with pytest.raises(AdapterNotFound) as absent:
                await greedy(anna, missing)
            assert hidden.value.message == absent.value.message.replace("namespaces/a/", "namespaces/b/")
        with pytest.raises(Unauthenticated):
            await greedy(nobody, "style")
        with pytest.raises(PermissionDenied):
            await anna.call(anna.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest()))
        with pytest.raises(PermissionDenied):
            await register(reader, "more", "file://store/content-0", BASE)
        loaded = await ben.call(ben.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest()))
        assert {adapter.adapter_version.split("/")[1] for adapter in loaded.adapters} == {"b"}
        listed = await anna.call(anna.registry.ListAdapters(registry_pb2.ListAdaptersRequest(parent="namespaces/-")))
        assert [adapter.name for adapter in listed.adapters] == ["namespaces/a/adapters/style"]

        # Who is taken out of the file is out at once, in both services.
        tokens.write_text("\n".join([*known[1:], entry("replica", ["replica"])]))
        await out(anna)
        assert (await greedy(reader, "style"))[0] == first
    logs = stack.registry.log_tail(100_000) + stack.inference.log_tail(100_000)
    assert '"rpc": "RegisterAdapter"' in logs
    for subject in (*SUBJECTS, "replica"):
        assert token(subject) not in logs


async def out(client: Client) -> None:
    """Returns when neither service knows the client any more."""

    async def asked_registry() -> None:
        await client.call(client.registry.ListBaseModels(registry_pb2.ListBaseModelsRequest()))

    async def asked_replica() -> None:
        await client.call(client.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()))

    for ask in (asked_registry, asked_replica):
        async with asyncio.timeout(60):
            with pytest.raises(Unauthenticated):
                await repeat(ask)


async def repeat(ask: Callable[[], Awaitable[None]]) -> None:
    while True:
        await ask()
        await asyncio.sleep(0.1)
