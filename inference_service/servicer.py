"""InferenceService: authorize → resolve → tokenize → engine → text."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from inference_service import responses
from inference_service.answer import Admitted, Answer, Event
from inference_service.availability import Availability
from inference_service.prompts import encode_chat, encode_text, prompt_ids, tokenizer_of
from inference_service.request_checks import (
    MAX_N,
    MAX_ROUND_TRIP_TOKENS,
    Limits,
    Violations,
    check_chat,
    check_generate,
    check_length,
    check_round_trip,
    check_text,
    check_token_ids,
)
from inference_service.requests import generate_spec
from inference_service.served_model import ServedModel
from inference_service.types import EngineReady, GenerateSpec, PreparedAdapter
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc as pb_grpc
from shared.auth import Caller, authorize, caller_of
from shared.errors import AdapterUnloaded, InvalidArgument
from shared.grpc_server import MAX_MESSAGE_BYTES
from shared.references import Reference, parse_reference

MAX_TEXT_BYTES = MAX_MESSAGE_BYTES - 1024  # the rest of a message around it


class Engine(Protocol):
    """What Generate needs of `engine.client.EngineClient`."""

    def generate(self, spec: GenerateSpec) -> AsyncGenerator[Event, None]: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...


class Adapters(Protocol):
    """What Generate needs of `adapters.client.AdapterClient`."""

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter: ...


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Serves one base model and its adapters through one engine."""

    def __init__(self, model: ServedModel, engine: Engine, adapters: Adapters, availability: Availability) -> None:
        self._model = model
        self._engine = engine
        self._adapters = adapters
        self._availability = availability

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        arrival = time.monotonic()
        with self._availability.request() as ready:
            admitted = await self._admit(request, ready, arrival, context)
            answer = Answer(admitted, self._model, self._engine.abort)
            # Closing the iterator, for whatever reason, frees what the engine holds for this request.
            with _naming(admitted.adapter):
                async with aclosing(self._engine.generate(admitted.spec)) as events:
                    async for event in events:
                        for response in answer.respond(event):
                            yield response
                        if answer.is_complete:
                            break

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        return responses.model_info(self._model, self._availability.require_engine())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        limits, violations = self._limits(self._availability.engine), Violations()
        if request.HasField("chat"):
            check_chat(request.chat, limits, violations)
        elif request.HasField("text"):
            check_text(request.text, limits, violations)
        else:
            violations.add("prompt", "is missing: set text or chat")
        adapter = await self._prepare(request.adapter, "", violations, context)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else request.HasField("text")
        if request.HasField("text"):
            ids = await encode_text(request.text, self._model, adapter, add_special_tokens=special)
        else:
            ids = await encode_chat(
                request.chat.messages,
                self._model,
                adapter,
                max_bytes=limits.max_text_bytes,
                add_special_tokens=special,
            )
        check_round_trip(len(ids), f"prompt.{request.WhichOneof('prompt')}", violations)
        violations.check()
        pieces = await tokenizer_of(self._model, adapter, "prompt").pieces(ids)
        return pb.TokenizeResponse(token_ids=ids, tokens=pieces)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        violations = Violations()
        check_round_trip(len(request.token_ids), "token_ids", violations)
        ids = request.token_ids[:MAX_ROUND_TRIP_TOKENS]
        check_token_ids(ids, "token_ids", self._model.config.vocab_size, violations)
        adapter = await self._prepare(request.adapter, "", violations, context)
        text = await tokenizer_of(self._model, adapter, "token_ids").decode_any(ids, request.skip_special_tokens)
        if (nbytes := len(text.encode())) > MAX_TEXT_BYTES:
            raise InvalidArgument.of(
                "token_ids", f"stand for {nbytes} bytes; at most {MAX_TEXT_BYTES} are sent at once"
            )
        return pb.DetokenizeResponse(text=text)

    async def _admit(self, request: pb.GenerateRequest, ready: EngineReady, arrival: float, context: Any) -> Admitted:
        """Everything up to the engine: check, authorize, resolve and stage the adapter, tokenize."""
        limits, violations = self._limits(ready), Violations()
        check_generate(request, limits, violations)
        request_id = request.request_id or uuid.uuid4().hex
        adapter = await self._prepare(request.adapter, request.session_id or request_id, violations, context)
        prepare_seconds = time.monotonic() - arrival if adapter else 0.0
        ids = await prompt_ids(request, self._model, adapter, limits.max_text_bytes)
        check_length(len(ids), request, limits, violations)
        violations.check()
        now, remaining = time.monotonic(), context.time_remaining()
        spec = generate_spec(
            request,
            ids,
            ready,
            engine_id=uuid.uuid4().hex,
            tenant=caller_of(context.invocation_metadata()).namespace,
            adapter_digest=adapter.digest if adapter else None,
            arrival=now,
            deadline=None if remaining is None else now + remaining,
        )
        return Admitted(request_id, request, spec, adapter, responses.Clock(arrival, prepare_seconds))

    async def _prepare(
        self, adapter: str, choice_key: str, violations: Violations, context: Any
    ) -> PreparedAdapter | None:
        """Authorize, then resolve and stage the adapter that a request names; None for the base model.

        Raises:
            InvalidArgument: the reference or anything in `violations` is wrong.
            AdapterNotFound: there is none, or the caller may not know of it (then nothing was looked up).
        """
        caller = caller_of(context.invocation_metadata())
        reference = _parse_adapter(adapter, caller, violations)
        violations.check()
        authorize(caller, reference.namespace if reference else caller.namespace, "reader")
        if reference is None:
            return None
        return await self._adapters.prepare(reference.canonical(), choice_key)

    def _limits(self, ready: EngineReady | None) -> Limits:
        """Without an engine, those of the model: tokenizing needs no more."""
        max_model_len = ready.max_model_len if ready else self._model.config.max_position
        tokenizer = self._model.tokenizer
        return Limits(
            vocab_size=self._model.config.vocab_size,
            max_model_len=max_model_len,
            max_n=min(MAX_N, ready.max_num_seqs) if ready else MAX_N,
            has_tokenizer=self._model.has_tokenizer,
            has_chat_template=self._model.has_chat_template,
            max_text_bytes=max_model_len * tokenizer.longest_token if tokenizer else 0,
        )


@contextmanager
def _naming(adapter: PreparedAdapter | None) -> Iterator[None]:
    """An adapter that is unloaded under a request is named; the engine knows only digests."""
    try:
        yield
    except AdapterUnloaded as error:
        if adapter is not None:
            error.metadata |= {"adapter_version": adapter.version, "digest": adapter.digest}
        raise


def _parse_adapter(text: str, caller: Caller, violations: Violations) -> Reference | None:
    """The adapter that a request names, or None for the base model. What is wrong with it goes to `violations`."""
    if not text:
        return None
    try:
        return parse_reference(text, caller.namespace, "adapter")
    except InvalidArgument as error:
        violations.include(error)
        return None
