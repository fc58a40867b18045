"""What names without a namespace mean: to each request of the inference service, and in a registry with tokens."""

import asyncio
import json

import pytest

from loraplex.cli.identity import set_identity
from loraplex.cli.names import parent, qualified, read, written
from registry_service.config import RegistryConfig
from registry_service.server import start
from shared.channel import NOBODY, ClientIdentity
from tests.loraplex.cli_fakes import run_cli
from tests.registry_service.conftest import TINY, AdapterFolders
from tests.shared.auth.token_files import token, write_callers

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("namespace", "text", "reads_as", "sent"),
    [
        ("", "a@prod", "a@prod", "a@prod"),
        ("", "x/a", "x/a", "x/a"),
        ("team", "a", "team/a", "team/a"),
        ("team", f"a@{DIGEST}", f"team/a@{DIGEST}", f"team/a@{DIGEST}"),
        ("team", "x/a@2", "x/a@2", "x/a@2"),
        ("team", "namespaces/x/adapters/a/versions/2", "x/a@2", "namespaces/x/adapters/a/versions/2"),
        ("", "namespaces/x/adapters/a", "x/a", "namespaces/x/adapters/a"),
    ],
)
def test_a_name_is_qualified_by_the_setting_alone(namespace, text, reads_as, sent):
    set_identity(ClientIdentity(token="t"), namespace)
    try:
        assert (written(read(text)), qualified(text)) == (reads_as, sent)
        assert (qualified(""), qualified(DIGEST)) == ("", DIGEST)
        assert parent(read(text).namespace) == (f"namespaces/{reads_as.split('/')[0]}" if "/" in reads_as else "")
    finally:
        set_identity(NOBODY, "")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (["generate", "hi", "--adapter", "a@prod"], ["team/a@prod"]),
        (["generate", "hi"], [""]),
        (["generate", "hi", "--blend", "a=1", "--blend", "x/b=2"], ["", "team/a", "x/b"]),
        (["bench", "--requests", "2", "--adapter", "a", "--adapter", "x/b"], ["team/a", "x/b"]),
        (["adapter", "load", "a@1"], ["team/a@1"]),
        (["adapter", "unload", "a"], ["team/a"]),
        (["adapter", "unload", DIGEST], [DIGEST]),
    ],
)
def test_the_inference_service_hears_the_namespace(cli, servers, monkeypatch, command, names):
    monkeypatch.setenv("LORAPLEX_NAMESPACE", "team")
    before = len(servers.fake.requests)
    assert cli(*command).status == 0
    assert sorted(name for request in servers.fake.requests[before:] for name in _names(request)) == names


def _names(request):
    if hasattr(request, "blend"):
        return [request.adapter, *(part.reference for part in request.blend)]
    return [request.adapter if hasattr(request, "adapter") else request.reference]


async def test_without_the_setting_it_is_the_tokens_own(tmp_path, monkeypatch):
    """Every command of the registry, by a token of the namespace `team-a`, which `--namespace` is not needed for."""
    AdapterFolders(tmp_path / "store").write("one", seed=1)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    registry = await start(
        RegistryConfig(
            listen="127.0.0.1:0",
            database=f"sqlite:///{tmp_path}/registry.db",
            file_roots={"main": str(tmp_path / "store")},
            auth_token_file=str(write_callers(tmp_path / "tokens.toml")),
        )
    )
    monkeypatch.setenv("LORAPLEX_REGISTRY", f"127.0.0.1:{registry.port}")

    async def said(*arguments):
        ran = await asyncio.to_thread(run_cli, *arguments)
        return ran.out or ran.err

    entry = {"name": "b", "base_model": "tiny", "source": "file://main/one", "aliases": ["prod"]}
    (tmp_path / "adapters.yaml").write_text(json.dumps({"adapters": [entry]}))
    try:
        await said("--token", token("admin-all"), "base-model", "register", tmp_path / "tiny")
        monkeypatch.setenv("LORAPLEX_TOKEN", token("admin-a"))
        source = ("--base-model", "tiny", "--source", "file://main/one")
        assert (await said("adapter", "register", "a", *source)).startswith("registered: team-a/a@1 ")
        assert "team-a/a" in await said("adapter", "list")
        assert (await said("--namespace", "team-a", "adapter", "list")).splitlines()[1].startswith("a ")
        assert "namespaces/team-a/adapters/a" in await said("adapter", "show", "a@1")
        assert "team-a/a@1" in await said("adapter", "versions", "a")
        assert await said("adapter", "alias", "a@prod", "1") == "a@prod → version 1\n"
        assert await said("adapter", "promote", "a@1", "--alias", "stable") == "a@stable → version 1\n"
        assert await said("adapter", "alias", "a@prod", "--delete") == "deleted: a@prod\n"
        assert await said("adapter", "update", "a", "--description", "d") == "updated: team-a/a\n"
        assert "registered" in await said("apply", "-f", tmp_path / "adapters.yaml")
        assert "unchanged" in await said("apply", "-f", tmp_path / "adapters.yaml")
        folder = ("adapter", "import", tmp_path / "store", "--uri", "file://main", "--base-model", "tiny")
        assert "registered" in await said(*folder)
        assert await said("adapter", "delete", "a", "--yes") == "deleted: namespaces/team-a/adapters/a\n"
        assert await said("adapter", "undelete", "a") == "undeleted: namespaces/team-a/adapters/a\n"
        assert "there is no adapter namespaces/default/adapters/a" in await said("adapter", "show", "default/a")
    finally:
        await registry.stop()
