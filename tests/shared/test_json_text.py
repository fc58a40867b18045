"""Values of somebody's JSON are told as JSON, and always printable."""

import pytest

from shared.errors import InvalidArgument
from shared.json_fields import JsonFields
from shared.json_text import as_json


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "true"),
        (None, "null"),
        ({"a": ["b", 1.5]}, '{"a": ["b", 1.5]}'),
        ("größe", '"größe"'),
        ("a\n\x1b[1m", '"a\\n\\u001b[1m"'),
        ("\u202eevil", '"\\u202eevil"'),
        ("\ud800", '"\\ud800"'),
        (float("inf"), "Infinity"),
    ],
)
def test_a_value_is_told_as_it_is_written(value: object, expected: str) -> None:
    assert as_json(value) == expected
    assert as_json(value).isprintable()


def test_a_wrong_field_is_told_with_its_value_as_json() -> None:
    fields = JsonFields({"a": True, "b": {"c": None}}, "")
    fields.integer("a")
    fields.text("b", "")
    with pytest.raises(InvalidArgument) as caught:
        fields.check()
    assert [violation.description for violation in caught.value.violations] == [
        "must be an integer in [1, 2147483648], is true",
        'must be a string, is {"c": null}',
    ]
