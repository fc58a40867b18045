"""Finds what a reference names, or says exactly what there is none of."""

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import repository
from registry_service.models import DELETED, Adapter, AdapterVersion
from registry_service.repository import Target
from shared.errors import AdapterNotFound
from shared.references import LATEST, Reference, adapter_name


async def any_adapter(session: AsyncSession, namespace: str, name: str, *, lock: bool = False) -> Adapter:
    found = await repository.adapter(session, namespace, name, lock=lock)
    if found is None:
        resource = adapter_name(namespace, name)
        raise AdapterNotFound(f"there is no adapter {resource}", metadata={"adapter": resource})
    return found


async def live_adapter(session: AsyncSession, namespace: str, name: str, *, lock: bool = False) -> Adapter:
    found = await any_adapter(session, namespace, name, lock=lock)
    if found.delete_time is not None:
        resource = adapter_name(namespace, name)
        raise AdapterNotFound(f"adapter {resource} is deleted", metadata={"adapter": resource})
    return found


async def live_version(session: AsyncSession, adapter: Adapter, number: int) -> AdapterVersion:
    found = await repository.version(session, adapter.uid, number)
    if found is None or found.state == DELETED:
        raise not_found(adapter, "version", str(number))
    return found


async def targets_of(session: AsyncSession, adapter: Adapter, reference: Reference) -> tuple[str, list[Target]]:
    """The alias that was followed, and at least one target."""
    if reference.version is not None:
        return "", [Target(await live_version(session, adapter, reference.version), 1.0)]
    if reference.digest is not None:
        version = await repository.live_version(session, adapter.uid, reference.digest)
        if version is None:
            raise not_found(adapter, "digest", reference.digest)
        return "", [Target(version, 1.0)]
    alias = reference.alias or adapter.default_alias
    if alias == LATEST:
        version = await repository.latest_version(session, adapter.uid)
        targets = [] if version is None else [Target(version, 1.0)]
    else:
        targets = await repository.alias_targets(session, adapter.uid, alias)
    if not targets:
        raise not_found(adapter, "alias", alias)
    return alias, targets


def not_found(adapter: Adapter, kind: str, value: str) -> AdapterNotFound:
    resource = adapter_name(adapter.namespace, adapter.name)
    return AdapterNotFound(f"adapter {resource} has no {kind} {value}", metadata={"adapter": resource, kind: value})
