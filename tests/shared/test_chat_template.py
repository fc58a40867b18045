"""What a template's text tells without running it: never more than is true where it is run."""

import pytest

from inference_service.chat_template import ChatTemplate
from shared.chat_template import parse_template
from shared.errors import InvalidArgument

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
NEVER = {
    "": "is empty",
    " \n": "is empty",
    "{% for m in messages %}": "is not a template: Unexpected end of template",
    "\n\n{{ messages[ }}": "unexpected '}'",
    "{{ messages | shout }}": "uses the filter 'shout'",
    "{% for m in messages %}{{ m | shout }}{% endfor %}": "uses the filter 'shout'",
    "{{ messages is loud }}": "uses the test 'loud'",
    "{% include 'header' %}" + LOOP: "uses another template",
    "{% extends 'chatml' %}": "uses another template",
    "{{ messages }}{{ " + "(" * 3000: "nested too deeply",
    "{{ messages }}{{ 1" + "0" * 5000 + " }}": "is not a template: Exceeds the limit",
}


def rendered(text):
    """What a replica makes of it; empty if it refuses it."""
    try:
        return ChatTemplate(text, {}).render([{"role": "user", "content": "x"}]).strip()
    except InvalidArgument:
        return ""


@pytest.mark.parametrize("text", NEVER)
def test_what_can_render_nothing(text):
    assert NEVER[text] in parse_template(text).never
    assert not rendered(text)


def test_an_error_names_its_line():
    assert parse_template("{{ a }}\n\n{{ messages[ }}").never.endswith("(line 3)")
    with pytest.raises(InvalidArgument, match=r"\(line 3\)"):
        ChatTemplate("{{ a }}\n\n{{ messages[ }}", {})


@pytest.mark.parametrize(
    ("text", "doubts"),
    [
        (LOOP, []),
        ("{% generation %}{{ messages | tojson }}{% endgeneration %}{{ strftime_now('%Y') }}", []),
        ("{% for m in messages %}{{ m.role }}{% if m.x %}{% break %}{% endif %}{% endfor %}", []),
        (LOOP + "{{ raise_exception('no tools') if tools }}", []),
        ("You are a pirate.", ["does not use `messages`"]),
        (LOOP + "{% if tools %}{{ tools | shout }}{% endif %}", ["uses the filter 'shout'"]),
        (LOOP + "{{ tools | shout if tools else '' }}", ["uses the filter 'shout'"]),
        (LOOP + "{% if tools %}{% include 'tools' %}{% endif %}", ["uses another template"]),
        ("{% macro a() %}{% include 'tools' %}{% endmacro %}" + LOOP, ["uses another template"]),
    ],
)
def test_what_may_work_is_at_most_doubted(text, doubts):
    syntax = parse_template(text)
    assert syntax.never is None
    assert len(syntax.doubts) == len(doubts)
    assert all(words in doubt for words, doubt in zip(doubts, syntax.doubts, strict=True))
    assert rendered(text)


@pytest.mark.parametrize(
    "text", ["{{ 9 ** 9 ** 9 }}", "{{ 'a' * 9000000000 }}", "{{ range(9000000000) | list }}", "{{ ''.__class__ }}"]
)
def test_nothing_is_evaluated(text):
    assert parse_template(text + "{{ messages }}") == (None, ())


def test_long_chains_are_read_without_recursion():
    assert parse_template("{{ messages" + ".a" * 20_000 + " }}") == (None, ())
