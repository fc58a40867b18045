"""loraplex.registry.v1.AdapterRegistryService: read the request, call the service, return the message."""
# ruff: noqa: N802  # methods are named as the RPCs are

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc, resources_pb2
from registry_service import replica_requests, requests
from registry_service.adapter_changes import AdapterChanges
from registry_service.base_models import BaseModels
from registry_service.filter_fields import ADAPTER_FIELDS, VERSION_FIELDS
from registry_service.messages import (
    adapter_message,
    base_model_message,
    duration,
    replica_message,
    resolution_message,
    shown_adapter_message,
    version_message,
    watch_messages,
)
from registry_service.ordering import ADAPTER_COLUMNS, BY_NAME, NEWEST_FIRST, VERSION_COLUMNS, parse_order
from registry_service.pages import Page, read_page
from registry_service.replicas import Replicas
from registry_service.repository import ListQuery
from registry_service.service import RegistryService
from registry_service.update_requests import adapter_update
from shared.auth import caller_of, changed_nothing
from shared.references import parse_base_model, parse_reference

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext

T = TypeVar("T")


class RegistryServicer(registry_pb2_grpc.AdapterRegistryServiceServicer):
    def __init__(
        self,
        service: RegistryService,
        changes: AdapterChanges,
        replicas: Replicas,
        base_models: BaseModels,
        resolve_ttl: float,
    ) -> None:
        self._service = service
        self._changes = changes
        self._replicas = replicas
        self._base_models = base_models
        self._resolve_ttl = resolve_ttl

    # ---- adapters

    async def RegisterAdapter(self, request: pb.RegisterAdapterRequest, context: Context) -> pb.RegisterAdapterResponse:
        caller = caller_of(context)
        registered = await self._service.register_adapter(caller, requests.registration(request, caller.namespace))
        return pb.RegisterAdapterResponse(
            adapter=adapter_message(registered.view),
            version=version_message(registered.view.adapter, registered.version),
            created=registered.created,
            registry_revision=registered.revision,
        )

    async def ResolveAdapter(self, request: pb.ResolveAdapterRequest, context: Context) -> pb.ResolveAdapterResponse:
        caller = caller_of(context)
        reference = parse_reference(request.reference, caller.namespace, "reference")
        base_model = parse_base_model(request.base_model, "base_model") if request.base_model else ""
        revision = requests.min_revision(request.min_revision)
        found = await self._service.resolve(reference, base_model, revision, registered_only=request.registered_only)
        return resolution_message(found, self._resolve_ttl)

    async def WatchAdapters(
        self, request: pb.WatchAdaptersRequest, context: Context
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        caller = caller_of(context)
        async for batch in self._service.watch(caller, requests.watch(request, caller.namespace)):
            for message in watch_messages(batch):
                yield message

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Context) -> resources_pb2.Adapter:
        caller = caller_of(context)
        reference = requests.adapter_reference(request.name, caller.namespace, "name")
        return shown_adapter_message(await self._service.get_adapter(reference.namespace, reference.adapter))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        caller = caller_of(context)
        namespace = requests.listed_namespace(request.parent, caller.namespace)
        condition = requests.filtered(request.filter, ADAPTER_FIELDS)
        order = parse_order(request.order_by, ADAPTER_COLUMNS, BY_NAME)
        query = f"adapters\n{namespace}\n{request.show_deleted}\n{request.order_by}\n{request.filter}"
        page = read_page(request.page_size, request.page_token, query, order.key_types)
        listed = ListQuery(condition, order, page.after, page.size + 1, request.show_deleted)
        shown, more = _cut(await self._service.list_adapters(caller, namespace, listed), page)
        return pb.ListAdaptersResponse(
            adapters=[shown_adapter_message(adapter) for adapter in shown],
            next_page_token=page.next_token(order.key(shown[-1].view.adapter)) if more else "",
        )

    async def UpdateAdapter(self, request: pb.UpdateAdapterRequest, context: Context) -> pb.UpdateAdapterResponse:
        changed = await self._changes.update(*adapter_update(request, caller_of(context).namespace))
        return pb.UpdateAdapterResponse(adapter=adapter_message(changed.view), registry_revision=changed.revision)

    async def DeleteAdapter(self, request: pb.DeleteAdapterRequest, context: Context) -> pb.DeleteAdapterResponse:
        name = requests.adapter_reference(request.name, caller_of(context).namespace, "name")
        changed = await self._changes.delete(name, request.etag)
        return pb.DeleteAdapterResponse(adapter=adapter_message(changed.view), registry_revision=changed.revision)

    async def UndeleteAdapter(self, request: pb.UndeleteAdapterRequest, context: Context) -> pb.UndeleteAdapterResponse:
        name = requests.adapter_reference(request.name, caller_of(context).namespace, "name")
        changed = await self._changes.undelete(name)
        return pb.UndeleteAdapterResponse(adapter=adapter_message(changed.view), registry_revision=changed.revision)

    # ---- aliases

    async def SetAdapterAlias(self, request: pb.SetAdapterAliasRequest, context: Context) -> pb.SetAdapterAliasResponse:
        alias = requests.alias_reference(request.name, caller_of(context).namespace, "name")
        changed = await self._changes.set_alias(alias, requests.alias_targets(request.targets), request.etag)
        return pb.SetAdapterAliasResponse(adapter=adapter_message(changed.view), registry_revision=changed.revision)

    async def DeleteAdapterAlias(
        self, request: pb.DeleteAdapterAliasRequest, context: Context
    ) -> pb.DeleteAdapterAliasResponse:
        alias = requests.alias_reference(request.name, caller_of(context).namespace, "name")
        changed = await self._changes.delete_alias(alias, request.etag)
        return pb.DeleteAdapterAliasResponse(adapter=adapter_message(changed.view), registry_revision=changed.revision)

    # ---- versions

    async def GetAdapterVersion(
        self, request: pb.GetAdapterVersionRequest, context: Context
    ) -> resources_pb2.AdapterVersion:
        caller = caller_of(context)
        reference = requests.version_reference(request.name, caller.namespace, "name")
        return version_message(*await self._service.get_version(reference))

    async def ListAdapterVersions(
        self, request: pb.ListAdapterVersionsRequest, context: Context
    ) -> pb.ListAdapterVersionsResponse:
        caller = caller_of(context)
        parent = requests.adapter_reference(request.parent, caller.namespace, "parent")
        condition = requests.filtered(request.filter, VERSION_FIELDS)
        order = parse_order(request.order_by, VERSION_COLUMNS, NEWEST_FIRST)
        query = f"versions\n{parent.canonical()}\n{request.show_deleted}\n{request.order_by}\n{request.filter}"
        page = read_page(request.page_size, request.page_token, query, order.key_types)
        listed = ListQuery(condition, order, page.after, page.size + 1, request.show_deleted)
        adapter, found = await self._service.list_versions(parent.namespace, parent.adapter, listed)
        shown, more = _cut(found, page)
        return pb.ListAdapterVersionsResponse(
            versions=[version_message(adapter, version) for version in shown],
            next_page_token=page.next_token(order.key(shown[-1])) if more else "",
        )

    async def DeleteAdapterVersion(
        self, request: pb.DeleteAdapterVersionRequest, context: Context
    ) -> pb.DeleteAdapterVersionResponse:
        name = requests.numbered_version(request.name, caller_of(context).namespace, "name")
        deleted = await self._changes.delete_version(name, request.etag)
        return pb.DeleteAdapterVersionResponse(
            version=version_message(deleted.adapter, deleted.version), registry_revision=deleted.revision
        )

    # ---- base models

    async def RegisterBaseModel(
        self, request: pb.RegisterBaseModelRequest, context: Context
    ) -> pb.RegisterBaseModelResponse:
        registered = await self._base_models.register(
            parse_base_model(request.id, "id"),
            request.config_json,
            requests.fingerprint(request.fingerprint, "fingerprint"),
            requests.fingerprint(request.weights_fingerprint, "weights_fingerprint"),
        )
        if not registered.is_changed:
            changed_nothing(context)  # replicas tell their base model whenever they start
        return pb.RegisterBaseModelResponse(
            base_model=base_model_message(registered.base_model),
            created=registered.created,
            registry_revision=registered.revision,
        )

    async def GetBaseModel(self, request: pb.GetBaseModelRequest, context: Context) -> resources_pb2.BaseModel:
        return base_model_message(await self._base_models.get(parse_base_model(request.name, "name")))

    async def ListBaseModels(self, request: pb.ListBaseModelsRequest, context: Context) -> pb.ListBaseModelsResponse:
        page = read_page(request.page_size, request.page_token, "base models", (str,))
        shown, more = _cut(await self._base_models.list(page), page)
        return pb.ListBaseModelsResponse(
            base_models=[base_model_message(row) for row in shown],
            next_page_token=page.next_token([shown[-1].id]) if more else "",
        )

    # ---- replicas

    async def ReportReplicaState(
        self, request: pb.ReportReplicaStateRequest, context: Context
    ) -> pb.ReportReplicaStateResponse:
        is_taken = await self._replicas.report(replica_requests.report(request))
        lease = self._replicas.lease.total_seconds()
        return pb.ReportReplicaStateResponse(lease=duration(lease), needs_full=not is_taken)

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Context) -> pb.ListReplicasResponse:
        base_model = replica_requests.base_model_filter(request.base_model)
        page = read_page(request.page_size, request.page_token, f"replicas {base_model}", (str,))
        shown, more = await self._replicas.list(base_model, page)
        return pb.ListReplicasResponse(
            replicas=[replica_message(replica) for replica in shown],
            next_page_token=page.next_token([shown[-1].replica.name]) if more else "",
        )


def _cut(found: Sequence[T], page: Page) -> tuple[Sequence[T], bool]:
    """The page's entries, and whether there are more."""
    return found[: page.size], len(found) > page.size
