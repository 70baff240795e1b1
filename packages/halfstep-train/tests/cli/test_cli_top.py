from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from command_line import run_command
from halfstep.disk import lock_folder
from halfstep_train.cli.top import is_over
from halfstep_train.report.page.read_run import read_run


def look(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code, out, err = run_command(capsys, "top", *words)
    return code, out or err


def test_a_run_that_is_under_way_shows_its_newest_step_and_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("workload: unet\n")
    step = {"kind": "train", "epoch": 1, "total_steps": 400, "left_s": 4190.0, "epoch_loss": 0.7,
            "samples_per_s": 250.0, "tokens_per_s": 4000.0,
            "memory_bytes": 2.5e9, "skipped": 1}  # fmt: skip
    records = [{**step, "step": 10, "loss": 0.9}, {**step, "step": 20, "loss": 0.5},
               {"kind": "val", "step": 20, "epoch": 1, "loss": 0.6, "iou": 0.71, "train_loss": 0.6543, "best": True},
               {"kind": "event", "step": 15, "bad_step": 13, "event": "skipped", "reason": "loss is nan"}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, text = look(capsys, str(tmp_path), "--once")
    assert code == 0
    for part in (
        "possibly running",
        "20 of 400, about 1 h 10 min left (epoch 1)",
        "last loss 0.5000",
        "mean loss 0.6543",
        "last iou",
        "best iou 0.7100 (epoch 1)",
        "tokens/s",
        "4,000.0",
        "2.50 GB",
        "iou",
        "0.7100",
        "step 13: loss is nan",
    ):
        assert part in " ".join(text.split())
    assert "Ctrl-C" not in text
    facts = json.loads(look(capsys, str(tmp_path), "--json")[1])
    assert (facts["samples_per_s"], facts["tokens_per_s"], facts["iou"]) == (250.0, 4000.0, 0.71)
    assert facts["last_fault"] == {"step": 13, "reason": "loss is nan"}


def test_control_characters_in_the_records_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("workload: unet\n")
    event = {"kind": "event", "step": 1, "event": "skipped", "reason": "\x1b]0;owned\x07\x1b[2J\x9b31m\rloss is nan"}
    scores = {"kind": "val", "step": 1, "epoch": 1, "loss": 0.5, "\x1b[31miou": 0.5, "best": True}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (event, scores)))
    code, text = look(capsys, str(tmp_path), "--once")
    assert code == 0
    assert "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x0dloss is nan" in "".join(text.split("\n")).replace("  ", "")
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(text)
    main_output = look(capsys, str(tmp_path), "--json")[1]
    assert "\x1b" not in main_output


def test_a_run_without_records_and_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("workload: unet\n")
    assert "starting" in look(capsys, str(tmp_path / "run"), "--once")[1]
    code, text = look(capsys, str(tmp_path), "--once")
    assert (code, "is not a run" in text) == (2, True)
    assert f"`halfstep runs {tmp_path}` lists" in " ".join(text.split()), "it holds one"


HOLDS = """import sys, pathlib, halfstep.disk
with halfstep.disk.lock_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()"""


def test_a_run_is_running_while_its_process_lives_and_stopped_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("workload: unet\n")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "val", "step": 1, "iou": 0.5}\n')
    words = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "held\n"
        assert "running, last record" in look(capsys, str(tmp_path), "--once")[1]
        assert not is_over(read_run(tmp_path))
        run.kill()
    assert is_over(read_run(tmp_path)), "a live look leaves it"
    state = json.loads(look(capsys, str(tmp_path), "--json")[1])["state"]
    assert "before its first checkpoint: its process has ended" in state
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert f"train --resume {tmp_path}" in json.loads(look(capsys, str(tmp_path), "--json")[1])["state"]
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "summary.json").write_text('{"metric": "iou"}')
    assert json.loads(look(capsys, str(tmp_path), "--json")[1])["state"] == "ended"


def test_a_live_look_at_a_run_that_is_killed_ends_with_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal to rich
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "config.yaml").write_text("workload: unet\n")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "val", "step": 1, "iou": 0.5}\n')
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    words = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "held\n"
        killer = threading.Timer(0.5, run.kill)
        killer.start()
        code, text = look(capsys, str(tmp_path))
        killer.join()
    assert code == 0
    last = text[text.rindex("state") :]
    assert "the run continues" in text, "while it ran"
    assert "the run continues" not in last
    assert "its process has ended; continue with: halfstep train --resume" in last


# --- `halfstep runs`: every run of a folder in one line ---


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
