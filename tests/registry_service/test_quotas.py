"""Quotas of namespaces: none is exceeded, by however many at once, and what is deleted makes room."""

import asyncio
import dataclasses

import pytest

from registry_service.auto_registration import NamespaceSettings
from shared.errors import LoraplexError, NamespaceQuota

LIMIT = 5
WRITERS = 32


@pytest.fixture
def config(config):
    """Five adapters, seven versions, and for another namespace less."""
    return dataclasses.replace(config, namespace_max_adapters=LIMIT, namespace_max_versions=7)


async def attempts(calls):
    """How many succeeded; the others must have failed by the quota."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert {type(error) for error in failed} <= {NamespaceQuota}, failed
    return len(results) - len(failed)


async def test_many_writers_together_register_as_many_adapters_as_may_be(registry, folders):
    uris = [folders.write(f"a{n}", seed=n) for n in range(WRITERS)]
    assert await attempts(registry.register(f"a{n}", uri) for n, uri in enumerate(uris)) == LIMIT
    listed = await registry("ListAdapters", page_size=1000)
    assert len(listed.adapters) == LIMIT


async def test_many_writers_of_one_adapter_make_as_many_versions_as_may_be(registry, folders):
    uris = [folders.write(f"v{n}", seed=n) for n in range(WRITERS)]
    assert await attempts(registry.register("one", uri) for uri in uris) == 7
    versions = (await registry("ListAdapterVersions", parent="one", page_size=1000)).versions
    assert sorted(int(v.name.rpartition("/")[2]) for v in versions) == list(range(1, 8))


async def test_what_is_refused_and_why(registry, folders):
    for n in range(LIMIT):
        await registry.register(f"a{n}", folders.write(f"a{n}", seed=n))
    with pytest.raises(LoraplexError) as caught:
        await registry.register("more", folders.write("more", seed=9), validate_only=True)
    error = caught.value
    assert type(error) is NamespaceQuota
    assert error.metadata == {"namespace": "default", "quota": "adapters", "limit": "5", "used": "5"}
    # Known content adds nothing, two further versions are free, the third is not.
    assert not (await registry.register("a0", "file://main/a0")).created
    for n in (10, 11):
        await registry.register("a0", folders.write(f"a{n}", seed=n))
    assert not (await registry.register("a0", "file://main/a10")).created
    refused = registry.register("a0", folders.write("a12", seed=12))
    with pytest.raises(NamespaceQuota, match="versions"):
        await refused


async def test_deletions_make_room_that_an_undelete_needs(registry, folders):
    for n in range(LIMIT):
        await registry.register(f"a{n}", folders.write(f"a{n}", seed=n))
    await registry("DeleteAdapter", name="a0")
    await registry.register("next", folders.write("next", seed=9))
    error = await registry.refused(NamespaceQuota, "UndeleteAdapter", name="a0")
    assert error.metadata["quota"] == "adapters"
    await registry("DeleteAdapter", name="next")
    assert (await registry("UndeleteAdapter", name="a0")).adapter.name == "namespaces/default/adapters/a0"


class TestBytes:
    @pytest.fixture
    def config(self, config, folders):
        """Room for two and a half adapters, set for the namespace itself."""
        folders.write("size")
        size = sum(path.stat().st_size for path in (folders.root / "size").iterdir())
        own = NamespaceSettings(max_bytes=int(2.5 * size))
        return dataclasses.replace(config, namespace_max_bytes=1, namespaces={"default": own})

    async def test_bytes(self, registry, folders):
        uris = [folders.write(f"b{n}", seed=n) for n in range(8)]
        assert await attempts(registry.register("one", uri) for uri in uris) == 2
        await registry("DeleteAdapterVersion", name="one@1")
        more = [folders.write(f"c{n}", seed=20 + n) for n in range(4)]
        assert await attempts(registry.register("one", uri) for uri in more) == 1
