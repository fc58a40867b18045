"""Whatever the registry sends, it is either a resolution or a typed error."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from inference_service.adapters.resolution import Resolution, ResolvedVersion, read_resolution
from inference_service.adapters.sizes import PackedSize
from loraplex.registry.v1.registry_pb2 import ResolveAdapterResponse
from shared.errors import BaseModelMismatch, DigestMismatch, LoraplexError, RegistryUnavailable
from shared.sources.resolver import PinnedObject, PinnedSource
from shared.weighted_choice import choose
from tests.inference_service.adapters.small_adapters import BASE_MODEL, message_of, version_of, write_adapter


@pytest.fixture
def version(tmp_path: Path) -> ResolvedVersion:
    write_adapter(tmp_path / "a")
    return version_of(tmp_path / "a")


def _answer(*versions: ResolvedVersion) -> ResolveAdapterResponse:
    answer = ResolveAdapterResponse(version=message_of(versions[0]), adapter_uid="u", alias="prod")
    for version in versions if len(versions) > 1 else ():
        answer.targets.add(version=message_of(version), weight=version.number)
    answer.ttl.FromMilliseconds(1500)
    return answer


def _read(answer: Any, reference: str = "default/a") -> Resolution:
    return read_resolution(answer, reference, BASE_MODEL)


def test_one_target(version: ResolvedVersion) -> None:
    found = _read(_answer(version))
    assert found.choose("anything") == version._replace(adapter_uid="u")
    assert found.ttl == 1.5
    assert not version.texts


def test_what_the_registry_knows_of_the_packed_size_arrives(version: ResolvedVersion) -> None:
    answer = _answer(version)
    for name, rank, nbytes, kinds in (
        ("q_proj", 4, 100, ["lora"]),
        ("down_proj", 4, 30, ["block_diagonal", "lora"]),
        ("o_proj", 8, 7, ["lora", "dora"]),
        ("k_proj", 0, 1000, ["bias"]),
        ("lm_head", 4, 1000, ["lora", "modules_to_save"]),
        ("embed_tokens", 0, 1000, ["modules_to_save"]),
    ):
        answer.version.lora_config.modules.add(module=name, rank=rank, device_bytes=nbytes, kinds=kinds)
    packed = _read(answer).choose("").packed
    assert packed == PackedSize(factors=130, others=7)
    assert [packed.at_least(dtype) for dtype in ("float32", "bfloat16")] == [267, 137]


def test_pins_arrive_whole(version: ResolvedVersion) -> None:
    objects = (PinnedObject("adapter_config.json", "v1", '"e"'), PinnedObject("adapter_model.safetensors", "", '"f"'))
    sources = (PinnedSource("hf://o/r", "c" * 40, credential_ref="hub"), PinnedSource("s3://b/p", "", objects, "s"))
    assert _read(_answer(version._replace(sources=sources))).choose("").sources == sources


def test_weighted_targets_follow_the_shared_choice(version: ResolvedVersion) -> None:
    other = version._replace(name=version.name[:-1] + "3", number=3)
    found = _read(_answer(version, other))
    keys = [f"session-{i}" for i in range(300)]
    chosen = [found.choose(key).number for key in keys]
    assert chosen == [choose("u", "prod", key, [(1, 1.0), (3, 3.0)]) for key in keys]
    assert 40 < Counter(chosen)[1] < 120


def _set(path: str, value: Any) -> Callable[[ResolveAdapterResponse], None]:
    def change(answer: ResolveAdapterResponse) -> None:
        *parents, name = path.split(".")
        message: Any = answer
        for parent in parents:
            message = message[int(parent)] if parent.isdecimal() else getattr(message, parent)
        setattr(message, name, value)

    return change


def _add_targets(answer: ResolveAdapterResponse, *weights: float) -> None:
    for number, weight in enumerate(weights, 1):
        target = answer.targets.add(version=answer.version, weight=weight)
        target.version.name = f"namespaces/default/adapters/a/versions/{number}"


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.Clear(),
        lambda answer: answer.version.manifest.Clear(),
        lambda answer: answer.version.manifest.files.pop(),
        lambda answer: answer.version.manifest.files.add(path="../x", size_bytes=1, sha256="0" * 64),
        lambda answer: _add_targets(answer, 1, float("nan")),
        lambda answer: _add_targets(answer, 1, float("inf")),
        lambda answer: _add_targets(answer, 1, -1),
        lambda answer: _add_targets(answer, 0, 0),
        lambda answer: [_add_targets(answer, 1, 1) for _ in range(2)],
        _set("version.digest", ""),
        _set("version.digest", "sha256:xyz"),
        _set("version.name", "nonsense"),
        _set("version.name", "namespaces/default/adapters/other/versions/1"),
        _set("version.manifest.files.0.path", "/etc/passwd"),
        _set("version.manifest.files.0.path", "a/b"),
        _set("version.manifest.files.0.size_bytes", -1),
        _set("version.manifest.files.0.sha256", "no"),
    ],
)
def test_a_malformed_answer(version: ResolvedVersion, change: Callable[[ResolveAdapterResponse], Any]) -> None:
    answer = _answer(version)
    change(answer)
    with pytest.raises((RegistryUnavailable, DigestMismatch)):
        _read(answer)


def test_an_answer_to_another_question(version: ResolvedVersion) -> None:
    assert _read(_answer(version), "default/a@1")
    assert _read(_answer(version), f"default/a@{version.digest}")
    for reference in ("default/a@2", "default/b", "other/a", "default/a@sha256:" + "0" * 64):
        with pytest.raises(RegistryUnavailable, match="malformed"):
            _read(_answer(version), reference)


def test_content_that_is_not_its_digest(version: ResolvedVersion) -> None:
    with pytest.raises(DigestMismatch):
        _read(_answer(version._replace(digest="sha256:" + "0" * 64)))


@pytest.mark.parametrize(
    "change", [_set("version.base_model", "baseModels/other"), _set("version.base_model_fingerprint", "sha256:other")]
)
def test_another_base_model(version: ResolvedVersion, change: Callable[[ResolveAdapterResponse], None]) -> None:
    answer = _answer(version)
    change(answer)
    with pytest.raises(BaseModelMismatch, match="tiny"):
        _read(answer)


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    answer = ResolveAdapterResponse()
    try:
        answer.ParseFromString(data)
    except DecodeError:
        return
    with pytest.raises(LoraplexError):
        _read(answer)
