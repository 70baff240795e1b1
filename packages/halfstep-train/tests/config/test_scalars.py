"""Plain text to typed values."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep_train.config.section import Plain, convert_for_field, parse_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("-7", -7),
        ("1_000", 1000),
        ("010", 10),
        ("yes", True),
        ("Off", False),
        ("no", False),
        ("null", None),
        ("None", None),
        ("~", None),
        ("", None),
    ],
)
def test_a_number_is_what_a_person_calls_a_number(text: str, value: object) -> None:
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)


@pytest.mark.parametrize(
    "text", ["1:30", "12:30:45", "2024-01-01", "e5", ".", "-", "1e", "0x10", "v1", "1.2.3", "bf16"]
)
def test_yaml_1_1_surprises_stay_text(text: str) -> None:
    assert parse_scalar(text) == text


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none())
def test_what_python_prints_reads_back(value: object) -> None:
    assert parse_scalar(str(value)) == value


def test_plain_text_is_settled_by_its_field_and_quoted_text_is_left_alone() -> None:
    assert convert_for_field(Plain("off"), Literal["auto", "off"]) == "off"
    assert convert_for_field(Plain("off"), bool) is False
    for word in ("false", "False", "no", "off", "null"):
        assert convert_for_field(Plain(word), Literal["auto", "off"]) == "off"
    assert convert_for_field(Plain("false"), Literal["auto", "none"]) == "false", "no word of its own for it"
    assert convert_for_field([Plain("001"), "002"], tuple[str, ...]) == ["001", "002"]
    assert convert_for_field({"a": Plain("1e-3"), "b": "1e-3"}, dict[str, float | str]) == {"a": 1e-3, "b": "1e-3"}
    assert convert_for_field(Plain("null"), str | None) is None
