"""Finds what a reference names, or says exactly what there is none of."""

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import repository
from registry_service.adapter_cache import AdapterCache
from registry_service.models import DELETED, Adapter, AdapterVersion
from registry_service.records import AdapterRecord
from registry_service.repository import Target
from shared.auth import no_adapter
from shared.errors import AdapterNotFound
from shared.references import LATEST, Reference, adapter_name


async def any_adapter(session: AsyncSession, namespace: str, name: str, *, lock: bool = False) -> Adapter:
    found = await repository.adapter(session, namespace, name, lock=lock)
    if found is None:
        raise no_adapter(namespace, name)
    return found


async def live_adapter(session: AsyncSession, namespace: str, name: str, *, lock: bool = False) -> Adapter:
    found = await any_adapter(session, namespace, name, lock=lock)
    check_live(found)
    return found


def check_live(adapter: Adapter) -> None:
    if adapter.delete_time is not None:
        resource = adapter_name(adapter.namespace, adapter.name)
        short = f"{adapter.namespace}/{adapter.name}"
        message = f"adapter {resource} is deleted; UndeleteAdapter (loraplex adapter undelete {short}) brings it back"
        raise AdapterNotFound(message, metadata={"adapter": resource})


async def live_version(session: AsyncSession, adapter: Adapter, number: int) -> AdapterVersion:
    found = await repository.version(session, adapter.uid, number)
    if found is None or found.state == DELETED:
        raise not_found(adapter, "version", str(number))
    return found


async def targets_of(cache: AdapterCache, record: AdapterRecord, reference: Reference) -> tuple[str, list[Target]]:
    """The alias that was followed, and at least one target, highest weight first."""
    if (wanted := reference.version or reference.digest) is not None:
        version = await cache.version(record, wanted)
        if version is None:
            raise not_found(record.adapter, "version" if reference.version else "digest", str(wanted))
        return "", [Target(version, 1.0)]
    name = reference.alias or record.adapter.default_alias
    if name == LATEST:
        targets = [(number, 1.0) for number in record.versions if number == record.latest_version]
    else:
        targets = [target for alias in record.aliases if alias.name == name for target in alias.targets]
    if not targets:
        raise not_found(record.adapter, "alias", name)
    by_weight = sorted(targets, key=lambda target: (-target[1], -target[0]))
    return name, [Target(record.versions[number], weight) for number, weight in by_weight]


def not_found(adapter: Adapter, kind: str, value: str) -> AdapterNotFound:
    resource = adapter_name(adapter.namespace, adapter.name)
    return AdapterNotFound(f"adapter {resource} has no {kind} {value}", metadata={"adapter": resource, kind: value})
