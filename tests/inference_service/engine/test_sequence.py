"""What the engine refuses to compute, whoever asks."""

import pytest

from inference_service.engine.sequence import check_spec
from inference_service.types import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_OWN_EOS,
    MAX_STOP_TOKENS,
    GenerateSpec,
    Sampling,
    Stop,
)
from shared.errors import InvalidArgument

VOCAB, LONGEST = 10_000, 16


def spec(*, prompt=(1,), stop=(), eos=(), bias=(), logprobs=None, prompt_logprobs=None, max_tokens=4, added=0, start=0):
    return GenerateSpec(
        "r", list(prompt), Sampling(logit_bias=dict.fromkeys(bias, 1.0)),
        Stop(max_tokens, token_ids=tuple(stop), eos_ids=tuple(eos)),
        logprobs=logprobs, prompt_logprobs=prompt_logprobs, extra_vocab=added, adapter_start=start,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("prompt", {"prompt": ()}),
        ("prompt", {"prompt": range(LONGEST)}),
        ("prompt.token_ids", {"prompt": (VOCAB,)}),
        ("prompt.token_ids", {"prompt": (VOCAB + 1,), "added": 1}),
        ("prompt.token_ids", {"prompt": (1, VOCAB, 1, VOCAB), "added": 1, "start": 3}),
        ("sampling.logit_bias", {"bias": (VOCAB,)}),
        ("sampling.logit_bias", {"bias": range(MAX_LOGIT_BIASES + 1)}),
        ("stop.token_ids", {"stop": (-1,)}),
        ("stop.token_ids", {"stop": range(MAX_STOP_TOKENS + 1)}),
        ("stop.eos_ids", {"eos": (VOCAB,)}),
        ("stop.eos_ids", {"eos": range(MAX_OWN_EOS + 1)}),
        ("logprobs", {"logprobs": MAX_LOGPROBS + 1}),
        ("prompt_logprobs", {"prompt_logprobs": MAX_LOGPROBS + 1}),
    ],
)
def test_names_the_field(field, options):
    with pytest.raises(InvalidArgument) as caught:
        check_spec(spec(**options), VOCAB, LONGEST)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_takes_the_most_of_everything():
    check_spec(
        spec(
            prompt=range(LONGEST - 1), bias=range(MAX_LOGIT_BIASES), stop=range(MAX_STOP_TOKENS),
            eos=range(MAX_OWN_EOS), logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS,
        ),
        VOCAB, LONGEST,
    )  # fmt: skip
    check_spec(spec(prompt=range(LONGEST), max_tokens=0), VOCAB, LONGEST)
    check_spec(spec(prompt=(VOCAB, 1, VOCAB), added=1), VOCAB, LONGEST)
    check_spec(spec(prompt=(1, 1, 1, VOCAB), added=1, start=3), VOCAB, LONGEST)
