"""What the engine says, as messages of the public contract."""

from collections.abc import Iterable
from dataclasses import dataclass

from inference_service.output import Finish, OutputSequence, Piece
from inference_service.served_model import ServedModel
from inference_service.types import EngineReady, PreparedAdapter, Started, TokenLogprobs
from loraplex.inference.v1 import inference_pb2 as pb
from shared.references import base_model_name

_REASONS = {"stop": pb.Finished.FINISH_REASON_STOP, "length": pb.Finished.FINISH_REASON_LENGTH}


@dataclass(frozen=True)
class Clock:
    """When a request came and how long its adapter took to prepare, in seconds of the monotonic clock."""

    arrival: float
    prepare_seconds: float


def started(
    request_id: str, model: ServedModel, adapter: PreparedAdapter | None, prompt_tokens: int, event: Started
) -> pb.GenerateResponse:
    """The first message of a stream: what will answer."""
    message = pb.Started(
        request_id=request_id,
        base_model=base_model_name(model.model_id),
        adapter_version=adapter.version if adapter else "",
        adapter_digest=adapter.digest if adapter else "",
        prompt_tokens=prompt_tokens,
        cached_tokens=event.cached_tokens,
        blend=[
            pb.BlendedAdapter(adapter_version=part.version, adapter_digest=part.digest, weight=part.weight)
            for part in (adapter.parts if adapter else ())
        ],
    )
    return pb.GenerateResponse(started=message)


def prompt_logprobs(tokens: Iterable[TokenLogprobs]) -> pb.GenerateResponse:
    """Logprobs of the prompt."""
    return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(tokens=map(_token_logprob, tokens)))


def delta(index: int, piece: Piece, *, with_token_ids: bool) -> pb.GenerateResponse | None:
    """More of a sequence; None if the reader would get nothing."""
    token_ids = piece.token_ids if with_token_ids else []
    if not (piece.text or token_ids or piece.logprobs):
        return None
    logprobs = map(_token_logprob, piece.logprobs)
    return pb.GenerateResponse(delta=pb.Delta(index=index, text=piece.text, token_ids=token_ids, logprobs=logprobs))


def finished(
    index: int, finish: Finish, sequence: OutputSequence, prompt_tokens: int, event: Started, clock: Clock, now: float
) -> pb.GenerateResponse:
    """The end of a sequence, with what it used and where the time went."""
    first = sequence.first_token_time
    message = pb.Finished(
        index=index,
        finish_reason=_REASONS[finish.reason],
        usage=pb.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sequence.num_tokens,
            cached_tokens=event.cached_tokens,
        ),
        timings=pb.Timings(
            queue_seconds=event.queue_seconds,
            adapter_seconds=event.adapter_seconds + clock.prepare_seconds,
            first_token_seconds=0.0 if first is None else first - clock.arrival,
            total_seconds=now - clock.arrival,
        ),
    )
    if finish.stop_string is not None:
        message.stop_string = finish.stop_string
    elif finish.stop_token is not None:
        message.stop_token_id = finish.stop_token
    return pb.GenerateResponse(finished=message)


def model_info(model: ServedModel, ready: EngineReady) -> pb.GetModelInfoResponse:
    """What this replica serves."""
    return pb.GetModelInfoResponse(
        base_model=base_model_name(model.model_id),
        architecture=model.config.architecture,
        fingerprint=model.fingerprint,
        max_model_len=ready.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        device=ready.device,
        dtype=ready.dtype,
        has_chat_template=model.chat_template is not None,
        adapter_memory_bytes=ready.arena_bytes,
        max_num_seqs=ready.max_num_seqs,
        has_tokenizer=model.tokenizer is not None,
        kv_cache_tokens=ready.num_blocks * ready.block_size,
    )


def _token_logprob(entry: TokenLogprobs) -> pb.TokenLogprob:
    top = [pb.TokenLogprob.Alternative(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)
