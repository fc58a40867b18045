"""The rules of base models: known by their config, and immutable."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from registry_service import repository
from registry_service.database import Database
from registry_service.models import BaseModel
from registry_service.pages import Page
from shared.base_model import fingerprint, linear_shapes, parse_config
from shared.errors import BaseModelConflict, BaseModelNotFound, InvalidArgument
from shared.references import base_model_name

MAX_CONFIG_CHARS = 1 << 20


class RegisteredBaseModel(NamedTuple):
    """`is_changed`: it is new, or something of it is."""

    base_model: BaseModel
    created: bool
    is_changed: bool
    revision: int


class _Offer(NamedTuple):
    """A base model that somebody wants to register."""

    id: str
    architecture: str
    fingerprint: str
    weights_fingerprint: str | None
    config_json: str
    num_modules: int


class BaseModels:
    """The base models of one registry."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def register(
        self, model_id: str, config_json: str, expected: str, weights_fingerprint: str
    ) -> RegisteredBaseModel:
        """Makes a base model known, or says that it is.

        Raises:
            InvalidArgument: the config cannot be read, or its architecture is not supported.
            BaseModelConflict: the id stands for another fingerprint, or the config's is not the `expected` one.
        """
        offered = _offer(model_id, config_json, expected, weights_fingerprint)

        async def work(session: AsyncSession) -> RegisteredBaseModel:
            known = await repository.base_model(session, model_id, lock=True)
            if known is None:
                known = BaseModel(**offered._asdict(), create_time=datetime.now(UTC))
                session.add(known)
                return RegisteredBaseModel(known, True, True, await repository.next_revision(session))
            _check_same(known, offered)
            if known.weights_fingerprint is None and weights_fingerprint:
                known.weights_fingerprint = weights_fingerprint
                return RegisteredBaseModel(known, False, True, await repository.next_revision(session))
            return RegisteredBaseModel(known, False, False, await repository.revision(session))

        return await self._database.write(work)

    async def get(self, model_id: str) -> BaseModel:
        """One base model."""
        found = await self._database.read(lambda session: repository.base_model(session, model_id))
        if found is None:
            raise BaseModelNotFound(f"no base model {model_id} is registered", metadata={"base_model": model_id})
        return found

    async def list(self, page: Page) -> Sequence[BaseModel]:
        """Base models by id, one more than the page's size if there are more."""
        after = str(page.after[0]) if page.after else ""
        return await self._database.read(lambda session: repository.base_models(session, after, page.size + 1))


def _offer(model_id: str, config_json: str, expected: str, weights_fingerprint: str) -> _Offer:
    raw = _parsed(config_json)
    config = parse_config(raw)
    computed = fingerprint(raw)
    if expected and expected != computed:
        raise BaseModelConflict(
            f"the config of {model_id} has fingerprint {computed}, not {expected}",
            metadata={"base_model": base_model_name(model_id), "fingerprint": computed},
        )
    return _Offer(
        id=model_id,
        architecture=config.architecture,
        fingerprint=computed,
        weights_fingerprint=weights_fingerprint or None,
        config_json=config_json,
        num_modules=len(linear_shapes(config)),
    )


def _parsed(config_json: str) -> dict[str, Any]:
    if len(config_json) > MAX_CONFIG_CHARS:
        raise InvalidArgument.of("config_json", f"is longer than {MAX_CONFIG_CHARS} characters")
    try:
        raw = json.loads(config_json)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.of("config_json", f"is not JSON: {error!s:.200}") from None
    if not isinstance(raw, dict):
        raise InvalidArgument.of("config_json", "must be a JSON object")
    return raw


def _check_same(known: BaseModel, offered: _Offer) -> None:
    for kind in ("fingerprint", "weights_fingerprint"):
        old, new = getattr(known, kind), getattr(offered, kind)
        if old and new and old != new:
            raise BaseModelConflict(
                f"base model {known.id} is registered with {kind} {old}, not {new}: give the other model another id",
                metadata={"base_model": base_model_name(known.id), kind: old},
            )
