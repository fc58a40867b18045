"""What a request makes of adapters, through both services, against PEFT: blends, activation, text of their own."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from examples.stack import Stack, register, wait_for_base_model
from inference_service.requests import activation_start
from loraplex import Client
from loraplex.inference.v1 import inference_pb2 as pb
from shared.errors import AdapterInvalid, InvalidArgument, UnsupportedAdapter
from tests.e2e.oracle import TIE_GAP
from tests.inference_service.adapter_text.bases import ENDLESS, SHOUT, with_added
from tests.inference_service.serving_fakes import CHAT, byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASE = "tiny"
VOCAB = 260
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INVOCATION = [ord("!"), ord(">")]
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"r": 16, "lora_alpha": 24, "target_modules": LINEARS},
    "two": {"r": 5, "lora_alpha": 10, "target_modules": ["q_proj", "o_proj", "down_proj"], "use_rslora": True},
    "late": {"r": 8, "lora_alpha": 16, "target_modules": LINEARS, "alora_invocation_tokens": INVOCATION},
    "later": {"r": 4, "lora_alpha": 16, "target_modules": LINEARS, "alora_invocation_tokens": [ord("#")]},
}
BLENDS = {
    "half and more": [("one", 0.5), ("two", 1.75)],
    "against": [("two", -1.0), ("one", 1.25)],
    "alone": [("one", -0.4)],
}
REFUSED = {"with one that is activated": [("one", 1.0), ("late", 1.0)]}
SHARED = list(b"The quick brown fox jumps over the lazy dog, and over the fence as well.")
TOLERANCE = 1e-4


class World(NamedTuple):
    client: Client
    oracle: PeftModel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("request_kinds")
    oracle = build(folder)
    (run := folder / "run").mkdir()
    flags = (
        f"--model-name={BASE}", "--dtype=float32", "--device=cpu", "--threads=1", "--kv-cache-memory=64MiB",
        "--adapter-memory=64MiB",
    )  # fmt: skip
    stack = Stack(run, flags=[*flags], model=folder / "base", roots={"store": folder / "store"})
    async with stack, stack.client() as client:
        await wait_for_base_model(client, BASE)
        for name in (*ADAPTERS, "own", "ends", "hostile", "foreign"):
            await register(client, name, f"file://store/{name}", BASE)
        yield World(client, oracle)


def build(folder: Path) -> PeftModel:
    """A base model with a byte tokenizer, ADAPTERS, and four copies of `one` that bring text of their own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, bos_token_id=257, eos_token_id=256,
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    base.save_pretrained(folder / "base")
    byte_tokenizer().backend.save(str(folder / "base" / "tokenizer.json"))
    (folder / "base" / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT, "eos_token": "<eos>"}))
    model: PeftModel | None = None
    for name, options in ADAPTERS.items():
        lora = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        if model is None:
            model = get_peft_model(base, lora, adapter_name=name)
        else:
            model.add_adapter(name, lora)
    assert model is not None
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "store")
    tool = with_added(AddedToken("<tool>", special=False))
    texts: dict[str, dict[str, bytes]] = {
        "own": {"tokenizer.json": tool, "chat_template.jinja": f"{SHOUT}<tool>".encode()},
        "ends": {"tokenizer.json": tool, "tokenizer_config.json": b'{"eos_token": "<tool>"}'},
        "hostile": {"chat_template.jinja": ENDLESS.encode()},
        "foreign": {"tokenizer.json": byte_tokenizer().backend.to_str().replace('"a":97', '"a":98').encode()},
    }
    texts["foreign"]["tokenizer.json"] = texts["foreign"]["tokenizer.json"].replace(b'"b":98', b'"b":97')
    for name, files in texts.items():
        copy = folder / "store" / name
        copy.mkdir()
        for path in (folder / "store" / "one").iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        for file, data in files.items():
            (copy / file).write_bytes(data)
    for name, parts in BLENDS.items():
        adapters, weights = [part for part, _ in parts], [weight for _, weight in parts]
        model.add_weighted_adapter(adapters, weights, name, combination_type="cat")
        for module in model.modules():
            if isinstance(module, LoraLayer) and name in module.scaling:
                module.scaling[name] = 1.0  # PEFT takes use_rslora over from the first part, and scales once more
    return model.eval()


@torch.inference_mode()
def expected(oracle: PeftModel, ids: list[int], num_prompt: int, adapter: str) -> torch.Tensor:
    """Logits `[len(ids), vocab]` with an adapter or blend, or the base model's."""
    inputs = torch.tensor([ids])
    if not adapter:
        with oracle.disable_adapter():
            return oracle(inputs).logits[0]
    oracle.set_adapter(adapter)
    invocation = ADAPTERS.get(adapter, {}).get("alora_invocation_tokens")
    if invocation is None:
        return oracle(inputs).logits[0]
    start = activation_start(ids[:num_prompt], tuple(invocation))
    return oracle(inputs, alora_offsets=[None if start is None else len(ids) - start]).logits[0]


class Told(NamedTuple):
    """What a stream said."""

    started: pb.Started
    token_ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    text: str
    ends: list[pb.Finished]


async def ask(client: Client, prompt: Any, adapter: str = "", **fields: Any) -> Told:
    """Greedy; `adapter` may be a blend of those above."""
    output = {"token_ids": True, "logprobs": 0, **fields.pop("output", {})}
    parts = {**BLENDS, **REFUSED}.get(adapter, [])
    request = {"blend": [pb.BlendPart(reference=reference, weight=weight) for reference, weight in parts]}
    told = Told(pb.Started(), [], [], [], "", [])
    options: dict[str, Any] = {"temperature": 0, "stop": {"max_tokens": 10, "ignore_eos": True}, "timeout": 60} | fields
    reference = "" if parts else adapter
    async for event in client.generate(prompt, adapter=reference, output=output, request=request, **options):
        if event.HasField("started"):
            told = told._replace(started=event.started)
        told.prompt_logprobs.extend(token.logprob for token in event.prompt_logprobs.tokens)
        told.token_ids.extend(event.delta.token_ids)
        told.logprobs.extend(token.logprob for token in event.delta.logprobs)
        told = told._replace(text=told.text + event.delta.text)
        if event.HasField("finished"):
            told.ends.append(event.finished)
    return told


def check(oracle: PeftModel, told: Told, prompt: list[int], adapter: str) -> float:
    """The worst difference of a logprob; each token must be the oracle's, ties apart."""
    logits = expected(oracle, [*prompt, *told.token_ids], len(prompt), adapter)
    wanted = torch.log_softmax(logits, -1)
    end = len(prompt) - 1
    for token, row in zip(told.token_ids, logits[end:-1], strict=True):
        top = row.topk(2)
        assert token == top.indices[0] or top.values[0] - top.values[1] < TIE_GAP
    found, targets = told.logprobs, told.token_ids
    if told.prompt_logprobs:
        found, targets, end = [*told.prompt_logprobs, *found], [*prompt[1:], *targets], 0
    scores = wanted[end:-1].gather(1, torch.tensor(targets)[:, None])[:, 0]
    return float((scores - torch.tensor(found)).abs().max())


async def test_all_kinds_of_requests_are_those_of_peft_in_mixed_batches(world: World) -> None:
    chosen = random.Random(1)
    cases = [
        (adapter, SHARED[: chosen.choice([16, 40, 70])] + tail)
        for adapter in ["", "one", "two", "late", "later", *BLENDS]
        for tail in ([3], [*INVOCATION, 9, 10], [ord("#"), *INVOCATION, ord("#"), 77, 78, 79])
    ]
    for scored in (False, True):
        chosen.shuffle(cases)
        output = {"prompt_logprobs": 0} if scored else {}
        answers = await asyncio.gather(*(ask(world.client, ids, name, output=output) for name, ids in cases))
        worst: dict[str, float] = {}
        for (name, ids), told in zip(cases, answers, strict=True):
            worst[name] = max(worst.get(name, 0.0), check(world.oracle, told, ids, name))
        print({name or "base": f"{difference:.1e}" for name, difference in worst.items()})
        assert max(worst.values()) < TOLERANCE


async def test_keys_and_values_before_the_activation_are_everybodys(world: World) -> None:
    prompt = [99, *SHARED, *INVOCATION, 1, 2, 3, ord("#"), 5]
    blocks_before = 16 * (len(SHARED) // 16)
    assert (await ask(world.client, prompt)).started.cached_tokens == 0
    for adapter in ("late", "later"):
        told = await ask(world.client, prompt, adapter)
        assert told.started.cached_tokens == blocks_before
        assert told.started.adapter_version.endswith(f"/{adapter}/versions/1")
        assert check(world.oracle, told, prompt, adapter) < TOLERANCE
    assert (await ask(world.client, prompt, "one")).started.cached_tokens == 0


async def test_a_blend_says_what_it_consists_of(world: World) -> None:
    started = (await ask(world.client, SHARED, "against")).started
    assert started.adapter_version == ""
    assert started.adapter_digest.startswith("sha256:")
    assert [(part.adapter_version.split("/")[3], part.weight) for part in started.blend] == [("two", -1), ("one", 1.25)]
    again = (await ask(world.client, SHARED, "against")).started
    assert (again.adapter_digest, again.cached_tokens) == (started.adapter_digest, 64)
    with pytest.raises(UnsupportedAdapter) as refused:
        await ask(world.client, SHARED, "with one that is activated")
    assert refused.value.metadata["field"] == "blend[1]"


async def test_an_adapters_own_text_is_used_from_prompt_to_answer(world: World) -> None:
    chat = [{"role": "user", "content": "a<tool>"}]
    ids = [*b"[USER] a", 258, ord("\n"), 256, 258]
    request = pb.TokenizeRequest(adapter="own", chat=pb.Chat(messages=[pb.ChatMessage(**chat[0])]))
    told = await world.client.call(world.client.inference.Tokenize(request))
    assert list(told.token_ids) == ids
    answer = await ask(world.client, chat, "own")
    assert answer.started.prompt_tokens == len(ids)
    assert check(world.oracle, answer, ids, "one") < TOLERANCE  # whose weights it has
    forced = await ask(world.client, "x", "own", logit_bias={258: 100.0})
    assert forced.text == "<tool>" * 10
    base = await ask(world.client, "x", "one", logit_bias={258: 100.0})
    assert base.text == ""  # the base model's tokenizer knows no such token


async def test_an_adapters_own_eos_token_ends_its_requests_alone(world: World) -> None:
    tool = 258
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("ends", {}, {}),
        ("ends", {}, {"n": 2}),
        ("ends", {"min_tokens": 4}, {}),
        ("ends", {"ignore_eos": True}, {}),
        ("own", {}, {}),
        ("", {}, {}),
    ]
    answers = await asyncio.gather(
        *(
            ask(world.client, [1, 2, 3], name, logit_bias={tool: 100.0}, stop={"max_tokens": 10, **stop}, **more)
            for name, stop, more in cases
        )
    )
    once, twice, late, ignored, *others = answers
    assert (once.token_ids, twice.token_ids, once.text) == ([tool], [tool, tool], "")
    assert late.token_ids.index(tool) == len(late.token_ids) - 1 == 4
    for end in (*once.ends, *twice.ends, *late.ends):
        assert end.finish_reason == pb.Finished.FINISH_REASON_STOP
        assert end.WhichOneof("matched_stop") is None
    for told in (ignored, *others):
        assert told.token_ids == [tool] * 10
        assert told.ends[0].finish_reason == pb.Finished.FINISH_REASON_LENGTH


async def test_bad_text_of_an_adapter_is_named_and_harms_nobody(world: World) -> None:
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(AdapterInvalid) as foreign:
        await ask(world.client, "hi", "foreign")
    assert foreign.value.metadata["file"] == "tokenizer.json"
    hostile = asyncio.create_task(ask(world.client, chat, "hostile"))
    num_answers = 0
    while not hostile.done():
        answers = await asyncio.gather(*(ask(world.client, chat, adapter) for adapter in ("", "own", "one")))
        num_answers += len(answers)
        await asyncio.sleep(0.1)
    with pytest.raises(AdapterInvalid) as refused:
        await hostile
    assert refused.value.metadata["file"] == "chat_template.jinja"
    assert num_answers > 3
    assert len((await ask(world.client, [1, 2, 3], "hostile")).token_ids) == 10  # token ids need no template
    with pytest.raises(InvalidArgument):
        await ask(world.client, chat, "one", logit_bias={VOCAB: 1.0})
