"""How steps are chosen to run: the rules, the trials that leave no trace, and what is stored of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch_config

from halfstep.config.load import from_dict
from halfstep.config.schema import RunConfig
from halfstep.data.demo_segmentation import write_demo
from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan, Row
from halfstep.run import tune
from halfstep.run.assemble import assemble, build_workload, plan_for
from halfstep.run.engine import Engine
from halfstep.run.memory_low import CannotRun, Cost, MemorySetting
from halfstep.run.randomness import generator_states
from halfstep.run.train import train
from halfstep.run.trials import Trial, trial_run
from halfstep.run.tune import Kept, expected_steps, fastest_way, tuned
from halfstep.run.ways import asked_way
from halfstep.workloads.workload import Workload
from tiny_training import bits


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "demo"
    write_demo(folder, num_images=7, side=16)
    return folder


def made(demo: Path, **values: object) -> tuple[RunConfig, Workload, Plan]:
    small = {"data.dir": str(demo), "data.image_size": 16, "data.num_workers": 0, "data.val_fraction": 0.2,
             "model.base_channels": 2, "model.depth": 1, "train.batch_size": 2, "device": "cpu"}  # fmt: skip
    config = from_dict("unet", {**small, **{k.replace("__", "."): v for k, v in values.items()}}).config
    workload = build_workload(config)
    return config, workload, plan_for(config, workload, probe("cpu"))


@pytest.mark.parametrize(
    ("wish", "device", "way"),
    [
        ("off", "cuda", "eager"),
        ("compile", "cuda", "compile"),
        ("graph", "cuda", "graph"),
        ("graph", "cpu", "compile"),
        ("auto", "cpu", "eager"),
        ("auto", "cuda", None),
    ],
)
def test_the_way_is_what_was_asked_for_and_auto_leaves_it_to_trials_on_cuda(
    demo: Path, wish: str, device: str, way: str | None
) -> None:
    config, _, plan = made(demo, train__fast=wish)
    assert asked_way(config, dataclasses.replace(plan, device=device)) == way


def test_auto_does_not_measure_where_bits_must_repeat_and_follows_a_stored_choice(demo: Path) -> None:
    config, _, plan = made(demo, train__deterministic=True)
    assert asked_way(config, dataclasses.replace(plan, device="cuda")) == "eager"
    config, _, plan = made(demo)
    assert asked_way(config, dataclasses.replace(plan, device="cuda", way="graph")) == "graph"


@pytest.mark.parametrize(
    ("times", "way"),
    [
        ({"eager": 30.0, "compile": 20.0, "graph": 15.0}, "graph"),
        ({"eager": 30.0, "compile": 20.0, "graph": 19.9}, "compile"),
        ({"eager": 30.0, "eager NCHW": 20.1, "compile": 20.0}, "eager"),
        ({"eager": 30.0, "graph": 15.0}, "graph"),
        ({"compile": 20.0}, "compile"),
    ],
)
def test_the_simplest_way_wins_that_is_as_fast_as_the_fastest(times: dict[str, float], way: str) -> None:
    assert fastest_way({label: Cost(ms, 1) for label, ms in times.items()}) == way


def test_expected_steps_count_windows_and_the_limit(demo: Path) -> None:
    config, workload, _ = made(demo, train__epochs=4, train__accumulate=2)
    assert len(workload.train_samples) == 6
    assert expected_steps(config, workload) == 4 * 2
    config, workload, _ = made(demo, train__max_steps=3)
    assert expected_steps(config, workload) == 3


def test_trials_leave_weights_buffers_and_generators_bit_identical(demo: Path) -> None:
    config, workload, plan = made(demo)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    generators = generator_states()
    with trial_run(config, workload, plan) as trial:
        cost = trial.cost("eager")
        assert trial.parts.step.attempted > 0
    assert cost.ms > 0
    assert cost.peak_bytes > 0
    assert all(torch.equal(bits(before[name]), bits(now)) for name, now in workload.model.state_dict().items())
    after = generator_states()
    assert torch.equal(generators["torch"], after["torch"])
    assert generators["python"] == after["python"]


def test_every_trial_is_compiled_under_its_own_setting(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, workload, plan = made(demo, train__fast="compile")
    budgets: list[float] = []

    def compiler(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        budgets.append(functorch_config.activation_memory_budget)
        return module.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, options: real(f, dynamic=dynamic, backend=compiler))
    for share in (1.0, 0.5):
        memory = dataclasses.asdict(MemorySetting(activation_budget=share))
        with trial_run(config, workload, dataclasses.replace(plan, memory=memory)) as trial:
            trial.cost("compile")
    assert budgets == [1.0, 0.5]


def test_a_trial_that_falls_to_another_way_is_no_candidate(demo: Path) -> None:
    config, workload, plan = made(demo)
    with trial_run(config, workload, plan) as trial:
        trial.parts.region = trial.parts.eager
        with pytest.raises(CannotRun, match="needs a CUDA device"):
            trial.cost("graph")


def test_a_short_run_is_not_compiled_for_and_a_long_one_is(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, workload, plan = made(demo, train__epochs=120)
    assert "too short to compile for" in tune._measured(config, workload, plan)["way_reason"]
    tried: list[str] = []
    real = tune._try

    def remembered(trial, way, costs, problems, label=""):  # type: ignore[no-untyped-def]
        tried.append(way)
        return real(trial, way, costs, problems, label) if way == "eager" else None

    monkeypatch.setattr(tune, "_try", remembered)
    config, workload, plan = made(demo, train__epochs=2)
    assert "too short for trials" in tune._measured(config, workload, plan)["way_reason"]
    assert tried == []
    config, workload, plan = made(demo, train__epochs=10_000_000)
    found = tune._measured(config, workload, plan)
    assert tried == ["eager", "eager", "compile", "graph"]
    assert found["way"] == "eager"
    assert found["tunes_kernels"]


def test_what_fits_only_compiled_runs_compiled(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(trial: Trial, way: str) -> Cost:
        if way == "compile":
            return Cost(20.0, 1)
        raise CannotRun("out of memory")

    monkeypatch.setattr(Trial, "cost", cost)
    found = tune._measured(*made(demo))
    assert found["way"] == "compile"
    assert "eager not possible: out of memory" in found["way_reason"]


def test_a_model_that_cannot_be_copied_runs_untried_and_says_why(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, workload, plan = made(demo, train__memory="low")
    workload.model.held = (k for k in range(3))  # type: ignore[assignment]
    said: list[str] = []
    chosen = tuned(config, workload, plan, said.append)
    assert chosen.memory == dataclasses.asdict(MemorySetting())
    assert "cannot be copied" in said[-1]
    monkeypatch.setattr(tune, "asked_way", lambda config, plan: None)
    chosen = tuned(config, workload, plan, said.append)
    assert chosen.way == "eager"
    assert "cannot be copied" in chosen.way_reason


def test_a_compiled_trial_that_fails_in_whatever_way_is_no_candidate(demo: Path) -> None:
    config, workload, plan = made(demo)

    def failing(batch: object) -> object:
        if trial.parts.step.attempted:
            raise RuntimeError("PTXAS error: no such file")
        return trial.parts.eager(batch)  # type: ignore[arg-type]

    with trial_run(config, workload, plan) as trial:
        trial.parts.region = failing  # type: ignore[assignment]
        with pytest.raises(CannotRun, match="PTXAS error"):
            trial.cost("compile")


def test_a_graph_asked_for_on_a_cpu_is_told_why_there_is_none(demo: Path) -> None:
    said: list[str] = []
    assert tuned(*made(demo, train__fast="graph"), said.append).way == "compile"
    assert said == [
        "warning: train.fast=graph needs a CUDA device, this run is on cpu: the step is compiled, not captured"
    ]


def test_what_was_measured_is_kept_for_the_same_model_and_shape_only(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {"way": "graph", "way_reason": "measured", "channels_last": True, "tunes_kernels": False}
    assert Kept(*made(demo)).read() is None
    assert Kept(*made(demo)).write(found) == ""
    assert Kept(*made(demo)).read() == found
    assert Kept(*made(demo, train__batch_size=1)).read() is None
    assert Kept(*made(demo, model__base_channels=4)).read() is None
    assert Kept(*made(demo, train__activation_checkpointing=True)).read() is None
    assert Kept(*made(demo, train__tune_kernels=True)).read() is None
    config, workload, plan = made(demo)
    apart = Row(module="head", storage="fp32", compute="fp16", reason="asked for", kind="module")
    assert Kept(config, workload, dataclasses.replace(plan, rows=(*plan.rows, apart))).read() is None


def test_memory_low_is_measured_said_and_stored_with_the_plan(demo: Path) -> None:
    config, workload, plan = made(demo, train__memory="low")
    said: list[str] = []
    chosen = tuned(config, workload, plan, said.append)
    assert any(line.startswith("memory low:") for line in said)
    assert set(chosen.memory) == {"activation_budget", "recompute", "optimizer_bits"}
    assert Plan.from_json(chosen.to_json()) == chosen


def test_a_run_with_memory_low_trains_and_resumes_without_measuring_again(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "data.dir": str(demo), "data.image_size": 16, "data.num_workers": 0, "model.base_channels": 2, "device": "cpu",
        "model.depth": 1, "train.batch_size": 2, "train.epochs": 1, "train.memory": "low",
    }  # fmt: skip
    folder = train(from_dict("unet", values), out=tmp_path / "run")
    assert "memory low:" in capsys.readouterr().err
    stored = json.loads((folder / "plan.json").read_text())
    assert stored["way"] == "eager"
    train(from_dict("unet", {**values, "train.epochs": 2}), resume=folder)
    assert "memory low:" not in capsys.readouterr().err


def test_a_batch_of_another_size_runs_the_eager_region(demo: Path) -> None:
    config, workload, plan = made(demo, train__fast="compile", train__batch_size=4)
    parts = assemble(config, workload, plan)
    calls: list[int] = []
    eager = parts.eager

    def as_compiled(batch):  # type: ignore[no-untyped-def]
        calls.append(len(batch["image"]))
        return eager(batch)

    parts.region = as_compiled
    engine = Engine(parts, "compile", lambda text, level: pytest.fail(text))
    for batch in parts.train_loader.epoch(0):
        engine([batch])
    assert calls == [4]
    assert parts.step.attempted == 2


def test_compiling_is_announced_once_and_eager_steps_are_not(demo: Path) -> None:
    for way, times in (("compile", 1), ("eager", 0)):
        config, workload, plan = made(demo, train__fast="compile")
        parts = assemble(config, workload, plan)
        parts.region = parts.eager
        told: list[int] = []
        engine = Engine(
            parts,
            way,  # type: ignore[arg-type]
            lambda text, level: pytest.fail(text),
            before_compiling=lambda told=told, step=parts.step: told.append(step.attempted),
        )
        for batch in parts.train_loader.epoch(0):
            engine([batch])
        assert parts.step.attempted > 1
        assert told == [0] * times


def fp8_plan(demo: Path) -> tuple[RunConfig, Workload, Plan]:
    config, workload, plan = made(demo)
    return config, workload, dataclasses.replace(plan, granted="fp8", way="eager")


@pytest.mark.parametrize(("fails", "granted"), [("fp8", "bf16"), ("bf16", "fp8")])
def test_a_precision_whose_step_cannot_run_leaves_the_other(
    demo: Path, monkeypatch: pytest.MonkeyPatch, fails: str, granted: str
) -> None:
    config, workload, plan = fp8_plan(demo)
    monkeypatch.setattr(tune, "trial_run", lambda config, workload, plan: contextlib.nullcontext(Costing(plan, fails)))
    assert tune._with_fp8_that_pays(config, workload, plan, lambda line: None).granted == granted


class Costing:
    """A trial that runs but in one precision."""

    def __init__(self, plan: Plan, fails: str) -> None:
        self.plan, self.fails = plan, fails

    def cost(self, way: str) -> Cost:
        if self.plan.granted == self.fails:
            raise CannotRun("out of memory")
        return Cost(1.0, 1)


def test_a_model_that_does_not_fit_is_no_traceback_of_a_trial(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def does_not_fit(*arguments: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")

    monkeypatch.setattr("halfstep.run.trials.assemble", does_not_fit)
    with pytest.raises(CannotRun, match="out of memory"), trial_run(*made(demo)):
        pass
