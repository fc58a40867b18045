import json

from shared.base_model import fingerprint
from shared.errors import BaseModelConflict, BaseModelNotFound, InvalidArgument

ONE, TWO = "sha256:" + "1" * 64, "sha256:" + "2" * 64


async def test_a_base_model_is_registered_once(registry, tiny):
    shown = await registry("GetBaseModel", name="tiny")
    assert shown.name == "baseModels/tiny"
    assert shown.architecture == "LlamaForCausalLM"
    assert shown.fingerprint == fingerprint(tiny)
    assert shown.num_modules == 14
    again = await registry("RegisterBaseModel", id="baseModels/tiny", config_json=json.dumps({**tiny, "use_cache": 1}))
    assert not again.created
    assert again.base_model == shown
    new = await registry(
        "RegisterBaseModel", id="org--other", config_json=json.dumps(tiny), fingerprint=shown.fingerprint
    )
    assert new.created
    assert new.registry_revision == again.registry_revision + 1


async def test_conflicts(registry, tiny):
    other = json.dumps({**tiny, "hidden_size": 32})
    error = await registry.refused(BaseModelConflict, "RegisterBaseModel", id="tiny", config_json=other)
    assert error.metadata == {"base_model": "baseModels/tiny", "fingerprint": fingerprint(tiny)}
    await registry.refused(
        BaseModelConflict, "RegisterBaseModel", id="new", config_json=json.dumps(tiny), fingerprint=ONE
    )
    await registry.refused(BaseModelNotFound, "GetBaseModel", name="new")


async def test_the_weights_are_remembered_once_known(registry, tiny):
    config = json.dumps(tiny)
    before = await registry.revision()
    first = await registry("RegisterBaseModel", id="tiny", config_json=config, weights_fingerprint=ONE)
    assert first.base_model.weights_fingerprint == ONE
    assert first.registry_revision == before + 1
    again = await registry("RegisterBaseModel", id="tiny", config_json=config, weights_fingerprint=ONE)
    assert again.registry_revision == first.registry_revision
    assert (await registry("RegisterBaseModel", id="tiny", config_json=config)).base_model.weights_fingerprint == ONE
    error = await registry.refused(
        BaseModelConflict, "RegisterBaseModel", id="tiny", config_json=config, weights_fingerprint=TWO
    )
    assert error.metadata["weights_fingerprint"] == ONE


WRONG_FIELDS = [
    ({"id": "Upper"}, "id"),
    ({"id": ""}, "id"),
    ({"config_json": ""}, "config_json"),
    ({"config_json": "[]"}, "config_json"),
    ({"config_json": "[" * 100_000}, "config_json"),
    ({"config_json": " " * ((1 << 20) + 1)}, "config_json"),
    ({"config_json": '{"architectures": ["MambaForCausalLM"]}'}, "config.architectures"),
    ({"config_json": '{"architectures": ["\\u0000\\ud800"]}'}, "config.architectures"),
    ({"fingerprint": "x"}, "fingerprint"),
    ({"weights_fingerprint": "sha256:xyz"}, "weights_fingerprint"),
]


async def test_wrong_fields(registry, tiny):
    for fields, field in WRONG_FIELDS:
        request = {"id": "new", "config_json": json.dumps(tiny), **fields}
        error = await registry.refused(InvalidArgument, "RegisterBaseModel", **request)
        assert error.violations[0].field == field


async def test_odd_text_in_a_config_is_kept(registry, tiny):
    config = json.dumps({**tiny, "note": "\0\ud800"})
    assert (await registry("RegisterBaseModel", id="odd", config_json=config)).created


async def test_pages(registry, tiny):
    for name in ("a", "b", "z"):
        await registry("RegisterBaseModel", id=name, config_json=json.dumps(tiny))
    first = await registry("ListBaseModels", page_size=3)
    second = await registry("ListBaseModels", page_size=3, page_token=first.next_page_token)
    names = [model.name for page in (first, second) for model in page.base_models]
    assert names == ["baseModels/a", "baseModels/b", "baseModels/tiny", "baseModels/z"]
    assert not second.next_page_token
