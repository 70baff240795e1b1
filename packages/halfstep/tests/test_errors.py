"""What messages are made of: commands that a shell takes as they stand, counts with nouns, sizes with units."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from halfstep.errors import format_bytes, format_count, suggest_command, summarise_error


@pytest.mark.parametrize("folder", ["runs/unet", "runs/my unet", "it's here", "a$b", "ä ö", "-x"])
def test_a_suggested_command_survives_the_shell(folder: str) -> None:
    assert shlex.split(suggest_command("train", "--resume", Path(folder))) == ["halfstep", "train", "--resume", folder]


@pytest.mark.parametrize(("number", "words"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (2000, "2,000 files")])
def test_one_thing_is_not_plural(number: int, words: str) -> None:
    assert format_count(number, "file") == words


def test_irregular_plurals_are_given() -> None:
    assert (format_count(1, "class", "classes"), format_count(3, "class", "classes")) == ("1 class", "3 classes")


@pytest.mark.parametrize(
    ("num_bytes", "short", "fine"),
    [
        (999, "999 B", "999 B"),
        (12_345_678, "12 MB", "12.3 MB"),
        (999_700_000, "1.0 GB", "1.00 GB"),
        (9_999_000_000, "10.0 GB", "10.0 GB"),
        (99_960_000_000, "100 GB", "100 GB"),
        (1_500_000_000_000, "1.5 TB", "1.50 TB"),
    ],
)
def test_sizes_speak_in_the_decimal_unit_that_fits_them(num_bytes: int, short: str, fine: str) -> None:
    assert (format_bytes(num_bytes), format_bytes(num_bytes, digits=3)) == (short, fine)


@pytest.mark.parametrize(("error", "line"), [(ValueError(), "ValueError"), (OSError("\nno\nmore"), "no")])
def test_any_error_is_summarised_in_one_line_even_without_a_message(error: Exception, line: str) -> None:
    assert summarise_error(error) == line
