"""What messages are made of: commands that a shell takes as they stand, and counts with their noun."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from halfstep.errors import counted, suggested


@pytest.mark.parametrize("folder", ["runs/unet", "runs/my unet", "it's here", "a$b", "ä ö", "-x"])
def test_a_suggested_command_survives_the_shell(folder: str) -> None:
    assert shlex.split(suggested("train", "--resume", Path(folder))) == ["halfstep", "train", "--resume", folder]


def test_a_plain_path_is_not_quoted() -> None:
    assert suggested("evaluate", Path("runs/unet-1")) == "halfstep evaluate runs/unet-1"


@pytest.mark.parametrize(("number", "words"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (2000, "2,000 files")])
def test_one_thing_is_not_plural(number: int, words: str) -> None:
    assert counted(number, "file") == words


def test_irregular_plurals_are_given() -> None:
    assert (counted(1, "class", "classes"), counted(3, "class", "classes")) == ("1 class", "3 classes")
