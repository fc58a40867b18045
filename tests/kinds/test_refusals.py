"""What cannot be served exactly is refused when it is registered, with what is wrong and what can be done."""

import asyncio
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM

from examples.stack import REGISTRY_SERVICE, ServerProcess, free_address, register
from loraplex import Client, LoraplexError
from loraplex.registry.v1 import registry_pb2
from tests.kinds.bases import build
from tests.kinds.refusals import REFUSALS
from tests.kinds.world import slug

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"),
]
Refused = dict[str, LoraplexError | None]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Refused:
    """What a real registry says to every one of them."""
    folder = tmp_path_factory.mktemp("refusals")
    build("llama", folder / "base")
    for name in REFUSALS:
        save(name, folder)
    return asyncio.run(register_all(folder))


def save(name: str, folder: Path) -> None:
    """Makes the adapter with PEFT and spoils it."""
    torch.manual_seed(1)
    keys = REFUSALS[name].config
    if not isinstance(keys, PeftConfig):
        keys = LoraConfig(**{"r": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **keys})
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    get_peft_model(base, keys).save_pretrained(folder / "store" / slug(name))
    REFUSALS[name].edit(folder / "store" / slug(name))


async def register_all(folder: Path) -> Refused:
    """With a registry as a process of its own, as users have it."""
    flags = [f"--database=sqlite:///{folder}/registry.db", f"--file-root=store={folder}/store"]
    server = ServerProcess("registry_service", flags, free_address(), REGISTRY_SERVICE, folder / "registry.log")
    found: Refused = {}
    try:
        await server.start()
        await server.ready(60)
        async with Client(registry=server.address) as client:
            config = (folder / "base" / "config.json").read_text()
            request = registry_pb2.RegisterBaseModelRequest(id="llama", config_json=config)
            await client.call(client.registry.RegisterBaseModel(request))
            for name in REFUSALS:
                try:
                    await register(client, slug(name), f"file://store/{slug(name)}", "llama")
                    found[name] = None
                except LoraplexError as error:
                    found[name] = error
    finally:
        assert await server.stop() == 0
    return found


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_the_reason(case: str, refused: Refused) -> None:
    error = refused[case]
    assert error is not None, "it was registered"
    assert error.reason in REFUSALS[case].reason.split("|"), error.summary
    said = " ".join((error.message, *error.metadata.values()))
    assert all(words in said for words in REFUSALS[case].says), said
    assert set(error.metadata) & {"key", "tensor", "file"}, error.metadata
