"""The bar of a run: precision at once, numbers as soon as they are known, no compilation in its rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep.report import progress
from halfstep.report.metrics_file import read
from halfstep.report.progress import Bar
from halfstep.report.run_report import RunReport
from halfstep.run.assemble import build_workload, decide_plan
from halfstep.run.journal import COMPILING, Journal, Waiting
from halfstep.step.facts import Reading
from halfstep.workloads import from_dict


@pytest.fixture
def plan() -> Plan:
    config = from_dict("tiny_workload:build", {"data.dir": "anywhere", "device": "cpu", "precision": "fp32"}).config
    return decide_plan(config, build_workload(config), probe("cpu"))


def journal(folder: Path, plan: Plan) -> Journal:
    return Journal(RunReport(folder, quiet=True), plan, epochs=2, report_every=10, metric="accuracy")


def fact(attempted: int, loss: float) -> Reading:
    return Reading(attempted=attempted, loss=loss, grad_norm=1.0, is_bad=False, is_spike=False, is_empty=False,
                   is_ruined=False, scale=1.0, committed=attempted, lr=1e-3)  # fmt: skip


def bar_of(journal: Journal) -> Bar:
    assert journal._bar is not None
    return journal._bar


def test_precision_shows_at_once_and_the_numbers_with_the_first_step_that_is_readable(
    tmp_path: Path, plan: Plan
) -> None:
    told = journal(tmp_path, plan)
    for epoch in range(2):
        with told.show_training(epoch, 12):
            assert "fp32" in bar_of(told).format_parts()
            if epoch == 0:
                told.record_step(1, 1.0, Waiting())
                assert not any(part.startswith("loss") for part in bar_of(told).format_parts())
                told.observe(None, fact(1, 0.75))
            told.record_step(2, 1.0, Waiting())
            assert {"loss 0.7500", "lr 1.0e-03", "fp32"} <= set(bar_of(told).format_parts())


def test_what_the_bar_shows_early_is_no_record(tmp_path: Path, plan: Plan) -> None:
    told = journal(tmp_path, plan)
    with told.show_training(0, 12):
        for attempted in range(1, 13):
            told.observe(None, fact(attempted, 1.0 / attempted))
            told.record_step(attempted, 1.0, Waiting())
            shown = [part for part in bar_of(told).format_parts() if part.startswith("loss")]
            assert shown == [f"loss {1.0 / (1 if attempted < 10 else 10 if attempted < 12 else 12):.4f}"]
    told.report.close()
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [10]


def test_the_step_that_compiles_is_announced_and_left_out_of_the_rate(
    tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Journal(RunReport(tmp_path), plan, epochs=1, report_every=10, metric="accuracy")
    with told.show_training(0, 3):
        told.exclude_compiling()
        told.record_step(1, 1.0, Waiting())
        assert bar_of(told)._begin[1] == 1
        told.record_step(2, 1.0, Waiting())
        assert bar_of(told)._begin[1] == 1
    assert capsys.readouterr().out.splitlines()[1] == COMPILING


def test_the_line_written_after_a_long_compilation_tells_neither_its_rate_nor_a_time_left(
    tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    told = Journal(RunReport(tmp_path), plan, epochs=1, report_every=10, metric="accuracy")
    with told.show_training(0, 4):
        told.exclude_compiling()
        told.record_step(1, 1.0, Waiting())
        told.record_step(2, 1.0, Waiting())
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index(COMPILING) + 1] == "Epoch 1/1 [Train] 1/4 fp32"
    assert "it/s fp32" in lines[4]
    assert lines[4].endswith("left")
