"""The tables of counts and biases hold what the sequences' own tokens say, whoever had their rows before."""

import random

import pytest
import torch

from inference_service.engine.sequence import Request, State
from inference_service.types import MAX_LOGIT_BIASES, MAX_OWN_EOS, MAX_STOP_TOKENS, GenerateSpec, Sampling, Stop

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from inference_service.engine.adjusted_rows import CELLS, UNADJUSTED, AdjustedRows
from kernels.sampling import PROMPT_BIT, count_tokens

pytestmark = pytest.mark.gpu

VOCAB, EOS = 5000, (2, 3)


def sequence_of(number, prompt, sampling, stop=None):
    spec = GenerateSpec(str(number), prompt, sampling, stop or Stop(1 << 20, ignore_eos=True))
    sequence = Request(spec, b"", b"", number).sequences[0]
    sequence.state = State.RUNNING
    return sequence


def tables(num_rows):
    return AdjustedRows(num_rows, VOCAB, EOS, torch.device("cuda"))


def place(rows, sequences):
    """As the runner does: each is about to sample its next token."""
    for sequence in sequences:
        sequence.num_pending += 1
    return rows.place(sequences)


def expected_counts(prompt, output, marks_prompt):
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
    if marks_prompt:
        counts[torch.tensor(prompt)] |= PROMPT_BIT
    return counts.int()


def test_counts_follow_the_tokens_through_preemption_and_others_rows():
    chosen, num_rows = random.Random(0), 3
    rows = tables(num_rows)
    penalties = (Sampling(repetition_penalty=1.2), Sampling(presence_penalty=0.5), Sampling(frequency_penalty=-1.0))
    sequences = [
        sequence_of(i, [chosen.randrange(VOCAB) for _ in range(chosen.choice([1, 30, CELLS + 5]))], penalties[i % 3])
        for i in range(7)
    ]
    tokens = {i: list(sequence.token_ids) for i, sequence in enumerate(sequences)}  # those not yet read included
    unread = []
    for _ in range(120):
        ready = [i for i in range(7) if sequences[i].state is State.RUNNING or sequences[i].num_pending == 0]
        running = chosen.sample(ready, min(num_rows, len(ready)))
        for i, sequence in enumerate(sequences):
            sequence.state = State.RUNNING if i in running else State.WAITING
        placed = place(rows, [sequences[i] for i in running])
        assert len({row.count_row for row in placed}) == len(running)
        for i, row in zip(running, placed, strict=True):
            prompt, output = tokens[i][: sequences[i].num_prompt], tokens[i][sequences[i].num_prompt :]
            expected = expected_counts(prompt, output, i % 3 == 0)
            actual = rows.token_counts[row.count_row].cpu()
            assert torch.equal(actual & ~PROMPT_BIT, expected & ~PROMPT_BIT)
            if i % 3 == 0:
                assert torch.equal(actual, expected)
        sampled = [chosen.randrange(VOCAB) for _ in running]
        count_rows = torch.tensor([row.count_row for row in placed], dtype=torch.int32, device="cuda")
        count_tokens(rows.token_counts, count_rows, torch.tensor(sampled, device="cuda"))
        for i, token in unread:  # the step before is read once this one is launched
            sequences[i].token_ids.append(token)
            sequences[i].num_pending -= 1
        unread = list(zip(running, sampled, strict=True))
        for i, token in unread:
            tokens[i].append(token)


def test_biases_and_forbidden_tokens():
    rows = tables(12)
    plain = sequence_of(0, [1], Sampling())
    biased = [sequence_of(i, [1], Sampling(logit_bias={i: 0.5, 2: 7.0})) for i in range(1, 11)]
    held_back = sequence_of(11, [1], Sampling(logit_bias={2: 7.0}), Stop(9, min_tokens=1, token_ids=(50,)))
    placed = place(rows, [plain, *biased, held_back])
    assert placed[0] == UNADJUSTED
    assert all(row.count_row == -1 for row in placed)
    for i, row in enumerate(placed[1:-1], 1):
        assert biases_in(rows, row) == {i: 0.5, 2: 7.0}
    assert biases_in(rows, placed[-1]) == {2: float("-inf"), 3: float("-inf"), 50: float("-inf")}
    held_back.token_ids.append(9)
    held_back.num_pending = 0
    (row,) = place(rows, [held_back])
    assert row == placed[-1]
    assert biases_in(rows, row) == {2: 7.0}


def test_the_most_biases_fit():
    rows = tables(1)
    bias = {token: 0.001 * token for token in range(100, 100 + MAX_LOGIT_BIASES)}
    stops = tuple(range(4500, 4500 + MAX_STOP_TOKENS))
    own = tuple(range(4, 4 + MAX_OWN_EOS))
    sequence = sequence_of(0, [1], Sampling(logit_bias=bias), Stop(9, min_tokens=5, token_ids=stops, eos_ids=own))
    (row,) = place(rows, [sequence])
    assert biases_in(rows, row) == pytest.approx(bias | dict.fromkeys((*stops, *EOS, *own), float("-inf")))


def biases_in(rows, row):
    ids, values = rows.bias_ids[row.bias_row].tolist(), rows.bias_values[row.bias_row].tolist()
    return {token: value for token, value in zip(ids, values, strict=True) if token >= 0}
