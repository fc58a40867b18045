"""loraplex.registry.v1.AdapterRegistryService: read the request, call the service, return the message."""
# ruff: noqa: N802  # methods are named as the RPCs are

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc, resources_pb2
from registry_service import requests
from registry_service.base_models import BaseModels
from registry_service.messages import adapter_message, base_model_message, resolution_message, version_message
from registry_service.pages import Page, read_page
from registry_service.service import RegistryService
from shared.auth import Caller, caller_of
from shared.errors import Unimplemented
from shared.references import parse_base_model, parse_reference

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext

T = TypeVar("T")


class RegistryServicer(registry_pb2_grpc.AdapterRegistryServiceServicer):
    def __init__(self, service: RegistryService, base_models: BaseModels, resolve_ttl: float) -> None:
        self._service = service
        self._base_models = base_models
        self._resolve_ttl = resolve_ttl

    # ---- adapters

    async def RegisterAdapter(self, request: pb.RegisterAdapterRequest, context: Context) -> pb.RegisterAdapterResponse:
        caller = _caller(context)
        registered = await self._service.register_adapter(caller, requests.registration(request, caller.namespace))
        return pb.RegisterAdapterResponse(
            adapter=adapter_message(registered.view),
            version=version_message(registered.view.adapter, registered.version),
            created=registered.created,
            registry_revision=registered.revision,
        )

    async def ResolveAdapter(self, request: pb.ResolveAdapterRequest, context: Context) -> pb.ResolveAdapterResponse:
        caller = _caller(context)
        reference = parse_reference(request.reference, caller.namespace, "reference")
        base_model = parse_base_model(request.base_model, "base_model") if request.base_model else ""
        revision = requests.min_revision(request.min_revision)
        found = await self._service.resolve(caller, reference, base_model, revision)
        return resolution_message(found, self._resolve_ttl)

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Context) -> resources_pb2.Adapter:
        caller = _caller(context)
        reference = requests.adapter_reference(request.name, caller.namespace, "name")
        return adapter_message(await self._service.get_adapter(caller, reference.namespace, reference.adapter))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        caller = _caller(context)
        requests.refuse_filter(request.filter, request.order_by)
        namespace = requests.listed_namespace(request.parent, caller.namespace)
        query = f"adapters {namespace} {request.show_deleted}"
        page = read_page(request.page_size, request.page_token, query, (str, str))
        found = await self._service.list_adapters(caller, namespace, page, show_deleted=request.show_deleted)
        shown, more = _cut(found, page)
        return pb.ListAdaptersResponse(
            adapters=[adapter_message(view) for view in shown],
            next_page_token=page.next_token([shown[-1].adapter.namespace, shown[-1].adapter.name]) if more else "",
        )

    async def DeleteAdapter(self, request: pb.DeleteAdapterRequest, context: Context) -> pb.DeleteAdapterResponse:
        caller = _caller(context)
        name = requests.adapter_reference(request.name, caller.namespace, "name")
        changed = await self._service.delete_adapter(caller, name.namespace, name.adapter, request.etag)
        return pb.DeleteAdapterResponse(adapter=adapter_message(changed.view), registry_revision=changed.revision)

    async def UndeleteAdapter(self, request: pb.UndeleteAdapterRequest, context: Context) -> pb.UndeleteAdapterResponse:
        caller = _caller(context)
        name = requests.adapter_reference(request.name, caller.namespace, "name")
        changed = await self._service.undelete_adapter(caller, name.namespace, name.adapter)
        return pb.UndeleteAdapterResponse(adapter=adapter_message(changed.view), registry_revision=changed.revision)

    async def SetAdapterAlias(self, request: pb.SetAdapterAliasRequest, context: Context) -> pb.SetAdapterAliasResponse:
        caller = _caller(context)
        alias = requests.alias_reference(request.name, caller.namespace, "name")
        version, weight = requests.single_target(request.targets)
        changed = await self._service.set_alias(caller, alias, version, weight, request.etag)
        return pb.SetAdapterAliasResponse(adapter=adapter_message(changed.view), registry_revision=changed.revision)

    # ---- versions

    async def GetAdapterVersion(
        self, request: pb.GetAdapterVersionRequest, context: Context
    ) -> resources_pb2.AdapterVersion:
        caller = _caller(context)
        reference = requests.version_reference(request.name, caller.namespace, "name")
        return version_message(*await self._service.get_version(caller, reference))

    async def ListAdapterVersions(
        self, request: pb.ListAdapterVersionsRequest, context: Context
    ) -> pb.ListAdapterVersionsResponse:
        caller = _caller(context)
        parent = requests.adapter_reference(request.parent, caller.namespace, "parent")
        query = f"versions {parent.canonical()} {request.show_deleted}"
        page = read_page(request.page_size, request.page_token, query, (int,))
        adapter, found = await self._service.list_versions(
            caller, parent.namespace, parent.adapter, page, show_deleted=request.show_deleted
        )
        shown, more = _cut(found, page)
        return pb.ListAdapterVersionsResponse(
            versions=[version_message(adapter, version) for version in shown],
            next_page_token=page.next_token([shown[-1].number]) if more else "",
        )

    # ---- base models

    async def RegisterBaseModel(
        self, request: pb.RegisterBaseModelRequest, context: Context
    ) -> pb.RegisterBaseModelResponse:
        registered = await self._base_models.register(
            _caller(context),
            parse_base_model(request.id, "id"),
            request.config_json,
            requests.fingerprint(request.fingerprint, "fingerprint"),
            requests.fingerprint(request.weights_fingerprint, "weights_fingerprint"),
        )
        return pb.RegisterBaseModelResponse(
            base_model=base_model_message(registered.base_model),
            created=registered.created,
            registry_revision=registered.revision,
        )

    async def GetBaseModel(self, request: pb.GetBaseModelRequest, context: Context) -> resources_pb2.BaseModel:
        return base_model_message(await self._base_models.get(_caller(context), parse_base_model(request.name, "name")))

    async def ListBaseModels(self, request: pb.ListBaseModelsRequest, context: Context) -> pb.ListBaseModelsResponse:
        page = read_page(request.page_size, request.page_token, "base models", (str,))
        shown, more = _cut(await self._base_models.list(_caller(context), page), page)
        return pb.ListBaseModelsResponse(
            base_models=[base_model_message(row) for row in shown],
            next_page_token=page.next_token([shown[-1].id]) if more else "",
        )

    # ---- in the contract, not built yet

    def WatchAdapters(
        self, request: pb.WatchAdaptersRequest, context: Context
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        _unbuilt("WatchAdapters")

    async def UpdateAdapter(self, request: pb.UpdateAdapterRequest, context: Context) -> pb.UpdateAdapterResponse:
        _unbuilt("UpdateAdapter")

    async def DeleteAdapterVersion(
        self, request: pb.DeleteAdapterVersionRequest, context: Context
    ) -> pb.DeleteAdapterVersionResponse:
        _unbuilt("DeleteAdapterVersion")

    async def DeleteAdapterAlias(
        self, request: pb.DeleteAdapterAliasRequest, context: Context
    ) -> pb.DeleteAdapterAliasResponse:
        _unbuilt("DeleteAdapterAlias")

    async def ReportReplicaState(
        self, request: pb.ReportReplicaStateRequest, context: Context
    ) -> pb.ReportReplicaStateResponse:
        _unbuilt("ReportReplicaState")

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Context) -> pb.ListReplicasResponse:
        _unbuilt("ListReplicas")


def _caller(context: Context) -> Caller:
    return caller_of(tuple(context.invocation_metadata() or ()))


def _cut(found: Sequence[T], page: Page) -> tuple[Sequence[T], bool]:
    """The page's entries, and whether there are more."""
    return found[: page.size], len(found) > page.size


def _unbuilt(rpc: str) -> NoReturn:
    raise Unimplemented(f"{rpc} is not built yet")
