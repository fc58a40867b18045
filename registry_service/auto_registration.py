"""Adapters that nobody registered, found by their name: the templates of a namespace, tried in order on first use."""

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from registry_service.quotas import is_quota
from registry_service.registration import Registrar
from registry_service.registration_rules import AdapterExists, Registered, Registration
from registry_service.single_flight import SingleFlight
from shared.auth import Caller, audit, no_adapter
from shared.errors import (
    CredentialNotAllowed,
    ErrorRecord,
    LoraplexError,
    NotFound,
    QueueFull,
    SourceForbidden,
    SourceNotFound,
    SourceUnavailable,
    from_record,
)
from shared.ranges import is_limit
from shared.references import LATEST, Reference, adapter_name, version_name

log = logging.getLogger(__name__)

CALLER = "auto_register"
WAIT_SECONDS = 2.0  # less than a replica waits for an answer
ABSENT_SECONDS, FAILED_SECONDS = 10.0, 1.0
MAX_AT_ONCE = 4  # of the registrar's threads, so that registrations always find one
MAX_WAITING = 64
MAX_REMEMBERED = 10_000

_PLACE = "{adapter}"
# The name goes into the path: were it the host, bucket, root or organisation, it would choose whose files are read.
_TEMPLATE = re.compile(r"[a-z][a-z0-9+.-]*://[^/{}\s]*/[^{}\s]*\{adapter\}[^{}\s]*")


def are_templates(templates: tuple[str, ...]) -> str | None:
    """A `check` for templates."""
    wrong = [template for template in templates if not _TEMPLATE.fullmatch(template)]
    return f"URIs with {_PLACE} once in their path, such as file://ROOT/{_PLACE}" if wrong else None


@dataclass(frozen=True)
class NamespaceSettings:
    """One table `[namespaces.NAME]`."""

    auto_register: tuple[str, ...] = field(
        default=(),
        metadata={"help": f"where to look for unknown adapters: URIs with {_PLACE}, in order", "check": are_templates},
    )
    base_model: str = field(default="", metadata={"help": "id of the base model of what is found there"})
    credential_refs: dict[str, str] = field(
        default_factory=dict, metadata={"help": "credentials to look there with, by scheme: {hf = NAME}"}
    )
    max_adapters: int = field(default=0, metadata={"help": "adapters; 0: namespace_max_adapters", "check": is_quota})
    max_versions: int = field(default=0, metadata={"help": "versions; 0: namespace_max_versions", "check": is_quota})
    max_bytes: int = field(default=0, metadata={"help": "bytes of versions; 0: namespace_max_bytes", "check": is_quota})
    requests_per_second: float = field(
        default=0.0, metadata={"help": "calls a second; 0: tenant_requests_per_second", "check": is_limit}
    )


class _Failure(NamedTuple):
    until: float
    record: ErrorRecord


class AutoRegistrar:
    """Registers unknown adapters of the namespaces that say where to look.

    Args:
        registered: Called with namespace, name and revision when there is a new adapter.
    """

    def __init__(
        self,
        registrar: Registrar,
        namespaces: Mapping[str, NamespaceSettings],
        registered: Callable[[str, str, int], None],
    ) -> None:
        self._registrar = registrar
        self._namespaces = {name: settings for name, settings in namespaces.items() if settings.auto_register}
        self._registered = registered
        self._flights: SingleFlight[None] = SingleFlight()
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._failures: OrderedDict[str, _Failure] = OrderedDict()

    def covers(self, reference: Reference, base_model: str) -> bool:
        """Whether the first version of an unknown adapter, for this base model if any, would answer the reference."""
        settings = self._namespaces.get(reference.namespace)
        is_first = reference.version in (None, 1) and reference.alias in (None, LATEST)
        return settings is not None and is_first and base_model in ("", settings.base_model)

    async def register(self, namespace: str, name: str) -> None:
        """Returns when the adapter is registered, by whomever.

        Raises:
            AdapterNotFound: it lies in none of the places; remembered for a moment.
            SourceUnavailable: it cannot be said yet; the search goes on, and a retry joins it.
            QueueFull: too many other names are being looked for.
            LoraplexError: what was found cannot be registered.
        """
        key = adapter_name(namespace, name)
        failure = self._failures.get(key)
        if failure is not None and time.monotonic() < failure.until:
            raise from_record(failure.record)
        if key not in self._flights and len(self._flights) >= MAX_WAITING:
            raise QueueFull(
                "too many unknown adapters are being looked for",
                metadata={"limit": "unknown_adapters", "value": str(MAX_WAITING)},
                retry_after=FAILED_SECONDS,
            )
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._flights.run(key, "", lambda: self._search(namespace, name))
        except TimeoutError:
            raise SourceUnavailable(
                f"{key} is being looked for", metadata={"adapter": key}, retry_after=FAILED_SECONDS
            ) from None

    async def close(self) -> None:
        """Gives up what is being looked for."""
        await self._flights.close()

    async def _search(self, namespace: str, name: str) -> None:
        try:
            async with self._at_once:
                await self._try_templates(namespace, name)
        except LoraplexError as error:
            self._remember(adapter_name(namespace, name), error)
            raise

    async def _try_templates(self, namespace: str, name: str) -> None:
        settings = self._namespaces[namespace]
        tried = []
        for template in settings.auto_register:
            uri = template.replace(_PLACE, name)
            try:
                answer = await self._registrar.register(CALLER, _registration(namespace, name, uri, settings))
            except AdapterExists:
                return self._registered(namespace, name, 0)
            except (SourceNotFound, SourceForbidden, CredentialNotAllowed) as error:
                tried.append(f"{uri} ({error.reason})")
            except LoraplexError as error:
                raise _found_in(uri, error) from error
            else:
                log.info("registered %s from %s", adapter_name(namespace, name), uri)
                _audit(namespace, name, answer)
                return self._registered(namespace, name, answer.revision)
        absent = no_adapter(namespace, name)
        absent.message += f", and none in {', '.join(tried)}"
        raise absent

    def _remember(self, key: str, error: LoraplexError) -> None:
        seconds = ABSENT_SECONDS if isinstance(error, NotFound) else FAILED_SECONDS
        self._failures.pop(key, None)
        self._failures[key] = _Failure(time.monotonic() + seconds, error.record())
        if len(self._failures) > MAX_REMEMBERED:
            self._failures.popitem(last=False)


def _found_in(uri: str, error: LoraplexError) -> LoraplexError:
    """`error`, which says in its message and metadata what was tried to be registered."""
    record = error.record()
    message = record.message if uri in record.message else f"{uri}: {record.message}"
    return from_record(msgspec.structs.replace(record, message=message, metadata={"uri": uri, **record.metadata}))


def _audit(namespace: str, name: str, answer: Registered) -> None:
    version = version_name(namespace, name, answer.version.number)
    caller = Caller(CALLER, namespace, {})
    audit.record(
        caller, "RegisterAdapter", f"{namespace}/{name}", outcome="OK", revision=answer.revision, version=version
    )


def _registration(namespace: str, name: str, uri: str, settings: NamespaceSettings) -> Registration:
    return Registration(
        namespace=namespace,
        adapter_id=name,
        base_model=settings.base_model,
        source_uri=uri,
        credential_ref=settings.credential_refs.get(uri.partition("://")[0], ""),
        labels={},
        description="",
        aliases=(),
        request_id="",
        validate_only=False,
        only_new=True,
    )
