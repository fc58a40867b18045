"""AdapterControlService: what this replica holds, and changing it by hand."""

import asyncio
import base64
import binascii
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from inference_service.replica_status import digests_of, replica_status, visible_name
from inference_service.stats import AdapterStats, EngineStats
from inference_service.types import EngineReady, PinOwner, PreparedAdapter, ResidentAdapter, StagedAdapter
from loraplex.inference.v1 import control_pb2 as pb
from loraplex.inference.v1 import control_pb2_grpc as pb_grpc
from shared.auth import Caller, caller_of
from shared.digest import check_digest
from shared.errors import AdapterNotFound, EngineUnavailable, InvalidArgument, SourceUnavailable
from shared.references import adapter_name, parse_reference, parse_version_name

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
MAX_OTHER_VERSIONS = 8
STATS_SECONDS = 1.0

T = TypeVar("T")

_PIN_OWNERS: dict[PinOwner, pb.LoadedAdapter.PinOwner.ValueType] = {
    "operator": pb.LoadedAdapter.PIN_OWNER_OPERATOR,
    "registry": pb.LoadedAdapter.PIN_OWNER_RESIDENCY,
}
_LEVELS = {"DISK": pb.LoadedAdapter.LEVEL_DISK, "HOST": pb.LoadedAdapter.LEVEL_HOST}


class Engine(Protocol):
    """What this servicer needs of `engine.client.EngineClient`."""

    async def load_adapter(self, digest: str, *, pinned: bool, wait: bool, prepare_seconds: float = 0.0) -> None: ...
    async def unload_adapter(self, digest: str, *, force: bool) -> None: ...
    async def list_resident(self) -> list[ResidentAdapter]: ...
    async def hello(self) -> EngineReady: ...
    async def stats(self) -> EngineStats: ...


class Adapters(Protocol):
    """What this servicer needs of `adapters.client.AdapterClient`."""

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter: ...
    async def resolve(self, reference: str) -> str: ...
    async def drop(self, digest: str) -> int: ...
    async def list_staged(self, digests: Sequence[str] = ()) -> list[StagedAdapter]: ...
    async def names(self, digests: Sequence[str]) -> dict[str, list[str]]: ...
    async def stats(self) -> AdapterStats: ...
    async def await_residency(self, seconds: float) -> None: ...


class ControlServicer(pb_grpc.AdapterControlServiceServicer):
    """Acts on one replica."""

    def __init__(self, engine: Engine, adapters: Adapters) -> None:
        self._engine = engine
        self._adapters = adapters

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:  # noqa: N802
        caller = caller_of(context)
        reference = parse_reference(request.reference, caller.namespace, "reference")
        began = time.monotonic()
        prepared = await self._adapters.prepare(reference.canonical())
        seconds = time.monotonic() - began
        await self._engine.load_adapter(
            prepared.digest, pinned=request.pinned, wait=request.wait, prepare_seconds=seconds
        )
        held = {adapter.digest: adapter for adapter in await self._held()}
        on_its_way = pb.LoadedAdapter(
            digest=prepared.digest,
            level=pb.LoadedAdapter.LEVEL_DISK,
            rank=prepared.rank,
            size_bytes=prepared.size_bytes,
        )
        adapter = held.get(prepared.digest, on_its_way)
        adapter.adapter_version = prepared.version
        return pb.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:  # noqa: N802
        caller = caller_of(context)
        digest = await self._digest(request.adapter, caller)
        names = [name for name in (await self._adapters.names([digest])).get(digest, []) if name]
        if not all(_may_operate(caller, name) for name in names):
            return pb.UnloadAdapterResponse()  # it is loaded for others, of whom the caller must not hear
        others = _others(names, request.adapter, caller)
        resident = [a for a in await self._engine.list_resident() if a.digest == digest]
        on_device = sum(a.size_bytes for a in resident)
        # Also if it is not resident: that ends its pin, and a load under way.
        await self._engine.unload_adapter(digest, force=request.force)
        in_host = await self._adapters.drop(digest)
        return pb.UnloadAdapterResponse(
            freed_bytes=on_device + in_host,
            device_bytes=on_device,
            host_bytes=in_host,
            shared_with=others,
            comes_back=any("registry" in a.pinned_by for a in resident),
        )

    async def ListLoadedAdapters(  # noqa: N802
        self, request: pb.ListLoadedAdaptersRequest, context: Any
    ) -> pb.ListLoadedAdaptersResponse:
        size, after = _page(request)
        visible = sorted(await self._visible(caller_of(context)), key=_sort_key)
        rest = [a for a in visible if _sort_key(a) > after]
        page = rest[:size]
        token = _encode_token(page[-1]) if len(rest) > size else ""
        return pb.ListLoadedAdaptersResponse(adapters=page, next_page_token=token)

    async def GetReplicaStatus(  # noqa: N802
        self, request: pb.GetReplicaStatusRequest, context: Any
    ) -> pb.GetReplicaStatusResponse:
        caller = caller_of(context)
        engine, adapters = await asyncio.gather(_if_it_runs(self._engine.stats()), _if_it_runs(self._adapters.stats()))
        ready = await _if_it_runs(self._engine.hello()) if engine else None
        digests = digests_of(engine, adapters)
        names = (await _if_it_runs(self._adapters.names(digests)) if digests else None) or {}

        def name_of(digest: str) -> str | None:
            return _name_for(caller, names.get(digest, []))

        return replica_status(engine, adapters, ready.memory if ready else None, name_of)

    async def _held(self) -> list[pb.LoadedAdapter]:
        """Every adapter on this replica, each at its fastest tier."""
        resident = await self._engine.list_resident()
        return merge(resident, await self._adapters.list_staged([adapter.digest for adapter in resident]))

    async def _digest(self, text: str, caller: Caller) -> str:
        """The digest that `text` names: a reference, which is only resolved, or `sha256:HEX` of what is here."""
        if not text.startswith("sha256:"):
            return await self._adapters.resolve(parse_reference(text, caller.namespace, "adapter").canonical())
        digest = check_digest(text, "adapter")
        if all(adapter.digest != digest for adapter in await self._visible(caller)):
            raise AdapterNotFound(f"{digest} is not on this replica", metadata={"adapter": digest})
        return digest

    async def _visible(self, caller: Caller) -> list[pb.LoadedAdapter]:
        """What the caller may hear of, under a name that it may know. Others may have the same content."""
        held = await self._held()
        names = await self._adapters.names([adapter.digest for adapter in held]) if held else {}
        found = []
        for adapter in held:
            versions = [adapter.adapter_version, *names.get(adapter.digest, [])]
            name = _name_for(caller, versions)
            if name is not None:
                adapter.adapter_version = name
                others = sorted({v for v in versions if v and v != name and _may_operate(caller, v)})
                adapter.other_versions.extend(others[:MAX_OTHER_VERSIONS])
                found.append(adapter)
        return found


def merge(resident: Iterable[ResidentAdapter], staged: Iterable[StagedAdapter]) -> list[pb.LoadedAdapter]:
    """One entry a digest: that of the fastest tier which holds it. A resident takes its version from the staged."""
    found: dict[str, pb.LoadedAdapter] = {}
    staged = list(staged)
    names = {adapter.digest: adapter.version for adapter in staged}
    held = [adapter for adapter in staged if adapter.level != "KNOWN"]
    for adapter in sorted(held, key=lambda a: a.level):  # DISK, then HOST
        found[adapter.digest] = pb.LoadedAdapter(
            adapter_version=adapter.version,
            digest=adapter.digest,
            level=_LEVELS[adapter.level],
            rank=adapter.rank,
            size_bytes=adapter.size_bytes,
        )
    for on_gpu in resident:
        found[on_gpu.digest] = pb.LoadedAdapter(
            adapter_version=names.get(on_gpu.digest, ""),
            digest=on_gpu.digest,
            level=pb.LoadedAdapter.LEVEL_GPU,
            pinned=on_gpu.pinned,
            pinned_by=[_PIN_OWNERS[owner] for owner in on_gpu.pinned_by],
            rank=on_gpu.rank,
            size_bytes=on_gpu.size_bytes,
            active_requests=on_gpu.active_requests,
        )
    return list(found.values())


async def _if_it_runs(call: Awaitable[T]) -> T | None:
    """What a process answers; None if it is down, or takes as long as if it were."""
    try:
        async with asyncio.timeout(STATS_SECONDS):
            return await call
    except (TimeoutError, EngineUnavailable, SourceUnavailable):
        return None


def _name_for(caller: Caller, names: Iterable[str]) -> str | None:
    """See `replica_status.NameOf`. Content without a name may be anybody's, so it is shown to who may see all."""
    name = visible_name(names, lambda version: _may_operate(caller, version))
    return name if name or caller.has_everywhere(["operator"]) else None


def _may_operate(caller: Caller, version: str) -> bool:
    return "operator" in caller.roles_in(parse_version_name(version, "adapter_version").namespace)


def _others(versions: Iterable[str], asked: str, caller: Caller) -> list[str]:
    """Of versions with one content, those of other adapters than the one that was asked for, if one was by its name."""
    if asked.startswith("sha256:"):
        return sorted(versions)
    named = parse_reference(asked, caller.namespace, "adapter")
    its_own = f"{adapter_name(named.namespace, named.adapter)}/"
    return sorted(version for version in versions if not version.startswith(its_own))


def _sort_key(adapter: pb.LoadedAdapter) -> tuple[str, str]:
    return adapter.adapter_version, adapter.digest


def _page(request: pb.ListLoadedAdaptersRequest) -> tuple[int, tuple[str, str]]:
    """Size of the page and the sort key after which it begins."""
    if request.page_size < 0:
        raise InvalidArgument.of("page_size", f"must be 0 or more, is {request.page_size}")
    return min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE), _decode_token(request.page_token)


def _encode_token(adapter: pb.LoadedAdapter) -> str:
    return base64.urlsafe_b64encode("\n".join(_sort_key(adapter)).encode()).decode()


def _decode_token(token: str) -> tuple[str, str]:
    if not token:
        return "", ""
    try:
        version, digest = base64.urlsafe_b64decode(token.encode()).decode().split("\n")
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument.of("page_token", "is not a token that this service gave out") from error
    return version, digest
