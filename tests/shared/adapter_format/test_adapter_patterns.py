import re
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.adapter_format.patterns import NamePattern, StepBudget
from shared.errors import AdapterInvalid, UnsupportedAdapter

NAME = "model.layers.12.self_attn.q_proj"
PEFT_FORM = r"(.*\.)?({})$"


@pytest.mark.parametrize(
    "source",
    [
        "q_proj",
        "self_attn.q_proj",
        "model.layers.12.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "_proj",
        r".*\.q_proj",
        r".*\.(q|v)_proj",
        r"model\.layers\.(1[0-9]|2)\.self_attn\.(q_proj|v_proj)",
        r".*layers\.\d+\.self_attn.*",
        r".*layers\.\d\.self_attn.*",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
        r"^(?!.*layers\.12\.).*q_proj$",
        r"^(?=.*attn).*proj",
        r".*(?<!k)_proj",
        r".*(?<=self_attn\.)q_proj",
        r".*(?<!self_attn\.)q_proj",
        r"(?P<name>.+)\.[^.]*",
        r"\w+(\.\w+){4}",
        r"\w+(\.\w+){5,}",
        r"(|x)*?model.*",
        r"[^\W]+.*\Z",
        "",
    ],
)
@pytest.mark.parametrize(("form", "whole"), [("{}", True), ("{}", False), (PEFT_FORM, False)])
def test_answers_are_those_of_re(source, form, whole):
    match = re.fullmatch if whole else re.match
    expected = match(form.replace("{}", source), NAME) is not None
    assert NamePattern(source, "key", form, whole).matches(NAME, StepBudget()) == expected


def test_a_pattern_is_put_into_the_form_as_text():
    """PEFT formats the string, so a pattern may close the group that was meant to hold it."""
    source = "a)|(.*q_proj"
    assert re.match(PEFT_FORM.replace("{}", source), NAME)
    assert NamePattern(source, "key", PEFT_FORM, whole=False).matches(NAME, StepBudget())


pieces = st.recursive(
    st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\b", "[ab]", "[^a]", r"[\w.]", "^", "$", "()"]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,}"])),
        st.builds("(?={})".format, inner),
        st.builds("(?!{})".format, inner),
        st.builds("(?<={})".format, st.sampled_from(["a", "[ab]", r"\d.", "a|b", "^a", "(?:ab|b.)"])),
        st.builds("(?<!{})".format, st.sampled_from(["a", "[ab]", r"\w\.", "(?=b)a", "$"])),
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(pieces, st.text("ab1.", max_size=6), st.booleans())
def test_random_patterns_answer_as_re(source, name, whole):
    expected = (re.fullmatch if whole else re.match)(source, name) is not None
    assert NamePattern(source, "key", whole=whole).matches(name, StepBudget()) == expected


@pytest.mark.parametrize(
    "source",
    [
        r"(a+)+$",
        r"(.*)*x",
        r"(.|.)*x" * 20,
        r"(.*.*.*.*.*.*.*.*)*x",
        "(" * 15 + ".*" + ")*" * 15 + "x",
        "(?:" + "|" * 1990 + ")*x",
        r"((.{0,900}){0,900}){0,900}x",
        r"((.?){900}){900}x",
        r"(?=(?=(?=.*a).*b).*c).*" * 20,
    ],
)
def test_no_pattern_hangs(source):
    started = time.process_time()
    with suppress(AdapterInvalid, UnsupportedAdapter):
        pattern, budget = NamePattern(source, "rank_pattern", PEFT_FORM, whole=False), StepBudget()
        for _ in range(200):
            pattern.matches("a" * 60, budget)
    assert time.process_time() - started < 10


def test_an_exhausted_budget_names_the_key():
    with pytest.raises(AdapterInvalid, match="too long to match") as caught:
        NamePattern(".*x", "target_modules").matches(NAME, StepBudget(steps=20))
    assert caught.value.metadata == {"key": "target_modules"}


@pytest.mark.parametrize(
    "source", ["(", "[", "*", "a{2,1}", "x" * 2001, "(" * 41 + ")" * 41, "(" * 900 + ")" * 900, "(?<=a*)b"]
)
def test_malformed_patterns(source):
    with pytest.raises(AdapterInvalid) as caught:
        NamePattern(source, "key", PEFT_FORM)
    assert caught.value.metadata == {"key": "key"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("(?i)q_proj", "holds '(?i)q_proj', whose flags PEFT cannot load: it puts the pattern behind a prefix; remove"),
        ("q_proj)", "holds 'q_proj)', no regular expression: unbalanced parenthesis at position 6; correct it"),
        ("[q", "holds '[q', no regular expression: unterminated character set at position 0; correct it"),
    ],
)
def test_what_is_wrong_is_told_of_the_pattern_itself(source, said):
    """Not of what PEFT builds around it, which fails."""
    with pytest.raises(re.error):
        re.compile(PEFT_FORM.replace("{}", source))
    with pytest.raises(AdapterInvalid, match=re.escape(f"adapter_config.json: rank_pattern {said}")):
        NamePattern(source, "rank_pattern", PEFT_FORM, whole=False)


def test_flags_that_would_load_are_not_served():
    for source in ("(?i)a", "(?i:a)"):
        with pytest.raises(UnsupportedAdapter, match=r"inline flags in .* are not supported; spell the letters out"):
            NamePattern(source, "target_modules")


@pytest.mark.parametrize("source", [r"(a)\1", "(?i)a", "(?i:a)", "(?>a)", "a*+", "(a)?(?(1)b|c)"])
def test_patterns_beyond_regular_ones(source):
    with pytest.raises(UnsupportedAdapter) as caught:
        NamePattern(source, "key")
    assert caught.value.metadata == {"key": "key"}
