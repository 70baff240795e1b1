"""How fast a run goes and what it waits for; the share of the peak that it uses."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

import tiny_workload
from halfstep.hardware.gpus import look_up_gpu
from halfstep.precision.decide import decide
from halfstep_train.config.schema import WITHOUT_END
from halfstep_train.config.section import count_cores
from halfstep_train.config.statements import Launcher
from halfstep_train.run.journal import compute_utilisation, find_peak_flops
from halfstep_train.run.train import train
from halfstep_train.workloads import KINDS, load


def test_gpt2_124m_at_half_a_million_tokens_a_second_takes_43_percent_of_an_h200() -> None:
    """857 million operations a token, as others count them, of 989 TFLOP/s."""
    config = load("gpt2", overrides=["data.dir=anywhere"]).config
    unit = KINDS["gpt2"].make_unit(config, {"vocab": 50257})
    assert unit.per_sample == 1024
    assert unit.flops_per_sample / 1024 == pytest.approx(857e6, rel=0.01)
    plan = dataclasses.replace(decide("bf16", look_up_gpu("H200")), device="cuda:0")
    peak = find_peak_flops(plan)
    assert peak == pytest.approx(989e12, rel=0.01)
    assert compute_utilisation(unit, 500_000 / 1024, peak) == pytest.approx(0.433, abs=0.01)


def test_nothing_is_said_of_a_cpu_or_of_a_model_whose_operations_are_not_counted() -> None:
    plan = dataclasses.replace(decide("fp32", look_up_gpu("H200")), device="cpu")
    assert find_peak_flops(plan) is None
    assert compute_utilisation(KINDS["unet"].make_unit(load("unet").config, {}), 10.0, 1e12) is None


TINY = {"log.verbose": True,
        "data.dir": "anywhere", "data.num_workers": 0, "device": "cpu", "train.batch_size": 4, "train.max_steps": 4,
        "train.report_every": 1, "precision": "fp32"}  # fmt: skip


def slowed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seconds: float) -> None:
    quick = getattr(owner, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return quick(*arguments, **named)

    monkeypatch.setattr(owner, name, slow)


def said_by_a_run(out: Path, capsys: pytest.CaptureFixture[str], **more: object) -> str:
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**TINY, **more}.items()]
    train(load("tiny_workload:build", overrides=overrides), out=out)
    return capsys.readouterr().out


def test_slow_data_show_on_the_bar_and_the_summary_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slowed(monkeypatch, tiny_workload.Samples, "sample", 0.05)
    said = said_by_a_run(tmp_path / "run", capsys)
    bar = next(line for line in said.splitlines() if line.startswith("Epoch 1/") and "4/4" in line)
    share = int(bar.split(" data ")[1].split("%")[0])
    assert 20 < share <= 100
    (row,) = [line for line in said.splitlines() if "waiting for data" in line]
    assert f"data.num_workers={count_cores()} (it is 0" in row


def test_the_first_step_of_a_run_is_its_start_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, delays_s = tiny_workload.Net.forward, [1.0]

    def slow_at_first(*arguments: Any) -> Any:
        time.sleep(delays_s.pop() if delays_s else 0.0)
        return forward(*arguments)

    monkeypatch.setattr(tiny_workload.Net, "forward", slow_at_first)
    said_by_a_run(tmp_path / "run", capsys)
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert 1.0 <= summary["start_s"] < summary["trained_s"]
    assert summary["start_waited_s"] <= summary["waited_s"]


def test_data_in_time_are_not_talked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slowed(monkeypatch, tiny_workload.Net, "forward", 0.2)
    said = said_by_a_run(tmp_path / "run", capsys)
    assert "fp32" in said
    assert " data " not in next(line for line in said.splitlines() if line.startswith("Epoch 1/") and "4/4" in line)
    assert "waiting for data" not in said


def test_the_bar_says_which_runs_are_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by_a_run(tmp_path / "run", capsys, **{"precision": "bf16", "precision.simulate": True})
    assert " mp bf16 (simulated)" in said


def test_steps_say_how_long_a_run_is_unless_epochs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("unet", overrides=["data.dir=x", "train.max_steps=9"]).config.train.epochs == WITHOUT_END
    assert load("unet", overrides=["data.dir=x", "train.max_steps=0"]).config.train.epochs == 100
    assert load("gpt2", overrides=["data.dir=x", "train.max_steps=9", "epochs=2"]).config.train.epochs == 2
    said = said_by_a_run(tmp_path / "run", capsys, **{"train.max_steps": 8, "train.epochs": 1})
    assert "steps: 6 = 1 epoch of 6 (fewer than train.max_steps=8)" in said


def test_a_warmup_that_is_longer_than_the_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by_a_run(tmp_path / "run", capsys, **{"train.max_steps": 2, "schedule.warmup_steps": 2500})
    assert "schedule.warmup_steps=2500 is longer: the learning rate only rises to 0.0008 of optimizer.lr" in said


def test_the_header_names_accelerates_variable_as_the_source_of_the_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in TINY.items() if key != "precision"]
    launcher = Launcher(mixed_precision="bf16")
    train(load("tiny_workload:build", overrides=overrides, launcher=launcher), out=tmp_path / "run")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  precision: ")]
    assert row.endswith(" (ACCELERATE_MIXED_PRECISION=bf16)")
