"""A family is a folder and an entry in one dict: tests/new_family trains, resumes, benches, evaluates and predicts.

It has what a family can ask of the house: a frozen encoder, two phases, a loss weight that changes with the steps,
noise, averaged parts and samples.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfstep.hardware.cache import measure_once
from halfstep.hardware.measure import Sizes, measure
from halfstep.hardware.probe import probe
from halfstep_train.cli.main import main
from halfstep_train.workloads import KINDS
from new_family.demo import SIDE
from warm_processes import process
from whole_runs import assert_same_run, newest, records

ENTRY = {"autoencoder": "new_family:KIND"}
SETTINGS = (
    "device=cpu", "data.num_workers=0", "precision.default=bf16", "precision.simulate=true", "train.batch_size=4",
    "train.max_steps=24", "train.checkpoint_every=4", "train.validate_every_steps=12", "train.sample_every=12",
    "train.report_every=1", "optimizer.lr=0.01", "ema.enabled=true", "log.quiet=true",
)  # fmt: skip


def with_entry(*words: str) -> None:
    KINDS.paths.update(ENTRY)
    main(list(words))


def killed_at(checkpoint: Path, *words: str) -> None:
    """Train until this checkpoint exists, then kill the process."""

    def wait_and_kill() -> None:
        while not checkpoint.is_dir():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_kill, daemon=True).start()
    with_entry(*words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on demo data, in a process of its own: tests before may have changed how this one rounds."""
    folder = tmp_path_factory.mktemp("family")
    finish(folder / "said", "train", "autoencoder", "--out", str(folder / "run"), *SETTINGS)
    return folder / "run"


def finish(said: Path, *words: str) -> None:
    with process(with_entry, *words, output=said) as running:
        running.join(timeout=120)
        assert running.exitcode == 0, said.read_text()


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(KINDS, "paths", {**KINDS.paths, **ENTRY})
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(list(words))
    said = capsys.readouterr()
    assert not end.value.code, said.err
    return said.out


def test_it_trains_both_phases_and_leaves_samples(whole: Path) -> None:
    steps = newest(whole).state["step"]
    assert {name: own["committed"] for name, own in steps["phases"].items()} == {"decoder": 24, "critic": 12}
    losses = [record["loss/decoder"] for record in records(whole) if record["kind"] == "train"]
    assert len(losses) == 24
    errors = [record["squared_error"] for record in records(whole) if record["kind"] == "val"]
    assert errors[-1] < errors[0]
    for step, say in (("00000012", "0.12"), ("00000024", "0.16")):
        folder = whole / "report" / "samples" / step
        with Image.open(folder / "drawn.png") as drawn:
            assert drawn.size == (SIDE, SIDE)
        assert (folder / "say.txt").read_text().strip() == say
    assert (whole / "frozen" / "encoder.safetensors").is_file()
    assert not any("encoder" in name for name in newest(whole).model)
    assert {name.split(".")[0] for name in newest(whole).ema} == {"decoder"}


@pytest.mark.slow  # starts two processes
def test_it_goes_on_after_a_kill_to_the_bit(whole: Path, tmp_path: Path) -> None:
    parts, said = tmp_path / "run", tmp_path / "said"
    words = ("train", "autoencoder", "--out", str(parts), *SETTINGS, "--data-dir", str(whole / "data"))
    with process(killed_at, parts / "checkpoints" / "step-00000008", *words, output=said) as killed:
        killed.join(timeout=120)
        assert killed.exitcode == -signal.SIGKILL, said.read_text()
    finish(said, "train", "--resume", str(parts))
    assert_same_run(whole, parts)


def test_it_is_evaluated_and_predicts(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(command(monkeypatch, capsys, "evaluate", str(whole), "--json"))
    best = min(record["squared_error"] for record in records(whole) if record["kind"] == "val")
    assert found["metrics"]["squared_error"] == pytest.approx(best, rel=1e-6)
    pixels = tmp_path / "pixels.csv"
    pixels.write_text(",".join(map(str, np.zeros(SIDE * SIDE))))
    (answer,) = json.loads(command(monkeypatch, capsys, "predict", str(whole), str(pixels), "--json"))["predictions"]
    assert answer["error"] > 0


def test_it_is_benched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    image = (1, 4, 8)
    sizes = Sizes(matmul=16, image=image, copy_bytes=2**16, budget_s=0.2)
    measure_once(probe("cpu"), tmp_path / "cache" / "halfstep", functools.partial(measure, sizes=sizes))
    words = ("--batch-size", "4", "--steps", "10", "--precisions", "fp32", "--modes", "eager", "--device", "cpu")
    (row,) = json.loads(command(monkeypatch, capsys, "bench", "autoencoder", *words, "--json"))["rows"]
    assert row["ms"] > 0


def test_its_settings_are_shown_without_torch() -> None:
    code = (
        "import sys; from halfstep_train.workloads import KINDS, load; "
        "KINDS.paths.update(autoencoder='new_family:KIND'); "
        "print(load('autoencoder', overrides=['model.width=3']).config.model.width, 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True
    )
    assert found.stdout.split() == [b"3", b"False"], found.stderr
