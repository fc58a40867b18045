"""What cannot be served exactly is refused when it is registered, with what is wrong and what can be done."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM

from examples.stack import register
from loraplex import Client, LoraplexError
from loraplex.registry.v1 import registry_pb2
from registry_service.config import RegistryConfig
from registry_service.server import start
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
    saved: dict[str, Path] = {}  # by what PEFT was asked for: most are one adapter, spoiled in different ways
    for name, refusal in REFUSALS.items():
        asked, place = repr(refusal.config), folder / "store" / slug(name)
        if asked not in saved:
            saved[asked] = folder / f"saved {len(saved)}"
            save(refusal.config, folder / "base", saved[asked])
        refusal.edit(shutil.copytree(saved[asked], place))
    return asyncio.run(register_all(folder))


def save(keys: Any, base: Path, folder: Path) -> None:
    """Makes an adapter with PEFT."""
    torch.manual_seed(1)
    if not isinstance(keys, PeftConfig):
        keys = LoraConfig(**{"r": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **keys})
    get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), keys).save_pretrained(folder)


async def register_all(folder: Path) -> Refused:
    database, roots = f"sqlite:///{folder}/registry.db", {"store": str(folder / "store")}
    registry = await start(RegistryConfig(listen="127.0.0.1:0", database=database, file_roots=roots))
    found: Refused = {}
    try:
        async with Client(registry=f"127.0.0.1:{registry.port}") as client:
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
        await registry.stop()
    return found


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_the_reason(case: str, refused: Refused) -> None:
    error = refused[case]
    assert error is not None, "it was registered"
    assert error.reason == REFUSALS[case].reason, error.summary
    said = " ".join((error.message, *error.metadata.values()))
    assert all(words in said for words in REFUSALS[case].says), said
    assert "; " in error.message, error.message
    assert set(error.metadata) & {"key", "tensor", "file"}, error.metadata
