"""Which kinds of steps are captured, and which one a step is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.engine.step_kinds import (
    MOST_PREFILLS,
    MOST_TOKENS,
    SHORT,
    StepKinds,
    batch_buckets,
    length_classes,
    rank_class,
    token_buckets,
)
from kernels.table import MAX_RANK, SMALL_RANK

LENGTH = 8192


@given(st.integers(1, 2000))
def test_every_batch_has_a_bucket_and_is_not_padded_beyond_its_double(most: int) -> None:
    buckets = batch_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == most
    for size in range(1, most + 1):
        assert next(bucket for bucket in buckets if bucket >= size) <= max(2 * size, 1)


@given(st.integers(1, 3000))
def test_prefill_is_not_padded_by_more_than_a_half(most: int) -> None:
    buckets = token_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == min(most, MOST_TOKENS)
    for size in range(129, buckets[-1] + 1):
        padded = next(bucket for bucket in buckets if bucket >= size)
        assert padded <= 1.5 * size
        assert padded < size + 128


@pytest.mark.parametrize(
    ("max_model_len", "classes"), [(1, (1,)), (SHORT, (SHORT,)), (SHORT + 1, (SHORT, SHORT + 1)), (8192, (SHORT, 8192))]
)
def test_length_classes_end_at_the_longest(max_model_len: int, classes: tuple[int, ...]) -> None:
    assert length_classes(max_model_len) == classes


def test_only_few_rows_tell_small_ranks_apart() -> None:
    assert [rank_class(rank, 64) for rank in (0, 1, SMALL_RANK, SMALL_RANK + 1)] == [
        0,
        SMALL_RANK,
        SMALL_RANK,
        MAX_RANK,
    ]
    assert [rank_class(rank, 65) for rank in (0, 1, MAX_RANK)] == [0, MAX_RANK, MAX_RANK]


@given(st.data(), st.integers(1, 300), st.integers(0, 3000), st.sampled_from([0, 8, 64]))
def test_a_step_fits_its_kind(data: st.DataObject, seqs: int, more_tokens: int, max_rank: int) -> None:
    """And is captured unless it has too many tokens or prompts."""
    kinds = StepKinds(seqs, seqs + more_tokens, LENGTH)
    captured = Counter(kinds.captured())
    assert set(captured.values()) == {1}
    num_decodes = data.draw(st.integers(0, seqs))
    num_prefills = data.draw(st.integers(0, min(seqs - num_decodes, more_tokens // 2)))
    if not num_decodes + num_prefills:
        return
    num_tokens = num_decodes + (data.draw(st.integers(2 * num_prefills, more_tokens)) if num_prefills else 0)
    kind = kinds.mixed(num_tokens, num_decodes, num_prefills, max_rank)
    assert num_tokens <= kind.num_tokens <= seqs + more_tokens
    assert num_decodes <= kind.max_decodes <= kind.num_tokens
    assert num_prefills <= kind.max_prefills <= seqs
    assert max_rank <= kind.max_rank
    assert not kind.is_decode
    most_tokens = kinds.most_captured(max_rank)
    assert most_tokens == min(seqs + more_tokens, 2048 if max_rank else 1024)
    assert (kind in captured) or num_tokens > most_tokens or num_prefills > min(MOST_PREFILLS, seqs)
    if num_decodes and not num_prefills:
        for longest in (1, SHORT, SHORT + 1, LENGTH):
            kind = kinds.decode(num_decodes, longest, max_rank)
            assert kind in captured
            assert kind.is_decode
            assert num_decodes <= kind.num_tokens == kind.max_decodes <= seqs
            assert longest <= kind.max_len


def test_steps_that_are_not_captured_launch_what_captured_ones_do() -> None:
    """Attention splits the keys by the bound of the decodes, of which there are few."""
    kinds = StepKinds(256, 8192, LENGTH)
    bounds = {kind.max_decodes for kind in kinds.captured() if not kind.is_decode} | {0}
    assert {kinds.exact(200, decodes, 20, 0).max_decodes for decodes in range(181)} <= bounds
