"""`halfstep formats`."""

from __future__ import annotations

import pytest

from command_line import run_command
from halfstep.formats import FORMATS


def output_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    found, *said = run_command(capsys, "formats", *argv)
    assert found == code
    return said[0], said[1]


def test_without_values_every_format_stands_in_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = output_of(capsys)
    rows = {
        line.split()[0]: line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in FORMATS
    }
    assert list(rows) == list(FORMATS)
    assert rows["fp16"] == ["fp16", "16", "1+5+10", "65504", "6.10e-05", "5.96e-08", "9.77e-04", "3.3"]
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_values_are_shown_one_by_one_with_their_fate(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = output_of(capsys, "70000", "1e-8")
    first, second = out.split("1e-8\n")
    assert "inf      overflow" in first
    assert "the largest is 65504" in first
    assert "flushed to zero" in second


@pytest.mark.parametrize("argv", [("-3.5",), ("--", "-3.5"), ("1", "-1e-8", "-3.5", "-inf")])
def test_negative_numbers_are_numbers_and_not_flags(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    out, _ = output_of(capsys, *argv)
    assert {word for word in argv if word != "--"} <= set(out.split("\n"))


@pytest.mark.parametrize("word", ["foo", "--foo", "1,5"])
def test_what_is_not_a_number_is_a_clear_error(capsys: pytest.CaptureFixture[str], word: str) -> None:
    out, err = output_of(capsys, "1.0", word, code=2)
    assert out == ""
    assert f"error: '{word}' is not a number" in err
    assert "fix:" in err
