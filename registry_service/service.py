"""What the registry answers from: resolution, watches, lists. Registrations and changes have their own files.

Who may call was decided before (`shared.auth.rules`). Adapters and versions that do not exist or are deleted are all
`AdapterNotFound`.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import repository
from registry_service.adapter_cache import AdapterCache
from registry_service.auto_registration import AutoRegistrar
from registry_service.change_log import ChangeLog
from registry_service.database import Database
from registry_service.lookup import (
    any_adapter,
    check_live,
    not_found,
    targets_of,
)
from registry_service.models import Adapter, AdapterVersion
from registry_service.records import AdapterRecord
from registry_service.registration import Registrar
from registry_service.registration_rules import Registered, Registration
from registry_service.repository import ListQuery, Target
from registry_service.serving import ShownAdapter, shown
from registry_service.watch import Batch, Watches, WatchRequest
from shared.auth import Caller, no_adapter
from shared.errors import (
    BaseModelMismatch,
    RegistryUnavailable,
)
from shared.references import Reference

MIN_REVISION_WAIT_SECONDS = 2.0


class Resolution(NamedTuple):
    """What a reference means now: targets by weight, highest first, and the alias that was followed, if any."""

    adapter: Adapter
    targets: list[Target]
    alias: str
    revision: int


class RegistryService:
    """Everything that the RPCs do, without protobuf."""

    def __init__(
        self,
        database: Database,
        registrar: Registrar,
        log: ChangeLog,
        cache: AdapterCache,
        watches: Watches,
        auto: AutoRegistrar,
    ) -> None:
        self._database = database
        self._registrar = registrar
        self._log = log
        self._cache = cache
        self._watches = watches
        self._auto = auto

    # ---- adapters

    async def register_adapter(self, caller: Caller, request: Registration) -> Registered:
        """See `Registrar.register`."""
        registered = await self._registrar.register(caller.name, request)
        self._cache.forget(request.namespace, request.adapter_id, registered.revision)
        return registered

    async def resolve(
        self, reference: Reference, base_model: str, min_revision: int, *, registered_only: bool = False
    ) -> Resolution:
        """What `reference` means, at `min_revision` or later; `base_model` is the id it must be for, if any.

        An unknown adapter is registered first where its namespace's settings say so, unless `registered_only`; see
        `AutoRegistrar.register`.

        Raises:
            AdapterNotFound: metadata names the adapter, version, digest or alias that there is none of.
            BaseModelMismatch: the adapter is for another base model.
            RegistryUnavailable: the revision did not come about in time.
        """
        await self._wait_for(min_revision)
        record = await self._record(reference)
        if record is None and not registered_only and self._auto.covers(reference, base_model):
            await self._auto.register(reference.namespace, reference.adapter)
            record = await self._record(reference)
        record = _live(record, reference)
        adapter = record.adapter
        if base_model and adapter.base_model != base_model:
            raise BaseModelMismatch(
                f"{reference.canonical()} is for base model {adapter.base_model}, not {base_model}",
                metadata={"base_model": adapter.base_model, "requested": base_model},
            )
        alias, targets = await targets_of(self._cache, record, reference)
        return Resolution(adapter, targets, alias, max(record.revision, self._log.position.revision))

    def watch(self, caller: Caller, request: WatchRequest) -> AsyncIterator[Batch]:
        """See `Watches.watch`."""
        return self._watches.watch(caller, request)

    async def get_adapter(self, namespace: str, name: str) -> ShownAdapter:
        """One adapter, also a deleted one."""

        async def work(session: AsyncSession) -> ShownAdapter:
            adapter = await any_adapter(session, namespace, name)
            views = await repository.views(session, [adapter])
            return (await shown(session, views, datetime.now(UTC)))[0]

        return await self._database.read(work)

    async def list_adapters(self, caller: Caller, namespace: str, listed: ListQuery) -> list[ShownAdapter]:
        """Adapters in the query's order; namespace "" is all that may be seen."""
        namespaces = frozenset([namespace]) if namespace else caller.namespaces(["reader"])

        async def work(session: AsyncSession) -> list[ShownAdapter]:
            found = await repository.adapters(session, namespaces, listed)
            return await shown(session, await repository.views(session, found), datetime.now(UTC))

        return await self._database.read(work)

    # ---- versions

    async def get_version(self, reference: Reference) -> tuple[Adapter, AdapterVersion]:
        """One version; by number also a deleted one, or one of a deleted adapter."""
        number = reference.version
        if number is None:
            record = _live(await self._record(reference), reference)
            return record.adapter, (await targets_of(self._cache, record, reference))[1][0].version

        async def work(session: AsyncSession) -> tuple[Adapter, AdapterVersion]:
            adapter = await any_adapter(session, reference.namespace, reference.adapter)
            version = await repository.version(session, adapter.uid, number)
            if version is None:
                raise not_found(adapter, "version", str(number))
            return adapter, version

        return await self._database.read(work)

    async def list_versions(
        self, namespace: str, name: str, listed: ListQuery
    ) -> tuple[Adapter, Sequence[AdapterVersion]]:
        """Versions of an adapter, also of a deleted one, in the query's order."""

        async def work(session: AsyncSession) -> tuple[Adapter, Sequence[AdapterVersion]]:
            adapter = await any_adapter(session, namespace, name)
            return adapter, await repository.versions(session, adapter.uid, listed)

        return await self._database.read(work)

    async def _record(self, reference: Reference) -> AdapterRecord | None:
        return await self._cache.get(reference.namespace, reference.adapter, is_current=self._log.is_current())

    async def _wait_for(self, min_revision: int) -> None:
        """Returns once this registry sees the revision; another replica's commit may take a moment to show."""
        is_behind = min_revision > self._log.position.revision
        if is_behind and not await self._log.reaches(min_revision, MIN_REVISION_WAIT_SECONDS):
            raise RegistryUnavailable(
                f"revision {min_revision} is not there yet",
                metadata={"min_revision": str(min_revision)},
                retry_after=1,
            )


def _live(record: AdapterRecord | None, reference: Reference) -> AdapterRecord:
    if record is None:
        raise no_adapter(reference.namespace, reference.adapter)
    check_live(record.adapter)
    return record
