"""What a registration's transactions do: look at the rules, then write the version, or say what would be written."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import repository
from registry_service.models import UPSERT, Adapter, AdapterVersion, BaseModel, RequestId
from registry_service.quotas import Amounts, Quotas
from registry_service.repository import AdapterView, RequestKey
from registry_service.rows import new_adapter, new_version, pinned_source
from registry_service.single_flight import request_id_reused
from registry_service.validation import ValidatedAdapter
from shared.errors import AdapterDeleted, BaseModelMismatch, BaseModelUnknown, InvalidArgument
from shared.references import adapter_name

REQUEST_ID_LIFE = timedelta(days=1)


@dataclass(frozen=True)
class Registration:
    """A checked request. `base_model` is an id, empty for that of the existing adapter; `request_id` may be empty.

    `only_new`: if there is an adapter of the name already, that is `AdapterExists`.
    """

    namespace: str
    adapter_id: str
    base_model: str
    source_uri: str
    credential_ref: str
    labels: Mapping[str, str]
    description: str
    aliases: tuple[str, ...]
    request_id: str
    validate_only: bool
    only_new: bool = False

    def request_hash(self) -> str:
        """Equal for equal requests of callers."""
        fields = asdict(self)
        del fields["only_new"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class AdapterExists(Exception):
    """The adapter that was to be new is there already, or was once."""


class Registered(NamedTuple):
    """The answer. With validate_only `version.number` is 0 and nothing was written."""

    view: AdapterView
    version: AdapterVersion
    created: bool
    revision: int


async def before(session: AsyncSession, quotas: Quotas, caller: str, request: Registration) -> Registered | BaseModel:
    """The answer that this request got before, or the base model to validate against."""
    if (answered := await _answered(session, caller, request, _now())) is not None:
        return answered
    adapter = await repository.adapter(session, request.namespace, request.adapter_id)
    base = await _base_model(session, request, adapter)
    if adapter is None:
        await quotas.check(session, request.namespace, Amounts(1, 1, 0))
    return base


async def write(
    session: AsyncSession, quotas: Quotas, caller: str, request: Registration, checked: ValidatedAdapter
) -> Registered:
    """Writes the version, or finds the one that there is, and points the aliases at it."""
    now = _now()
    await quotas.lock(session, request.namespace)
    if (answered := await _answered(session, caller, request, now)) is not None:
        return answered
    adapter = await repository.adapter(session, request.namespace, request.adapter_id, lock=True)
    base = await _base_model(session, request, adapter)
    version = await repository.live_version(session, adapter.uid, checked.digest) if adapter is not None else None
    if is_new := version is None:
        await quotas.check(session, request.namespace, _adding(adapter, checked))
    if adapter is None:
        adapter = _new_adapter(request, base, now)
        adapter.next_version = await repository.first_version(session, request.namespace, request.adapter_id)
        session.add(adapter)
        await session.flush()
    if version is None:
        version = _new_version(adapter, adapter.next_version, caller, request, base, checked, now)
        adapter.next_version += 1
        session.add(version)
        await session.flush()
    has_new_source = _add_source(version, checked)
    has_new_aliases = await _set_aliases(session, adapter, version, request.aliases, now)
    await repository.forget_answers(session, now)
    (view,) = await repository.views(session, [adapter])
    if is_new or has_new_source or has_new_aliases:
        revision = await commit_change(session, adapter, UPSERT, now)
    else:
        revision = await repository.revision(session)
    await _remember(session, caller, request, version, is_new, revision, now)
    return Registered(view, version, is_new, revision)


def _adding(adapter: Adapter | None, checked: ValidatedAdapter) -> Amounts:
    """What a new version adds to the namespace; `adapter` is the one that there is."""
    return Amounts(int(adapter is None), 1, sum(file.size for file in checked.files))


async def commit_change(
    session: AsyncSession, adapter: Adapter, kind: str, now: datetime, deleted_version: int | None = None
) -> int:
    """Gives the changed adapter a new etag and writes the change log: the last thing before commit. The revision."""
    adapter.generation += 1
    adapter.update_time = now
    return await repository.record_change(session, adapter, kind, now, deleted_version)


async def _answered(session: AsyncSession, caller: str, request: Registration, now: datetime) -> Registered | None:
    """The answer that this request id got before."""
    if request.validate_only or not request.request_id:
        return None
    key = RequestKey(caller, request.namespace, request.request_id)
    answer = await repository.stored_answer(session, key, now)
    if answer is None:
        return None
    if answer.request_hash != request.request_hash():
        raise request_id_reused()
    version = await repository.version_by_uid(session, answer.version_uid)
    adapter = await repository.adapter(session, request.namespace, request.adapter_id)
    assert adapter is not None
    (view,) = await repository.views(session, [adapter])
    return Registered(view, version, answer.created, answer.revision)


async def pretend(
    session: AsyncSession, quotas: Quotas, caller: str, request: Registration, checked: ValidatedAdapter
) -> Registered:
    """What would be written."""
    now = _now()
    adapter = await repository.adapter(session, request.namespace, request.adapter_id)
    base = await _base_model(session, request, adapter)
    known = None
    view = AdapterView(_new_adapter(request, base, now))
    if adapter is not None:
        known = await repository.live_version(session, adapter.uid, checked.digest)
        (view,) = await repository.views(session, [adapter])
    version = _new_version(view.adapter, 0, caller, request, base, checked, now)
    if known is None:
        await quotas.check(session, request.namespace, _adding(adapter, checked))
    return Registered(view, version, known is None, await repository.revision(session))


async def _base_model(session: AsyncSession, request: Registration, adapter: Adapter | None) -> BaseModel:
    """The base model to validate against, if the adapter may be registered on it."""
    name = adapter_name(request.namespace, request.adapter_id)
    if adapter is not None and request.only_new:
        raise AdapterExists(name)
    if adapter is not None and adapter.delete_time is not None:
        raise AdapterDeleted(
            f"{name} is deleted; call UndeleteAdapter (loraplex adapter undelete "
            f"{request.namespace}/{request.adapter_id}) first, or register under another name",
            metadata={"adapter": name},
        )
    wanted = request.base_model or (adapter.base_model if adapter is not None else "")
    if not wanted:
        raise InvalidArgument.of("base_model", "is required when the adapter is created")
    base = await repository.base_model(session, wanted)
    if base is None:
        raise BaseModelUnknown(
            f"base model {wanted} is not registered; a replica that serves it makes it known, or RegisterBaseModel "
            "(loraplex base-model register)",
            metadata={"base_model": wanted},
        )
    if adapter is not None and adapter.base_model != base.id:
        raise BaseModelMismatch(
            f"{name} is for base model {adapter.base_model}, not {base.id}",
            metadata={"base_model": adapter.base_model, "requested": base.id, "adapter": name},
        )
    return base


def _add_source(version: AdapterVersion, checked: ValidatedAdapter) -> bool:
    """Adds where the content was found now, or what it is pinned to there now; False if all that is known."""
    pinned = pinned_source(checked)
    known = list(version.pinned_sources)
    places = [(source["uri"], source["credential_ref"]) for source in known]
    if (place := (pinned["uri"], pinned["credential_ref"])) in places:
        known[places.index(place)] = pinned
    else:
        known.append(pinned)
    if known == version.pinned_sources:
        return False
    version.pinned_sources = known
    return True


async def _set_aliases(
    session: AsyncSession, adapter: Adapter, version: AdapterVersion, aliases: Sequence[str], now: datetime
) -> bool:
    """Points the aliases at `version`. Returns whether any of them was elsewhere."""
    has_changed = False
    for alias in aliases:
        current = await repository.alias_targets(session, adapter.uid, alias)
        if [target.version.number for target in current] != [version.number]:
            await repository.set_alias(session, adapter.uid, alias, [(version.number, 1.0)], now)
            has_changed = True
    return has_changed


async def _remember(
    session: AsyncSession,
    caller: str,
    request: Registration,
    version: AdapterVersion,
    is_new: bool,
    revision: int,
    now: datetime,
) -> None:
    if not request.request_id:
        return
    answer = RequestId(
        caller=caller,
        namespace=request.namespace,
        request_id=request.request_id,
        request_hash=request.request_hash(),
        version_uid=version.uid,
        created=is_new,
        revision=revision,
        expire_time=now + REQUEST_ID_LIFE,
    )
    session.add(answer)
    await session.flush()


def _new_adapter(request: Registration, base: BaseModel, now: datetime) -> Adapter:
    return new_adapter(request.namespace, request.adapter_id, base.id, request.labels, request.description, now)


def _new_version(
    adapter: Adapter,
    number: int,
    caller: str,
    request: Registration,
    base: BaseModel,
    checked: ValidatedAdapter,
    now: datetime,
) -> AdapterVersion:
    source = {"uri": request.source_uri, "credential_ref": request.credential_ref}
    return new_version(adapter, number, base, checked, source, caller, now)


def _now() -> datetime:
    return datetime.now(UTC)
