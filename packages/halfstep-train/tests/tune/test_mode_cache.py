"""What trials found is kept: for the same run only, where it pays, and not when others used the GPU meanwhile."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from halfstep.hardware.driver import Driver
from halfstep.precision.plan import Gain, Plan, PlanRow
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.engine import RunRehearsal
from halfstep_train.tune import choose
from halfstep_train.tune.choose import tune_plan
from halfstep_train.tune.mode_search import CachedMode, FoundMode
from halfstep_train.tune.trials import TrialTime
from halfstep_train.workloads.base.workload import Workload
from mode_trials import USUAL, Machine, ScriptedRehearsal, made

FIELDS = {
    "mode": "graph", "mode_reason": "as measured", "channels_last": True, "tunes_kernels": False,
    "cudnn_benchmark": False, "gains": (Gain(part="graph", before_ms=20.0, after_ms=15.0, is_taken=True),),
}  # fmt: skip


def cached(config: RunConfig, workload: Workload, plan: Plan) -> CachedMode:
    return CachedMode(plan, RunRehearsal(config, workload))


def found(untried: tuple[str, ...] = (), **fields: Any) -> FoundMode:
    values = {**FIELDS, **fields}
    return FoundMode(fields=values, eager_ms=30.0, ms=15.0, run_s=600.0, untried=untried, is_final=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


def test_it_is_kept_for_the_same_model_and_shape_only(demo: Path) -> None:
    assert cached(*made(demo)).read() is None
    assert cached(*made(demo)).write(found()) == ""
    assert cached(*made(demo)).read() == found()
    assert cached(*made(demo, train__batch_size=1)).read() is None
    assert cached(*made(demo, model__base_channels=4)).read() is None
    assert cached(*made(demo, train__activation_checkpointing=True)).read() is None
    assert cached(*made(demo, train__tune_kernels=True)).read() is None
    config, workload, plan = made(demo)
    apart = PlanRow(module="head", storage="fp32", compute="fp16", reason="asked for", kind="module")
    assert cached(config, workload, dataclasses.replace(plan, rows=(*plan.rows, apart))).read() is None


def test_a_file_that_lacks_fields_is_measured_again(demo: Path) -> None:
    kept = cached(*made(demo))
    kept.path.parent.mkdir(parents=True)
    kept.path.write_text('{"mode": "graph", "mode_reason": "old", "channels_last": true, "tunes_kernels": false}')
    assert kept.read() is None


@pytest.mark.parametrize(
    ("num_steps", "mode"),
    [
        (10_000, "graph"),  # saves 150 s
        (2_000, "graph"),  # saves 30 s, starts in 15
        (500, "eager"),  # saves 7.5 s
    ],
)
def test_a_cached_mode_is_followed_where_it_pays(demo: Path, num_steps: int, mode: str) -> None:
    kept = cached(*made(demo))
    kept.write(found())
    fields = kept.choose_for_run(num_steps)
    assert fields is not None
    assert fields["mode"] == mode
    assert fields["channels_last"]
    assert "measured before: as measured" in fields["mode_reason"]
    assert mode == "graph" or "to start" in fields["mode_reason"]


def test_cudnns_trials_count_as_part_of_a_start(demo: Path) -> None:
    kept = cached(*made(demo))
    kept.write(found(cudnn_benchmark=True))
    fields = kept.choose_for_run(2_000)  # saves 30 s, starts in 15 + 20
    assert fields is not None
    assert (fields["mode"], fields["cudnn_benchmark"]) == ("eager", False)


def test_what_does_not_fit_eagerly_is_always_followed(demo: Path) -> None:
    kept = cached(*made(demo))
    kept.write(dataclasses.replace(found(), eager_ms=None))
    fields = kept.choose_for_run(1)
    assert fields is not None
    assert fields["mode"] == "graph"


def test_a_much_longer_run_tries_what_was_left_untried(demo: Path) -> None:
    kept = cached(*made(demo))
    kept.write(found(untried=("kernel tuning",)))  # 600 s expected: 20,000 steps
    assert kept.choose_for_run(20_000) is not None
    assert kept.choose_for_run(100_000) is None
    kept.write(found())
    assert kept.choose_for_run(100_000) is not None


class Shared(Driver):
    """A GPU that others use, or not."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def describe_other_use(self, device: str) -> str:
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("answers", "is_kept"),
    [(("", ""), True), (("5 GB taken and 40 % busy",), False), (("", "5 GB taken and 40 % busy"), False)],
)
def test_what_was_measured_on_a_busy_gpu_is_used_but_not_kept(
    demo: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: tuple[str, ...],
    is_kept: bool,
) -> None:
    machine = Machine(USUAL)
    monkeypatch.setattr(choose, "TrialTime", lambda steps, most_s: TrialTime(steps, most_s=most_s, clock=machine.clock))
    config, workload, plan = made(demo, train__epochs=200_000)
    on_gpu = dataclasses.replace(plan, device="cuda", granted="bf16")
    said: list[str] = []
    chosen = tune_plan(on_gpu, ScriptedRehearsal(config, workload, machine), said.append, driver=Shared(*answers))
    assert chosen.mode == "graph"
    assert (cached(config, workload, on_gpu).read() is not None) == is_kept
    assert ("5 GB taken" in chosen.mode_reason) == (not is_kept)
    assert "  graph 1.33x, 20.0 -> 15.0 ms" in said
    assert type(chosen).from_json(chosen.to_json()) == chosen
