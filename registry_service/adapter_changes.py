"""Changes of adapters beside registration: update, delete and undelete, versions' deletion, aliases.

Each is one transaction that locks the adapter's row, looks at the rules, and tells the change log last. What changes
nothing is no change: it moves no revision, etag or update_time.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import repository
from registry_service.adapter_cache import AdapterCache
from registry_service.database import Database
from registry_service.lookup import any_adapter, live_adapter, live_version, not_found
from registry_service.models import DELETE, DELETED, UPSERT, Adapter, AdapterVersion
from registry_service.quotas import Quotas, amounts_of
from registry_service.registration_rules import commit_change
from registry_service.repository import AdapterView
from shared.errors import EtagMismatch, FailedPrecondition, InvalidArgument, VersionInUse
from shared.references import LATEST, Reference, adapter_name, version_name


class Changed(NamedTuple):
    """An adapter after a change, and the revision of the change."""

    view: AdapterView
    revision: int


class DeletedVersion(NamedTuple):
    adapter: Adapter
    version: AdapterVersion
    revision: int


class AdapterChanges:
    """Changes adapters. What is deleted can be seen, and an adapter brought back, for `keep`; then it is purged."""

    def __init__(self, database: Database, cache: AdapterCache, quotas: Quotas, keep: timedelta) -> None:
        self._database = database
        self._quotas = quotas
        self._cache = cache
        self._keep = keep

    async def update(self, name: Reference, fields: Mapping[str, Any], etag: str) -> Changed:
        """Sets columns of an adapter's row.

        Raises:
            InvalidArgument: `default_alias` names no alias of the adapter.
        """

        async def work(session: AsyncSession) -> Changed:
            adapter = await live_adapter(session, name.namespace, name.adapter, lock=True)
            _check_etag(adapter, etag)
            alias = fields.get("default_alias", LATEST)
            if alias != LATEST and not await repository.alias_targets(session, adapter.uid, alias):
                raise InvalidArgument.of("adapter.default_alias", f"the adapter has no alias {alias}")
            if all(getattr(adapter, field) == value for field, value in fields.items()):
                return await _unchanged(session, adapter)
            for field, value in fields.items():
                setattr(adapter, field, value)
            return await _changed(session, adapter, UPSERT, datetime.now(UTC))

        return await self._change(name, work)

    async def delete(self, name: Reference, etag: str) -> Changed:
        """Marks an adapter as deleted. Its versions and aliases stay, for an undelete."""

        async def work(session: AsyncSession) -> Changed:
            adapter = await live_adapter(session, name.namespace, name.adapter, lock=True)
            _check_etag(adapter, etag)
            now = datetime.now(UTC)
            adapter.delete_time, adapter.purge_time = now, now + self._keep
            return await _changed(session, adapter, DELETE, now)

        return await self._change(name, work)

    async def undelete(self, name: Reference) -> Changed:
        """Takes a deletion back: the adapter resolves again, with the versions and aliases that it had.

        Raises:
            AdapterNotFound: there is no such adapter, not even a deleted one.
            FailedPrecondition: it is not deleted.
            NamespaceQuota: meanwhile others have taken its place.
        """

        async def work(session: AsyncSession) -> Changed:
            await self._quotas.lock(session, name.namespace)
            adapter = await any_adapter(session, name.namespace, name.adapter, lock=True)
            if adapter.delete_time is None:
                resource = adapter_name(name.namespace, name.adapter)
                raise FailedPrecondition(f"adapter {resource} is not deleted", metadata={"adapter": resource})
            await self._quotas.check(session, name.namespace, await amounts_of(session, adapter))
            adapter.delete_time = adapter.purge_time = None
            return await _changed(session, adapter, UPSERT, datetime.now(UTC))

        return await self._change(name, work)

    async def delete_version(self, name: Reference, etag: str) -> DeletedVersion:
        """Marks a version, named by its number, as deleted for good; `latest` falls back to the one before.

        Raises:
            VersionInUse: aliases name it; metadata says which.
        """
        number = name.version
        assert number is not None

        async def work(session: AsyncSession) -> DeletedVersion:
            adapter = await live_adapter(session, name.namespace, name.adapter, lock=True)
            _check_etag(adapter, etag)
            version = await live_version(session, adapter, number)
            if aliases := await repository.aliases_of(session, adapter.uid, number):
                resource = version_name(name.namespace, name.adapter, number)
                who = f"alias {aliases[0]} means" if len(aliases) == 1 else f"aliases {', '.join(aliases)} mean"
                message = f"{resource} is what {who}: point {'it' if len(aliases) == 1 else 'them'} elsewhere first"
                raise VersionInUse(message, metadata={"version": resource, "aliases": ",".join(aliases)})
            now = datetime.now(UTC)
            version.state, version.delete_time, version.purge_time = DELETED, now, now + self._keep
            await session.flush()
            return DeletedVersion(adapter, version, await commit_change(session, adapter, UPSERT, now, number))

        deleted = await self._database.write(work)
        self._cache.forget(name.namespace, name.adapter, deleted.revision)
        return deleted

    async def set_alias(self, alias: Reference, targets: Sequence[tuple[int, float]], etag: str) -> Changed:
        """Points an alias at live versions [(number, weight)], and away from whatever it meant before."""
        assert alias.alias is not None
        name = alias.alias

        async def work(session: AsyncSession) -> Changed:
            adapter = await live_adapter(session, alias.namespace, alias.adapter, lock=True)
            _check_etag(adapter, etag)
            for number, _ in targets:
                await live_version(session, adapter, number)
            before = await repository.alias_targets(session, adapter.uid, name)
            if {(target.version.number, target.weight) for target in before} == set(targets):
                return await _unchanged(session, adapter)
            now = datetime.now(UTC)
            await repository.set_alias(session, adapter.uid, name, targets, now)
            return await _changed(session, adapter, UPSERT, now)

        return await self._change(alias, work)

    async def delete_alias(self, alias: Reference, etag: str) -> Changed:
        """Takes an alias away; references with it are not found from then on.

        Raises:
            AdapterNotFound: there is no such alias.
            FailedPrecondition: it is the adapter's default alias.
        """
        assert alias.alias is not None
        name = alias.alias

        async def work(session: AsyncSession) -> Changed:
            adapter = await live_adapter(session, alias.namespace, alias.adapter, lock=True)
            _check_etag(adapter, etag)
            if adapter.default_alias == name:
                raise FailedPrecondition(
                    f"{name} is the adapter's default_alias: set that to another one first",
                    metadata={"adapter": adapter_name(alias.namespace, alias.adapter), "alias": name},
                )
            if not await repository.delete_alias(session, adapter.uid, name):
                raise not_found(adapter, "alias", name)
            return await _changed(session, adapter, UPSERT, datetime.now(UTC))

        return await self._change(alias, work)

    async def _change(self, name: Reference, work: Callable[[AsyncSession], Awaitable[Changed]]) -> Changed:
        """Does `work`, which changes an adapter, in one transaction."""
        changed = await self._database.write(work)
        self._cache.forget(name.namespace, name.adapter, changed.revision)
        return changed


async def _changed(session: AsyncSession, adapter: Adapter, kind: str, now: datetime) -> Changed:
    (view,) = await repository.views(session, [adapter])
    return Changed(view, await commit_change(session, adapter, kind, now))


async def _unchanged(session: AsyncSession, adapter: Adapter) -> Changed:
    (view,) = await repository.views(session, [adapter])
    return Changed(view, await repository.revision(session))


def _check_etag(adapter: Adapter, etag: str) -> None:
    if etag and etag != adapter.etag:
        raise EtagMismatch(
            f"adapter {adapter.name} was changed meanwhile: read it again", metadata={"etag": adapter.etag}
        )
