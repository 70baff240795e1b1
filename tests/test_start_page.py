"""Every command of docs/start.md runs on a CPU, as it is on the page, with smaller models and fewer steps behind it."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from doc_pages import ROOT, Shown, blocks, commands
from halfstep_train.cli.main import main

PAGE = ROOT / "docs" / "start.md"
RUN = "runs/unet-20250101-120000"
SHOWN = [(shown, words) for shown, words in commands(PAGE) if shown.where in {b.where for b in blocks(PAGE, "bash")}]
SHORT = ("data.num_workers=0", "train.max_steps=2", "train.batch_size=2", "schedule.name=constant")
UNET = ("data.image_size=16", "model.base_channels=2", "model.depth=1")
SMALLER: dict[str, tuple[str, ...]] = {
    "train unet": (*SHORT, *UNET),
    "train resnet50": (*SHORT, "data.image_size=32"),
    "train gpt2": (*SHORT, "model.depth=1", "model.dim=32", "model.heads=2", "model.context=16"),
    "train --resume": ("train.max_steps=3",),
    "compare unet": (*SHORT, *UNET, "--margin", "0.9", "--data-dir", "data/carvana"),
    "bench unet": (*UNET, "--batch-size", "2", "--steps", "10"),
}
"""What is added to a command, by its first two words."""
COMPILES = "bench"
"""Compiles for a CPU, with a C++ compiler, for a minute or more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folders that the page names, and a run of the name it has there."""
    place, before = tmp_path_factory.mktemp("start"), Path.cwd()
    noise = np.random.default_rng(0)
    for number in range(20):
        for name in ("carvana/imgs", "carvana/masks", "pictures/cat", "pictures/dog", "../photos"):
            is_mask = name.endswith("masks")
            pixels = noise.integers(0, 2, (16, 16)) * 255 if is_mask else noise.integers(0, 256, (16, 16, 3))
            path = place / "data" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    (place / "texts").mkdir()
    (place / "texts" / "one.txt").write_text("to be or not to be, that is the question. " * 400)
    os.chdir(place)
    try:
        call("train", "unet", "--out", RUN, *SHORT, *UNET)
        yield place
    finally:
        os.chdir(before)


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("shown", "words"),
    [pytest.param(*one, marks=pytest.mark.soak if one[1][0] == COMPILES else ()) for one in SHOWN],
    ids=[" ".join(words) for _, words in SHOWN],
)
def test_a_command_of_the_start_page_runs_on_a_cpu(
    shown: Shown,
    words: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: True)  # the only thing outside of this process
    more = SMALLER.get(" ".join(words[:2]), ())
    assert call(*words, *more) == 0, f"{shown.where}: {capsys.readouterr().err}"
