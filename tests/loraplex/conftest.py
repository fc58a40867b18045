import json

import pytest

from tests.loraplex.cli_fakes import run_cli, serving
from tests.registry_service.conftest import TINY, AdapterFolders


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """Both services. The registry knows the base model `tiny`; file://main has one, two, three, foreign, and talks."""
    folder = tmp_path_factory.mktemp("cli")
    adapters = AdapterFolders(folder / "adapters")
    adapters.write("one", seed=1)
    adapters.write("two", seed=2)
    adapters.write("three", seed=3)
    adapters.write("foreign", seed=4, config={"base_model_name_or_path": "org/another"})
    adapters.write("talks", seed=5)
    (adapters.root / "talks" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    with serving(folder) as servers:
        ran = run_cli("base-model", "register", folder / "tiny", "--registry", servers.registry)
        assert ran.out == "registered: baseModels/tiny LlamaForCausalLM\n", ran
        yield servers


@pytest.fixture
def cli(servers, monkeypatch):
    """Runs a command against both services."""
    monkeypatch.setenv("LORAPLEX_REGISTRY", servers.registry)
    monkeypatch.setenv("LORAPLEX_SERVER", servers.inference)
    return run_cli


@pytest.fixture
def register(cli):
    """Registers an adapter and returns what the command printed."""

    def register(name, source="one", *options):
        ran = cli("adapter", "register", name, "--base-model", "tiny", "--source", f"file://main/{source}", *options)
        assert ran.status == 0, ran
        return ran.out

    return register
