"""Builds the registry: the only file that knows every part."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from registry_service import migrations
from registry_service.base_models import BaseModels
from registry_service.config import RegistryConfig
from registry_service.database import Database, is_sqlite
from registry_service.registration import Registrar
from registry_service.service import RegistryService
from registry_service.servicer import RegistryServicer
from registry_service.validation import Limits
from shared.errors import InvalidArgument
from shared.grpc_server import BoundServer, create_server, drain

log = logging.getLogger(__name__)

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["AdapterRegistryService"].full_name


@dataclass(frozen=True)
class RunningRegistry:
    """A registry that serves on `port`."""

    port: int
    database: Database
    _bound: BoundServer
    _registrar: Registrar

    async def stop(self, grace: float = 0.0) -> None:
        """No new calls; running ones have `grace` seconds; then everything is closed."""
        await drain(self._bound, grace)
        await self._registrar.close()
        await self.database.close()


async def start(config: RegistryConfig) -> RunningRegistry:
    """Prepares the database and serves.

    Raises:
        SchemaOutdated: Postgres has not been migrated.
        RegistryUnavailable: the database cannot be reached.
        InvalidArgument: a file root does not exist, or the address is taken.
    """
    roots = _existing(config.file_roots)
    prepare = migrations.upgrade if is_sqlite(config.database) else migrations.check
    await asyncio.to_thread(prepare, config.database)
    database = Database(config.database)
    registrar, servicer = _build(config, roots, database)
    try:
        bound = await create_server(
            config.listen,
            lambda server: registry_pb2_grpc.add_AdapterRegistryServiceServicer_to_server(servicer, server),
            [SERVICE],
        )
    except InvalidArgument:
        await registrar.close()
        await database.close()
        raise
    await bound.server.start()
    await bound.readiness.set(serving=True)
    log.info("the registry is ready", extra={"port": bound.port, "listen": config.listen})
    return RunningRegistry(bound.port, database, bound, registrar)


def _existing(file_roots: Mapping[str, str]) -> dict[str, Path]:
    missing = [f"{name}={folder}" for name, folder in file_roots.items() if not Path(folder).is_dir()]
    if missing:
        raise InvalidArgument.of("file_roots", f"no such folder: {', '.join(missing)}")
    return {name: Path(folder).resolve() for name, folder in file_roots.items()}


def _build(config: RegistryConfig, roots: dict[str, Path], database: Database) -> tuple[Registrar, RegistryServicer]:
    limits = Limits(config=config.max_config_bytes, weights=config.max_adapter_bytes)
    registrar = Registrar(database, roots, limits, config.registration_seconds)
    service, base_models = RegistryService(database, registrar), BaseModels(database)
    return registrar, RegistryServicer(service, base_models, config.resolve_ttl_seconds)
