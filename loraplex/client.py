"""The Python client of both services.

async with Client("localhost:50052") as client:
    async for event in client.generate("Tell me a joke.", adapter="pirate"):
        print(event.delta.text, end="")
"""

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import grpc

from loraplex.inference.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from shared.channel import NOBODY, ClientIdentity, open_channel
from shared.errors import InvalidArgument, LoraplexError, WatchTooSlow
from shared.status import from_rpc_error
from shared.targets import is_target

Response = TypeVar("Response")
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Page(Protocol):
    """What every answer of a List RPC has."""

    @property
    def next_page_token(self) -> str: ...


AnyPage = TypeVar("AnyPage", bound=Page)

INFERENCE_SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
REGISTRY_SERVICE: str = registry_pb2.DESCRIPTOR.services_by_name["AdapterRegistryService"].full_name

_MAX_MESSAGE_BYTES = 16 << 20
_PAGE_SIZE = 200
_LONGEST_DELAY = 5.0  # seconds between attempts to resume a watch
_FIRST_RECONNECT_MS, _LONGEST_RECONNECT_MS = 200, 5_000  # gRPC's own are 1 s and 2 minutes
_PING_MS, _PING_TIMEOUT_MS = 30_000, 10_000  # while calls run: a server whose machine is gone closes no connection


class Client:
    """Speaks to one inference service, one registry, or both.

    `registry`, `inference` and `control` are the generated stubs, for every RPC of the contract. Their failures are
    `grpc.aio.AioRpcError`; `call` and `generate` raise `LoraplexError` with the reason instead.

    Args:
        inference: Where inference services are, for `inference`, `control` and `generate`: "host:port" or another of
            gRPC's targets (`check_address`). Calls go in turn to all addresses that are SERVING.
        registry: Where registries are, for `registry`.
        identity: The bearer token or certificate to show both, and the CA to trust; by default nothing, and no TLS.

    Raises:
        InvalidArgument: an address is no target, or a file of `identity` cannot be used.
    """

    def __init__(
        self,
        inference: str = "localhost:50052",
        registry: str = "localhost:50051",
        identity: ClientIdentity = NOBODY,
    ) -> None:
        check_address(inference, "inference")
        check_address(registry, "registry")
        self._inference_channel = _channel(inference, INFERENCE_SERVICE, identity)
        self._registry_channel = _channel(registry, REGISTRY_SERVICE, identity)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self._inference_channel)
        self.control = control_pb2_grpc.AdapterControlServiceStub(self._inference_channel)
        self.registry = registry_pb2_grpc.AdapterRegistryServiceStub(self._registry_channel)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes both channels; running streams end."""
        await self._inference_channel.close(None)
        await self._registry_channel.close(None)

    async def call(self, rpc: Awaitable[Response]) -> Response:
        """The answer of a unary RPC: `await client.call(client.registry.GetAdapter(request))`.

        Raises:
            LoraplexError: the RPC failed; `reason`, `message` and `metadata` say why.
        """
        try:
            return await rpc
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def pages(self, rpc: Callable[[Any], Awaitable[AnyPage]], request: Any) -> AsyncIterator[AnyPage]:
        """Every page of a List RPC: `async for page in client.pages(client.registry.ListAdapters, request)`.

        Raises:
            LoraplexError: the RPC failed; `reason`, `message` and `metadata` say why.
        """
        request = copy.deepcopy(request)
        request.page_size = request.page_size or _PAGE_SIZE
        while True:
            page = await self.call(rpc(request))
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def watch_adapters(
        self, namespace: str = "-", *, base_model: str = "", resume_token: str = "", skip_snapshot: bool = False
    ) -> AsyncGenerator[registry_pb2.WatchAdaptersResponse, None]:
        """What a WatchAdapters stream says, without end: a broken one is resumed where it broke off.

        Args:
            namespace: `-` for all.
            base_model: Id; only adapters for this one.
            resume_token: Of the last response of an earlier watch.
            skip_snapshot: Only what changes from now on.

        Raises:
            LoraplexError: the registry refuses; WatchCompacted: begin anew, without a resume_token.
        """
        request = registry_pb2.WatchAdaptersRequest(
            parent=f"namespaces/{namespace}",
            base_model=base_model,
            resume_token=resume_token,
            skip_snapshot=skip_snapshot,
        )
        delay = 0.0
        while True:
            call = self.registry.WatchAdapters(request, wait_for_ready=bool(request.resume_token))
            try:
                async for response in call:
                    yield response
                    request.resume_token = response.resume_token or request.resume_token
                    delay = 0.0
            except grpc.aio.AioRpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                is_passing = error.code == "UNAVAILABLE" or isinstance(error, WatchTooSlow)
                if not is_passing or not request.resume_token:
                    raise error from None
            finally:
                call.cancel()
            await asyncio.sleep(delay)
            delay = min(2 * delay + 0.05, _LONGEST_DELAY)

    async def generate(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        blend: Sequence[Mapping[str, Any]] = (),
        timeout: float | None = None,  # noqa: ASYNC109 - the RPC's deadline, which the server honours too
        stop: Mapping[str, Any] | None = None,
        output: Mapping[str, Any] | None = None,
        request: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the events of one request.

        Args:
            prompt: Text, token ids, or chat messages `{"role": …, "content": …}`.
            adapter: Reference such as `pirate`, `team/pirate@prod`; empty for the base model.
            blend: Several instead of `adapter`: `{"reference": "pirate", "weight": 0.7}` for each.
            timeout: Seconds until the request is given up.
            stop, output, request: Fields of the messages Stop, Output and GenerateRequest.
            **sampling: Fields of the message Sampling, such as `temperature=0`.

        Raises:
            LoraplexError: the request failed; `reason`, `message` and `metadata` say why.
            TypeError: an argument is no field of its message; says where it belongs.
        """
        for argument, given in (("", sampling), ("stop", stop), ("output", output), ("request", request)):
            _check_fields(argument, given or {})
        named = {"adapter": adapter, "blend": [*blend], "sampling": sampling, "stop": stop, "output": output}
        message = inference_pb2.GenerateRequest(**{**_prompt_field(prompt), **named, **(request or {})})
        call = self.inference.Generate(message, timeout=timeout)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()


def check_address(text: str, field: str) -> str:
    """`text` if it says where servers are (`shared.targets`).

    Raises:
        InvalidArgument: naming `field`.
    """
    if (expected := is_target(text)) is not None:
        raise InvalidArgument.of(field, f"{text!r:.200} is not {expected}")
    return text


def _channel(address: str, service: str, identity: ClientIdentity) -> grpc.aio.Channel:
    """A channel that balances over all addresses of a name, and only over those where `service` is SERVING."""
    balancing = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": service}}
    return open_channel(
        address,
        identity,
        options=[
            ("grpc.service_config", json.dumps(balancing)),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _LONGEST_RECONNECT_MS),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),  # a proxy may acknowledge for who is gone
        ],
    )


_FIELDS = {
    "": inference_pb2.Sampling.DESCRIPTOR.fields_by_name,
    "stop": inference_pb2.Stop.DESCRIPTOR.fields_by_name,
    "output": inference_pb2.Output.DESCRIPTOR.fields_by_name,
    "request": inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name,
}


def _check_fields(argument: str, given: Mapping[str, Any]) -> None:
    """Raises TypeError unless `given` are fields of the message that `argument` of `generate` stands for."""
    for name in given:
        if name in _FIELDS[argument]:
            continue
        whose = f"in {argument}=" if argument else "as a keyword"
        places = [f"{other}={{{name!r}: …}}" if other else f"{name}=…" for other in _FIELDS if name in _FIELDS[other]]
        advice = f"give {places[0]}" if places else f"there are {', '.join(_FIELDS[argument])}"
        raise TypeError(f"generate() takes no {name!r} {whose}: {advice}")


def _prompt_field(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if prompt and isinstance(prompt[0], Mapping):
        return {"chat": {"messages": list(prompt)}}
    return {"token_ids": {"ids": list(prompt)}}


__all__ = ["Client", "ClientIdentity", "LoraplexError"]
