"""Builds the registry: the only file that knows every part."""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from registry_service import migrations
from registry_service.adapter_cache import AdapterCache
from registry_service.adapter_changes import AdapterChanges
from registry_service.auto_registration import AutoRegistrar, NamespaceSettings
from registry_service.base_models import BaseModels
from registry_service.change_log import ChangeLog, LogSettings
from registry_service.config import RegistryConfig
from registry_service.database import Database, is_sqlite
from registry_service.listener import listen
from registry_service.metrics import RegistryMetrics, RegistryState
from registry_service.purging import Purger
from registry_service.quotas import Amounts, Quotas
from registry_service.registration import Registrar
from registry_service.replicas import Replicas
from registry_service.service import RegistryService
from registry_service.servicer import RegistryServicer
from registry_service.sqlite_claim import claim
from registry_service.validation import Limits
from registry_service.watch import Watches
from shared.auth.gate import AccessGate
from shared.auth.open_access import warn_of_open_access
from shared.auth.tenant_calls import TenantCalls
from shared.call_observers import CallObserver
from shared.errors import InvalidArgument
from shared.grpc_server import BoundServer, create_server, drain
from shared.listening import check_ports
from shared.metrics import MetricsServer
from shared.references import check_id, parse_base_model
from shared.sources.policy import SourcePolicy
from shared.tracing import start_tracing

log = logging.getLogger(__name__)

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["AdapterRegistryService"].full_name
HEARTBEAT_SECONDS = 5.0


@dataclass(frozen=True)
class RunningRegistry:
    """A registry that serves on `port`; `metrics_port` is 0 if its metrics are not wanted."""

    port: int
    metrics_port: int
    database: Database
    log: ChangeLog
    _bound: BoundServer
    _watches: Watches
    _parts: AsyncExitStack

    async def stop(self, grace: float = 0.0) -> None:
        """No new calls, no watches; other running calls have `grace` seconds; then everything is closed."""
        self._watches.drain()
        await drain(self._bound, grace)
        await self._parts.aclose()


async def start(config: RegistryConfig) -> RunningRegistry:
    """Prepares the database and serves.

    Raises:
        SchemaOutdated: Postgres has not been migrated.
        RegistryUnavailable: the database cannot be reached.
        InvalidArgument: a file root does not exist, settings of a namespace, of callers or of TLS are wrong, an address
            is taken, or another process serves the SQLite database: nothing has been written then.
    """
    roots, namespaces = _existing(config.file_roots), _checked(config.namespaces)
    listens = {name: getattr(config, name) for name in ("listen", "health_listen", "metrics_listen")}
    await asyncio.to_thread(check_ports, listens)
    gate, credentials = AccessGate(config.authenticator(), _tenant_calls(config)), config.tls_credentials()
    async with AsyncExitStack() as parts:
        await asyncio.to_thread(_prepare, config.database, parts)
        metrics = RegistryMetrics() if config.metrics_listen else None
        observers: list[CallObserver] = [*([metrics] if metrics else []), *_traces(config, parts)]
        database = Database(config.database)
        parts.push_async_callback(database.close)
        cache = AdapterCache(database, config.cached_adapters)
        parts.push_async_callback(cache.close)
        changes = await _started_log(config, database, cache, parts)
        watches = Watches(database, changes, min(HEARTBEAT_SECONDS, config.resolve_ttl_seconds / 3))
        limits = Limits(config=config.max_config_bytes, weights=config.max_adapter_bytes)
        policy = SourcePolicy(roots, config.credentials, config.allowed_sources, config.allowed_endpoints)
        quotas = _quotas(config)
        registrar = Registrar(database, policy, limits, quotas, config.registration_seconds)
        parts.push_async_callback(registrar.close)
        keep = timedelta(seconds=config.deleted_keep_seconds)
        purger = Purger(database, keep)
        purging = asyncio.get_running_loop().create_task(purger.run())
        parts.callback(purging.cancel)
        auto = AutoRegistrar(registrar, namespaces, cache.forget)
        parts.push_async_callback(auto.close)
        service = RegistryService(database, registrar, changes, cache, watches, auto)
        servicer = RegistryServicer(
            service,
            AdapterChanges(database, cache, quotas, keep),
            Replicas(database, timedelta(seconds=config.replica_lease_seconds)),
            BaseModels(database),
            config.resolve_ttl_seconds,
        )
        state = RegistryState(database, changes, cache, watches, purger)
        metrics_port = _serve_metrics(config.metrics_listen, metrics, state, parts) if metrics else 0
        bound = await create_server(
            config.listen,
            lambda server: registry_pb2_grpc.add_AdapterRegistryServiceServicer_to_server(servicer, server),
            [SERVICE],
            limits=config.limits(),
            gate=gate,
            credentials=credentials,
            health_listen=config.health_listen,
            observers=observers,
        )
        await bound.server.start()
        await bound.readiness.set(serving=True)
        warn_of_open_access(config, config.listen)
        log.info("the registry is ready", extra={"port": bound.port, "listen": config.listen})
        return RunningRegistry(bound.port, metrics_port, database, changes, bound, watches, parts.pop_all())


def _prepare(database: str, parts: AsyncExitStack) -> None:
    """Blocks."""
    if is_sqlite(database):
        migrations.check_folder(database)
        parts.callback(os.close, claim(Path(database.removeprefix("sqlite:///"))))  # the last to be closed
        migrations.upgrade(database)
    else:
        migrations.check(database)


def _traces(config: RegistryConfig, parts: AsyncExitStack) -> list[CallObserver]:
    tracing = start_tracing(config.otlp_endpoint, "loraplex-registry", "registry")
    if tracing is None:
        return []
    parts.push_async_callback(asyncio.to_thread, tracing.close)
    return [tracing]


def _serve_metrics(listen: str, metrics: RegistryMetrics, state: RegistryState, parts: AsyncExitStack) -> int:
    """Returns the port."""
    metrics.collector.register(state)
    state.database.on_connection = metrics.connected
    server = MetricsServer(listen, metrics.collector)
    parts.callback(server.close)
    log.info("metrics", extra={"port": server.port})
    return server.port


async def _started_log(
    config: RegistryConfig, database: Database, cache: AdapterCache, parts: AsyncExitStack
) -> ChangeLog:
    settings = LogSettings(
        poll_seconds=config.poll_seconds, keep_changes=config.log_keep_changes, keep_seconds=config.log_keep_seconds
    )
    changes = ChangeLog(database, settings, cache.follow)
    parts.push_async_callback(changes.close)
    await changes.start()
    database.on_write = changes.wake
    if config.listen_url:
        listener = asyncio.get_running_loop().create_task(listen(config.listen_url, changes.wake))
        parts.callback(listener.cancel)
    return changes


def _checked(namespaces: Mapping[str, NamespaceSettings]) -> Mapping[str, NamespaceSettings]:
    for name, settings in namespaces.items():
        check_id(name, "namespaces")
        if settings.auto_register:
            parse_base_model(settings.base_model, f"namespaces.{name}.base_model")
    return namespaces


def _tenant_calls(config: RegistryConfig) -> TenantCalls:
    own = {name: of.requests_per_second for name, of in config.namespaces.items()}
    return TenantCalls(config.max_calls_per_tenant, config.buckets(config.tenant_requests_per_second, own))


def _quotas(config: RegistryConfig) -> Quotas:
    usual = Amounts(config.namespace_max_adapters, config.namespace_max_versions, config.namespace_max_bytes)
    own = {name: Amounts(of.max_adapters, of.max_versions, of.max_bytes) for name, of in config.namespaces.items()}
    return Quotas(usual, own)


def _existing(file_roots: Mapping[str, str]) -> dict[str, Path]:
    missing = [f"{name}={folder}" for name, folder in file_roots.items() if not Path(folder).is_dir()]
    if missing:
        raise InvalidArgument.of("file_roots", f"no such folder: {', '.join(missing)}")
    return {name: Path(folder).resolve() for name, folder in file_roots.items()}
