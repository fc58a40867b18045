"""The registry's rules, one transaction per call. Registrations have their own file.

Every method authorizes before it looks anything up. Adapters and versions that do not exist, are deleted, or may not be
seen are all `AdapterNotFound`.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import repository
from registry_service.database import Database
from registry_service.lookup import any_adapter, live_adapter, live_version, not_found, targets_of
from registry_service.models import DELETE, UPSERT, Adapter, AdapterVersion
from registry_service.pages import Page
from registry_service.registration import Registered, Registrar, Registration, commit_change
from registry_service.repository import AdapterView, Target
from shared.auth import Caller, authorize
from shared.errors import (
    BaseModelMismatch,
    EtagMismatch,
    FailedPrecondition,
    RegistryUnavailable,
)
from shared.references import Reference, adapter_name

MIN_REVISION_WAIT_SECONDS = 2.0
MIN_REVISION_POLL_SECONDS = 0.05
MAX_CONFIG_CHARS = 1 << 20


class Resolution(NamedTuple):
    """What a reference means now: targets by weight, highest first, and the alias that was followed, if any."""

    adapter: Adapter
    targets: list[Target]
    alias: str
    revision: int


class Changed(NamedTuple):
    """An adapter after a change, and the revision of the change."""

    view: AdapterView
    revision: int


class RegistryService:
    """Everything that the RPCs do, without protobuf."""

    def __init__(self, database: Database, registrar: Registrar) -> None:
        self._database = database
        self._registrar = registrar

    # ---- adapters

    async def register_adapter(self, caller: Caller, request: Registration) -> Registered:
        """See `Registrar.register`."""
        authorize(caller, request.namespace, "writer")
        return await self._registrar.register(caller.name, request)

    async def resolve(self, caller: Caller, reference: Reference, base_model: str, min_revision: int) -> Resolution:
        """What `reference` means, at `min_revision` or later; `base_model` is the id it must be for, if any.

        Raises:
            AdapterNotFound: metadata names the adapter, version, digest or alias that there is none of.
            BaseModelMismatch: the adapter is for another base model.
            RegistryUnavailable: the revision did not come about in time.
        """
        authorize(caller, reference.namespace, "reader")
        await self._wait_for(min_revision)

        async def work(session: AsyncSession) -> Resolution:
            adapter = await live_adapter(session, reference.namespace, reference.adapter)
            if base_model and adapter.base_model != base_model:
                raise BaseModelMismatch(
                    f"{reference.canonical()} is for base model {adapter.base_model}, not {base_model}",
                    metadata={"base_model": adapter.base_model, "requested": base_model},
                )
            alias, targets = await targets_of(session, adapter, reference)
            return Resolution(adapter, targets, alias, await repository.revision(session))

        return await self._database.read(work)

    async def get_adapter(self, caller: Caller, namespace: str, name: str) -> AdapterView:
        """One adapter, also a deleted one."""
        authorize(caller, namespace, "reader")

        async def work(session: AsyncSession) -> AdapterView:
            adapter = await any_adapter(session, namespace, name)
            return (await repository.views(session, [adapter]))[0]

        return await self._database.read(work)

    async def list_adapters(
        self, caller: Caller, namespace: str, page: Page, *, show_deleted: bool
    ) -> list[AdapterView]:
        """Adapters by name, one more than the page's size if there are more; namespace "" is all that may be seen."""
        if namespace:
            authorize(caller, namespace, "reader")
        namespaces = [namespace] if namespace else sorted(ns for ns, roles in caller.roles.items() if "reader" in roles)
        after = (str(page.after[0]), str(page.after[1])) if page.after else ("", "")

        async def work(session: AsyncSession) -> list[AdapterView]:
            limit = page.size + 1
            found = await repository.adapters(session, namespaces, after, limit, show_deleted=show_deleted)
            return await repository.views(session, found)

        return await self._database.read(work)

    async def delete_adapter(self, caller: Caller, namespace: str, name: str, etag: str) -> Changed:
        """Marks an adapter as deleted. Its versions and aliases stay, for an undelete."""
        authorize(caller, namespace, "writer")

        async def work(session: AsyncSession) -> Changed:
            adapter = await live_adapter(session, namespace, name, lock=True)
            _check_etag(adapter, etag)
            adapter.delete_time = datetime.now(UTC)
            return await _changed(session, adapter, DELETE, adapter.delete_time)

        return await self._database.write(work)

    async def undelete_adapter(self, caller: Caller, namespace: str, name: str) -> Changed:
        """Takes a deletion back: the adapter resolves again, with the versions and aliases that it had.

        Raises:
            AdapterNotFound: there is no such adapter, not even a deleted one.
            FailedPrecondition: it is not deleted.
        """
        authorize(caller, namespace, "writer")

        async def work(session: AsyncSession) -> Changed:
            adapter = await any_adapter(session, namespace, name, lock=True)
            if adapter.delete_time is None:
                resource = adapter_name(namespace, name)
                raise FailedPrecondition(f"adapter {resource} is not deleted", metadata={"adapter": resource})
            adapter.delete_time = adapter.purge_time = None
            return await _changed(session, adapter, UPSERT, datetime.now(UTC))

        return await self._database.write(work)

    async def set_alias(self, caller: Caller, alias: Reference, version: int, weight: float, etag: str) -> Changed:
        """Points an alias at one live version."""
        authorize(caller, alias.namespace, "writer")

        async def work(session: AsyncSession) -> Changed:
            adapter = await live_adapter(session, alias.namespace, alias.adapter, lock=True)
            _check_etag(adapter, etag)
            target = await live_version(session, adapter, version)
            now = datetime.now(UTC)
            assert alias.alias is not None
            await repository.set_alias(session, adapter.uid, alias.alias, [(target.number, weight)], now)
            return await _changed(session, adapter, UPSERT, now)

        return await self._database.write(work)

    # ---- versions

    async def get_version(self, caller: Caller, reference: Reference) -> tuple[Adapter, AdapterVersion]:
        """One version; by number also a deleted one, or one of a deleted adapter."""
        authorize(caller, reference.namespace, "reader")

        async def work(session: AsyncSession) -> tuple[Adapter, AdapterVersion]:
            if reference.version is None:
                adapter = await live_adapter(session, reference.namespace, reference.adapter)
                return adapter, (await targets_of(session, adapter, reference))[1][0].version
            adapter = await any_adapter(session, reference.namespace, reference.adapter)
            version = await repository.version(session, adapter.uid, reference.version)
            if version is None:
                raise not_found(adapter, "version", str(reference.version))
            return adapter, version

        return await self._database.read(work)

    async def list_versions(
        self, caller: Caller, namespace: str, name: str, page: Page, *, show_deleted: bool
    ) -> tuple[Adapter, Sequence[AdapterVersion]]:
        """Versions, newest first, one more than the page's size if there are more."""
        authorize(caller, namespace, "reader")
        before = int(page.after[0]) if page.after else None

        async def work(session: AsyncSession) -> tuple[Adapter, Sequence[AdapterVersion]]:
            adapter = await any_adapter(session, namespace, name)
            limit = page.size + 1
            return adapter, await repository.versions(session, adapter.uid, before, limit, show_deleted=show_deleted)

        return await self._database.read(work)

    async def _wait_for(self, min_revision: int) -> None:
        """Returns once this registry sees the revision; another replica's commit may take a moment to show."""
        deadline = asyncio.get_running_loop().time() + MIN_REVISION_WAIT_SECONDS
        while min_revision > 0 and await self._database.read(repository.revision) < min_revision:
            if asyncio.get_running_loop().time() > deadline:
                raise RegistryUnavailable(
                    f"revision {min_revision} is not there yet",
                    metadata={"min_revision": str(min_revision)},
                    retry_after=1,
                )
            await asyncio.sleep(MIN_REVISION_POLL_SECONDS)


async def _changed(session: AsyncSession, adapter: Adapter, kind: str, now: datetime) -> Changed:
    revision = await commit_change(session, adapter, kind, now)
    (view,) = await repository.views(session, [adapter])
    return Changed(view, revision)


def _check_etag(adapter: Adapter, etag: str) -> None:
    if etag and etag != adapter.etag:
        raise EtagMismatch(
            f"adapter {adapter.name} was changed meanwhile: read it again", metadata={"etag": adapter.etag}
        )
