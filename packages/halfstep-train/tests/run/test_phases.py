"""Networks that train in turn: one iteration for all that are due, a verdict for each, one scaler, one checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.errors import CheckpointError, ConfigError, Interrupted, TrainingStopped
from halfstep.step.facts import PhasedReading
from halfstep.step.phases import PhasedStep
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import Assembly, assemble, build_workload
from halfstep_train.run.engine import PhasedEngine, RunRehearsal, make_engine
from halfstep_train.workloads.base.workload import Group, Phase
from tiny_training import assert_same_bits
from whole_runs import TINY, assemble_run, assert_same_run, config_of, events, newest, records, resume, run

PAIR = "phased_workload:build"
TURNS = {"model.options.critic": {"every": 2, "from_step": 1, "optimizer": {"lr": 3e-3}}}


def pair_of(**settings: Any) -> RunConfig:
    return config_of(TINY | {key.replace("__", "."): value for key, value in settings.items()}, PAIR)


def parts_of(**settings: Any) -> Assembly:
    return assemble_run(pair_of(**settings))


class Iterations:
    """An engine on its own, fed with one batch over and over."""

    def __init__(self, parts: Assembly, mode: str = "eager") -> None:
        self.parts, self.said = parts, list[str]()
        self.engine = make_engine(parts, mode, lambda text, level: self.said.append(text))  # type: ignore[arg-type]
        self.batch = next(iter(parts.train_loader.iterate_epoch(0)))

    @property
    def step(self) -> PhasedStep:
        assert isinstance(self.parts.step, PhasedStep)
        return self.parts.step

    def make(self, count: int = 1) -> PhasedReading:
        for _ in range(count):
            reading = self.engine([self.batch]).read()
        assert isinstance(reading, PhasedReading)
        return reading

    def weights(self, part: str = "") -> dict[str, Tensor]:
        state = self.parts.model.state_dict()
        return {name: value.clone() for name, value in state.items() if name.startswith(part)}


def whole_state(step: PhasedStep, phase: str) -> dict[str, Tensor]:
    """What a bad step of a phase must leave alone."""
    own = step.steps[phase]
    moments = {f"{i}.{k}": v for i, s in enumerate(own.optimizers[0].state.values()) for k, v in s.items()}
    average = own.ema.state_dict() if own.ema is not None else {}
    return {name: value.clone() for name, value in {**moments, **average, "committed": own.committed}.items()}


def test_a_phase_is_due_when_it_says() -> None:
    iterations = Iterations(parts_of(model__options__critic={"every": 3, "from_step": 2}))
    due = [list(iterations.make().phases) for _ in range(9)]
    both, one = ["generator", "critic"], ["generator"]
    assert due == [one, one, both, one, one, both, one, one, both]
    assert {name: step.attempted for name, step in iterations.step.steps.items()} == {"generator": 9, "critic": 3}
    assert iterations.step.attempted == 9


def test_each_phase_trains_its_own_parameters_and_gives_no_others_gradients() -> None:
    parts = parts_of()
    iterations = Iterations(parts)
    seen = dict[str, list[bool]]()
    for own in parts.phases:
        own.step.on_gradients = lambda model, name=own.phase.name: seen.update(  # type: ignore[misc]
            {name: [p.grad is not None for n, p in model.named_parameters() if not n.startswith(name)]}
        )
    before = iterations.weights()
    iterations.make()
    assert {name: any(found) for name, found in seen.items()} == {"generator": False, "critic": False}
    assert all(parameter.requires_grad for parameter in parts.model.parameters())
    moved = {name.split(".")[0] for name, value in iterations.weights().items() if not torch.equal(value, before[name])}
    assert moved == {"generator", "critic"}


def test_settings_of_a_phase_are_its_own() -> None:
    critic = {"optimizer": {"name": "sgd", "lr": 0.5}, "schedule": {"name": "constant"}, "every": 2, "from_step": 0}
    parts = parts_of(model__options__critic=critic, optimizer__lr=1e-3, train__max_steps=10, schedule__name="linear")
    iterations = Iterations(parts)
    names = [type(own.step.optimizers[0]).__name__ for own in parts.phases]
    assert names == ["AdamW", "SGD"]
    rates = [{name: own.lr for name, own in iterations.make().phases.items()} for _ in range(3)]
    assert [rate.get("critic") for rate in rates] == [0.5, None, 0.5]
    assert [rate["generator"] for rate in rates] == pytest.approx([1e-3, 0.9e-3, 0.8e-3])


def test_a_phase_has_groups_of_its_own() -> None:
    config = pair_of(optimizer__lr=1e-3, schedule__name="constant")
    parts = parts_of(optimizer__lr=1e-3, schedule__name="constant")
    slow = Group(modules=("critic.0",), lr=1e-5)
    phases = [dataclasses.replace(own, groups=(slow,) if own.name == "critic" else ()) for own in parts.workload.phases]
    workload = dataclasses.replace(build_workload(config), phases=tuple(phases))
    iterations = Iterations(assemble(config, workload, parts.plan))
    iterations.make()
    rates = {
        own.phase.name: {round(float(group["lr"]), 8) for group in own.step.optimizers[0].param_groups}
        for own in iterations.parts.phases
    }
    assert rates == {"generator": {1e-3}, "critic": {1e-3, 1e-5}}


def test_a_bad_step_is_dropped_for_its_phase_alone() -> None:
    iterations = Iterations(parts_of(model__options__poisoned={"critic": [3]}, ema__enabled=True))
    iterations.make(3)
    before, critic = iterations.weights("critic"), whole_state(iterations.step, "critic")
    generator = whole_state(iterations.step, "generator")
    reading = iterations.make()
    assert {name: own.is_bad for name, own in reading.phases.items()} == {"generator": False, "critic": True}
    assert reading.reason == "loss is nan (critic)"
    # The generator's own phase runs the critic and writes its statistics; the dropped one must not have.
    trained = {name: value for name, value in before.items() if "running" not in name and "num_batches" not in name}
    assert_same_bits(trained, {name: value for name, value in iterations.weights("critic").items() if name in trained})
    assert int(iterations.parts.model.critic[1].num_batches_tracked) == 3 * 3 + 1  # type: ignore[union-attr,index]
    assert_same_bits(critic, whole_state(iterations.step, "critic"))
    assert not torch.equal(whole_state(iterations.step, "generator")["committed"], generator["committed"])
    assert reading.committed == 4
    assert not iterations.make().is_bad


def test_the_scale_falls_once_for_any_overflow_and_is_stored_once() -> None:
    settings = {"precision__default": "fp16", "precision__simulate": True, "scaler__init_scale": 1024.0}
    iterations = Iterations(parts_of(**settings, model__options__poisoned={"critic": [1, 2], "generator": [2]}))
    scales, bad = [], []
    for _ in range(4):
        reading = iterations.make()
        scales.append({own.scale for own in reading.phases.values()})
        bad.append([name for name, own in reading.phases.items() if own.is_bad])
    assert bad == [[], ["critic"], ["generator", "critic"], []]
    assert scales == [{1024.0}, {1024.0}, {512.0}, {256.0}]
    state = iterations.step.state_dict()
    assert state["scaler"]["scale"] == 256.0
    assert state["scaler"]["_growth_tracker"] == 1
    assert not any("scaler" in own for own in state["phases"].values())


def test_a_run_of_two_phases_is_resumed_to_the_bit(tmp_path: Path) -> None:
    flag = tmp_path / "signal"
    settings = {
        **TURNS, "train.epochs": 3, "train.checkpoint_every": 4, "train.report_every": 1, "ema.enabled": True,
        "model.options.poisoned": {"critic": [3], "generator": [9]}, "train.accumulate": 2, "train.batch_size": 2,
        "model.options.signal_file": str(flag), "model.options.signal_step": 10,
    }  # fmt: skip
    whole = run(tmp_path / "whole", settings, PAIR)
    flag.touch()
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", settings, PAIR)
    resume(tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")
    steps = newest(whole).state["step"]
    assert {name: own["committed"] for name, own in steps["phases"].items()} == {"generator": 17, "critic": 8}
    assert (steps["attempted"], steps["committed"]) == (18, 18)
    assert [(event["phase"], event["bad_step"]) for event in events(whole, "skipped")] == [
        ("critic", 3),
        ("generator", 9),
    ]
    last = [line for line in records(whole) if line["kind"] == "train"][-1]
    assert {"loss", "loss/generator", "loss/critic", "lr/critic"} <= last.keys()


def test_faults_of_a_phase_that_runs_seldom_are_in_a_row_all_the_same(tmp_path: Path) -> None:
    settings = {**TURNS, "train.epochs": 4, "guard.max_consecutive": 3, "model.options.poisoned": {"critic": [3, 5, 7]}}
    with pytest.raises(TrainingStopped, match="critic: 3 bad steps in a row"):
        run(tmp_path / "run", settings, PAIR)
    assert newest(tmp_path / "run").state["step"]["attempted"] == 7 + 1 + 2  # the guard looks two steps back
    resume(tmp_path / "run")
    assert newest(tmp_path / "run").state["step"]["attempted"] == 24


def test_a_rollback_takes_all_phases_back_also_when_it_was_interrupted(tmp_path: Path) -> None:
    flag = tmp_path / "signal"
    settings = {
        **TURNS, "guard.on_fault": "rollback", "guard.margin": 2, "guard.snapshot_every": 4, "guard.max_consecutive": 2,
        "train.report_every": 1, "train.epochs": 4, "train.checkpoint_every": 3, "schedule.name": "constant",
        "model.options.poisoned": {"critic": [9, 11]}, "model.options.signal_file": str(flag),
        "model.options.signal_step": 15,
    }  # fmt: skip
    whole = run(tmp_path / "whole", settings, PAIR)
    flag.touch()
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", settings, PAIR)
    resume(tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")
    (rollback,) = events(whole, "rollback")
    assert rollback["to_committed"] == 4
    last = [line for line in records(whole) if line["kind"] == "train"][-1]
    assert (last["lr/generator"], last["lr/critic"]) == pytest.approx((0.5e-3, 1.5e-3))


def test_trials_run_every_phase_and_leave_the_run_alone() -> None:
    settings = {"model__options__critic": {"from_step": 1000}}
    parts = parts_of(**settings)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    with RunRehearsal(pair_of(**settings), parts.workload).begin(parts.plan) as trial:
        trial.measure("eager")
        step = trial.parts.step
        assert isinstance(step, PhasedStep)
        assert step.steps["critic"].attempted == step.attempted > 0
    assert_same_bits(before, dict(parts.model.state_dict()))


def test_a_phase_that_cannot_be_compiled_stays_eager_and_says_so() -> None:
    parts = parts_of(model__options__critic={"compiles": False}, model__options__penalty=True)
    for own in parts.phases:
        own.region = _refused if own.phase.name == "critic" else own.eager
    iterations = Iterations(parts, "compile")
    iterations.make(2)
    (line,) = iterations.said
    assert line.startswith("critic: runs eager")
    assert iterations.engine.mode == "compile"


def _refused(batch: Any) -> Any:
    pytest.fail("it was compiled")


def test_a_phase_that_fails_to_compile_goes_on_eager_and_is_resumed_so() -> None:
    parts = parts_of()

    def failing(batch: Any) -> Any:
        raise RuntimeError("no assembler")

    for own in parts.phases:
        own.region = failing if own.phase.name == "critic" else own.eager
    iterations = Iterations(parts, "compile")
    iterations.make(2)
    assert ["critic" in line and "no assembler" in line for line in iterations.said] == [True]
    stored = iterations.engine.state_dict()
    assert {name: own["mode"] for name, own in stored["phases"].items()} == {"generator": "compile", "critic": "eager"}
    again = PhasedEngine(parts, "compile", lambda text, level: None)
    again.restore(stored, is_same=True)
    assert again.state_dict() == stored


def test_metrics_count_outputs_of_the_phase_that_says_so(tmp_path: Path) -> None:
    assert "train_error" in records(run(tmp_path / "counted", {"train.max_steps": 2}, PAIR))[-1]
    uncounted = run(tmp_path / "not", {"train.max_steps": 2, "model.options.without": ["generator"],
                                       "model.options.critic": {"parameters": []}}, PAIR)  # fmt: skip
    assert "train_error" not in records(uncounted)[-1]


def phased(*phases: Phase) -> None:
    config = pair_of()
    workload = dataclasses.replace(build_workload(config), phases=phases)
    assemble(config, workload, parts_of().plan)


def phase(name: str = "all", **more: Any) -> Phase:
    return Phase(name=name, loss=lambda outputs, batch: outputs["image"].mean(), **more)


@pytest.mark.parametrize(
    ("phases", "said", "fix"),
    [
        ([phase(parameters=("genrator",))], "'genrator'", "generator"),
        ([phase(parameters=("generator",))], "no phase trains critic.0.weight and 5 more", "requires_grad_"),
        ([phase(), phase()], "all, all", "name"),
        ([phase(every=2)], "iteration 1", "every=1"),
        ([phase(from_step=5)], "iteration 0", "from_step=0"),
        ([phase(optimizer={"lr": -1})], "optimizer: lr is -1", ""),
        ([phase(schedule={"nam": "cosine"})], "schedule: nam", ""),
        ([phase(schedule={"name": "plateau"})], "plateau", "schedule.name=plateau"),
    ],
)
def test_phases_that_could_not_train_are_refused(phases: list[Phase], said: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        phased(*phases)
    assert said in refused.value.what
    assert fix in refused.value.fix


@pytest.mark.parametrize("wrong", [{"name": "a b"}, {"every": 0}, {"from_step": -1}])
def test_a_phase_needs_a_name_and_a_time(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        phase(**{"name": "fine", **wrong})


def test_phases_may_take_turns_or_share_parameters() -> None:
    phased(phase("even", every=2), phase("odd", every=2, from_step=1))


def test_a_stored_state_of_other_phases_is_refused(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.max_steps": 2}, PAIR)
    both = parts_of(train__max_steps=2)
    assert isinstance(both.step, PhasedStep)
    state = newest(folder).state["step"]
    del state["phases"]["critic"]
    before = {name: own.committed.clone() for name, own in both.step.steps.items()}
    with pytest.raises(CheckpointError, match="has the phases generator, not generator, critic"):
        both.step.load_state_dict({**state, "ema": {}})
    assert_same_bits(before, {name: own.committed for name, own in both.step.steps.items()})
