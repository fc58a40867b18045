"""Blends in the adapter process: exact sums, their own digest, evicted and built again."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_service.adapters.blend import blend_of
from inference_service.types import BlendPart, BlobLayout
from shared.adapter_format.files import CONFIG, WEIGHTS
from shared.base_model import MODULES, linear_shape, module_path
from shared.errors import AdapterNotFound, DigestMismatch, InvalidArgument, SourceNotFound, UnsupportedAdapter
from tests.inference_service.adapters.small_adapters import MODEL, decoded, flip_a_bit, version_of, write_adapter
from tests.inference_service.adapters.test_loader import Bench, running

ALPHA_OVER_R = 2.0  # of `write_adapter`


def deltas(blob: memoryview, layout: BlobLayout) -> dict[tuple[int, int], np.ndarray]:
    """scale · B A of each (layer, module), in float64."""
    found = {}
    item = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}[layout.dtype]
    for chunk in layout.chunks:
        for module in chunk.modules:
            out, columns = linear_shape(MODEL, module.module)
            a, b = (
                decoded(bytes(blob[at : at + module.rank * width * item[1]]), item[0]).reshape(module.rank, width)
                for at, width in (
                    (chunk.offset + module.a_offset, columns),
                    (chunk.offset + module.b_offset, out),
                )
            )
            found[chunk.layer, module.module] = module.scale * b.T.astype(np.float64) @ a.astype(np.float64)
    return found


def expected(parts: list[tuple[dict[str, np.ndarray], float]]) -> dict[tuple[int, int], np.ndarray]:
    """Σ weight · α/r · B A, of what `write_adapter` returned."""
    total: dict[tuple[int, int], np.ndarray] = {}
    for tensors, weight in parts:
        for layer in (0, 2):
            for module in range(len(MODULES)):
                stem = f"base_model.model.{module_path(layer, module)}"
                if f"{stem}.lora_A.weight" in tensors:
                    a, b = (tensors[f"{stem}.lora_{part}.weight"].astype(np.float64) for part in "AB")
                    delta = weight * ALPHA_OVER_R * b @ a
                    total[layer, module] = total.get((layer, module), 0) + delta
    return total


async def blob_of(bench: Bench, digest: str) -> tuple[memoryview, BlobLayout]:
    staged = await bench.loader.acquire(digest)
    blob = bench.loader._tiers.arena[staged.offset : staged.offset + staged.layout.nbytes]
    return blob, staged.layout


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(1, 9),
            st.sets(st.integers(0, len(MODULES) - 1), min_size=1, max_size=4),
            st.floats(-3, 3).filter(lambda weight: abs(weight) > 1e-3),
            st.sampled_from(["F32", "BF16"]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_blend_is_the_sum_of_its_parts(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, set[int], float, str]]
) -> None:
    async def check(folder: Path) -> None:
        async with running(folder, host_bytes=1 << 20) as bench:
            tensors = [
                write_adapter(
                    folder / "root" / f"part{index}", seed=index, rank=rank, modules=sorted(modules), dtype=dtype
                )
                for index, (rank, modules, _, dtype) in enumerate(shapes)
            ]
            weights = [weight for _, _, weight, _ in shapes]
            parts = [BlendPart(f"default/part{index}", weight) for index, weight in enumerate(weights)]
            prepared = await bench.loader.prepare_blend(parts)
            blob, layout = await blob_of(bench, prepared.digest)
            assert prepared.rank == layout.rank
            assert prepared.size_bytes == layout.nbytes
            assert [part.weight for part in prepared.parts] == weights
            found, wanted = deltas(blob, layout), expected(list(zip(tensors, weights, strict=True)))
            assert found.keys() == wanted.keys()
            for key in wanted:
                np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5, atol=1e-5)

    asyncio.run(check(tmp_path_factory.mktemp("blend")))


async def test_a_blend_is_rounded_once_to_the_arenas_dtype(tmp_path: Path) -> None:
    async with running(tmp_path, host_bytes=1 << 20, dtype="bfloat16") as bench:
        tensors = write_adapter(tmp_path / "root" / "a", rank=3, modules=(1,))
        prepared = await bench.loader.prepare_blend([BlendPart("default/a", 0.3)])
        blob, layout = await blob_of(bench, prepared.digest)
        assert [module.scale for chunk in layout.chunks for module in chunk.modules] == [1.0, 1.0]
        chunk = layout.chunks[0]
        (module,) = chunk.modules
        out = linear_shape(MODEL, 1)[0]
        at = chunk.offset + module.b_offset
        found = decoded(bytes(blob[at : at + 2 * 3 * out]), "BF16").reshape(3, out).T
        exact = tensors[f"base_model.model.{module_path(0, 1)}.lora_B.weight"] * np.float32(0.3 * ALPHA_OVER_R)
        half_a_unit = np.exp2(np.floor(np.log2(np.abs(exact))) - 8)  # in the last of 8 bits
        assert (np.abs(found - exact) <= half_a_unit).all()


async def test_a_blend_has_a_digest_of_its_own_and_is_packed_once(tmp_path: Path) -> None:
    async with running(tmp_path, host_bytes=1 << 20) as bench:
        bench.add("a")
        bench.add("bb", rank=2)
        one = [BlendPart("default/a", 0.5), BlendPart("default/bb", 2.0)]
        told = await asyncio.gather(*(bench.loader.prepare_blend(one) for _ in range(4)))
        assert len({prepared.digest for prepared in told}) == 1
        again = await bench.loader.prepare_blend(one[::-1])  # the sum does not depend on the order
        assert (again.digest, again.tier) == (told[0].digest, "host")
        assert [part.version.split("/")[3] for part in again.parts] == ["bb", "a"]
        other = await bench.loader.prepare_blend([one[0], one[1]._replace(weight=2.5)])
        assert other.digest != again.digest
        assert bench.loader.stats().load_seconds["pack"].count == 2
        assert [item.version for item in bench.loader.staged() if item.digest == again.digest] == [""]


async def test_an_evicted_blend_is_built_again(tmp_path: Path) -> None:
    async with running(tmp_path, host_bytes=1 << 20) as bench:
        bench.add("a")
        bench.add("bb")
        prepared = await bench.loader.prepare_blend([BlendPart("default/a", 1.0), BlendPart("default/bb", -1.0)])
        before = bytes((await blob_of(bench, prepared.digest))[0])
        bench.loader.release(prepared.digest)
        assert bench.loader.drop(prepared.digest) == len(before)
        bench.cache.evict(1 << 20)  # not even the parts' files are here any more
        assert bytes((await blob_of(bench, prepared.digest))[0]) == before


async def test_a_part_whose_cached_file_was_damaged_is_fetched_again(tmp_path: Path) -> None:
    async with running(tmp_path, host_bytes=1 << 20) as bench:
        version = bench.add("a")
        await bench.loader.prepare("default/a")
        bench.loader.drop(version.digest)
        flip_a_bit(next((tmp_path / "cache" / "sha256").iterdir()) / WEIGHTS)
        prepared = await bench.loader.prepare_blend([BlendPart("default/a", 1.0)])
        assert (await blob_of(bench, prepared.digest))[1].rank == 4


async def test_what_cannot_be_blended_names_the_part(tmp_path: Path) -> None:
    async with running(tmp_path, host_bytes=8 << 20) as bench:
        bench.add("a")
        bench.add("wide", rank=510, modules=(2,))
        (tmp_path / "root" / "same").mkdir()
        for name in (CONFIG, WEIGHTS):
            (tmp_path / "root" / "same" / name).write_bytes((tmp_path / "root" / "a" / name).read_bytes())
        bench.add("activated")
        path = tmp_path / "root" / "activated" / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), "alora_invocation_tokens": [1, 2]}))

        async def error(*parts: tuple[str, float]) -> Exception:
            with pytest.raises((InvalidArgument, UnsupportedAdapter, AdapterNotFound)) as caught:
                await bench.loader.prepare_blend([BlendPart(f"default/{name}", weight) for name, weight in parts])
            return caught.value

        twice = await error(("a", 1), ("wide", 1), ("same", 1))
        assert isinstance(twice, InvalidArgument)
        assert twice.violations[0].field == "blend[2].reference"
        assert twice.violations[0].description == "has the same content as blend[0]; add their weights up"
        ranks = await error(("a", 1), ("wide", 1))
        assert isinstance(ranks, UnsupportedAdapter)
        assert ranks.metadata == {"field": "blend", "rank": "514"}
        activated = await error(("a", 1), ("activated", 1))
        assert isinstance(activated, UnsupportedAdapter)
        assert "activated" in str(activated)
        assert activated.message.startswith("blend[1]: ")
        assert activated.metadata["field"] == "blend[1]"
        assert not bench.loader.stats().loads_in_flight


async def test_a_part_whose_source_or_content_is_wrong_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, host_bytes=8 << 20) as bench:
        for name in ("a", "gone", "changed"):
            bench.add(name)
            bench.known[name] = version_of(tmp_path / "root" / name, name)
        (tmp_path / "root" / "gone" / WEIGHTS).unlink()
        changed = tmp_path / "root" / "changed" / WEIGHTS
        changed.write_bytes(changed.read_bytes()[:-1] + b"x")
        for name, kind in (("gone", SourceNotFound), ("changed", DigestMismatch)):
            with pytest.raises(kind) as caught:
                await bench.loader.prepare_blend([BlendPart("default/a", 1), BlendPart(f"default/{name}", 1)])
            assert caught.value.message.startswith(f"blend[1]: {WEIGHTS} in file://root/{name}")
            assert "restore what" in caught.value.message.partition("; ")[2]
            assert caught.value.metadata["field"] == "blend[1]"
            with pytest.raises(kind) as alone:
                await bench.loader.prepare(f"default/{name}")
            assert "blend" not in alone.value.message


async def test_a_weight_beyond_the_dtypes_range_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, host_bytes=1 << 20, dtype="float16") as bench:
        bench.add("a", scale=10)
        bench.add("bb")
        with pytest.raises(InvalidArgument) as caught:
            await bench.loader.prepare_blend([BlendPart("default/bb", 1.0), BlendPart("default/a", 1e4)])
        assert caught.value.violations[0].field == "blend[1].weight"
        assert bench.loader.stats().host.used == 0


def test_the_digest_of_a_blend_is_canonical(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b", seed=1)
    a, b = version_of(tmp_path / "a", "a"), version_of(tmp_path / "b", "b")
    assert blend_of([a, b], [1.0, 0.1]).digest == blend_of([b, a], [0.1, 1]).digest
    assert blend_of([a, b], [1.0, 0.1]).digest != blend_of([a, b], [0.1, 1.0]).digest
    assert blend_of([a], [1.0]).digest != a.digest
