"""Clients that show who they are: the replica's channel to the registry, and the command line."""

import asyncio
import contextlib
import json
import os

import pytest

from inference_service.adapters.registration import BaseModelFacts
from inference_service.adapters.registry_client import RegistryClient
from inference_service.adapters.resolution import BaseModelIdentity
from registry_service.config import RegistryConfig
from registry_service.server import start
from shared.base_model import fingerprint
from shared.channel import ClientIdentity
from shared.errors import AdapterNotFound, RegistryUnavailable
from tests.loraplex.cli_fakes import run_cli
from tests.shared.auth.authority import Authority
from tests.shared.auth.token_files import token, write_callers

MODEL = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.fixture
async def registry(tmp_path):
    """A registry with TLS and tokens: its address, and its CA."""
    authority = Authority(tmp_path)
    files = authority.issue("server", "localhost")
    running = await start(
        RegistryConfig(
            listen="localhost:0",
            database=f"sqlite:///{tmp_path}/registry.db",
            auth_token_file=str(write_callers(tmp_path / "tokens.toml")),
            tls_cert=str(files.cert),
            tls_key=str(files.key),
        )
    )
    yield f"localhost:{running.port}", str(authority.cert)
    await running.stop()


@contextlib.asynccontextmanager
async def replica(address, identity):
    client = RegistryClient(address, BaseModelIdentity("tiny", fingerprint(MODEL)), identity=identity)
    facts = BaseModelFacts("tiny", json.dumps(MODEL), fingerprint(MODEL), "")
    registering = asyncio.create_task(client.keep_registered(facts))
    try:
        yield client
    finally:
        registering.cancel()
        await client.close()


async def settled(client):
    while client.registration in ("pending", "unreachable"):  # noqa: ASYNC110  # it tells nobody
        await asyncio.sleep(0.05)
    return client.registration


async def test_a_replica_shows_its_token_and_its_rotation_is_followed(registry, tmp_path, caplog):
    address, ca = registry
    file = tmp_path / "replica-token"
    file.write_text(token("replica"))
    async with replica(address, ClientIdentity(token_file=str(file), ca=ca)) as client:
        assert await settled(client) == "registered"
        for reference in ("team-a/none", "team-b/none"):
            with pytest.raises(AdapterNotFound):
                await client.resolve(reference)
        # Of a replica that the registry does not know any more a caller hears what it can mend: nothing.
        fresh = tmp_path / "fresh"
        fresh.write_text("no-such-token")
        os.replace(fresh, file)  # noqa: PTH105
        await asyncio.sleep(1.1)
        with pytest.raises(RegistryUnavailable, match="UNAUTHENTICATED"):
            await client.resolve("team-a/another")
        file.write_text(token("replica"))
        await asyncio.sleep(1.1)
        with pytest.raises(AdapterNotFound):
            await client.resolve("team-a/another-still")
    assert "no-such-token" not in caplog.text
    assert token("replica") not in caplog.text


async def test_a_replica_without_the_role_is_refused(registry, caplog):
    address, ca = registry
    async with replica(address, ClientIdentity(token=token("admin-a"), ca=ca)) as client:
        assert await settled(client) == "refused"
    assert "this needs the role admin or replica" in caplog.text


async def test_the_command_line_shows_a_token(registry, tmp_path, monkeypatch):
    address, ca = registry
    listing = ("base-model", "list", "--json", "--registry", address)

    async def cli(*arguments):
        return await asyncio.to_thread(run_cli, *arguments)

    shown = await cli("--token", token("reader-a"), "--ca", ca, *listing)
    assert shown.status == 0, shown.err
    refused = await cli("--ca", ca, *listing)
    assert (refused.status, refused.err.split(":")[0]) == (1, "UNAUTHENTICATED")
    untrusted = await cli("--ca", str(Authority(tmp_path, "stranger").cert), *listing)
    assert untrusted.err.startswith(f"UNAVAILABLE: no TLS with the registry service at {address}: ")
    assert "CERTIFICATE_VERIFY_FAILED" in untrusted.err
    assert "retry after" not in untrusted.err
    monkeypatch.setenv("LORAPLEX_CA", ca)
    monkeypatch.setenv("LORAPLEX_TOKEN", token("reader-a"))
    assert (await cli(*listing)).status == 0
    monkeypatch.delenv("LORAPLEX_TOKEN")
    (tmp_path / "mine").write_text(token("reader-a"))
    assert (await cli("--token-file", tmp_path / "mine", *listing)).status == 0
    # A name alone is in the namespace that is said before the command, here one that the token has no role in.
    mine = ("--token-file", tmp_path / "mine", "--namespace")
    show = ("adapter", "show", "none", "--registry", address)
    assert "namespaces/team-a/adapters/none" in (await cli(*mine, "team-a", *show)).err
    assert (await cli(*mine, "team-a", "adapter", "list", "--registry", address)).status == 0
    assert "namespaces/team-b" in (await cli(*mine, "team-b", "adapter", "list", "--registry", address)).err
    assert (await cli("--namespace", "A B", *listing)).status == 2
    missing = await cli("--token-file", "/no/such", *listing)
    assert missing.status == 2
    assert "--token-file: /no/such cannot be read" in missing.err
    help_text = (await cli("--token", "s3cret", "--help")).out
    assert "s3cret" not in help_text
