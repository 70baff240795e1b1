"""`halfstep verify`: each line by an observation; one that does not hold is exit code 1."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import run_command
from halfstep.step.clip import Clip
from halfstep_train.report.page.read_run import read_run
from halfstep_train.run.folder import RunFolder
from halfstep_train.run.train import train
from halfstep_train.use.observe_step import (
    _check_gpu,
    _check_skipped,
    check_clipping,
    check_nan_is_dropped,
    check_rates,
)
from halfstep_train.workloads import load
from tiny_training import batch, loss_of, make_step

FIVE = [
    "configuration aligned", "NaN handling operational", "gradient clipping active", "learning rate as scheduled",
    "AMP/BF16 synchronised",
]  # fmt: skip
TINY = {"train.max_steps": 6, "train.batch_size": 8, "device": "cpu", "log.quiet": True,
        "train.clip_norm": 1.0, "train.report_every": 1}  # fmt: skip


def run(out: Path, **more: Any) -> Path:
    overrides = [f"{key}={value}" for key, value in {**TINY, **more}.items()]
    return train(load("tiny_workload:build", flags={}, overrides=overrides), out=out)


def verified(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    code, out, _ = run_command(capsys, "verify", *words, "--json")
    return code, {one["line"]: one for one in json.loads(out)}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("verify") / "run")


def test_the_five_lines_hold_for_a_clean_run(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.read_bytes() for file in clean.rglob("*") if file.is_file()}
    capsys.readouterr()
    code, lines = verified(capsys, str(clean))
    assert code == 0, lines
    assert list(lines)[:5] == FIVE
    assert all(lines[name]["verdict"] == "holds" for name in FIVE)
    assert "stayed bit-equal" in lines[FIVE[1]]["observed"]
    assert "6 recorded rates" in lines[FIVE[3]]["observed"]
    assert lines["GPU use"]["verdict"] == "not measurable"
    assert before == {file: file.read_bytes() for file in clean.rglob("*") if file.is_file()}


def test_a_configuration_is_not_checked_without_the_package_and_the_exit_code_stays(
    clean: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfstep_train.cli.check.OBSTACLE", "halfstep-check is missing")
    code, lines = verified(capsys, str(clean))
    assert code == 0
    assert lines[FIVE[0]]["verdict"] == "not measurable"
    assert "not checked: halfstep-check is missing (pip install" in lines[FIVE[0]]["observed"]


def test_a_rate_that_left_its_schedule_is_found(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = clean / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    stored = file.read_text()
    for record in records:
        if record.get("step") == 4 and "lr" in record:
            record["lr"] *= 1.5
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, lines = verified(capsys, str(clean))
    file.write_text(stored)
    assert code == 1
    assert lines[FIVE[3]]["verdict"] == "DOES NOT HOLD"
    assert "step 4" in lines[FIVE[3]]["observed"]


@pytest.mark.slow
def test_rates_of_a_resumed_run_follow_the_schedule_of_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(tmp_path / "longer", **{"schedule.name": "cosine"})
    for changes in (["train.max_steps=9"], ["train.max_steps=12", "optimizer.lr=0.02"]):
        again = load(str(path / "config.yaml"), flags={}, overrides=changes)
        train(again, resume=path, allow_changes=True)
    capsys.readouterr()
    code, lines = verified(capsys, str(path))
    assert code == 0, lines
    assert lines[FIVE[3]]["observed"] == "12 recorded rates, each as scheduled; the settings changed after step 6, 9"
    # Steps that a lost checkpoint repeats follow the schedule of the repetition.
    for step in ("00000009", "00000012"):
        shutil.rmtree(path / "checkpoints" / f"step-{step}")
    train(load(str(path / "config.yaml"), flags={}, overrides=[]), resume=path)
    capsys.readouterr()
    assert verified(capsys, str(path))[1][FIVE[3]]["observed"].endswith("; the settings changed after step 6")
    # The last schedule alone does not explain the steps before.
    folder = RunFolder(path)
    folder.write_settled(dataclasses.replace(folder.read_settled(), before=[]))
    assert verified(capsys, str(path))[1][FIVE[3]]["verdict"] == "DOES NOT HOLD"


def test_skipped_steps_and_a_module_outside_the_plan_do_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(tmp_path / "bad", **{"model.options": "{poisoned: [2]}"})
    capsys.readouterr()
    code, lines = verified(capsys, str(path))
    assert code == 1
    assert "step 2" in lines["skipped steps"]["observed"]
    words = ("differing_workload:build", "--device", "cpu", "--precision", "bf16", "--simulate", "train.batch_size=8")
    code, lines = verified(capsys, *words)
    assert code == 1
    assert "body.1" in lines[FIVE[4]]["observed"]
    assert lines[FIVE[0]]["verdict"] == "not measurable"


def test_a_step_that_commits_a_nan_is_found() -> None:
    step = make_step()
    step(loss_of(step.model), [batch(0)])
    assert check_nan_is_dropped(step, loss_of(step.model), [batch(1)])[0]
    step.commit_on_device = _never_bad(step)  # type: ignore[method-assign]
    holds, text = check_nan_is_dropped(step, loss_of(step.model), [batch(1)])
    assert not holds
    assert "changed" in text


def _never_bad(step: Any) -> Any:
    """A step that ignores its verdict."""

    def commit_on_device(facts: Any) -> None:
        facts.bad = torch.zeros_like(facts.bad)
        type(step).commit_on_device(step, facts)

    return commit_on_device


@pytest.mark.parametrize("kind", ["l2", "inf", "value"])
def test_clipping_is_measured_and_its_absence_found(kind: Any) -> None:
    step = make_step(clip=Clip(limit=0.5, kind=kind))
    assert check_clipping(step, loss_of(step.model), [batch(0)])[0]
    step._judge = _without_clipping(step)  # type: ignore[method-assign]
    assert not check_clipping(step, loss_of(step.model), [batch(0)])[0]


def _without_clipping(step: Any) -> Any:
    """A step that does not clip but reports that it does."""
    judge, limited = type(step)._judge, step.clip

    def unclipped(*args: Any, **kwargs: Any) -> Any:
        step.clip = Clip()
        try:
            return judge(step, *args, **kwargs)
        finally:
            step.clip = limited

    return unclipped


def test_rates_of_a_few_steps_follow_the_schedule() -> None:
    step = make_step()
    holds, text = check_rates(step, loss_of(step.model), [batch(0)])
    assert holds, text
    assert step.rates is not None
    step.rates.table = step.rates.table * 2
    assert not check_rates(step, loss_of(step.model), [batch(0)])[0]


def test_a_run_that_faults_ended_counts_the_steps_it_tried(tmp_path: Path) -> None:
    """It stops between two lines of metrics: the last one is older than the faults."""
    faults = [
        {"kind": "event", "event": "skipped", "step": 6 + n, "bad_step": 4 + n, "reason": "loss is nan"}
        for n in range(5)
    ]
    overflow = {"kind": "event", "event": "overflow", "step": 3, "bad_step": 1, "reason": "loss is inf", "scale": 2.0}
    records = [overflow, {"kind": "train", "step": 4, "loss": 1.0}, *faults]
    (tmp_path / "config.yaml").write_text("workload: unet\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert _check_skipped(read_run(tmp_path)).text.startswith(
        "5 of 10 steps skipped, 1 fp16 overflow; the last at step 8"
    )


@pytest.mark.parametrize(
    ("utilization", "start_s", "holds"), [(95.0, 5.0, True), (40.0, 5.0, False), (95.0, 55.0, None), (40.0, 55.0, None)]
)
def test_a_gpu_is_judged_by_its_use_after_the_start_and_not_where_that_is_too_short(
    clean: Path, utilization: float, start_s: float, holds: bool | None
) -> None:
    times = {"elapsed_s": 60.0, "trained_s": 58.0, "waited_s": 1.0, "start_s": start_s, "start_waited_s": 0.0}
    record = read_run(clean)
    record = dataclasses.replace(
        record, monitor=[{"steady": True, "utilization": utilization}], summary={**record.summary, **times}
    )
    assert _check_gpu(record).holds is holds
