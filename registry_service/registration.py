"""RegisterAdapter: validate a source against its base model, then write the version in one short transaction.

Nothing is written before the validation is done, and nothing of a registration that failed remains. The rules are
looked at twice: before the files are read, so that a request that cannot succeed costs nothing, and in the transaction.
"""

import asyncio
import json
import threading

from registry_service import registration_rules
from registry_service.adapter_folder import Origin
from registry_service.database import Database
from registry_service.models import BaseModel
from registry_service.quotas import Quotas
from registry_service.readers import SourceReaders
from registry_service.registration_rules import Registered, Registration
from registry_service.repository import RequestKey
from registry_service.single_flight import SingleFlight
from registry_service.validation import Limits, ValidatedAdapter, validate
from shared.base_model import parse_config
from shared.errors import SourceUnavailable
from shared.sources.policy import SourcePolicy


class Registrar:
    """Registers adapters. Holds the registrations that run."""

    def __init__(
        self, database: Database, policy: SourcePolicy, limits: Limits, quotas: Quotas, time_limit: float
    ) -> None:
        self._database = database
        self._quotas = quotas
        self._policy = policy
        self._limits = limits
        self._time_limit = time_limit
        self._flights: SingleFlight[Registered] = SingleFlight()
        self._readers = SourceReaders()

    async def register(self, caller: str, request: Registration) -> Registered:
        """Register, or answer as before. With a request id the work outlives a caller that leaves; a retry joins it.

        Raises:
            BaseModelUnknown, BaseModelMismatch, AdapterDeleted, RequestIdReused, CredentialNotAllowed, NamespaceQuota:
                the rules.
            InvalidArgument and everything that `validation.validate` raises.
        """
        if request.validate_only or not request.request_id:
            return await self._limited(caller, request)
        key = RequestKey(caller, request.namespace, request.request_id)
        return await self._flights.run(key, request.request_hash(), lambda: self._limited(caller, request))

    async def close(self) -> None:
        """Gives up what still runs."""
        await self._flights.close()
        self._readers.close()

    async def _limited(self, caller: str, request: Registration) -> Registered:
        try:
            async with asyncio.timeout(self._time_limit):
                return await self._register(caller, request)
        except TimeoutError:
            raise SourceUnavailable(
                f"the registration took longer than {self._time_limit:g} seconds", metadata={"uri": request.source_uri}
            ) from None

    async def _register(self, caller: str, request: Registration) -> Registered:
        found = await self._database.read(
            lambda session: registration_rules.before(session, self._quotas, caller, request)
        )
        if isinstance(found, Registered):
            return found
        checked = await self._validated(request, found)
        finish = registration_rules.pretend if request.validate_only else registration_rules.write
        transaction = self._database.read if request.validate_only else self._database.write
        return await transaction(lambda session: finish(session, self._quotas, caller, request, checked))

    async def _validated(self, request: Registration, base: BaseModel) -> ValidatedAdapter:
        """The validation runs in a thread; it ends soon when nobody waits for it any more."""
        origin = Origin(request.source_uri, request.credential_ref, request.namespace)

        def work(stopping: threading.Event) -> ValidatedAdapter:
            model = parse_config(json.loads(base.config_json))
            return validate(origin, self._policy, stopping, base.id, model, self._limits)

        return await self._readers.read(origin, work)
