"""Filters, orders and pages of lists, on both databases."""

import pytest

from shared.errors import InvalidArgument

BEFORE, AFTER = "2000-01-01T00:00:00Z", "2100-01-01T00:00:00Z"


@pytest.fixture
async def fleet(registry, folders):
    """Four adapters in different states."""
    other = {"labels": {"team": "y", "app.io/x": "1"}, "description": 'Reads 100% of "mail"'}
    await registry.register("mail", folders.write("v1", seed=1), aliases=["prod"], **other)
    await registry.register("mail", folders.write("v2", seed=2, rank=4, config={"r": 4}))
    await registry.register("chat", folders.write("v3", seed=3), labels={"team": "x"}, description="Ünïcode")
    await registry.register("gone", folders.write("v4", seed=4))
    await registry("DeleteAdapter", name="gone")
    await registry.register("empty", folders.write("v5", seed=5), labels={"team": "x"})
    await registry("DeleteAdapterVersion", name="empty@1")
    await registry("UpdateAdapter", adapter={"name": "chat", "residency": 3}, update_mask={"paths": ["residency"]})


async def names(registry, text, **fields):
    answer = await registry("ListAdapters", filter=text, **fields)
    return [adapter.name.rpartition("/")[2] for adapter in answer.adapters]


FILTERS = [  # and the adapters found
    ("", "chat empty mail"),
    ('base_model = "tiny" AND labels.team = "x" AND state = READY', "chat"),
    ("base_model = baseModels/tiny", "chat empty mail"),
    ("base_model != tiny", ""),
    ("name = mail", "mail"),
    ("name = m*", "mail"),
    ("name = * AND NOT name = *l", "chat empty mail"),
    ("name:A", "chat mail"),
    ("namespace = default", "chat empty mail"),
    ("labels:team", "chat empty mail"),
    ("labels:app.io/x AND labels.app.io/x:*", "mail"),
    ("labels.team != x", "mail"),
    ("NOT labels.app.io/x = 1", "chat empty"),
    ("labels.nosuch != x", "chat empty mail"),
    ("labels.nosuch:''", ""),
    ("state = EMPTY", "empty"),
    ("state != READY", "empty"),
    ("state = EMPTY OR residency = PINNED", "chat empty"),
    ("residency != ON_DEMAND", "chat"),
    ("aliases:prod", "mail"),
    ("NOT aliases:prod", "chat empty"),
    ("latest_version >= 2", "mail"),
    ("latest_version < 1", "empty"),
    (f"create_time > {BEFORE} AND update_time < {AFTER}", "chat empty mail"),
    (f"delete_time > {BEFORE}", ""),
    ("description:'100%'", "mail"),
    ("description:'%_'", ""),
    ('description:"\\"MAIL\\""', "mail"),
    ("description = Ünïcode", "chat"),
    ('description:"\' OR 1=1 --"', ""),
]


async def test_filters(registry, fleet):
    for text, found in FILTERS:
        assert await names(registry, text) == found.split(), text


async def test_filters_of_deleted_adapters(registry, fleet):
    assert await names(registry, "state = DELETED", show_deleted=True) == ["gone"]
    assert await names(registry, f"delete_time > {BEFORE}", show_deleted=True) == ["gone"]
    assert await names(registry, f"NOT delete_time > {BEFORE}", show_deleted=True) == ["chat", "empty", "mail"]


VERSION_FILTERS = [  # and the versions found
    ("", "2 1"),
    ("rank > 2", "2"),
    ("rank = 2 AND state = READY", "1"),
    ("version <= 1", "1"),
    ("size_bytes > 1 AND num_tensors > 1", "2 1"),
    ("source:v2", "2"),
    ("source = 'file://main/v1'", "1"),
    ('digest = "sha256:*"', "2 1"),
    ("creator = anonymous", "2 1"),
]


async def test_filters_of_versions(registry, fleet):
    for text, found in VERSION_FILTERS:
        answer = await registry("ListAdapterVersions", parent="mail", filter=text)
        assert [version.name.rpartition("/")[2] for version in answer.versions] == found.split(), text


async def test_wrong_filters_and_orders(registry, fleet):
    for rpc, parent in (("ListAdapters", ""), ("ListAdapterVersions", "mail")):
        for field, text in [
            ("filter", "nosuch = 1"),
            ("filter", "("),
            ("filter", "x" * 3000),
            ("order_by", "nosuch"),
            ("order_by", "create_time, create_time desc"),
            ("order_by", "create_time down"),
            ("order_by", ","),
            ("order_by", "x" * 600),
        ]:
            error = await registry.refused(InvalidArgument, rpc, parent=parent, **{field: text})
            assert [violation.field for violation in error.violations] == [field]
    await registry.refused(InvalidArgument, "ListAdapters", page_size=-1)


async def test_orders(registry, fleet):
    assert await names(registry, "", order_by="create_time") == ["mail", "chat", "empty"]
    assert await names(registry, "", order_by=" create_time  desc ") == ["empty", "chat", "mail"]
    assert await names(registry, "", order_by="base_model desc, name desc") == ["mail", "empty", "chat"]
    assert await names(registry, "", order_by="update_time desc") == ["chat", "empty", "mail"]
    answer = await registry("ListAdapterVersions", parent="mail", order_by="size_bytes desc, version")
    assert [version.name[-1] for version in answer.versions] == ["2", "1"]


@pytest.mark.parametrize(
    "order",
    [
        "",
        pytest.param("name desc", marks=pytest.mark.slow),
        pytest.param("create_time", marks=pytest.mark.slow),
        "base_model, create_time desc",
        "update_time desc",
    ],
)
async def test_pages_show_each_once_whatever_is_inserted(registry, fleet, folders, order):
    wanted = await names(registry, "", order_by=order)
    found, token = [], ""
    for index in range(len(wanted)):
        answer = await registry("ListAdapters", page_size=1, page_token=token, order_by=order)
        found += [adapter.name.rpartition("/")[2] for adapter in answer.adapters]
        token = answer.next_page_token
        if not token:
            break
        await registry.register(f"{'a' if index % 2 else 'z'}{index}", folders.write("v3", seed=3))
    assert [name for name in found if name in wanted] == wanted
    assert len(set(found)) == len(found)


async def test_a_token_belongs_to_its_list(registry, fleet):
    token = (await registry("ListAdapters", page_size=1)).next_page_token
    for fields in ({"filter": "name = a*"}, {"order_by": "name"}, {"show_deleted": True}):
        error = await registry.refused(InvalidArgument, "ListAdapters", page_token=token, **fields)
        assert [violation.field for violation in error.violations] == ["page_token"]
    assert (await registry("ListAdapters", page_size=5000, page_token=token)).adapters


async def test_lists_show_what_a_name_alone_means(registry, fleet):
    chat, empty, mail = (await registry("ListAdapters")).adapters
    assert (mail.default_version.version, mail.default_version.rank, mail.num_versions) == (2, 4, 2)
    version = await registry("GetAdapterVersion", name="mail@2")
    assert (mail.default_version.digest, mail.default_version.size_bytes) == (version.digest, version.size_bytes)
    assert not empty.HasField("default_version")
    assert (empty.num_versions, chat.num_versions) == (0, 1)
    assert mail == await registry("GetAdapter", name="mail")
