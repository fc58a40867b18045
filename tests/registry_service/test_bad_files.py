"""What a source may hold that is refused, each with its own error, and what stays unharmed."""

import asyncio
import itertools
import json
import os
import pickle

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.errors import (
    AdapterInvalid,
    InvalidArgument,
    SourceForbidden,
    SourceNotFound,
    SourceUnavailable,
    UnsupportedAdapter,
)

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def database_url(tmp_path):
    """The files do not care which database there is."""
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture
async def refuse(registry):
    """Registers and returns the error, after seeing that nothing was written."""

    async def call(error, uri="file://main/a"):
        refused = await registry.refused(
            error, "RegisterAdapter", adapter_id="a", base_model="tiny", source={"uri": uri}
        )
        assert not (await registry("ListAdapters", show_deleted=True)).adapters
        return refused

    return call


# ---- sources


async def test_uris(folders, refuse):
    folders.write()
    for uri, error in [
        ("main/a", InvalidArgument),
        ("file:", InvalidArgument),
        ("file://", InvalidArgument),
        ("FILE://main/a", InvalidArgument),
        ("nosuch://x/y", InvalidArgument),
        ("file://main/a\0", InvalidArgument),
        ("file://main/%00", InvalidArgument),
        ("file://main/" + "x" * 3000, InvalidArgument),
        ("file://main/" + "x" * 300, SourceNotFound),
        ("file://main/none", SourceNotFound),
        ("file://main/a/adapter_config.json", SourceNotFound),
        ("file://main/%ff", SourceNotFound),
        ("file://other/a", SourceForbidden),
        ("file://main/../a", SourceForbidden),
        ("file://main/b/..", SourceForbidden),
        ("file://main/%2e%2e/a", SourceForbidden),
        ("file://main/b%2F..%2F..", SourceForbidden),
        ("file://../a", SourceForbidden),
        ("file:///etc", SourceForbidden),
        ("file:///no/such/folder", SourceForbidden),
        ("file:///", SourceForbidden),
    ]:
        refused = await refuse(error, uri)
        if error is InvalidArgument:
            assert refused.violations[0].field == "source.uri"
        else:
            assert refused.metadata["uri"] == uri
            assert str(folders.root) not in refused.message


async def test_an_unknown_scheme_names_those_that_exist(refuse):
    message = (await refuse(InvalidArgument, "nosuch://x")).message
    assert message == "source.uri: scheme nosuch:// is not available; this registry reads file://, hf:// and s3://"


async def test_symbolic_links_out_of_the_root(tmp_path, folders, refuse):
    outside = tmp_path / "outside"
    folders.write("a")
    (folders.root / "a").rename(outside)
    (folders.root / "a").symlink_to(outside)
    await refuse(SourceForbidden)
    (folders.root / "a").unlink()
    (folders.root / "a").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folders.root / "a" / name).symlink_to(outside / name)
    error = await refuse(SourceForbidden)
    assert error.metadata["file"] == "adapter_config.json"


async def test_a_root_whose_name_begins_alike_is_outside(folders, refuse):
    folders.write("a")
    beside = folders.root.with_name(folders.root.name + "-secret")
    (folders.root / "a").rename(beside)
    await refuse(SourceForbidden, f"file://{beside}")


async def test_a_loop_of_links(folders, refuse):
    (folders.root / "a").symlink_to(folders.root / "b")
    (folders.root / "b").symlink_to(folders.root / "a")
    await refuse(SourceNotFound)


async def test_links_inside_the_root_are_followed(registry, folders):
    folders.write("real")
    (folders.root / "a").symlink_to("real")
    answer = await registry.register(uri="file://main/a")
    assert answer.version.pinned_sources[0].uri == "file://main/real"


async def test_a_fifo_is_no_file(folders, refuse):
    folders.write()
    (folders.root / "a" / "adapter_config.json").unlink()
    os.mkfifo(folders.root / "a" / "adapter_config.json")
    error = await refuse(SourceForbidden)
    assert error.metadata["file"] == "adapter_config.json"


# ---- files


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_missing_files(folders, refuse, name):
    folders.write()
    (folders.root / "a" / name).unlink()
    assert (await refuse(AdapterInvalid)).metadata["file"] == name


async def test_pickles(folders, refuse):
    folders.write()
    weights = folders.root / "a" / "adapter_model.safetensors"
    weights.write_bytes(pickle.dumps({"x": 1}))
    assert (await refuse(AdapterInvalid)).metadata["file"] == weights.name
    weights.rename(weights.with_name("adapter_model.bin"))
    error = await refuse(UnsupportedAdapter)
    assert error.metadata["file"] == "adapter_model.bin"
    assert "safe_serialization" in error.message


async def test_truncated_weights(folders, refuse):
    folders.write()
    weights = folders.root / "a" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for keep in [0, 7, 8, 100, -1]:
        weights.write_bytes(whole[:keep])
        await refuse(AdapterInvalid)


async def test_surplus_bytes(folders, refuse):
    folders.write()
    weights = folders.root / "a" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    await refuse(AdapterInvalid)


async def test_bit_flips_in_the_header_never_pass_unseen(registry, folders):
    """Each flip is refused, or changes nothing but free text of the header, and then the digest."""
    folders.write()
    weights = folders.root / "a" / "adapter_model.safetensors"
    good = weights.read_bytes()
    digests = {(await registry.register(uri="file://main/a", validate_only=True)).version.digest}
    for index in range(0, 8 + int.from_bytes(good[:8], "little"), 37):
        bad = bytearray(good)
        bad[index] ^= 1 << (index % 8)
        weights.write_bytes(bad)
        try:
            answer = await registry.register(uri="file://main/a", validate_only=True)
        except (AdapterInvalid, UnsupportedAdapter):
            continue
        assert answer.version.digest not in digests
        digests.add(answer.version.digest)


async def test_oversized_files(folders, refuse):
    folders.write()
    with (folders.root / "a" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(8 << 30)
    error = await refuse(AdapterInvalid)
    assert error.metadata == {"file": "adapter_model.safetensors", "limit": str(1 << 20)}
    (folders.root / "a" / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1))
    assert (await refuse(AdapterInvalid)).metadata["file"] == "adapter_config.json"


async def test_numbers_that_are_none(folders, refuse):
    for value, dtype in itertools.product([np.nan, np.inf, -np.inf], [np.float32, np.float16]):
        tensors = folders.tensors(dtype=dtype)
        tensors[f"{Q0}.lora_B.weight"][-1, -1] = value
        folders.write(tensors=tensors)
        assert (await refuse(AdapterInvalid)).metadata["tensor"] == f"{Q0}.lora_B.weight"


async def test_wrong_shapes_names_and_ranks(folders, refuse):
    tensors = folders.tensors()
    tensors[f"{Q0}.lora_A.weight"] = np.zeros((2, 17), np.float32)
    folders.write(tensors=tensors)
    assert (await refuse(AdapterInvalid)).metadata["tensor"] == f"{Q0}.lora_A.weight"
    tensors = folders.tensors()
    tensors.pop(f"{Q0}.lora_B.weight")
    folders.write(tensors=tensors)
    assert "lora_B" in (await refuse(AdapterInvalid)).message
    tensors = folders.tensors()
    tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = np.zeros((2, 16), np.float32)
    folders.write(tensors=tensors)
    assert "layers.9" in (await refuse(AdapterInvalid)).metadata["tensor"]
    folders.write(config={"target_modules": ["q_proj", "k_proj", "v_proj"]})
    assert "k_proj" in (await refuse(AdapterInvalid)).metadata["tensor"]
    folders.write(config={"r": 4})
    assert "rank" in (await refuse(AdapterInvalid)).message


async def test_configs(folders, refuse):
    for changed, error, key in [
        ({"peft_type": "IA3"}, UnsupportedAdapter, "peft_type"),
        ({"init_lora_weights": "pissa"}, UnsupportedAdapter, "init_lora_weights"),
        ({"layer_replication": [[0, 1]]}, UnsupportedAdapter, "layer_replication"),
        ({"r": "two"}, AdapterInvalid, "r"),
        ({"trainable_token_indices": {"k_proj": [3]}}, AdapterInvalid, "trainable_token_indices"),
    ]:
        folders.write(config=changed)
        assert (await refuse(error)).metadata["key"] == key


async def test_a_folder_of_several_adapters(registry, folders):
    folders.write("many/one")
    folders.write("many/two")
    source = {"uri": "file://main/many"}
    error = await registry.refused(AdapterInvalid, "RegisterAdapter", adapter_id="a", base_model="tiny", source=source)
    assert "name one of one, two" in error.message


async def test_configs_that_are_no_json(folders, refuse):
    folders.write()
    for content in [b"", b"[]", b"{", b"\xff", b'{"r": NaN}', b"[" * 100_000]:
        (folders.root / "a" / "adapter_config.json").write_bytes(content)
        assert (await refuse(AdapterInvalid)).metadata["file"] == "adapter_config.json"


async def test_a_bad_one_does_not_disturb_others(registry, folders):
    good = folders.write("good")
    folders.write("bad", tensors={"x": np.zeros((1, 1), np.float32)})
    calls = [registry.register(f"n{n}", uri=good if n % 2 else "file://main/bad") for n in range(8)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(results[n], AdapterInvalid) for n in range(0, 8, 2))
    assert all(results[n].created for n in range(1, 8, 2))


async def test_a_folder_that_may_not_be_read(folders, refuse, monkeypatch):
    """Root may read everything, so the answer of the operating system is made up."""
    folders.write()
    real = os.open

    def denied(path, *arguments, **names):
        if str(path).endswith("adapter_config.json"):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **names)

    monkeypatch.setattr(os, "open", denied)
    await refuse(SourceForbidden)
    monkeypatch.setattr(os, "open", lambda *a, **k: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    error = await refuse(SourceUnavailable)
    assert error.retry_after
    assert json.loads((folders.root / "a" / "adapter_config.json").read_text())


async def test_a_looping_link_beside_the_files_harms_nobody(registry, folders):
    folders.write()
    (folders.root / "a" / "README.md").symlink_to("README.md")
    assert (await registry.register(uri="file://main/a")).version.name.endswith("/versions/1")


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
async def test_an_adapter_that_does_nothing(folders, refuse, part):
    zeroed = {}
    folders.write()
    path = folders.root / "a" / "adapter_model.safetensors"
    for name, tensor in load_file(path).items():
        zeroed[name] = np.negative(np.zeros_like(tensor)) if part in name else tensor
    save_file(zeroed, path)
    error = await refuse(AdapterInvalid)
    assert f"the adapter does nothing: every {part} is all zero" in error.message
    assert error.metadata == {"file": "adapter_model.safetensors"}
