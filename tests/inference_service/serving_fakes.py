"""Twenty-line stand-ins for the engine and adapter clients, a byte tokenizer, and a model to serve with them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

import grpc
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from inference_service import server
from inference_service.chat_template import ChatTemplate
from inference_service.served_model import ServedModel
from inference_service.stats import AdapterStats, EngineStats
from inference_service.tokenizer import Tokenizer
from inference_service.types import (
    BlendedPart,
    BlendPart,
    EngineReady,
    GenerateSpec,
    PreparedAdapter,
    PromptLogprobs,
    ResidentAdapter,
    SequenceDelta,
    StagedAdapter,
    Started,
    TokenLogprobs,
)
from shared.base_model import parse_config
from shared.errors import AdapterNotFound, EngineUnavailable

EOS = 256
VOCAB = 260
DIGEST = "sha256:" + "ab" * 32
BLEND = "sha256:" + "bb" * 32
READY = EngineReady(128, 8, 40, 16, 1 << 20, "cpu", "float32")
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
SERVICE = "loraplex.inference.v1.InferenceService"


def byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Token id = byte; 256 is <eos> and 257 <bos>, both special."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>"), AddedToken("<bos>")])
    return Tokenizer(backend)


def raw_config(**changes: object) -> dict[str, object]:
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "eos_token_id": EOS,
    }  # fmt: skip
    return {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", **sizes, **changes}


def byte_model(*, with_tokenizer: bool = True, template: str | None = CHAT) -> ServedModel:
    chat = ChatTemplate(template, {}) if template is not None and with_tokenizer else None
    tokenizer = byte_tokenizer() if with_tokenizer else None
    return ServedModel("tiny", parse_config(raw_config()), "sha256:" + "00" * 32, tokenizer, chat)


Script = Callable[[GenerateSpec], Iterable[SequenceDelta]]


def saying(text: str, *, size: int = 1, end: str = "eos", index: int = 0) -> Script:
    """A script of `text` in deltas of `size` tokens, then EOS, `length` or nothing."""

    def script(spec: GenerateSpec) -> Iterable[SequenceDelta]:
        ids = list(text.encode())
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            logprobs = [TokenLogprobs(i, -0.5, ((i, -0.5),)) for i in part] if spec.logprobs is not None else None
            yield SequenceDelta(spec.request_id, index, part, logprobs)
        if end == "eos":
            yield SequenceDelta(spec.request_id, index, [EOS], None, "stop")
        elif end == "length":
            yield SequenceDelta(spec.request_id, index, [], None, "length")

    return script


class FakeEngine:
    """`engine.client.EngineClient` that says what its script says."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or saying("hello")
        self.specs: list[GenerateSpec] = []
        self.prepare_seconds: list[float] = []  # of loads
        self.aborted: list[tuple[str, int | None]] = []
        self.num_open = 0
        self.closed = asyncio.Event()
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_up = True
        self.up = asyncio.Event()
        self.up.set()
        self.down = asyncio.Event()
        self.resident: list[ResidentAdapter] = []
        self.said: EngineStats | None = None
        self.calls: list[tuple[object, ...]] = []

    async def hello(self) -> EngineReady:
        await self.up.wait()
        return READY

    async def wait_down(self) -> None:
        await self.down.wait()

    def die(self) -> None:
        self.up.clear()
        self.down.set()
        self.error = EngineUnavailable("the engine is restarting", retry_after=1.0)
        self.gate.set()

    def engine_down(self) -> None:
        self.die()

    async def generate(self, spec: GenerateSpec) -> AsyncIterator[Started | PromptLogprobs | SequenceDelta]:
        self.specs.append(spec)
        self.num_open += 1
        try:
            yield Started(spec.request_id, 3, 0.25, 0.5)
            if spec.prompt_logprobs is not None:
                yield PromptLogprobs(spec.request_id, [TokenLogprobs(7, -1.0, ((8, -0.5),))])
            for delta in self.script(spec):
                await self.gate.wait()
                if self.error is not None:
                    raise self.error
                await asyncio.sleep(0)
                yield delta
            if self.error is None and spec.stop.max_tokens != 0:
                await self.down.wait()
                raise self.error or EngineUnavailable("no engine")
        finally:
            self.num_open -= 1
            self.closed.set()

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    async def load_adapter(self, digest: str, *, pinned: bool, wait: bool, prepare_seconds: float = 0.0) -> None:
        self.calls.append(("load", digest, pinned, wait))
        self.prepare_seconds.append(prepare_seconds)
        if wait:
            self.resident.append(ResidentAdapter(digest, 4096, 8, ("operator",) if pinned else (), 2))

    async def unload_adapter(self, digest: str, *, force: bool) -> None:
        self.calls.append(("unload", digest, force))
        self.resident = [a for a in self.resident if a.digest != digest]

    async def list_resident(self) -> list[ResidentAdapter]:
        return self.resident

    async def stats(self) -> EngineStats:
        if self.said is None:
            raise EngineUnavailable("the engine is not ready", retry_after=1.0)
        return self.said


class FakeAdapters:
    """`adapters.client.AdapterClient` that knows `default/pirate`, version 2."""

    def __init__(self) -> None:
        self.prepared: list[tuple[str, str]] = []
        self.dropped: list[str] = []
        self.blended: list[tuple[tuple[BlendPart, ...], str]] = []
        self.texts: dict[str, dict[str, bytes]] = {}
        self.num_texts_read = 0
        self.others: dict[str, PreparedAdapter] = {}  # by canonical reference
        self.resolved: dict[str, str] = {}
        self.said: AdapterStats | None = None
        self.staged = [StagedAdapter("namespaces/default/adapters/pirate/versions/2", DIGEST, "DISK", 8, 5000)]

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter:
        self.prepared.append((reference, choice_key))
        if reference in self.others:
            return self.others[reference]
        if reference.split("@")[0] != "default/pirate":
            raise AdapterNotFound(f"no adapter {reference}", metadata={"adapter": reference})
        return PreparedAdapter("namespaces/default/adapters/pirate/versions/2", DIGEST, 8, 5000)

    async def prepare_blend(self, parts: Sequence[BlendPart], choice_key: str = "") -> PreparedAdapter:
        self.blended.append((tuple(parts), choice_key))
        told = [await self.prepare(part.reference, choice_key) for part in parts]
        blended = tuple(BlendedPart(a.version, a.digest, p.weight) for a, p in zip(told, parts, strict=True))
        return PreparedAdapter("", BLEND, sum(a.rank for a in told), 9000, parts=blended)

    async def read_texts(self, digest: str) -> Mapping[str, bytes]:
        self.num_texts_read += 1
        return self.texts[digest]

    async def resolve(self, reference: str) -> str:
        if reference not in ("default/pirate", "default/pirate@2", f"default/pirate@{DIGEST}"):
            raise AdapterNotFound(f"no adapter {reference}", metadata={"adapter": reference})
        return DIGEST

    async def drop(self, digest: str) -> int:
        self.dropped.append(digest)
        freed = sum(a.size_bytes for a in self.staged if a.digest == digest and a.level == "HOST")
        self.staged = [a for a in self.staged if not (a.digest == digest and a.level == "HOST")]
        return freed

    async def list_staged(self, digests: Sequence[str] = ()) -> list[StagedAdapter]:
        held = {adapter.digest for adapter in self.staged}
        names = [StagedAdapter(self.resolved.get(d, ""), d, "KNOWN", 0, 0) for d in digests if d not in held]
        return [*self.staged, *names]

    async def names(self, digests: Sequence[str]) -> dict[str, list[str]]:
        return {digest: [self.resolved[digest]] if digest in self.resolved else [] for digest in digests}

    async def stats(self) -> AdapterStats:
        if self.said is None:
            await asyncio.Event().wait()  # as long as it restarts
        assert self.said is not None
        return self.said


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine, adapters: FakeAdapters | None = None, model: ServedModel | None = None
) -> AsyncIterator[tuple[server.ApiServer, grpc.aio.Channel]]:
    """A real server on a free port, and a channel to it."""
    api = await server.start("127.0.0.1:0", model or byte_model(), engine, adapters or FakeAdapters())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        try:
            yield api, channel
        finally:
            await api.stop(0.0)
