"""`halfstep runs`: every run of a folder in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import run_command
from halfstep.disk import lock_folder

HOLDS = """import sys, pathlib, halfstep.disk
with halfstep.disk.lock_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()"""


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    _, out, err = run_command(capsys, "runs", *words)
    return out or err


def write_run(path: Path, *, is_over: bool, age_s: int) -> None:
    (path / "report").mkdir(parents=True)
    (path / "config.yaml").write_text("workload: unet\n")
    os.utime(path / "config.yaml", (2e9 - age_s, 2e9 - age_s))
    step = {"kind": "train", "epoch": 1, "step": 1230, "loss": 0.5, "total_steps": 20_000, "left_s": 4190.0,
            "samples_per_s": 3.0, "skipped": 0}  # fmt: skip
    scores = [{"kind": "val", "step": 9, "epoch": n, "loss": 0.6, "iou": iou, "best": n == 1}
              for n, iou in ((1, 0.7), (2, 0.6))]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (step, *scores)))
    if is_over:
        (path / "report" / "summary.json").write_text(json.dumps({"metric": "iou", "steps": 1234}))


def test_each_run_shows_state_progress_time_left_and_best_metric_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "unet-20250101-120000", is_over=True, age_s=100)
    write_run(tmp_path / "unet-20250102-120000", is_over=False, age_s=50)
    write_run(tmp_path / "unet-20250103-120000", is_over=False, age_s=0)
    (tmp_path / "data").mkdir()
    for name in ("step-00001200", "step-00001233"):  # saved by a signal, after the last record
        (tmp_path / "unet-20250102-120000" / "checkpoints" / name).mkdir(parents=True)
    with lock_folder(tmp_path / "unet-20250102-120000"):
        pass
    words = [sys.executable, "-c", HOLDS, str(tmp_path / "unet-20250103-120000")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "held\n"
        text = say(capsys, str(tmp_path))
        found = json.loads(say(capsys, str(tmp_path), "--json"))
        run.kill()
    title, _, *lines = text.splitlines()
    assert title.split() == ["run", "state", "step", "left", "best", "precision"]
    assert [line.split() for line in lines] == [
        ["unet-20250103-120000", "running", "1,230/20,000", "1", "h", "10", "min", "iou", "0.7000"],
        ["unet-20250102-120000", "stopped", "1,233/20,000", "iou", "0.7000"],
        ["unet-20250101-120000", "ended", "1,234/20,000", "iou", "0.7000"],
    ]
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert (found[0]["left_s"], found[0]["best"]) == (4190.0, {"value": 0.7, "epoch": 1})


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("good", "pipe"):
        write_run(tmp_path / name, is_over=True, age_s=0)
    (tmp_path / "pipe" / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    code, out, err = run_command(capsys, "runs", str(tmp_path))
    assert (code, "good" in out, "pipe" in out) == (0, True, False)
    assert "pipe is left out: " in err
    assert "is a named pipe, not a file" in err


def test_a_folder_without_runs_or_no_folder_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert say(capsys, str(tmp_path)) == f"no runs in {tmp_path}; `halfstep runs DIR` lists another folder\n"
    monkeypatch.chdir(tmp_path)
    assert say(capsys) == "no runs in runs; `halfstep runs DIR` lists another folder\n"
    assert "there is no folder" in say(capsys, str(tmp_path / "no"))
