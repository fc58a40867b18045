"""InferenceService: authorize → resolve → tokenize → engine → text."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any, Protocol

from inference_service import responses
from inference_service.answer import Admitted, Answer, Event
from inference_service.availability import Availability
from inference_service.model_header import name_adapter
from inference_service.prompts import encode_chat, prompt_ids, tokenizer_of
from inference_service.request_checks import (
    MAX_N,
    Limits,
    TextLimits,
    Violations,
    check_chat,
    check_chat_text,
    check_generate,
    check_length,
    check_round_trip,
    check_text,
    check_token_ids,
    check_vocabulary,
)
from inference_service.request_record import RequestJournal, RequestRecord
from inference_service.request_stats import StreamTimes
from inference_service.requests import generate_spec
from inference_service.served_model import ServedModel
from inference_service.texts import AdapterTexts, RequestText
from inference_service.token_rates import TokenRates
from inference_service.types import BlendPart, EngineReady, GenerateSpec, PreparedAdapter, SequenceDelta
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc as pb_grpc
from shared.auth import Caller, authorize, caller_of
from shared.blend_errors import of_part
from shared.errors import AdapterInvalid, AdapterUnloaded, InvalidArgument
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
    async def prepare_blend(self, parts: Sequence[BlendPart], choice_key: str = "") -> PreparedAdapter: ...
    async def read_texts(self, digest: str) -> Mapping[str, bytes]: ...


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Serves one base model and its adapters through one engine."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        adapters: Adapters,
        texts: AdapterTexts,
        availability: Availability,
        journal: RequestJournal,
        rates: TokenRates,
    ) -> None:
        self._journal = journal
        self._rates = rates
        self._texts = texts
        self._model = model
        self._engine = engine
        self._adapters = adapters
        self._availability = availability

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        arrival = time.monotonic()
        with self._journal.request(request, context, arrival) as record, self._availability.request() as ready:
            admitted = await self._admit(record, ready, context)
            answer = Answer(admitted, self._model, self._engine.abort)
            # Closing the iterator, for whatever reason, frees what the engine holds for this request.
            with _naming(record.adapter_name, admitted.adapter), self._count(admitted) as times:
                record.admit(admitted, answer, times)
                async with aclosing(self._engine.generate(admitted.spec)) as events:
                    async for event in events:
                        times.observe(event)
                        if isinstance(event, SequenceDelta):
                            self._rates.spend(admitted.spec.tenant, len(event.token_ids))
                        if answer.needs_reading:
                            await answer.read(event)
                        for response in answer.respond(event):
                            if record.keeps_text:
                                record.said(response)
                            yield response
                        if answer.is_complete:
                            break

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        return responses.model_info(self._model, self._availability.require_engine())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        violations = Violations()
        name_adapter(request, context, self._model.model_id)
        if request.HasField("chat"):
            check_chat(request.chat, violations)
        elif not request.HasField("text"):
            violations.add("prompt", "is missing: set text or chat")
        adapter = await self._prepare(request.adapter, "", violations, context)
        with _naming(request.adapter, adapter):
            text = await self._texts.of(adapter)
            limits = self._text_limits(self._availability.engine, text)
            special = request.add_special_tokens if request.HasField("add_special_tokens") else request.HasField("text")
            if request.HasField("text"):
                check_text(request.text, limits, violations)
                violations.check()
                ids = await tokenizer_of(text, "prompt.text").encode(request.text, special)
            else:
                check_chat_text(request.chat, limits, violations)
                violations.check()
                messages, max_bytes = request.chat.messages, limits.max_text_bytes
                ids = await encode_chat(messages, text, max_bytes=max_bytes, add_special_tokens=special)
            check_round_trip(len(ids), f"prompt.{request.WhichOneof('prompt')}", violations)
            violations.check()
            pieces = await tokenizer_of(text, "prompt").pieces(ids)
        return pb.TokenizeResponse(token_ids=ids, tokens=pieces)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        violations = Violations()
        name_adapter(request, context, self._model.model_id)
        check_round_trip(len(request.token_ids), "token_ids", violations)
        adapter = await self._prepare(request.adapter, "", violations, context)
        with _naming(request.adapter, adapter):
            words = await self._texts.of(adapter)
            check_token_ids(request.token_ids, "token_ids", words.vocab_size, violations)
            violations.check()
            tokenizer = tokenizer_of(words, "token_ids")
            text = await tokenizer.decode_any(request.token_ids, request.skip_special_tokens)
        if (nbytes := len(text.encode())) > MAX_TEXT_BYTES:
            raise InvalidArgument.of(
                "token_ids", f"stand for {nbytes} bytes; at most {MAX_TEXT_BYTES} are sent at once"
            )
        return pb.DetokenizeResponse(text=text)

    async def _admit(self, record: RequestRecord, ready: EngineReady, context: Any) -> Admitted:
        """Everything up to the engine: check, authorize, resolve and stage the adapter, tokenize."""
        request, tenant = record.request, record.tenant
        self._rates.check(tenant)
        name_adapter(request, context, self._model.model_id)
        limits, violations = Limits(ready.max_model_len, min(MAX_N, ready.max_num_seqs)), Violations()
        check_generate(request, limits, violations)
        if not request.adapter and not request.blend:
            check_vocabulary(request, self._text_limits(ready, self._texts.base), violations)
        choice_key = request.session_id or record.request_id
        adapter: PreparedAdapter | None
        if request.blend:
            adapter = await self._prepare_blend(request.blend, choice_key, violations, context)
        else:
            adapter = await self._prepare(request.adapter, choice_key, violations, context)
        prepare_seconds = time.monotonic() - record.arrival if adapter else 0.0
        with _naming(record.adapter_name, adapter):
            text = await self._texts.of(adapter)
            text_limits = self._text_limits(ready, text)
            if adapter is not None:
                check_vocabulary(request, text_limits, violations)
                violations.check()
            ids = await prompt_ids(request, text, text_limits.max_text_bytes)
        check_length(len(ids), request, limits, violations)
        violations.check()
        if adapter is not None:
            self._journal.meter.name(adapter.digest, record.adapter_name)
        self._rates.admit(tenant, len(ids))
        now, remaining = time.monotonic(), context.time_remaining()
        spec = generate_spec(
            request,
            ids,
            ready,
            engine_id=uuid.uuid4().hex,
            tenant=tenant,
            adapter=adapter,
            eos_ids=text.eos_ids,
            arrival=now,
            deadline=None if remaining is None else now + remaining,
            prepare_seconds=prepare_seconds,
        )
        clock = responses.Clock(record.arrival, prepare_seconds)
        return Admitted(record.request_id, request, spec, adapter, text, clock)

    def _count(self, admitted: Admitted) -> AbstractContextManager[StreamTimes]:
        """Counts a request from now on."""
        spec, clock = admitted.spec, admitted.clock
        return self._journal.meter.stream(
            clock.arrival,
            prepare_seconds=clock.prepare_seconds,
            submitted=spec.arrival,
            num_prompt=len(spec.prompt_ids),
        )

    async def _prepare(
        self, adapter: str, choice_key: str, violations: Violations, context: Any
    ) -> PreparedAdapter | None:
        """Authorize, then resolve and stage the adapter that a request names; None for the base model.

        Raises:
            InvalidArgument: the reference or anything in `violations` is wrong.
            AdapterNotFound: there is none, or the caller may not know of it (then nothing was looked up).
        """
        caller = caller_of(context)
        reference = _parse(adapter, caller, "adapter", violations)
        violations.check()
        if reference is None:
            return None
        authorize(caller, reference.namespace, "reader", reference.adapter)
        return await self._adapters.prepare(reference.canonical(), choice_key)

    async def _prepare_blend(
        self, parts: Sequence[pb.BlendPart], choice_key: str, violations: Violations, context: Any
    ) -> PreparedAdapter:
        """Authorize every part before any is looked up; then resolve them and stage their weighted sum.

        Raises:
            InvalidArgument: a reference or anything in `violations` is wrong.
            AdapterNotFound: there is none of a part, or the caller may not know of it.
        """
        caller = caller_of(context)
        fields = [f"blend[{position}].reference" for position in range(len(parts))]
        references = [_parse(p.reference, caller, field, violations) for p, field in zip(parts, fields, strict=True)]
        violations.check()
        named = [reference for reference in references if reference is not None]
        for position, reference in enumerate(named):
            with of_part(f"blend[{position}]"):
                authorize(caller, reference.namespace, "reader", reference.adapter)
        weighted = [BlendPart(r.canonical(), part.weight) for r, part in zip(named, parts, strict=True)]
        return await self._adapters.prepare_blend(weighted, choice_key)

    def _text_limits(self, ready: EngineReady | None, text: RequestText) -> TextLimits:
        """Without an engine, those of the model: tokenizing needs no more."""
        max_model_len = ready.max_model_len if ready else self._model.config.max_position
        return TextLimits(
            vocab_size=text.vocab_size,
            max_model_len=max_model_len,
            has_tokenizer=text.tokenizer is not None,
            has_chat_template=text.template is not None,
            max_text_bytes=max_model_len * text.tokenizer.longest_token if text.tokenizer else 0,
        )


@contextmanager
def _naming(asked: str, adapter: PreparedAdapter | None) -> Iterator[None]:
    """An adapter that ends a request is named, as it was asked for and as it was resolved: the engine, and the
    processes that hold its text, know only digests."""
    try:
        yield
    except (AdapterInvalid, AdapterUnloaded) as error:
        if adapter is None:
            raise
        named = {"digest": adapter.digest} | ({"adapter_version": adapter.version} if adapter.version else {})
        raise type(error)(f"{asked}: {error.message}", metadata=error.metadata | named) from error


def _parse(text: str, caller: Caller, field: str, violations: Violations) -> Reference | None:
    """The adapter that a request names, or None for the base model. What is wrong with it goes to `violations`."""
    if not text:
        return None
    try:
        return parse_reference(text, caller.namespace, field)
    except InvalidArgument as error:
        violations.include(error)
        return None
