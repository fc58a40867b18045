"""A small registry over a real gRPC server: answers by reference, and a watch that says what it is told to."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc

from examples.stack import free_address
from inference_service.adapters.resolution import ResolvedVersion
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from shared.errors import AdapterNotFound, LoraplexError, Unimplemented
from shared.interceptors import ErrorInterceptor
from tests.inference_service.adapters.small_adapters import message_of


class FakeRegistry(registry_pb2_grpc.AdapterRegistryServiceServicer):
    def __init__(self) -> None:
        self.answers: dict[str, registry_pb2.ResolveAdapterResponse | Exception] = {}
        self.calls: Counter[str] = Counter()
        self.base_models: list[registry_pb2.RegisterBaseModelRequest] = []
        self.base_model_error: LoraplexError | None = None
        self.report_error: LoraplexError | None = None
        self.delay = 0.0
        self.raw_details: bytes | None = None  # sent with NOT_FOUND instead of any answer
        self.min_revisions: list[int] = []  # of the calls
        self.num_registered_only = 0  # of the calls
        self.revision = 0  # of the answers
        self.is_watchable = False
        self.watch_requests: list[registry_pb2.WatchAdaptersRequest] = []
        self.num_watches = 0  # open ones
        self.to_watchers: asyncio.Queue[registry_pb2.WatchAdaptersResponse | Exception] = asyncio.Queue()
        self.port = int(free_address().rpartition(":")[2])

    def add(self, reference: str, *versions: ResolvedVersion, ttl: float = 60.0, **fields: Any) -> None:
        answer = registry_pb2.ResolveAdapterResponse(version=message_of(versions[0]), adapter_uid="u", **fields)
        answer.ttl.FromNanoseconds(int(ttl * 1e9))
        if len(versions) > 1:
            answer.targets.extend({"version": message_of(version), "weight": 1.0} for version in versions)
        self.answers[reference] = answer

    async def ResolveAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802 - the RPC's name
        self.calls[request.reference] += 1
        self.num_registered_only += request.registered_only
        self.min_revisions.append(request.min_revision)
        revision = self.revision
        answer = self.answers.get(request.reference, AdapterNotFound(f"no adapter {request.reference}"))
        await asyncio.sleep(self.delay)
        assert request.base_model == "tiny"
        await self._send_raw_details(context)
        if isinstance(answer, Exception):
            raise answer
        answer.registry_revision = revision
        return answer

    async def WatchAdapters(self, request: Any, context: Any) -> Any:  # noqa: N802 - the RPC's name
        if not self.is_watchable:
            raise Unimplemented("WatchAdapters")
        self.watch_requests.append(request)
        self.num_watches += 1
        try:
            while True:
                response = await self.to_watchers.get()
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            self.num_watches -= 1

    def tell(
        self,
        revision: int,
        *changed: str,
        deleted: bool = False,
        is_complete: bool = False,
        token: str = "",
        versions: Sequence[ResolvedVersion] = (),
        deleted_version: int = 0,
    ) -> None:
        """Have the watch say that it has told everything up to `revision`, where adapters of these names changed."""
        kind = registry_pb2.AdapterChange.TYPE_DELETE if deleted else registry_pb2.AdapterChange.TYPE_UPSERT
        changes = [
            {
                "type": kind,
                "adapter": {"name": f"namespaces/default/adapters/{name}"},
                "versions": [message_of(version) for version in versions],
                "revision": revision,
                "deleted_version": deleted_version,
            }
            for name in changed
        ]
        response = registry_pb2.WatchAdaptersResponse(
            changes=changes,
            resume_token=token or str(revision),
            snapshot_complete=is_complete,
            registry_revision=revision,
        )
        self.to_watchers.put_nowait(response)

    async def RegisterBaseModel(self, request: Any, context: Any) -> Any:  # noqa: N802 - the RPC's name
        await self._send_raw_details(context)
        if self.base_model_error is not None:
            raise self.base_model_error
        self.base_models.append(request)
        return registry_pb2.RegisterBaseModelResponse(created=True)

    async def ReportReplicaState(self, request: Any, context: Any) -> Any:  # noqa: N802 - the RPC's name
        if self.report_error is not None:
            raise self.report_error
        return registry_pb2.ReportReplicaStateResponse()

    async def _send_raw_details(self, context: Any) -> None:
        if self.raw_details is not None:
            context.set_trailing_metadata((("grpc-status-details-bin", self.raw_details),))
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")

    async def start(self) -> None:
        """Listen, on the same port as before, which nobody else takes meanwhile."""
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
        registry_pb2_grpc.add_AdapterRegistryServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)
