"""What rows say together, and against an earlier bench."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.bench.baseline import Comparison, Earlier, compare, earlier_rows, refuse_without_common_rows
from halfstep.bench.bench import clock_warning, concluded, drift_warning, loss_reference, loss_warnings, with_speedups
from halfstep.bench.problem import problem_for
from halfstep.bench.record import identity, refuse_to_overwrite, results, save
from halfstep.bench.row import Row
from halfstep.bench.settings import bench_config
from halfstep.errors import ConfigError
from halfstep.hardware.gpus import known_gpu


def row(variant: str, precision: str, ms: float, *, spread: float = 0.2, **others: Any) -> Row:
    windows = tuple(ms + spread * offset for offset in (-0.5, -0.1, 0.0, 0.1, 0.5))
    known = {"name": "halfstep", "loss": 1.0, "peak_bytes": 6_000_000_000, **others}
    return Row(variant=variant, precision=precision, window_ms=windows, **known)


def record_of(*rows: Row) -> dict[str, Any]:
    return {
        "bench": 1,
        "device": "NVIDIA H200",
        "versions": {"halfstep": "0.1.0", "torch": "2.11.0", "cuda": "13.0", "driver": "NVIDIA 580"},
        "problem": {"workload": "unet", "batch_size": 8},
        "rows": [r.to_dict() for r in rows],
    }


def worse(tmp_path: Path, before: Row, now: Row) -> list[str]:
    path = tmp_path / "before.json"
    save(record_of(before), path)
    return list(compare(earlier_rows(path, record_of(now)), [now], None).regressions)


def after_drift(tmp_path: Path, *, then: float = 1.0, here: float = 1.0, slower: float) -> Comparison:
    """An earlier bench and this one, whose first rows took so many times as long at the end; a later row got slower."""
    first, path = row("eager", "fp32", 100.0), tmp_path / "before.json"
    again = row("eager", "fp32", then * 100.0)
    save(record_of(first, row("graph", "bf16", 20.0)) | {"repeated": again.to_dict()}, path)
    rows = [first, row("graph", "bf16", slower * 20.0)]
    return compare(earlier_rows(path, record_of(*rows)), rows, row("eager", "fp32", here * 100.0))


def test_speedups_refer_to_eager_fp32_and_tf32() -> None:
    rows = [row("compile", "fp32", 50.0), row("eager", "fp32", 100.0), row("eager", "tf32", 60.0)]
    rows += [row("graph", "bf16", 10.0), row("eager", "fp8", 5.0, simulated=True)]
    found = {r.label: r for r in with_speedups(rows)}
    fast = found["halfstep graph bf16"]
    assert (fast.speedup_fp32, fast.speedup_tf32) == (10.0, 6.0)
    assert found["halfstep compile fp32"].speedup_fp32 == 2.0
    assert found["halfstep eager fp8"].speedup_fp32 is None


def test_the_rows_that_speedups_refer_to_are_named_whichever_they_are() -> None:
    rows = [row("auto", "fp32", 50.0), row("graph", "bf16", 10.0), row("tuned", "tf32", 20.0, name="plain")]
    found = concluded(rows, flops=1, hardware=known_gpu("h200"))
    assert found.bases == {"fp32": "halfstep auto fp32", "tf32": "plain tuned tf32"}
    assert results(found)["speedup_bases"] == found.bases
    assert concluded(rows[1:2], flops=1, hardware=known_gpu("h200")).bases == {}


def test_without_a_baseline_there_is_no_speedup() -> None:
    [only] = with_speedups([row("graph", "bf16", 10.0)])
    assert (only.speedup_fp32, only.speedup_tf32) == (None, None)


def test_a_loss_far_from_eager_fp32_is_warned_of_and_a_near_one_is_not() -> None:
    rows = [row("compile", "bf16", 10.0, loss=1.2), row("eager", "fp32", 100.0), row("eager", "bf16", 20.0, loss=1.05)]
    [warning] = loss_warnings(rows, loss_reference(rows))
    assert warning.startswith("halfstep compile bf16: loss 1.2")
    assert "halfstep eager fp32 has 1" in warning


def test_drift_beyond_the_spread_is_warned_of() -> None:
    first = row("eager", "fp32", 100.0)
    assert drift_warning([first], row("eager", "fp32", 101.5)) == ""
    assert "+10.0%" in drift_warning([first], row("eager", "fp32", 110.0))
    assert drift_warning([first], row("eager", "fp32", 110.0, spread=12.0)) == ""
    lost = Row(name="halfstep", variant="eager", precision="fp32", reason="out of memory")
    assert "out of memory" in drift_warning([first], lost)


def test_clocks_that_were_held_down_are_warned_of_by_row() -> None:
    rows = [row("eager", "fp32", 100.0), row("graph", "bf16", 10.0, clock_limits=("power cap",))]
    assert clock_warning(rows) == "the device's clocks were held down in halfstep graph bf16 (power cap)"
    assert clock_warning(rows[:1]) == ""


def test_a_slower_row_is_a_regression_only_beyond_the_spread(tmp_path: Path) -> None:
    before = row("graph", "bf16", 20.0, spread=2.0)
    [line] = worse(tmp_path, before, row("graph", "bf16", 22.5, spread=2.0))
    said = "22.5 ms a step against 20 (+12.5%; spread and drift explain up to +5.7%)"
    assert line == f"halfstep graph bf16 is slower: {said}"
    assert worse(tmp_path, before, row("graph", "bf16", 21.1, spread=2.0)) == []
    assert worse(tmp_path, before, row("graph", "bf16", 15.0)) == []


def test_a_window_in_which_the_machine_was_busy_hides_no_slowdown(tmp_path: Path) -> None:
    before = row("graph", "bf16", 20.0)
    slow = row("graph", "bf16", 40.0)
    busy = dataclasses.replace(slow, window_ms=(*slow.window_ms[:-1], 400.0))
    [line] = worse(tmp_path, before, busy)
    assert "(+100.0%" in line
    busy_then = dataclasses.replace(before, window_ms=(*before.window_ms[:-1], 400.0))
    assert len(worse(tmp_path, busy_then, slow)) == 1


def test_windows_that_vary_and_some_drift_do_not_hide_a_large_slowdown() -> None:
    before = dataclasses.replace(row("graph", "bf16", 20.0), window_ms=(18.8, 19.4, 20.0, 21.0, 24.0))
    slow = dataclasses.replace(before, window_ms=(24.5, 27.5, 28.8, 30.0, 32.0))
    found = compare(Earlier(rows={before.label: before}, drift=1.13), [slow], None)
    assert [line[:29] for line in found.regressions] == ["halfstep graph bf16 is slower"]


@pytest.mark.parametrize("drifts", [{"here": 1.3}, {"here": 1 / 1.3}, {"then": 1.3}, {"then": 1 / 1.3}])
def test_a_row_that_is_slower_by_less_than_a_bench_drifted_is_named_and_is_no_regression(
    tmp_path: Path, drifts: dict[str, float]
) -> None:
    within = after_drift(tmp_path, **drifts, slower=1.2)
    assert within.regressions == ()
    assert [line[:29] for line in within.within_drift] == ["halfstep graph bf16 is slower"]
    assert within.drift == pytest.approx(1.3)
    beyond = after_drift(tmp_path, **drifts, slower=1.4)
    assert [line[:29] for line in beyond.regressions] == ["halfstep graph bf16 is slower"]
    assert beyond.within_drift == ()


def test_drifts_of_both_benches_add_up(tmp_path: Path) -> None:
    assert after_drift(tmp_path, then=1.2, here=1.2, slower=1.4).regressions == ()
    assert after_drift(tmp_path, then=1.2, here=1.2, slower=1.6).regressions != ()


def test_without_a_row_that_was_measured_again_nobody_knows_of_a_drift() -> None:
    before = row("graph", "bf16", 20.0)
    lost = Row(name="halfstep", variant="graph", precision="bf16", reason="out of memory")
    for again in (None, lost):
        found = compare(Earlier(rows={before.label: before}), [row("graph", "bf16", 24.0)], again)
        assert found.drift == 1.0
        assert len(found.regressions) == 1


def test_steady_windows_do_not_make_a_percent_a_regression(tmp_path: Path) -> None:
    before = row("graph", "bf16", 20.0, spread=0.0)
    assert worse(tmp_path, before, row("graph", "bf16", 20.3, spread=0.0)) == []
    assert worse(tmp_path, before, row("graph", "bf16", 20.5, spread=0.0)) != []


def test_a_larger_row_and_a_lost_one_are_regressions(tmp_path: Path) -> None:
    before = row("graph", "bf16", 20.0)
    [line] = worse(tmp_path, before, dataclasses.replace(before, peak_bytes=6_100_000_000))
    assert line == "halfstep graph bf16 is larger: 6.1 GB against 6.0 GB"
    lost = Row(name="halfstep", variant="graph", precision="bf16", reason="out of memory")
    [line] = worse(tmp_path, before, lost)
    assert "out of memory" in line


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("", "device", "NVIDIA A100", "device was NVIDIA A100, is NVIDIA H200"),
        ("versions", "torch", "2.9.0", "torch was 2.9.0, is 2.11.0"),
        ("problem", "batch_size", 16, "batch_size was 16, is 8"),
    ],
)
def test_another_device_version_or_problem_is_named_and_refused(
    tmp_path: Path, where: str, name: str, value: object, said: str
) -> None:
    now = record_of(row("graph", "bf16", 20.0))
    earlier = copy.deepcopy(now)
    (earlier[where] if where else earlier)[name] = value
    path = tmp_path / "before.json"
    save(earlier, path)
    with pytest.raises(ConfigError, match="cannot be compared") as refused:
        earlier_rows(path, now)
    assert refused.value.why == said


def test_another_version_of_halfstep_is_what_a_baseline_is_for(tmp_path: Path) -> None:
    now = record_of(row("graph", "bf16", 20.0))
    earlier = copy.deepcopy(now)
    earlier["versions"]["halfstep"] = "0.0.9"
    save(earlier, tmp_path / "before.json")
    assert list(earlier_rows(tmp_path / "before.json", now).rows) == ["halfstep graph bf16"]


def test_a_baseline_without_any_of_the_rows_is_refused_and_one_with_one_of_them_is_not() -> None:
    before = {r.label: r for r in (row("graph", "bf16", 20.0), row("eager", "bf16", 40.0))}
    asked = [row("eager", "fp32", 100.0), row("compile", "fp32", 50.0)]
    with pytest.raises(ConfigError, match="none of these rows: halfstep eager fp32, halfstep compile fp32") as refused:
        refuse_without_common_rows(before, asked)
    assert refused.value.fix == "it has halfstep graph bf16, halfstep eager bf16"
    refuse_without_common_rows(before, [*asked, row("graph", "bf16", 20.0)])


def problem_with(*words: str) -> dict[str, Any]:
    tiny = ("data.image_size=16", "model.base_channels=2", "model.depth=1", *words)
    return identity(problem_for(bench_config("unet", tiny, {"batch_size": 2}, small=True), torch.device("cpu")), 7)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.channels_last=false", "train.channels_last was auto, is False"),
        ("train.tune_kernels=true", "train.tune_kernels was auto, is True"),
        ("train.deterministic=true", "train.deterministic was False, is True"),
        ("train.clip_type=value", "train.clip_type was l2, is value"),
        ("optimizer.lr=1e-1", "optimizer.lr was 0.0001, is 0.1"),
        ("optimizer.betas=[0.5, 0.9]", "optimizer.betas was None, is [0.5, 0.9]"),
        ("schedule.name=cosine", "schedule.name was constant, is cosine"),
        ("precision.modules.head=fp32", "precision.modules was {}, is {'head': 'fp32'}"),
        ("model.dice_weight=0", "model.dice_weight was 1.0, is 0.0"),
        ("ema.decay=0.5", "ema.decay was 0.9999, is 0.5"),
        ("guard.skip_spikes=true", "guard.skip_spikes was False, is True"),
        ("train.clip_norm=0", "clip_norm was 1.0, is 0.0"),
    ],
)
def test_every_setting_that_a_step_depends_on_makes_another_problem(tmp_path: Path, word: str, said: str) -> None:
    earlier = record_of(row("eager", "fp32", 20.0)) | {"problem": problem_with()}
    save(earlier, tmp_path / "before.json")
    with pytest.raises(ConfigError, match="cannot be compared") as refused:
        earlier_rows(tmp_path / "before.json", earlier | {"problem": problem_with(word)})
    assert refused.value.why == said


@pytest.mark.parametrize("word", ["log.quiet=true", "data.num_workers=3", "train.report_every=7", "device=cpu"])
def test_settings_that_no_step_depends_on_do_not(tmp_path: Path, word: str) -> None:
    earlier = record_of(row("eager", "fp32", 20.0)) | {"problem": problem_with()}
    save(earlier, tmp_path / "before.json")
    found = earlier_rows(tmp_path / "before.json", earlier | {"problem": problem_with(word)})
    assert list(found.rows) == ["halfstep eager fp32"]
    assert found.warning == ""


def test_an_older_file_that_does_not_tell_its_settings_is_compared_with_a_warning(tmp_path: Path) -> None:
    path, problem = tmp_path / "before.json", problem_with()
    now = record_of(row("eager", "fp32", 20.0)) | {"problem": problem}
    older = {name: value for name, value in problem.items() if name != "settings"}
    save(now | {"problem": older}, path)
    found = earlier_rows(path, now)
    assert list(found.rows) == ["halfstep eager fp32"]
    assert found.warning.startswith(f"{path} does not tell its settings")
    fewer = {name: value for name, value in problem["settings"].items() if name != "train.seed"}
    save(now | {"problem": problem | {"settings": fewer}}, path)
    assert earlier_rows(path, now).warning == f"{path} and this bench do not both tell train.seed: not compared"


def test_simulated_rows_are_not_compared_however_slow_they_got(tmp_path: Path) -> None:
    path, real = tmp_path / "before.json", row("eager", "fp32", 100.0)
    save(record_of(real, row("eager", "bf16", 20.0, simulated=True)), path)
    before = earlier_rows(path, record_of(real))
    assert list(before.rows) == ["halfstep eager fp32"]
    found = compare(before, [real, row("eager", "fp32", 900.0, simulated=True)], None)
    assert found.regressions == ()
    assert found.simulated == ("halfstep eager fp32",)


def test_a_baseline_of_simulated_rows_alone_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    path, simulated = tmp_path / "before.json", row("eager", "bf16", 20.0, simulated=True)
    save(record_of(simulated), path)
    with pytest.raises(ConfigError, match="has no row to compare with"):
        earlier_rows(path, record_of(simulated))


def test_files_are_overwritten_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    refuse_to_overwrite({"--save": path, "--picture": None}, force=False)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        refuse_to_overwrite({"--save": path}, force=False)
    refuse_to_overwrite({"--save": path}, force=True)


@pytest.mark.parametrize(
    ("name", "why", "fix"),
    [
        (".", "", "name a file in it: --save {}/bench.json"),
        ("no where/bench.json", "the folder {}/no where does not exist", "make it first: mkdir -p '{}/no where'"),
        ("file/bench.json", "the folder {}/file is a file, not a folder", "another name"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path, name: str, why: str, fix: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError) as refused:
        refuse_to_overwrite({"--save": tmp_path / name}, force=True)
    assert (refused.value.why, refused.value.fix) == (why.format(tmp_path), fix.format(tmp_path))
