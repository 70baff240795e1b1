"""The bar of a run: precision at once, numbers as soon as they are known, no compilation in its rate."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from halfstep.step.facts import Reading
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import Bar, RunReport
from halfstep_train.run.journal import COMPILING, Journal, Pace, Waiting
from halfstep_train.workloads import from_dict
from hand_clock import HandClock
from whole_runs import assemble_run, run

TINY = {"data.dir": "anywhere", "data.num_workers": 0, "device": "cpu", "precision": "fp32", "train.report_every": 10}


def journal(folder: Path, total_steps: int, epochs: int = 2, *, quiet: bool = False) -> Journal:
    parts = assemble_run(from_dict("tiny_workload:build", TINY).config)
    told = Journal(RunReport(folder, quiet=quiet), dataclasses.replace(parts, total_steps=total_steps))
    told.epochs = epochs
    return told


def fact(attempted: int, loss: float) -> Reading:
    return Reading(attempted=attempted, loss=loss, grad_norm=1.0, is_bad=False, is_spike=False, is_empty=False,
                   is_ruined=False, scale=1.0, committed=attempted, lr=1e-3)  # fmt: skip


def bar_of(journal: Journal) -> Bar:
    assert journal._bar is not None
    return journal._bar


def test_precision_shows_at_once_and_the_numbers_with_the_first_step_that_is_readable(tmp_path: Path) -> None:
    told = journal(tmp_path, 24, quiet=True)
    for epoch in range(2):
        with told.show_training(epoch, 12):
            assert "fp32" in bar_of(told).format_parts()
            if epoch == 0:
                told.record_step(1, 1.0, Waiting())
                assert not any("loss" in part for part in bar_of(told).format_parts())
                told.observe(None, fact(1, 0.75))
            told.record_step(2, 1.0, Waiting())
            assert {"mean loss 0.7500", "last loss 0.7500", "lr 1.0e-03", "fp32"} <= set(bar_of(told).format_parts())
    told.report.close()


def test_bar_record_and_epoch_line_show_the_same_losses(tmp_path: Path) -> None:
    told = journal(tmp_path, 24, quiet=True)
    with told.show_training(0, 12):
        for attempted in range(12):
            told.observe(None, fact(attempted, 1.0 / (attempted + 1)))
            told.record_step(attempted + 1, 1.0, Waiting())
            shown = [part for part in bar_of(told).format_parts() if "loss" in part]
            # Fields change with a record: each tenth step, and before that 1, 2, 4 and 8.
            seen = [1.0 / (k + 1) for k in range(max(step for step in (1, 2, 4, 8, 10) if step <= attempted + 1))]
            assert shown == [f"mean loss {sum(seen) / len(seen):.4f}", f"last loss {seen[-1]:.4f}"]
        told.finish_bar()
        seen = [1.0 / (k + 1) for k in range(12)]
        assert f"mean loss {sum(seen) / len(seen):.4f}" in bar_of(told).format_parts()
    told.record_epoch(0, 12, {}, {"loss": 0.5, "accuracy": 0.75}, is_best=True)
    told.report.close()
    *early, train, val = read(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in early] == [(1, 1.0), (2, 0.5), (4, 0.25), (8, 0.125)]
    assert (train["step"], train["loss"]) == (10, pytest.approx(0.1))
    assert train["epoch_loss"] == pytest.approx(sum(1.0 / (k + 1) for k in range(10)) / 10)
    assert val["train_loss"] == pytest.approx(sum(1.0 / (k + 1) for k in range(12)) / 12)
    assert (train["total_steps"], train["left_s"] >= 0) == (24, True)


def test_the_time_left_is_that_of_the_whole_run_with_its_validations_and_without_its_compilation() -> None:
    clock = HandClock()
    pace = Pace(1000, clock=clock)
    pace.begin_training()
    for lap_s, counts in ((60.0, True), (30.0, False), *[(1.0, True)] * 98):
        clock.now_s += lap_s
        pace.count_step(counts=counts)
    assert pace.estimate_left_s(100) == pytest.approx(900.0)
    clock.now_s += 50.0  # a validation: half a second per step so far
    pace.begin_training()
    assert pace.estimate_left_s(100) == pytest.approx(900.0 * 1.5)
    for _ in range(300):  # another job ends: the estimate follows
        clock.now_s += 0.5
        pace.count_step(counts=True)
    assert pace.estimate_left_s(400) == pytest.approx(600 * (0.5 + 0.5), rel=0.15)


def test_two_lines_for_each_epoch_name_mean_best_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = journal(tmp_path, 4)
    clock = HandClock()
    told.pace = Pace(4, clock=clock)
    for epoch, score in enumerate((0.75, 0.5)):
        with told.show_training(epoch, 2):
            for attempted in (2 * epoch, 2 * epoch + 1):
                clock.now_s += 10.0
                told.observe(None, fact(attempted, 0.5))
                told.record_step(attempted + 1, 16.0, Waiting())
        is_best = told.stopping.observe(score, epoch, in_turn=True)
        val = {"loss": 0.6, "accuracy": score}
        told.record_epoch(epoch, 2 * epoch + 2, {"accuracy": 0.9}, val, is_best=is_best)
    told.report.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Epoch 1/2 train: mean loss 0.5000, accuracy 0.9000, 16.0 samples/s"
    assert lines[1] == "Epoch 1/2 val:   loss 0.6000, accuracy 0.7500 (best), about 20 s left"
    assert lines[3] == "Epoch 2/2 val:   loss 0.6000, accuracy 0.5000 (best 0.7500 in epoch 1)"
    assert len(lines) == 4


def test_nan_is_never_called_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = journal(tmp_path, 4)
    is_best = told.stopping.observe(math.nan, 0)
    told.record_epoch(0, 2, {}, {"loss": math.nan, "accuracy": math.nan}, is_best=is_best)
    told.record_early_stop("epoch 1")
    told.report.close()
    shown = capsys.readouterr()
    assert "accuracy nan" in shown.out
    assert "best" not in shown.out
    assert "no finite accuracy in 1 validations" in shown.out + shown.err


def test_a_validation_whose_loss_is_nan_is_never_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", {"optimizer.lr": 1e30, "train.max_steps": 2, "log.quiet": False})
    shown = [line for line in capsys.readouterr().out.splitlines() if "val:" in line]
    assert shown
    assert all("loss nan, accuracy 0." in line and "best" not in line for line in shown)


def test_the_step_that_compiles_is_announced_and_left_out_of_the_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = journal(tmp_path, 0, epochs=1)
    with told.show_training(0, 3):
        told.exclude_compiling()
        told.record_step(1, 1.0, Waiting())
        assert bar_of(told)._pace_from[1] == 1
        told.record_step(2, 1.0, Waiting())
        assert bar_of(told)._pace_from[1] == 1
    assert capsys.readouterr().out.splitlines() == [COMPILING]
