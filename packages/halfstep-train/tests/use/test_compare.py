"""A comparison from rows to verdicts, by the command line, on a model that trains in a moment."""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from command_line import run_command
from halfstep.errors import CheckpointError, ConfigError
from halfstep_train.cli.compare import parse_budget
from halfstep_train.cli.report import render_comparison_page
from halfstep_train.run.train import train
from halfstep_train.use.compare import (
    STORED,
    ComparedRow,
    CompareRequest,
    Comparison,
    RunOutcome,
    collect_settings,
    open_comparison,
    run_in_parallel,
    train_row,
)
from halfstep_train.use.compare_table import (
    build_columns,
    build_lines,
    collect_notes,
    convert_comparison,
    show_comparison,
)
from halfstep_train.workloads import load

MOONS = "own_workload:KIND"
SMALL = ("train.batch_size=32", "data.num_workers=0", "device=cpu", "train.max_steps=3", "optimizer.lr=0.003")
TWO = ("--rows", "plain: precision=fp32", "clipped: precision=fp32 train.clip_norm=0.5")


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "examples")


def request_one(row: ComparedRow) -> CompareRequest:
    return CompareRequest(target=MOONS, overrides=SMALL, rows=(row,))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return run_command(capsys, "compare", *words)


def test_precisions_get_a_verdict_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c"
    words = (MOONS, *SMALL, "--precisions", "fp32,tf32", "--seeds", "5", "--margin", "0.9")
    code, text, progress = run(capsys, *words, "--out", str(out), "--json")
    found = json.loads(text)
    assert code == 0, progress
    assert [row["verdict"] for row in found["rows"]] == ["baseline", "same, wide margin"]
    assert found["rows"][0]["samples_per_s"] > 0
    assert found["rows"][1]["samples_per_s"] is None, "a simulated format has no speed"
    assert "tf32 differs from fp32 in precision.default, precision.simulate" in found["notes"]
    assert [row["ran"] for row in found["rows"]] == ["", "simulated"], "no CPU has tf32"
    assert progress.count("warning: tf32 is simulated: ") == 1
    assert any(note.startswith("tf32 is simulated: ") and "has no tf32" in note for note in found["notes"])
    assert not list(out.glob("runs/*/checkpoints")), "numbers stay, models go"
    page = render_comparison_page(out)
    low, high = found["rows"][1]["difference"]
    assert f"{low:+.2g} … {high:+.2g}" in page, "the interval that the verdict rests on"
    assert " ± " in page
    assert "<tr class=differs><td>precision.default</td><td>fp32</td><td>tf32</td>" in page
    assert "tf32 (simulated), all seeds" in page


def test_rows_by_settings_are_judged_by_half_a_point_and_go_on_where_they_stood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    code, text, progress = run(capsys, MOONS, *SMALL, *TWO, "--seeds", "5", "--out", str(out), "--price", "2.5")
    assert "2 rows x 5 seeds: 10 runs; the first run shows how long they take" in progress
    assert "margin 0.005 in accuracy: half a point" in text
    assert "money/run" in text
    whole = json.loads((out / "comparison.json").read_text())
    # As if it had been interrupted after three runs: only the others are trained, and the same numbers come out.
    (out / "comparison.json").write_text(json.dumps({**whole, "runs": whole["runs"][:3]}))
    again, text_again, progress = run(capsys, "--resume", str(out))
    assert again == code
    assert progress.count(", seed ") == 7
    assert [r["value"] for r in json.loads((out / "comparison.json").read_text())["runs"]] == [
        r["value"] for r in whole["runs"]
    ]


def test_a_run_that_the_guard_stopped_is_a_row_that_shows_nothing(tmp_path: Path) -> None:
    row = ComparedRow(name="wild", overrides=("optimizer.lr=1e30", "train.clip_norm=0", "guard.max_consecutive=1"))
    rows = (ComparedRow(name="a", overrides=("precision=fp32",)), row)
    request = CompareRequest(target=MOONS, overrides=SMALL, rows=rows, margin=0.1)
    outcome = train_row(request, row, 0, tmp_path / "wild")
    assert math.isnan(outcome.value)
    assert (outcome.end, bool(outcome.stopped)) == ("stopped", True)
    runs = [timed("a", 0, [0.5, 0.8]), outcome]
    comparison = Comparison(request=request, runs=runs, settings=collect_settings(request))
    stored = STORED.validate_json(STORED.dump_json(comparison))
    assert math.isnan(stored.runs[1].value)
    assert (stored.request, stored.runs[1].end, stored.runs[0]) == (request, outcome.end, runs[0])
    wild = build_lines(comparison)[1]
    assert wild.seconds_per_epoch is None
    found = json.loads(json.dumps(convert_comparison(comparison), allow_nan=False))["rows"][1]
    assert (found["values"], found["difference"]) == ([None], None)


HUNGRY = """
import dataclasses
import torch
from own_workload import KIND as MOONS

def build(config, store=None):
    moons = MOONS.builder(config, store)
    def forward(model, batch):
        if len(batch["point"]) > 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return moons.forward(model, batch)
    return dataclasses.replace(moons, forward=forward)

KIND = dataclasses.replace(MOONS, builder=build)
"""


@pytest.fixture
def hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A workload that runs out of memory above 32 samples."""
    (tmp_path / "hungry_moons.py").write_text(HUNGRY)
    monkeypatch.syspath_prepend(tmp_path)
    return "hungry_moons:KIND"


def test_a_row_out_of_memory_is_marked_and_tried_once_and_the_others_go_on(
    hungry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ("--rows", "plain: precision=fp32", "large: precision=fp32 train.batch_size=64", "low: optimizer.lr=0.002")
    out = tmp_path / "c"
    words = (hungry, *SMALL, *rows, "--seeds", "5", "--margin", "0.9", "--out", str(out), "--json")
    code, text, progress = run(capsys, *words)
    assert code == 1, "not every row is the same"
    found = json.loads(text)
    assert [row["verdict"].split(" (")[0] for row in found["rows"]] == ["baseline", "out of memory", "same"]
    assert "large, seeds 0, 1, 2, 3, 4: out of memory on cpu with batch size 64" in found["notes"]
    assert progress.count("out of memory") == 5
    assert not list(out.glob("runs/large-[1-4]*")), "another seed takes as much memory"


def timed(row: str, seed: int, values: list[float], **more: Any) -> RunOutcome:
    curve = tuple((10 * (k + 1), float(k + 1), value) for k, value in enumerate(values))
    summary = {
        "metric": "accuracy",
        "mode": "max",
        "simulated": False,
        "elapsed_s": 1.0,
        "trained_s": 0.8,
        "samples": 80,
        "epochs": 2.0,
        "device": "cpu",
        **more,
    }
    return RunOutcome(row=row, seed=seed, value=values[-1], curve=curve, summary=summary, alone=True)


def test_an_epochs_time_is_that_of_training_and_a_runs_money_is_that_of_all_of_it() -> None:
    rows = tuple(ComparedRow(name=name, overrides=()) for name in ("a", "b"))
    runs = [timed(row, seed, [0.5]) for row in ("a", "b") for seed in range(3)]
    request = CompareRequest(target="x", overrides=(), rows=rows, price=7.2, margin=0.05)
    line = build_lines(Comparison(request=request, runs=runs))[0]
    assert (line.seconds_per_epoch, line.samples_per_s) == pytest.approx((0.4, 100))
    assert line.money == pytest.approx(0.002)
    assert line.rate == pytest.approx(("samples/s", 100))


def test_a_table_wider_than_the_terminal_is_split_and_not_cut() -> None:
    rows = tuple(ComparedRow(name=name, overrides=()) for name in ("baseline", "everything else in this run"))
    runs = [timed(row.name, seed, [0.5 + seed / 1e6], joules=123_456.0) for row in rows for seed in range(3)]
    request = CompareRequest(target="x", overrides=(), rows=rows, margin=0.05)
    comparison = Comparison(request=request, runs=runs, settings={row.name: {} for row in rows})
    console = Console(width=80, file=io.StringIO(), record=True)
    show_comparison(comparison, console)
    said = console.export_text().split("margin 0.05")[0]
    cells = [cell for column in build_columns(build_lines(comparison), "accuracy").values() for cell in column]
    assert all(cell in said for cell in cells)
    assert max(map(len, said.splitlines())) <= 80
    assert said.count("everything else in this run") == 2, "one row in each of two tables"


def test_what_a_budget_cut_off_counts_for_nothing_and_small_metrics_show_their_deviation() -> None:
    rows = tuple(ComparedRow(name=name, overrides=()) for name in ("a", "b"))
    runs = [timed(row, seed, [1e-4 + 1e-6 * seed]) for row in "ab" for seed in range(5)]
    request = CompareRequest(target="x", overrides=(), rows=rows, margin=0.05)
    whole = Comparison(request=request, runs=runs)
    cut = Comparison(request=request, runs=[*runs, timed("a", 5, [0.5])])
    assert [line.values for line in build_lines(cut)] == [line.values for line in build_lines(whole)]
    assert build_columns(build_lines(cut), "mse")["mse"] == 2 * ["0.0001020 ± 1.6e-06"]


def test_the_report_of_an_unfinished_comparison_says_so_and_has_no_empty_note(tmp_path: Path) -> None:
    rows = tuple(ComparedRow(name=name, overrides=("precision=fp32",)) for name in ("a", "b"))
    runs = [timed(row, seed, [0.8 + 0.01 * seed], precision="fp32") for seed in range(2) for row in "ab"]
    request = CompareRequest(target=MOONS, overrides=("device=cpu",), rows=rows)
    page = render_comparison_page(written(tmp_path / "c", request, runs=runs))
    assert "unfinished after 4 runs; continue it with halfstep compare --resume" in page
    assert "ended: <" not in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to compare"),
        ((MOONS, "--precisions", "fp32,fp32"), "two rows are called 'fp32'"),
        ((MOONS, "--device", "cpu", "--strict", "--precisions", "fp32,fp8"), "strict is on"),
        (
            (MOONS, "precision.simulate=true", "--rows", "a: precision=fp32", "b: precision=bf16 train.fast=graph"),
            "b: a simulated",
        ),
        ((MOONS, *TWO, "--precisions", "fp32,bf16"), "--rows and --precisions"),
        ((MOONS, "--rows", "amp precision=bf16"), "a name, a colon"),
        ((MOONS, "--rows", "a: precision=fp32", "--rows", "b: train.epoch=1"), "train.epochs"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run(capsys, *words)
    assert code == 2
    assert said in error
    assert not list(tmp_path.iterdir())


def written(folder: Path, request: CompareRequest, **more: Any) -> Path:
    folder.mkdir()
    comparison = Comparison(request=request, settings=collect_settings(request), **more)
    (folder / "comparison.json").write_bytes(STORED.dump_json(comparison))
    return folder


def test_a_comparison_goes_on_with_the_settings_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tuple(ComparedRow(name=name, overrides=(f"precision={name}",)) for name in ("fp32", "bf16"))
    config = tmp_path / "moons.yaml"
    config.write_text(f"workload: {MOONS}\noptimizer: {{lr: 0.003}}\n")
    request = CompareRequest(
        target=str(config), overrides=("device=cpu", "precision.simulate=true"), rows=rows, margin=0.5
    )
    folder = written(tmp_path / "c", request)
    config.write_text(f"workload: {MOONS}\noptimizer: {{lr: 0.1}}\n")
    code, _, error = run(capsys, "--resume", str(folder))
    assert code == 2
    assert "optimizer.lr was 0.003, and is now 0.1" in error
    code, _, error = run(capsys, "--resume", str(folder), "--seeds", "9", "train.epochs=3")
    assert (code, "--seeds, the settings" in error, "--budget" in error) == (2, True, True)


def test_a_budget_that_ended_can_be_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "c")
    code, text, _ = run(capsys, MOONS, *SMALL, *TWO, "--budget", "0.01s", "--seeds", "5", "--out", out)
    assert (code, "is spent (--resume with a larger --budget continues)" in text) == (1, True)
    run(capsys, "--resume", out)
    assert len(open_comparison(Path(out)).runs) == 1, "nothing was left to spend"
    run(capsys, "--resume", out, "--budget", "0.02s", "--price", "3")
    assert (open_comparison(Path(out)).request.budget_s, open_comparison(Path(out)).request.price) == (0.02, 3)


def test_a_kill_at_any_moment_costs_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints go only when the outcome is stored, and what a kill left of them goes later."""
    folder, place = tmp_path / "c", tmp_path / "c" / "runs" / "plain-0"
    rows = tuple(ComparedRow(name=name, overrides=("precision=fp32", f"train.clip_norm={clip}"))
                 for name, clip in (("plain", 1), ("clipped", 0.5)))  # fmt: skip
    request = CompareRequest(target=MOONS, overrides=SMALL, rows=rows, seeds=5, margin=0.5, budget_s=1e-9)
    found = train_row(request, rows[0], 0, place)
    assert list(place.glob("checkpoints/step-*")), "killed now, it goes on from here"
    comparison = Comparison(request=request, settings=collect_settings(request), runs=[found], spent_s=1.0)
    (tmp_path / "c" / "comparison.json").write_bytes(STORED.dump_json(comparison))
    run(capsys, "--resume", str(folder))  # nothing is left to spend: it only puts away
    assert not list(folder.glob("runs/*/checkpoints"))
    assert len(open_comparison(folder).runs) == 1


def test_a_run_without_a_usable_checkpoint_is_named_with_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "run" / "checkpoints" / "step-00000004"
    broken.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(f"workload: {MOONS}\n")
    row = ComparedRow(name="a", overrides=())
    with pytest.raises(CheckpointError) as found:
        train_row(request_one(row), row, 0, tmp_path / "run")
    assert f"delete {tmp_path / 'run'}" in found.value.fix


def test_runs_that_differ_in_more_than_the_rows_say_are_told() -> None:
    rows = tuple(
        ComparedRow(name=name, overrides=("precision=tf32", f"optimizer.lr={lr}")) for name, lr in (("a", 1), ("b", 2))
    )
    request = CompareRequest(target=MOONS, overrides=("device=cpu",), rows=rows)
    runs = [timed(row, seed, [0.5, 0.8 + 0.01 * seed], device=device, data="of digest 12",
                    precision="tf32" if row == "a" else "fp32")
            for seed, device in ((0, "cuda:0 (A)"), (1, "cuda:0 (B)")) for row in "ab"]  # fmt: skip
    comparison = Comparison(request=request, runs=runs, settings=collect_settings(request))
    notes = collect_notes(comparison)
    assert "b asked for tf32 and ran fp32" in notes
    assert [note for note in notes if "more than their settings" in note] == [
        "runs differ in more than their settings: devices cuda:0 (A) and cuda:0 (B)"
    ]


def test_budgets_are_read_in_seconds_minutes_and_hours() -> None:
    assert [parse_budget(text) for text in ("90s", "30m", "1.5h", "20")] == [90, 1800, 5400, 20]
    with pytest.raises(ConfigError, match="0m"):
        parse_budget("0m")


def test_a_run_that_an_interruption_cut_in_two_counts_by_its_metric_and_not_by_its_time(tmp_path: Path) -> None:
    # A schedule that does not follow the length of the run: cut short it trains as the whole one does.
    row = ComparedRow(name="plain", overrides=("precision=fp32", "schedule.name=constant"))
    whole = train_row(request_one(row), row, 0, tmp_path / "whole")
    cut = [word for word in SMALL if "max_steps" not in word] + ["train.max_steps=2", "train.seed=0"]
    train(load(MOONS, overrides=[*cut, *row.overrides]), out=tmp_path / "cut")
    (tmp_path / "cut" / "report" / "summary.json").unlink()
    resumed = train_row(request_one(row), row, 0, tmp_path / "cut")
    assert resumed.value == whole.value
    assert (whole.alone, resumed.alone) == (True, False)


def test_a_run_killed_before_its_summary_gets_one_when_it_is_resumed(tmp_path: Path) -> None:
    words = [*SMALL, "train.seed=0", "precision=fp32", "log.quiet=true"]
    out = train(load(MOONS, overrides=words), out=tmp_path / "run")
    (out / "report" / "summary.json").unlink()
    row = ComparedRow(name="plain", overrides=("precision=fp32",))
    found = train_row(request_one(row), row, 0, out)
    assert math.isfinite(found.value)
    assert found.summary["metric"] == "accuracy"


# --- parallel runs end with their comparison ---


def at_once_or_in_minutes(row: ComparedRow, seed: int, place: Path) -> RunOutcome:
    time.sleep(600 * seed)
    return RunOutcome(row=row.name, seed=seed, value=0.5, curve=(), summary={}, alone=False)


@pytest.mark.slow
def test_a_comparison_that_stops_waits_for_no_run_under_way_or_to_come(tmp_path: Path) -> None:
    jobs = [(ComparedRow(name="a", overrides=()), seed, tmp_path) for seed in range(5)]
    outcomes = run_in_parallel(at_once_or_in_minutes, jobs, 2)
    assert next(outcomes).seed == 0
    outcomes.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
