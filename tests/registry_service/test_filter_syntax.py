"""The grammar of filters, and that whatever is typed gives a tree or a position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry_service.filter_fields import ADAPTER_FIELDS, condition
from registry_service.filter_syntax import All, AnyOf, Comparison, Not, parse_filter
from shared.errors import InvalidArgument


def shown(term):
    match term:
        case All(terms):
            return "(" + " AND ".join(map(shown, terms)) + ")"
        case AnyOf(terms):
            return "(" + " OR ".join(map(shown, terms)) + ")"
        case Not(inner):
            return f"NOT {shown(inner)}"
        case Comparison():
            key = f".{term.key}" if term.key else ""
            return f"{term.field}{key}{term.operator}{term.value.text!r}"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a = 1", "a='1'"),
        ("a=1 AND b!=2 OR c>3", "(a='1' AND (b!='2' OR c>'3'))"),  # OR binds tighter, as AIP-160 has it
        ("(a=1 AND b=2) OR c=3", "((a='1' AND b='2') OR c='3')"),
        ("NOT a:b AND NOT (c<=1 OR d>=2)", "(NOT a:'b' AND NOT (c<='1' OR d>='2'))"),
        ("NOT NOT a=1", "NOT NOT a='1'"),
        ('labels.team = "x y"', "labels.team='x y'"),
        ("labels.app.kubernetes.io/name = 'a\"b'", "labels.app.kubernetes.io/name='a\"b'"),
        ('labels."a b":*', "labels.a b:'*'"),
        (r'd = "say \"hi\" \\ "', "d='say \"hi\" \\\\ '"),
        ("create_time > 2026-01-31T09:00:00.5+01:00", "create_time>'2026-01-31T09:00:00.5+01:00'"),
        ('a = "AND"', "a='AND'"),
        ("  a=-1\n", "a='-1'"),
    ],
)
def test_what_filters_mean(text, meant):
    assert shown(parse_filter(text)) == meant


def test_a_blank_filter_is_none():
    assert parse_filter("") is None
    assert parse_filter(" \n") is None


@pytest.mark.parametrize(
    ("text", "position", "said"),
    [
        ("a", 2, "expected one of = !="),
        ("a =", 4, "expected a value"),
        ("a = b c", 7, "expected AND, OR or the end"),
        ("= 1", 1, "expected a field"),
        ("(a = 1", 7, "expected )"),
        ("a = 1)", 6, "expected AND, OR"),
        ("a = (b)", 5, "expected a value"),
        ("AND a = 1", 1, "expected a field"),
        ("a = NOT", 5, "expected a value"),
        ('a = "b', 5, "cannot be read"),
        ("labels. = 1", 9, "expected a key"),
        ("a ! 1", 3, "cannot be read"),
        ("(" * 50 + "a=1", 21, "nested"),
        ("NOT " * 50 + "a=1", 81, "nested"),
        ("nosuch = 1", 1, "there is no field 'nosuch'"),
        ("name.x = 1", 1, "has no fields"),
        ("state = LIVE", 9, "one of READY, EMPTY, DELETED"),
        ("state > READY", 1, "compared by ="),
        ("latest_version = 'x'", 18, "whole number"),
        ("latest_version = 9999999999999999999", 18, "whole number"),
        ("create_time < yesterday", 15, "is not a time"),
        ("create_time < '2026-01-01T00:00:00'", 15, "is not a time"),
        ("create_time < 0001-01-01T00:00:00+23:00", 15, "is not a time"),
        ("labels = 1", 1, "compared by :"),
        ('labels."a b" = 1', 1, "is no key"),
        ("aliases = prod", 1, "compared by :"),
    ],
)
def test_what_is_wrong_is_said_with_its_position(text, position, said):
    with pytest.raises(InvalidArgument) as caught:
        condition(parse_filter(text), ADAPTER_FIELDS)
    (violation,) = caught.value.violations
    assert violation.field == "filter"
    assert violation.description.startswith(f"at {position}: ")
    assert said in violation.description


@pytest.mark.parametrize("text", ["a" * 2001, "a = \0", "a = '\x7f'"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(InvalidArgument):
        parse_filter(text)


WORDS = [
    "a",
    "name",
    "labels.k",
    "=",
    "!=",
    ":",
    "<",
    "AND",
    "OR",
    "NOT",
    "(",
    ")",
    '"x"',
    "'",
    '"',
    "\\",
    "*",
    ".",
    "1",
]


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=12).map(" ".join) | st.text(max_size=60))
def test_whatever_is_typed(text):
    assert wrong_fields(text) in ([], ["filter"])


def wrong_fields(text):
    try:
        term = parse_filter(text)
        if term is not None:
            condition(term, ADAPTER_FIELDS)
    except InvalidArgument as error:
        return [violation.field for violation in error.violations]
    return []
