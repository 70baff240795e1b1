"""How steps are chosen to run: the rules, the trials that leave no trace, and what is stored of them."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config

from halfstep.hardware.driver import Driver
from halfstep.precision.plan import Plan
from halfstep.step.randomness import read_generators
from halfstep_train.config.schema import RunConfig
from halfstep_train.kernels.fast_forms import is_forced_on
from halfstep_train.run.assemble import assemble
from halfstep_train.run.engine import Engine, RunRehearsal
from halfstep_train.tune import choose
from halfstep_train.tune.choose import Tuning, find_asked_mode, tune_plan
from halfstep_train.tune.modes import UNCAPTURED
from halfstep_train.tune.trials import (
    CannotRun,
    Cost,
    DoesNotFit,
    MemorySetting,
    NotCaptured,
    Rehearsal,
    Trial,
    measure_cost,
)
from halfstep_train.workloads.base.workload import Workload
from mode_trials import made
from tiny_training import bits


@pytest.mark.parametrize(
    ("wish", "device", "mode"),
    [
        ("off", "cuda", "eager"),
        ("compile", "cuda", "compile"),
        ("graph", "cuda", "graph"),
        ("graph", "cpu", "compile"),
        ("auto", "cpu", "eager"),
        ("auto", "cuda", None),
    ],
)
def test_the_mode_is_what_was_asked_for_and_auto_leaves_it_to_trials_on_cuda(
    demo: Path, wish: str, device: str, mode: str | None
) -> None:
    config, _, plan = made(demo, train__fast=wish)
    assert find_asked_mode(config.train, dataclasses.replace(plan, device=device)) == mode


def test_auto_does_not_measure_where_bits_must_repeat_and_follows_a_stored_choice(demo: Path) -> None:
    config, _, plan = made(demo, train__deterministic=True)
    assert find_asked_mode(config.train, dataclasses.replace(plan, device="cuda")) == "eager"
    config, _, plan = made(demo)
    assert find_asked_mode(config.train, dataclasses.replace(plan, device="cuda", mode="graph")) == "graph"


def test_expected_steps_count_windows_and_the_limit(demo: Path) -> None:
    config, workload, _ = made(demo, train__epochs=4, train__accumulate=2)
    assert len(workload.train_samples) == 6
    assert expected_steps(config, workload) == 4 * 2
    config, workload, _ = made(demo, train__max_steps=3)
    assert expected_steps(config, workload) == 3


def expected_steps(config: RunConfig, workload: Workload) -> int:
    return Tuning(RunRehearsal(config, workload), print, Driver(), lambda plan, setting: None).num_steps


def test_trials_leave_weights_buffers_and_generators_bit_identical(demo: Path) -> None:
    config, workload, plan = made(demo)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    generators = read_generators()
    with RunRehearsal(config, workload).begin(plan) as trial:
        cost = trial.measure("eager")
        assert trial.parts.step.attempted > 0
    assert cost.ms > 0
    assert cost.peak_bytes > 0
    assert all(torch.equal(bits(before[name]), bits(now)) for name, now in workload.model.state_dict().items())
    after = read_generators()
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
        with RunRehearsal(config, workload).begin(dataclasses.replace(plan, memory=memory)) as trial:
            trial.measure("compile")
    assert budgets == [1.0, 0.5]


def test_a_model_that_cannot_be_copied_runs_untried_and_says_why(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, workload, plan = made(demo, train__memory="low", train__epochs=200)
    workload.model.held = (k for k in range(3))  # type: ignore[assignment]
    said: list[str] = []
    chosen = tune_plan(plan, RunRehearsal(config, workload), said.append)
    assert chosen.memory == dataclasses.asdict(MemorySetting())
    assert "cannot be copied" in said[-1]
    monkeypatch.setattr(choose, "find_asked_mode", lambda config, plan: None)
    chosen = tune_plan(plan, RunRehearsal(config, workload), said.append)
    assert chosen.mode == "eager"
    assert "cannot be copied" in chosen.mode_reason


def test_a_compiled_trial_that_fails_in_whatever_way_is_no_candidate(demo: Path) -> None:
    config, workload, plan = made(demo)

    def failing(batch: object) -> object:
        if trial.parts.step.attempted:
            raise RuntimeError("PTXAS error: no such file")
        return trial.parts.eager(batch)  # type: ignore[arg-type]

    with RunRehearsal(config, workload).begin(plan) as trial:
        trial.parts.region = failing  # type: ignore[assignment]
        with pytest.raises(CannotRun, match="PTXAS error"):
            trial.measure("compile")


def test_a_graph_asked_for_on_a_cpu_is_told_why_there_is_none(demo: Path) -> None:
    said: list[str] = []
    config, workload, plan = made(demo, train__fast="graph")
    assert tune_plan(plan, RunRehearsal(config, workload), said.append).mode == "compile"
    assert said == [
        "warning: train.fast=graph needs a CUDA device, but this run is on cpu: the step is compiled, not captured"
    ]


def test_memory_low_is_measured_said_and_stored_with_the_plan(demo: Path) -> None:
    config, workload, plan = made(demo, train__memory="low", train__epochs=100_000)  # time enough for every trial
    said: list[str] = []
    chosen = tune_plan(plan, RunRehearsal(config, workload), said.append)
    assert any(line.startswith("memory low:") for line in said)
    assert set(chosen.memory) == {"activation_budget", "recompute", "optimizer_bits"}
    assert Plan.from_json(chosen.to_json()) == chosen
    for lever in ("normal", "recompute pointwise", "8-bit optimizer"):
        line = next(line for line in chosen.memory_trials if line.startswith(f"{lever}: "))
        assert " ms" in line
        assert f"  {line}" in said
        assert lever == "normal" or "% memory" in line and "% time" in line
    assert any(line.startswith("not tried: activation budget") for line in chosen.memory_trials)


def test_a_run_shorter_than_the_trials_of_memory_low_tries_the_most_promising_lever_alone(demo: Path) -> None:
    config, workload, plan = made(demo, train__memory="low", train__max_steps=1)
    chosen = tune_plan(plan, RunRehearsal(config, workload), lambda line: None)
    tried = [line.split(":")[0] for line in chosen.memory_trials if " ms" in line]
    assert tried == ["normal", "recompute pointwise"]
    assert any("the time for trials was used up" in line for line in chosen.memory_trials)


def test_where_nothing_fits_yet_trials_go_on_however_short_the_run(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits_with_blocks(mode: str, plan: Plan, rehearsal: Rehearsal) -> Cost:
        if plan.memory["recompute"] != "blocks":
            raise DoesNotFit("out of memory")
        return Cost(1.0, 10**6)

    monkeypatch.setattr(choose, "measure_cost", fits_with_blocks)
    config, workload, plan = made(demo, train__memory="low", train__max_steps=1)
    assert tune_plan(plan, RunRehearsal(config, workload), lambda line: None).memory["recompute"] == "blocks"


@pytest.mark.parametrize(("fails", "granted"), [("fp8", "bf16"), ("bf16", "fp8")])
def test_a_precision_whose_step_cannot_run_leaves_the_other(demo: Path, fails: str, granted: str) -> None:
    config, workload, plan = made(demo)
    plan = dataclasses.replace(plan, granted="fp8", mode="eager")

    class Rehearsal(RunRehearsal):
        def begin(self, plan: Plan, **changes: object) -> Any:
            return contextlib.nullcontext(Costing(plan, fails))

    assert tune_plan(plan, Rehearsal(config, workload), lambda line: None).granted == granted


class Costing:
    """A trial that runs but in one precision."""

    def __init__(self, plan: Plan, fails: str) -> None:
        self.plan, self.fails = plan, fails

    def measure(self, mode: str) -> Cost:
        if self.plan.granted == self.fails:
            raise CannotRun("out of memory")
        return Cost(1.0, 1)


def test_a_trial_ends_where_its_capture_fails_and_compiles_nothing_else(demo: Path) -> None:
    config, workload, plan = made(demo)
    with RunRehearsal(config, workload).begin(plan) as trial:
        eager, allowed = trial.parts.eager, list[bool]()

        def region(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float, object]:
            allowed.append(is_forced_on("chain", otherwise=True))
            return eager(batch)

        trial.parts.region = region
        with pytest.raises(NotCaptured, match="a CUDA graph needs a CUDA device, not cpu"):
            trial.measure("graph")
    assert allowed == [True] * UNCAPTURED


def test_who_commits_by_the_host_is_not_compiled_for_a_graph_first(demo: Path) -> None:
    config, workload, plan = made(demo, optimizer__name="adagrad")
    parts = assemble(config, workload, plan)
    for committer in parts.step.committers:
        committer.optimizer.register_step_post_hook(lambda *arguments: None)
    said: list[str] = []
    assert Engine(parts, "graph", lambda text, level: said.append(text)).mode == "compile"
    assert len(said) == 1
    assert "commits by the host's decision" in said[0]


def test_a_trial_of_a_step_that_cannot_be_captured_times_what_the_run_would_do(demo: Path) -> None:
    class Uncaptured:
        def measure(self, mode: str) -> Cost:
            if mode == "graph":
                raise NotCaptured("it waits for the device")
            return Cost({"compile": 2.0, "eager": 3.0}[mode], 1)

    class Rehearsal(RunRehearsal):
        def begin(self, plan: Plan, **changes: object) -> Any:
            return contextlib.nullcontext(Uncaptured())

    config, workload, plan = made(demo)
    assert measure_cost("graph", plan, Rehearsal(config, workload)).ms == 2.0
    assert measure_cost("eager", plan, Rehearsal(config, workload)).ms == 3.0


def test_a_trial_that_failed_is_gone_when_the_next_begins(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[torch.nn.Module]] = []
    alive: list[bool] = []

    def cost(trial: Trial, mode: str, time: object = None) -> Cost:
        models.append(weakref.ref(trial.parts.model))
        alive.append(models[0]() is not None)
        if mode == "graph":
            raise NotCaptured("it waits for the device")
        return Cost(2.0, 1)

    monkeypatch.setattr(Trial, "measure", cost)
    config, workload, plan = made(demo)
    measure_cost("graph", plan, RunRehearsal(config, workload))
    assert alive == [True, False]


def test_a_model_that_does_not_fit_is_no_traceback_of_a_trial(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def does_not_fit(*arguments: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")

    monkeypatch.setattr("halfstep_train.run.engine.assemble", does_not_fit)
    config, workload, plan = made(demo)
    rehearsal = RunRehearsal(config, workload)
    with pytest.raises(DoesNotFit, match="does not fit into memory"), rehearsal.begin(plan):
        pass
