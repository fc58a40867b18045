import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.engine import sampler
from inference_service.engine.sampler import Row, cutoffs_by_filter, cutoffs_by_sort, sample, token_logprobs
from inference_service.types import Sampling
from kernels.philox import Words, philox, token_noise

VOCAB = 203


def logits_of(rows, scale=3.0, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(position=0, index=0, **sampling):
    extra = {k: sampling.pop(k) for k in ("prompt_ids", "output_ids", "forbidden_ids", "logprobs") if k in sampling}
    return Row(Sampling(**sampling), index, position, **extra)


def philox_of_ints(counter, key):
    """Straight from the paper, on Python's integers."""
    mask = 2**32 - 1
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = ((p1 >> 32) ^ counter[1] ^ key[0], p1 & mask, (p0 >> 32) ^ counter[3] ^ key[1], p0 & mask)
        key = ((key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask)
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that come with the paper's code
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
@pytest.mark.parametrize("array", [lambda x: np.array([x], np.int64), lambda x: torch.tensor([x])])
def test_philox_gives_the_published_words(counter, key, expected, array):
    words = philox(Words(*map(array, counter)), *map(array, key))
    assert tuple(int(word[0]) for word in words) == expected == philox_of_ints(counter, key)


@given(st.integers(0, 2**64 - 1), st.integers(0, 63), st.integers(0, 2**20), st.integers(0, 2**18))
def test_noise_is_philox_of_seed_index_position_and_token(seed, index, position, group):
    counters = sampler._counters(row(position, index, seed=seed))
    words = token_noise(np.array([group]), *counters)
    assert tuple(int(w[0]) for w in words) == philox_of_ints((group, position, index, 0), (seed % 2**32, seed >> 32))


def kept_by_definition(logits, s):
    """top-k, then top-p, then min-p, one token after another, best first."""
    scores = (logits.double() / s.temperature).tolist()
    order = sorted(range(len(scores)), key=lambda t: -scores[t])
    kept = order[: s.top_k or len(order)]
    mass = [math.exp(scores[t] - scores[order[0]]) for t in kept]
    total, so_far, nucleus = sum(mass), 0.0, []
    for token, part in zip(kept, mass, strict=True):
        if nucleus and s.top_p < 1 and so_far / total >= s.top_p:
            break
        nucleus.append(token)
        so_far += part
    return {t for t in nucleus if math.exp(scores[t] - scores[order[0]]) >= s.min_p}


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3.0),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 5)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(samplings, min_size=1, max_size=4), st.integers(0, 1000), st.floats(0.1, 6.0))
def test_cuts_keep_what_the_definition_keeps(settings_of_rows, seed, scale):
    logits = logits_of(len(settings_of_rows), scale, seed)
    scores = logits / torch.tensor([s.temperature for s in settings_of_rows])[:, None]
    for cutoffs in (cutoffs_by_sort, cutoffs_by_filter):
        for values, cutoff, raw, s in zip(
            scores, cutoffs(scores, settings_of_rows), logits, settings_of_rows, strict=True
        ):
            kept = set((values >= cutoff).nonzero().squeeze(1).tolist())
            difference = kept ^ kept_by_definition(raw, s)
            assert len(difference) <= 1  # float32 may round one token across the border


@settings(max_examples=100, deadline=None)
@given(st.lists(samplings, min_size=2, max_size=5), st.integers(0, 1000), st.integers(0, 50))
def test_a_row_does_not_depend_on_its_batch_or_on_the_path(settings_of_rows, seed, position):
    logits = logits_of(len(settings_of_rows), seed=seed)
    rows = [Row(s, 0, position) for s in settings_of_rows]
    together = sample(logits, rows).token_ids
    assert together == [sample(logits[i : i + 1], [r]).token_ids[0] for i, r in enumerate(rows)]
    scores = logits / torch.tensor([s.temperature for s in settings_of_rows])[:, None]
    cutoffs = cutoffs_by_filter(scores, settings_of_rows)
    assert sampler._choose_at_once(scores, cutoffs, rows).tolist() == together


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 0.2, -3.0]])
    count = 6_000
    rows = [row(position, temperature=0.8, seed=7) for position in range(count)]
    drawn = np.bincount(sample(logits.expand(count, -1), rows).token_ids, minlength=7)
    expected = (logits[0] / 0.8).softmax(0).numpy() * count
    assert float(((drawn - expected) ** 2 / expected).sum()) < 22.5  # chi-square, 6 degrees: p = 0.001


def test_seed_index_and_position_each_change_the_draw():
    logits = logits_of(1, 0.1).expand(40, -1)
    for vary in ("seed", "index", "position"):
        rows = [row(**{vary: value}) for value in range(40)]
        assert len(set(sample(logits, rows).token_ids)) > 25
    assert sample(logits, [row(seed=3)] * 40).token_ids == sample(logits, [row(seed=3)] * 40).token_ids


INF = float("inf")


@pytest.mark.parametrize("spoil", [slice(7, 8), slice(None)])
@pytest.mark.parametrize("value", [float("nan"), INF])
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_a_row_that_is_not_finite_has_no_token_and_spoils_no_other(how, value, spoil):
    logits = logits_of(3)
    rows = [row(**how, seed=i, logprobs=1, output_ids=[4], presence_penalty=float(i)) for i in range(3)]
    before = sample(logits, rows)
    logits[1, spoil] = value
    after = sample(logits, rows)
    assert after.token_ids == [before.token_ids[0], -1, before.token_ids[2]]
    assert after.logprobs == [before.logprobs[0], None, before.logprobs[2]]


def test_impossible_tokens_are_no_reason_to_fail_unless_there_is_no_other():
    logits = torch.tensor([[-INF, 2.0, -INF], [-INF] * 3])
    assert sample(logits, [row(), row()]).token_ids == [1, -1]


def test_temperature_zero_and_tiny_are_greedy():
    logits = logits_of(3)
    rows = [row(temperature=0.0), row(temperature=1e-30, top_p=0.5), row(temperature=0.0, top_k=5)]
    assert sample(logits, rows).token_ids == logits.argmax(-1).tolist()


def test_repetition_counts_prompt_and_output_and_the_others_output_only():
    logits = torch.tensor([[4.0, -2.0, 3.0, 1.0]])
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    adjusted = sampler._adjust(logits, [row(**penalties, prompt_ids=[0, 1], output_ids=[2, 2])])
    torch.testing.assert_close(adjusted, torch.tensor([[2.0, -4.0, 1.5 - 0.5 - 2 * 0.25, 1.0]]))
    assert logits[0, 0] == 4.0


def test_bias_and_forbidden_tokens_come_after_penalties():
    logits = torch.tensor([[4.0, 1.0, 3.0]])
    adjusted = sampler._adjust(
        logits, [row(repetition_penalty=2.0, prompt_ids=[0], logit_bias={0: 1.0, 1: 9.0}, forbidden_ids=(1,))]
    )
    assert adjusted.tolist() == [[3.0, float("-inf"), 3.0]]
    assert sample(logits, [row(forbidden_ids=(0,), seed=s) for s in range(1)]).token_ids[0] != 0


def test_logprobs_are_of_the_raw_logits_whatever_was_done_to_them():
    logits = logits_of(3)
    rows = [
        row(logprobs=2, temperature=0.3, top_k=1, logit_bias={5: 100.0}),
        row(),
        row(logprobs=0, temperature=0.0, repetition_penalty=5.0, prompt_ids=list(range(VOCAB))),
    ]
    sampled = sample(logits, rows)
    expected = logits.log_softmax(-1)
    first, none, last = sampled.logprobs
    assert sampled.token_ids[0] == 5 == first.token_id
    assert none is None
    assert first.logprob == pytest.approx(float(expected[0, 5]), abs=1e-5)
    best = expected[0].topk(2)
    assert [t for t, _ in first.top] == best.indices.tolist()
    assert [p for _, p in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert last.top == ()


def test_more_alternatives_than_tokens_gives_all():
    (entry,) = token_logprobs(torch.tensor([[0.0, 1.0]]), [0], 20)
    assert [t for t, _ in entry.top] == [1, 0]


def test_ties_at_the_cut_are_all_kept():
    logits = torch.zeros(1, VOCAB)
    seen = {sample(logits, [row(position, top_k=2)]).token_ids[0] for position in range(300)}
    assert len(seen) > 100
