"""An 8B-shaped two-layer model in bfloat16: steps are bit-equal to eager ones and no less exact than plain PyTorch;
once warm, nothing is compiled and no memory is asked for, whatever the requests."""

import dataclasses
import random
from array import array

import pytest
import torch

from inference_service.lora.batch import LoraBatch
from inference_service.types import GenerateSpec, Sampling, Stop
from shared.base_model import linear_shape
from tests.inference_service.engine.random_models import blob_of, tiny_family, two_layers_of_8b
from tests.inference_service.engine.tiny_engine import build_engine, run

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import triton
from triton import knobs

from inference_service.engine.adjusted_rows import UNADJUSTED
from inference_service.engine.batch import gather
from inference_service.engine.cuda_runner import CudaRunner
from inference_service.engine.device_batch import segments_of, shape_of
from inference_service.engine.sequence import Request
from inference_service.engine.step import Chunk, Schedule
from inference_service.model.attention import KVCache
from inference_service.model.decoder import Decoder

pytestmark = pytest.mark.gpu

RANKS = (16, 64, 16, 8, 16, 64, 16, 32)
SEQS, BUDGET = 24, 1024


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return two_layers_of_8b(tmp_path_factory.mktemp("large"), RANKS, "bfloat16")


def build(model, dtype, load_format, **settings):
    engine = build_engine(
        model, runner_class=CudaRunner, device="cuda", host=model.host.pin_memory(), dtype=dtype,
        load_format=load_format, **settings,
    )  # fmt: skip
    engine.runner.warm_up()
    return engine


@pytest.fixture(scope="module")
def engine(large):
    """With every adapter in a slot."""
    engine = build(
        large, "bfloat16", "dummy", kv_tokens=48 * 1024, budget=BUDGET, num_seqs=SEQS, adapter_bytes=128 << 20
    )
    loads = [GenerateSpec(digest, [1, 2], Sampling(temperature=0.0), Stop(1), digest) for digest in large.digests]
    run(engine, loads)
    return engine


def slots_of(engine, model):
    """A handle of each adapter; it keeps its slot until it is released."""
    return [engine.scheduler.adapters.acquire(digest) for digest in model.digests]


def sequence_of(engine, number, token_ids, handle, *, blocks):
    spec = GenerateSpec(f"s{number}", token_ids, Sampling(temperature=0.0), Stop(8, ignore_eos=True))
    sequence = Request(spec, b"", b"", number).sequences[0]
    sequence.handle, sequence.num_pending = handle, 1
    sequence.blocks = array("i", range(number * blocks, (number + 1) * blocks))
    return sequence


def random_ids(count, seed):
    return [random.Random(seed * 1000 + i).randrange(128256) for i in range(count)]


# ---- the forward pass


@pytest.mark.parametrize("num_adapters", range(9))
@pytest.mark.parametrize("num_seqs", [8, 13])
@torch.inference_mode()
def test_a_replayed_graph_is_bit_equal_to_the_eager_step(engine, large, num_seqs, num_adapters):
    """Mixed batches of the base model and several adapters, at the same padded bucket and with the same streams."""
    runner, handles = engine.runner, slots_of(engine, large)
    taken = [None] * (num_seqs - num_adapters) + sorted(handles[:num_adapters])
    sequences = [sequence_of(engine, i, random_ids(30 + i, i), handle, blocks=4) for i, handle in enumerate(taken)]
    prefill = Schedule(tuple(Chunk(s, 0, s.num_prompt - 1, False) for s in sequences), 0)
    runner.launch(prefill)
    step = Schedule(tuple(Chunk(s, s.num_prompt - 1, 1, True) for s in sequences), num_seqs)
    kind = kind_of(runner, step)
    assert kind.is_decode
    assert kind.num_tokens == (8 if num_seqs == 8 else 16)
    replayed = runner._forward(step, [UNADJUSTED] * num_seqs).logits.clone()
    assert torch.equal(replayed, runner.compute(kind)[:num_seqs])
    assert replayed.isfinite().all()
    for handle in handles:
        engine.scheduler.adapters.release(handle)


@pytest.mark.parametrize("num_adapters", [0, 1, 8])
@pytest.mark.parametrize(
    ("num_decodes", "lengths"), [(0, (40,)), (5, (50, 17, 2)), (3, (90, 300)), (12, (2,)), (20, (600,))]
)
@torch.inference_mode()
def test_a_replayed_mixed_step_is_bit_equal_to_the_eager_step(engine, large, num_decodes, lengths, num_adapters):
    """Decodes, whole prompts and a later chunk of one, over base and adapters, behind them padding."""
    runner, handles = engine.runner, slots_of(engine, large)
    number = num_decodes + len(lengths)
    taken = [None, *handles[:num_adapters]]
    slots = [taken[i % len(taken)] for i in range(number)]
    sequences = [
        sequence_of(engine, i, random_ids(30 if i < num_decodes else lengths[i - num_decodes] + 20, i), slot, blocks=40)
        for i, slot in enumerate(slots)
    ]  # fmt: skip
    before = [Chunk(s, 0, 29 if i < num_decodes else 20, False) for i, s in enumerate(sequences)]
    runner.launch(Schedule(tuple(sorted(before, key=slot_of)), 0))
    decodes = sorted((Chunk(s, 29, 1, True) for s in sequences[:num_decodes]), key=slot_of)
    prefills = sorted((Chunk(s, 20, s.num_prompt - 20, True) for s in sequences[num_decodes:]), key=slot_of)
    step = Schedule((*decodes, *prefills), num_decodes)
    kind, shape = kind_of(runner, step), shape_of(step)
    assert kind in runner.graphs
    assert kind.num_tokens > shape.num_tokens
    forward = runner._forward(step, [UNADJUSTED] * number)
    logits, replayed = forward.logits.clone(), runner._hidden[: shape.num_tokens].clone()
    runner._hidden.fill_(float("nan"))
    assert torch.equal(replayed, runner.compute(kind)[: shape.num_tokens])
    assert replayed.isfinite().all()
    # Without padding, products and attention are cut into other pieces.
    exact = runner.kinds.exact(shape.num_tokens, num_decodes, shape.num_prefills, kind.max_rank)
    staging = runner._stage(step, exact, segments_of(step), [UNADJUSTED] * number)
    hidden = runner.compute(exact).index_select(0, staging.device["logit_rows"][:number])
    difference = (runner.fused.logits(hidden).double() - logits.double()).pow(2).mean().sqrt()
    assert difference <= 0.05 * logits.double().pow(2).mean().sqrt()
    for handle in handles:
        engine.scheduler.adapters.release(handle)


def slot_of(chunk):
    return chunk.sequence.slot


def kind_of(runner, step):
    return runner._kind_of(step, shape_of(step), segments_of(step))


@torch.inference_mode()
def test_logits_are_no_less_exact_than_plain_pytorchs(engine, large):
    """Teacher-forced, prefill in chunks and decode: against float64, error at most 1.1 times eager bfloat16's."""
    runner, handles = engine.runner, slots_of(engine, large)
    length, prefilled, num_seqs = 48, 30, 4
    taken = sorted([None, handles[0], handles[1], None], key=lambda handle: -1 if handle is None else handle.slot)
    digests = dict(zip(handles, large.digests, strict=True)) | {None: None}
    sequences = [sequence_of(engine, i, random_ids(length, i), handle, blocks=4) for i, handle in enumerate(taken)]
    for begin, end in ((0, 17), (17, prefilled)):
        runner.launch(Schedule(tuple(Chunk(s, begin, end - begin, False) for s in sequences), 0))
    fused = [
        runner._forward(
            Schedule(tuple(Chunk(s, p, 1, True) for s in sequences), num_seqs), [UNADJUSTED] * num_seqs
        ).logits.double()
        for p in range(prefilled, length)
    ]
    fused = torch.stack(fused, 1)  # [seqs, positions, vocab]
    plain, exact = [], []
    for i, sequence in enumerate(sequences):
        again = sequence_of(engine, 8 + i, sequence.token_ids, sequence.handle, blocks=4)
        whole = Schedule((Chunk(again, 0, length, True, range(length - 1)),), 0)
        batch = gather(whole, runner.block_size, runner.num_blocks * runner.block_size, runner.device)
        if batch.lora is not None:
            batch = dataclasses.replace(batch, lora=LoraBatch(batch.lora.segments, None))  # PyTorch's products
        plain.append(ordered(runner.decoder.logits(runner.decoder(batch, runner.kv_cache)).double()))
        decoder, cache = merged_in_float64(runner, large, digests[sequence.handle])
        exact.append(ordered(decoder.logits(decoder(dataclasses.replace(batch, lora=None), cache)).double()))
    plain, exact = (torch.stack(rows)[:, prefilled:] for rows in (plain, exact))
    errors = [(each - exact).pow(2).mean().sqrt().item() for each in (fused, plain)]
    print(f"RMS error of logits: fused {errors[0]:.3e}, plain bfloat16 {errors[1]:.3e}")
    assert errors[0] <= 1.1 * errors[1]
    top = exact.topk(2).values
    clear = top[..., 0] - top[..., 1] > 2 * (plain - exact).abs().max()
    assert clear.any()
    assert torch.equal(fused.argmax(-1)[clear], exact.argmax(-1)[clear])
    for handle in handles:
        engine.scheduler.adapters.release(handle)


def ordered(logits):
    """By position: the row that samples comes first, and is the last position."""
    return torch.cat((logits[1:], logits[:1]))


def merged_in_float64(runner, model, digest):
    """The same weights in float64, with the adapter's product added to them."""
    config = runner.model_config
    decoder = Decoder(config, device=runner.device, dtype=torch.float64)
    weights = {name.replace(".base.", "."): value for name, value in runner.decoder.named_parameters()}
    for name, parameter in decoder.named_parameters():
        parameter.copy_(weights[name])
    if digest is not None:
        blob, layout = blob_of(model, digest)
        values = blob.view(torch.bfloat16)
        for chunk in layout.chunks:
            for module in chunk.modules:
                add_module(decoder, config, chunk, module, values)
    shape = (config.num_layers, runner.num_blocks + 1, runner.block_size, config.num_kv_heads, config.head_dim)
    return decoder, KVCache(*shape, torch.float64, runner.device)


def add_module(decoder, config, chunk, module, values):
    rows, columns = linear_shape(config, module.module)
    a, b = (
        values[(start := (chunk.offset + offset) // 2) : start + module.rank * size].view(module.rank, size)
        for offset, size in ((module.a_offset, columns), (module.b_offset, rows))
    )
    layer = decoder.layers[chunk.layer]
    packed, before = {
        0: (layer.self_attn.qkv_proj, 0), 1: (layer.self_attn.qkv_proj, 1), 2: (layer.self_attn.qkv_proj, 2),
        3: (layer.self_attn.o_proj, 0), 4: (layer.mlp.gate_up_proj, 0), 5: (layer.mlp.gate_up_proj, 1),
        6: (layer.mlp.down_proj, 0),
    }[module.module]  # fmt: skip
    first = sum(linear_shape(config, module.module - back)[0] for back in range(1, before + 1))
    product = b.double().cuda().T @ a.double().cuda()
    packed.weight[first : first + rows] += module.scale * product


# ---- once warm


def heavy_specs(model, vocab_size, max_len, seed):
    """The most that requests may ask for, all at once, in every combination."""
    chosen, digests = random.Random(seed), [None, *model.digests]
    samplings = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
         "logit_bias": dict.fromkeys(range(min(4096, vocab_size - 3)), -1.0), "top_p": 0.95},
    )  # fmt: skip
    lengths = (1, 2, 17, 63, 64, 65, 200, max_len - 8, max_len // 2)
    return [
        GenerateSpec(
            f"h{seed}-{i}",
            [chosen.randrange(vocab_size) for _ in range(min(lengths[i % len(lengths)], max_len - 1))],
            Sampling(seed=i, n=(1, 1, 4)[i % 3], **samplings[i % len(samplings)]),
            Stop(chosen.randrange(1, 9), min_tokens=(0, 5)[i % 2], token_ids=tuple(range(5)), ignore_eos=True),
            digests[chosen.randrange(len(digests))],
            logprobs=(None, 0, 20)[i % 3],
            prompt_logprobs=(None, 20, 0, None)[i % 4],
            arrival=float(i),
        )
        for i in range(40)
    ]


@pytest.fixture
def compiled():
    """Names of the Triton kernels that were compiled, or loaded from the cache folder, during the test."""
    names = []

    @triton.jit
    def nothing():
        pass

    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: names.append(fn.name)
    nothing[(1,)]()
    assert len(names) == 1  # so the hook works
    names.clear()
    yield names
    knobs.runtime.jit_post_compile_hook = None


@pytest.mark.parametrize("size", ["tiny", "large"])
def test_once_warm_nothing_is_compiled_and_no_memory_is_asked_for(tmp_path, large, size, compiled):
    if size == "large":
        sizes = {"kv_tokens": 40 * 1024, "budget": 2048, "num_seqs": 40, "adapter_bytes": 128 << 20}
        model, engine = large, build(large, "bfloat16", "dummy", **sizes)
    else:
        model = tiny_family(tmp_path, "llama", (16, 64, 8))
        engine = build(model, "float32", "safetensors", kv_tokens=2048, budget=96, num_seqs=18, adapter_bytes=1 << 20)
    compiled.clear()  # by the warm-up
    vocab_size, max_len = engine.runner.vocab_size, engine.scheduler.limits.max_model_len
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for seed in range(3):
        run(engine, heavy_specs(model, vocab_size, max_len, seed))
    for count in range(1, engine.scheduler.limits.max_num_seqs + 1):  # every number of decodes, every bucket
        run(engine, heavy_specs(model, vocab_size, 32, 100 + count)[:count])
    assert compiled == []
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
