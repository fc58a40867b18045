"""Adapters' tokenizers and templates in real workers: what they give, and how they are ended."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from inference_service.adapter_text.loaded import BaseText, LoadedText
from inference_service.adapter_text.messages import Compile, Continue, Request, StreamState, StreamTokens, cpu_seconds
from inference_service.adapter_text.process import WorkerProcess
from inference_service.served_model import ServedModel
from inference_service.texts import AdapterTexts
from inference_service.types import PreparedAdapter
from shared.errors import AdapterInvalid, InvalidArgument
from tests.inference_service.adapter_text.bases import (
    ENDLESS,
    GREEDY,
    SHOUT,
    VOCAB,
    changed,
    entries,
    with_added,
    write_base,
)
from tests.inference_service.serving_fakes import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = AddedToken("<tool>", special=False)


class Adapters:
    """Adapters by digest: their files, and texts that read them from here."""

    def __init__(self, model: ServedModel) -> None:
        self.files: dict[str, Mapping[str, bytes]] = {}
        self.num_reads = 0
        self.texts = AdapterTexts(model, self._read)

    async def _read(self, digest: str) -> Mapping[str, bytes]:
        self.num_reads += 1
        return self.files[digest]

    def add(self, digest: str, files: Mapping[str, bytes | str], extra_vocab: int = 0) -> PreparedAdapter:
        content = {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}
        self.files[digest] = content
        return PreparedAdapter(f"v/{digest}", digest, 8, 100, texts=entries(content), extra_vocab=extra_vocab)


@pytest.fixture
async def adapters(tmp_path: Path) -> AsyncIterator[Adapters]:
    adapters = Adapters(write_base(tmp_path / "base"))
    yield adapters
    await adapters.texts.close()


async def test_an_adapter_that_brings_only_a_template_keeps_the_base_models_tokenizer(adapters: Adapters) -> None:
    text = await adapters.texts.of(adapters.add("a", {"chat_template.jinja": SHOUT}))
    assert text.tokenizer is adapters.texts.base.tokenizer
    assert text.template is not None
    # The special tokens are the base model's: the adapter has no tokenizer_config.json.
    assert await text.template.prompt(MESSAGES, 1000) == "[USER] hi\n<eos>"
    with pytest.raises(InvalidArgument, match=r"has 15 bytes; no text of more than 9 fits"):
        await text.template.prompt(MESSAGES, 9)


async def test_a_template_in_tokenizer_config_comes_with_its_special_tokens(adapters: Adapters) -> None:
    config = json.dumps({"chat_template": SHOUT, "eos_token": {"content": "<end>"}})
    text = await adapters.texts.of(adapters.add("a", {"tokenizer_config.json": config}))
    assert text.template is not None
    assert await text.template.prompt(MESSAGES, 1000) == "[USER] hi\n<end>"


END = with_added(AddedToken("<end>", special=True))  # 258


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"tokenizer.json": END, "tokenizer_config.json": '{"eos_token": "<end>"}'}, (258,)),
        ({"tokenizer.json": END, "tokenizer_config.json": '{"eos_token": {"content": "<end>", "id": 1}}'}, (258,)),
        ({"tokenizer.json": END, "special_tokens_map.json": '{"eos_token": {"content": "<end>"}}'}, (258,)),
        ({"tokenizer_config.json": '{"eos_token": "<bos>"}'}, (257,)),  # of the base model's tokenizer
        ({"tokenizer.json": END, "tokenizer_config.json": '{"eos_token": "<eos>"}'}, ()),  # the base model's
        ({"tokenizer_config.json": '{"eos_token": "<end>"}'}, ()),  # unknown
        ({"tokenizer_config.json": '{"eos_token": "\\ud800"}'}, ()),
        ({"tokenizer.json": END, "tokenizer_config.json": '{"eos_token": null, "eos_token_id": 258}'}, ()),
        ({"tokenizer.json": END, "tokenizer_config.json": '{"eos_token": ["<end>"]}'}, ()),
        ({"tokenizer.json": END}, ()),
    ],
)  # fmt: skip
def test_the_eos_token_is_looked_up_in_its_tokenizer(files: dict[str, bytes | str], eos_ids: tuple[int, ...]) -> None:
    content = {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}
    base = BaseText(byte_tokenizer().backend.get_vocab(), None, None, "<eos>")
    assert LoadedText(content, base, VOCAB).facts().eos_ids == eos_ids
    if "tokenizer.json" not in files:  # a base model's tokenizer may name more ids than the model has
        assert LoadedText(content, base, 257).facts().eos_ids == ()


async def test_what_equals_the_base_models_is_the_base_models(adapters: Adapters, tmp_path: Path) -> None:
    base = adapters.texts.base
    files = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    text = await adapters.texts.of(adapters.add("same files", files))
    assert (text, adapters.num_reads) == (base, 0)
    # Trainers save the tokenizer with what they set of padding and truncation.
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padded = changed(files["tokenizer.json"], truncation=truncation)
    template = json.loads(files["tokenizer_config.json"])["chat_template"]
    config = json.dumps({"eos_token": "<eos>", "model_max_length": 3})
    same = {"tokenizer.json": padded, "chat_template.jinja": template, "tokenizer_config.json": config}
    assert await adapters.texts.of(adapters.add("same meaning", same)) == base
    assert adapters.num_reads == 1
    assert await adapters.texts.of(adapters.add("none", {})) == base


async def test_added_tokens_encode_decode_and_stream(adapters: Adapters) -> None:
    data = with_added(TOOL, AddedToken("<end>", special=True))
    text = await adapters.texts.of(adapters.add("a", {"tokenizer.json": data}))
    tokenizer = text.tokenizer
    assert tokenizer is not None
    assert text.template is adapters.texts.base.template
    ids = await tokenizer.encode("hé<tool>!<end>")
    assert ids == [*"hé".encode(), 258, ord("!"), 259]
    assert await adapters.texts.base.tokenizer.encode("<tool>") == list(b"<tool>")  # type: ignore[union-attr]
    assert await tokenizer.decode_any(ids, skip_special_tokens=True) == "hé<tool>!"
    assert await tokenizer.decode_any(ids, skip_special_tokens=False) == "hé<tool>!<end>"
    assert await tokenizer.pieces([258, 104, 258, 0xC3]) == ["<tool>", "h", "<tool>", "\ufffd"]
    stream = tokenizer.detokenizer()
    await stream.read(ids[:2], is_last=False)  # type: ignore[attr-defined]
    assert [stream.feed(i) for i in ids[:2]] == ["h", ""]  # half a character is held back
    await stream.read(ids[2:], is_last=True)  # type: ignore[attr-defined]
    assert [stream.feed(i) for i in ids[2:]] == ["é", "<tool>", "!", ""]
    assert stream.flush() == ""


async def test_a_stream_that_ends_in_half_a_character_shows_it(adapters: Adapters) -> None:
    text = await adapters.texts.of(adapters.add("a", {"tokenizer.json": with_added(TOOL)}))
    stream = text.tokenizer.detokenizer()  # type: ignore[union-attr]
    await stream.read([104, 0xC3], is_last=True)  # type: ignore[attr-defined]
    assert [stream.feed(104), stream.feed(0xC3), stream.flush()] == ["h", "", "\ufffd"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 259), max_size=30), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_streamed_text_is_the_decoded_text(ids: list[int], sizes: list[int]) -> None:
    data = with_added(TOOL, AddedToken("<end>", special=True))
    text = LoadedText({"tokenizer.json": data}, BaseText({}, None, None, None), 260)
    state, pieces, at, turn = StreamState(), "", 0, 0
    while True:
        part = ids[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(part), turn + 1
        told = text.advance(StreamTokens(state, part, is_last=at == len(ids)))
        state, pieces = told.state, pieces + "".join(told.texts) + told.rest
        assert len(told.texts) == len(part)
        if at == len(ids):
            break
    assert pieces == Tokenizer.from_buffer(data).decode(ids)


@pytest.mark.parametrize(
    ("template", "word"), [(ENDLESS, "render"), (GREEDY, "render")], ids=["endless loop", "gigabytes"]
)
async def test_a_hostile_template_ends_its_worker_and_keeps_nobody_waiting(
    adapters: Adapters, template: str, word: str
) -> None:
    hostile = await adapters.texts.of(adapters.add("hostile", {"chat_template.jinja": template}))
    good = await adapters.texts.of(adapters.add("good", {"chat_template.jinja": SHOUT}))
    assert hostile.template is not None
    assert good.template is not None
    running = asyncio.create_task(hostile.template.prompt(MESSAGES, 1000))
    again = asyncio.create_task(hostile.template.prompt(MESSAGES, 1000))
    await asyncio.sleep(0.05)
    for _ in range(3):
        assert await good.template.prompt(MESSAGES, 1000) == "[USER] hi\n<eos>"
    assert not running.done() or template is GREEDY
    for call in (running, again):
        with pytest.raises(AdapterInvalid) as caught:
            await asyncio.wait_for(call, 60)
        assert caught.value.metadata == {"file": "chat_template.jinja", "digest": "hostile"}
        assert word in caught.value.message
        assert caught.value.message.endswith("; prompts of text or token ids need none")
    reads = adapters.num_reads
    with pytest.raises(AdapterInvalid):
        await hostile.template.prompt(MESSAGES, 1000)
    assert adapters.num_reads == reads, "remembered: it gets no worker for a while"
    assert await good.template.prompt(MESSAGES, 1000) == "[USER] hi\n<eos>"


async def test_a_tokenizer_whose_pattern_never_ends_is_ended(adapters: Adapters) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    data = changed(with_added(TOOL), pre_tokenizer={"type": "Sequence", "pretokenizers": [pattern]})
    text = await adapters.texts.of(adapters.add("hostile", {"tokenizer.json": data}))
    assert text.tokenizer is not None
    with pytest.raises(AdapterInvalid) as caught:
        await asyncio.wait_for(text.tokenizer.encode("x" * 5000), 60)
    assert caught.value.metadata["file"] == "tokenizer.json"


@pytest.mark.parametrize(
    ("files", "file", "problem"),
    [
        ({"tokenizer.json": b"{"}, "tokenizer.json", "is not a tokenizer"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja", "cannot be read"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json", "must be a JSON object"),
        ({"chat_template.jinja": SHOUT, "special_tokens_map.json": "{"}, "special_tokens_map.json", "n: is not JSON"),
        ({"tokenizer.json": END, "tokenizer_config.json": '{"pad_token": "<p>"}'}, "tokenizer_config.json", "pad_tok"),
        ({"tokenizer.json": with_added("<a>", "<b>", "<c>", "<d>")}, "tokenizer.json", 'the model has 260 token ids'),
    ],
)  # fmt: skip
async def test_files_that_cannot_be_used_are_named(
    adapters: Adapters, files: dict[str, bytes | str], file: str, problem: str
) -> None:
    adapter = adapters.add("a", files)
    for _ in range(2):  # the second time out of memory
        with pytest.raises(AdapterInvalid, match=problem) as caught:
            await adapters.texts.of(adapter)
        assert caught.value.metadata["file"] == file
    assert adapters.num_reads == 1


@pytest.mark.parametrize(
    ("files", "file"),
    [
        ({"chat_template.jinja": "{% if %}"}, "chat_template.jinja"),
        ({"tokenizer_config.json": json.dumps({"chat_template": "{% if %}"})}, "tokenizer_config.json"),
    ],
)
async def test_a_template_that_is_none_fails_chats_alone(
    adapters: Adapters, files: dict[str, bytes | str], file: str
) -> None:
    text = await adapters.texts.of(adapters.add("a", {"tokenizer.json": with_added(TOOL), **files}))
    assert text.template is not None
    assert text.tokenizer is not None
    for _ in range(2):  # the second time out of memory
        with pytest.raises(AdapterInvalid, match="the chat template is not a template") as caught:
            await text.template.prompt(MESSAGES, 1000)
        assert caught.value.metadata == {"file": file, "digest": "a"}
        assert await text.tokenizer.encode("<tool>") == [258]


DEAR = {
    "format": "{{ '%999999999d' | format(3) }}",
    "product": "{{ 'a' * 999999999 }}",
    "power": "{{ (9 ** (9 ** 9)) }}",
    "set": "{% set x = 9 ** (9 ** 9) %}",
    "argument": "{% for m in messages | batch(9 ** (9 ** 9)) %}{% endfor %}",
}


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("name", DEAR)
async def test_a_dear_constant_of_a_template_is_paid_by_chats_alone(adapters: Adapters, name: str, file: str) -> None:
    template = DEAR[name] + SHOUT
    content = template if file == "chat_template.jinja" else json.dumps({"chat_template": template})
    text = await adapters.texts.of(adapters.add("dear", {"tokenizer.json": with_added(TOOL), file: content}))
    assert text.template is not None
    assert text.tokenizer is not None
    assert await text.tokenizer.encode("<tool>") == [258]
    for _ in range(2):  # the second time it is remembered
        with pytest.raises(AdapterInvalid) as caught:
            await asyncio.wait_for(text.template.prompt(MESSAGES, 1000), 100)
        assert caught.value.metadata == {"file": file, "digest": "dear"}
        said = f"{file}: takes too much time or memory to be rendered with these messages; register the adapter with a"
        assert caught.value.message.startswith(said)
        assert await text.tokenizer.encode("<tool>") == [258]


async def test_a_template_that_takes_too_long_to_compile_is_told_so(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(request: Request) -> float:
        return 0.05 if isinstance(request, Compile) else cpu_seconds(request)

    monkeypatch.setattr("inference_service.adapter_text.process.cpu_seconds", short)
    template = "{% autoescape 9 ** (9 ** 9) %}{% endautoescape %}"  # the one constant that jinja2 computes nonetheless
    files = {"tokenizer.json": with_added(TOOL), "chat_template.jinja": template}
    text = await adapters.texts.of(adapters.add("dear", files))
    assert text.template is not None
    assert text.tokenizer is not None
    with pytest.raises(AdapterInvalid, match=r"^chat_template\.jinja: takes too much time or memory to be compiled; "):
        await text.template.prompt(MESSAGES, 1000)
    assert await text.tokenizer.encode("<tool>") == [258]


async def test_what_a_library_panics_over_names_its_file_and_says_what_to_do(adapters: Adapters) -> None:
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "(?:(a+)+)+c"},
        "behavior": "Isolated",
        "invert": False,
    }
    data = changed(with_added(TOOL), pre_tokenizer={"type": "Sequence", "pretokenizers": [pattern]})
    text = await adapters.texts.of(adapters.add("a", {"tokenizer.json": data}))
    assert text.tokenizer is not None
    with pytest.raises(AdapterInvalid) as caught:
        await text.tokenizer.encode("a" * 400)
    assert caught.value.metadata == {"file": "tokenizer.json", "digest": "a"}
    assert caught.value.message.startswith("tokenizer.json: cannot make tokens of this text: ")
    assert "Regex search error" in caught.value.message
    assert "Panic" not in caught.value.message
    assert "; send token ids, or register the adapter with its tokenizer" in caught.value.message


async def test_an_id_that_only_the_post_processor_knows_is_the_tokenizers_fault(adapters: Adapters) -> None:
    ends = {"type": "RobertaProcessing", "sep": ["<tool>", VOCAB + 5], "cls": ["<bos>", 257]}
    data = changed(with_added(TOOL), post_processor={**ends, "trim_offsets": True, "add_prefix_space": False})
    text = await adapters.texts.of(adapters.add("a", {"tokenizer.json": data}))
    assert text.tokenizer is not None
    said = (
        f"tokenizer.json: its post_processor adds the id {VOCAB + 5}; with this adapter the model has {VOCAB} token ids"
    )
    with pytest.raises(AdapterInvalid, match=said) as caught:
        await text.tokenizer.encode("a")
    assert caught.value.metadata["file"] == "tokenizer.json"
    assert await text.tokenizer.encode("a", add_special_tokens=False) == [97]


async def test_an_adapter_may_add_as_many_tokens_as_its_model_has_ids(adapters: Adapters) -> None:
    adapter = adapters.add("a", {"tokenizer.json": with_added("<a>", "<b>", "<c>", "<d>")}, extra_vocab=2)
    text = await adapters.texts.of(adapter)
    assert text.vocab_size == 262
    assert await text.tokenizer.encode("<d>") == [261]  # type: ignore[union-attr]


def _swapped(data: bytes) -> bytes:
    content = json.loads(data)
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return json.dumps(content).encode()


def _without(data: bytes) -> bytes:
    content = json.loads(data)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<bos>"]
    return json.dumps(content).encode()


@pytest.mark.parametrize(("change", "token_id"), [(_swapped, "97"), (_without, "257")])
async def test_the_base_models_ids_must_mean_what_they_meant(adapters: Adapters, change, token_id: str) -> None:  # type: ignore[no-untyped-def]
    adapter = adapters.add("a", {"tokenizer.json": change(with_added())})
    with pytest.raises(AdapterInvalid, match="base model's vocabulary") as caught:
        await adapters.texts.of(adapter)
    assert caught.value.metadata == {"file": "tokenizer.json", "token_id": token_id, "digest": "a"}


async def test_a_cancelled_call_leaves_its_worker_alone(adapters: Adapters) -> None:
    text = await adapters.texts.of(adapters.add("a", {"tokenizer.json": with_added(TOOL)}))
    assert text.tokenizer is not None
    call = asyncio.create_task(text.tokenizer.encode("x" * 100_000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await text.tokenizer.encode("<tool>") == [258]
    assert adapters.num_reads == 1  # loaded once: the worker lived on


async def test_what_a_worker_has_no_room_for_is_read_again(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_service.adapter_text.sandbox.MAX_LOADED", 2)
    texts = [await adapters.texts.of(adapters.add(f"{n}", {"chat_template.jinja": f"{n}"})) for n in range(3)]
    for _ in range(2):
        assert [await text.template.prompt(MESSAGES, 9) for text in texts] == ["0", "1", "2"]  # type: ignore[union-attr]
    assert adapters.num_reads == 9  # in turn, each of them was the one that had to go


async def test_streams_of_one_adapter_share_messages(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    ask = WorkerProcess.ask

    async def counting(worker, request):  # type: ignore[no-untyped-def]
        if isinstance(request, Continue):
            sizes.append(len(request.streams))
        return await ask(worker, request)

    monkeypatch.setattr(WorkerProcess, "ask", counting)
    text = await adapters.texts.of(adapters.add("a", {"tokenizer.json": with_added(TOOL)}))
    streams = [text.tokenizer.detokenizer() for _ in range(40)]  # type: ignore[union-attr]
    given_up = asyncio.create_task(streams[0].read([65], is_last=False))  # type: ignore[attr-defined]
    reading = [asyncio.create_task(s.read([65 + n % 26], is_last=False)) for n, s in enumerate(streams[1:])]  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(*reading)
    assert [s.feed(0) for s in streams[1:]] == [chr(65 + n % 26) for n in range(39)]
    assert sum(sizes) == 40
    assert len(sizes) <= 2


async def test_all_streams_hear_of_their_workers_end(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    text = await adapters.texts.of(adapters.add("a", {"tokenizer.json": with_added(TOOL)}))
    monkeypatch.setattr("inference_service.adapter_text.process.cpu_seconds", lambda _: 0.0)  # no answer is so quick
    reads = [text.tokenizer.detokenizer().read([65], is_last=False) for _ in range(5)]  # type: ignore[union-attr]
    for error in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(error, AdapterInvalid)
        assert error.metadata["file"] == "tokenizer.json"
