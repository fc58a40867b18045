"""Paged attention's kernels against the references and float64, over caches that hold NaN wherever no token is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.paged_attention import (
    gather_reference,
    paged_decode,
    paged_decode_reference,
    paged_prefill,
    paged_prefill_reference,
)
from tests.kernels.poisoning import (
    DEVICE,
    DTYPES,
    FEWER_DTYPES,
    assert_close,
    assert_no_worse,
    poison_empty,
    poisoned,
    random,
)

triton = pytest.importorskip("triton")
from kernels import paged_decode_triton, paged_prefill_triton  # noqa: E402  the interpreter is chosen by conftest
from kernels.paged_prefill_triton import Tile  # noqa: E402

BLOCK_SIZE = 16
# heads, KV heads, head_dim
SHAPES = [
    (4, 1, 64),
    (6, 2, 32),
    (3, 1, 80),
    pytest.param((8, 2, 128), marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")]),
]
SMALL = Tile(16, 16, 4, 2)


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, [paged_decode_triton, paged_prefill_triton])


class Case:
    """Sequences of `lens` tokens of which the last `query_lens` are queries; blocks lie in any order."""

    def __init__(
        self, lens: list[int], query_lens: list[int], shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
    ) -> None:
        heads, kv_heads, head_dim = shape
        self.lens, self.query_lens, self.scale = lens, query_lens, head_dim**-0.5
        needed = [-(-length // BLOCK_SIZE) for length in lens]
        order = torch.randperm(sum(needed) + 1, generator=torch.Generator().manual_seed(seed))
        self.caches = [poisoned(len(order), BLOCK_SIZE, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        # Entries past a sequence's blocks name a block that does not exist.
        self.tables = torch.full((len(lens), max(needed) + 1), 1 << 30, dtype=torch.int32, device=DEVICE)
        for s, blocks in enumerate(order[:-1].split(needed)):
            self.tables[s, : len(blocks)] = blocks
            for i, cache in enumerate(self.caches):
                for n, block in enumerate(blocks.tolist()):
                    rows = min(BLOCK_SIZE, lens[s] - n * BLOCK_SIZE)
                    cache[block, :rows] = random(rows, kv_heads, head_dim, dtype=dtype, seed=97 * block + i)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        self.query_starts = starts.to(DEVICE, torch.int32)
        self.q = random(int(starts[-1]), heads, head_dim, dtype=dtype, seed=seed)

    def expected(self, window: int, dtype: torch.dtype = torch.float64) -> Tensor:
        caches = [cache.to(dtype) for cache in self.caches]
        out = poisoned(*self.q.shape, dtype=dtype)
        return paged_prefill_reference(
            self.q.to(dtype), *caches, self.tables, self.query_starts, self.seq_lens, scale=self.scale, window=window,
            out=out,
        )  # fmt: skip

    def plain(self, window: int) -> Tensor:
        """As eager PyTorch computes it: products, scores and probabilities in the model's dtype."""
        out = torch.empty_like(self.q)
        starts = self.query_starts.tolist()
        for s, length in enumerate(self.lens):
            q = self.q[starts[s] : starts[s + 1]].transpose(0, 1)
            k, v = (gather_reference(cache, self.tables[s], length).transpose(0, 1) for cache in self.caches)
            k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
            positions = torch.arange(length, device=DEVICE)
            queries = positions[length - q.shape[1] :, None]
            hidden = (positions > queries) | ((positions <= queries - window) & (window > 0))
            scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(hidden, float("-inf"))
            out[starts[s] : starts[s + 1]] = (scores.softmax(-1, torch.float32).to(q.dtype) @ v).transpose(0, 1)
        return out

    def decode(self, window: int = 0, splits: int | None = None, max_len: int = 64) -> Tensor:
        return paged_decode_triton.paged_decode(
            self.q, *self.caches, self.tables, self.seq_lens, max_len=max_len, scale=self.scale, window=window,
            splits=splits,
        )  # fmt: skip

    def prefill(self, window: int = 0, tile: Tile | None = SMALL) -> Tensor:
        return paged_prefill_triton.paged_prefill(
            self.q, *self.caches, self.tables, self.query_starts, self.seq_lens, scale=self.scale, window=window,
            tile=tile,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "splits"), [(0, 1), (0, 4), (37, 1), (16, 2)])
def test_decode(window: int, splits: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    lens = [1, 133, 64]
    case = Case(lens, [1] * len(lens), shape, dtype)
    actual, expected = case.decode(window, splits), case.expected(window)
    assert_close(actual, expected)
    assert_close(case.expected(window, dtype), expected)
    assert_no_worse(actual, case.plain(window), expected)


@pytest.mark.parametrize("splits", [1, 2])
def test_padding_rows_come_out_zero(splits: int) -> None:
    case = Case([3, 5, 40], [1, 1, 1], (4, 2, 32), torch.float32)
    full = case.decode(splits=splits)
    case.seq_lens[1] = 0
    padded = case.decode(splits=splits)
    assert torch.equal(padded[1], torch.zeros_like(padded[1]))
    assert torch.equal(padded[[0, 2]], full[[0, 2]])


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_that_do_not_decode_are_left_alone(splits: int) -> None:
    case = Case([3, 5, 40], [1, 1, 1], (4, 2, 32), torch.float32)
    full = case.decode(splits=splits)
    case.seq_lens[1] = -1
    outs = [torch.full_like(case.q, 7.0) for _ in range(2)]
    args = case.q, *case.caches, case.tables, case.seq_lens
    paged_decode_triton.paged_decode(*args, max_len=64, scale=case.scale, splits=splits, out=outs[0])
    paged_decode_reference(*args, scale=case.scale, out=outs[1])
    for out in outs:
        assert (out[1] == 7.0).all()
        assert_close(out[[0, 2]], full[[0, 2]].double())


def test_a_decode_row_depends_on_no_other_row() -> None:
    case = Case([3, 133, 64], [1, 1, 1], (4, 2, 32), torch.float32)
    together = case.decode(splits=2)
    case.q, case.tables, case.seq_lens = case.q[1:2], case.tables[1:2], case.seq_lens[1:2]
    assert torch.equal(case.decode(splits=2)[0], together[1])


@pytest.mark.parametrize("dtype", FEWER_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [0, 9, 37])
def test_prefill(window: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    # A whole prompt, a chunk of a longer one, a single token, no token, a chunk that begins inside a block.
    case = Case([33, 50, 7, 5, 21], [33, 17, 1, 0, 3], shape, dtype)
    actual, expected = case.prefill(window), case.expected(window)
    assert_close(actual, expected)
    assert_close(case.expected(window, dtype), expected)
    assert_no_worse(actual, case.plain(window), expected)


@pytest.mark.parametrize("tile", [None, Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(64, 64, 4, 3)], ids=str)
def test_prefill_tiles(tile: Tile | None) -> None:
    for window in (0, 20):
        case = Case([70, 33], [70, 2], (4, 2, 32), torch.float16)
        assert_close(case.prefill(window, tile), case.expected(window))


def test_rows_and_sequences_past_the_last_chunk() -> None:
    case = Case([9, 20], [9, 4], (2, 1, 32), torch.float32)
    expected = case.expected(0)
    case.q = torch.cat((case.q, torch.full_like(case.q[:6], float("nan"))))
    case.query_starts = torch.cat((case.query_starts, case.query_starts[-1:].expand(3)))
    case.seq_lens = torch.cat((case.seq_lens, case.seq_lens.new_zeros(3)))
    case.tables = torch.cat((case.tables, case.tables.new_full((3, case.tables.shape[1]), 1 << 30)))
    actual = case.prefill()
    assert_close(actual[:13], expected)
    assert actual[13:].isnan().all()


@pytest.mark.parametrize("num_before", [1, 2, 17])
def test_rows_before_the_first_chunk_are_others(num_before: int) -> None:
    """They are decodes, of as many sequences, and what has been written there stays."""
    case = Case([5] * num_before + [33, 20], [1] * num_before + [33, 4], (4, 2, 32), torch.float32)
    expected = case.expected(0)
    case.query_starts = torch.cat((case.query_starts[num_before:], case.query_starts[-1:].expand(2)))
    for actual in (case.prefill(), case.expected(0, torch.float32)):
        assert actual[:num_before].isnan().all()
        assert_close(actual[num_before:], expected[num_before:])


@settings(max_examples=15, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=4),
    window=st.sampled_from([0, 1, 5, 24]),
    tile=st.sampled_from([SMALL, Tile(32, 16, 4, 2)]),
)
def test_any_chunks(chunks: list[tuple[int, int]], window: int, tile: Tile) -> None:
    chunks = [*chunks, (3, 2)]
    case = Case([sum(chunk) for chunk in chunks], [new for _, new in chunks], (3, 1, 16), torch.float32)
    assert_close(case.prefill(window, tile), case.expected(window))


def test_decode_is_prefill_of_one_token() -> None:
    case = Case([12, 33], [1, 1], (4, 2, 32), torch.float64)
    args = case.q, *case.caches, case.tables
    out = torch.empty_like(case.q)
    decoded = paged_decode_reference(*args, case.seq_lens, scale=case.scale, window=10, out=out)
    assert torch.equal(decoded, case.expected(10))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("splits", [1, 4])
def test_a_captured_graph_follows_the_device_data(splits: int) -> None:
    case = Case([133, 64, 90], [1, 1, 1], (8, 2, 128), torch.bfloat16)

    def run() -> list[Tensor]:
        return [case.decode(splits=splits), case.prefill(tile=None)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for lens in ([133, 64, 90], [1, 60, 17], [130, 1, 33]):
        case.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        for actual, expected in zip(captured, run(), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="the doors on a CPU")
def test_the_doors_on_a_cpu() -> None:
    case = Case([12, 33], [1, 1], (4, 2, 32), torch.float32)
    args, out = (case.q, *case.caches, case.tables), torch.empty_like(case.q)
    expected = case.expected(0, torch.float32)
    assert torch.equal(paged_prefill(*args, case.query_starts, case.seq_lens, scale=case.scale), expected)
    assert paged_decode(*args, case.seq_lens, max_len=33, scale=case.scale, out=out) is out
    assert torch.equal(out, expected)


def test_num_splits() -> None:
    def splits(seqs: int, max_len: int) -> int:
        return paged_decode_triton.num_splits(seqs, 8, max_len)

    assert [splits(seqs, 1024) for seqs in (1, 8, 32, 256)] == [8, 4, 1, 1]
    assert splits(1, 8192) == 32
    assert splits(32, 8192) == 4
    assert splits(256, 131072) == 1
    assert all(math.log2(splits(seqs, 1 << k)).is_integer() for seqs in range(1, 70) for k in range(17))
