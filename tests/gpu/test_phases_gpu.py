"""Two phases captured as a CUDA graph each: the same verdicts as eager, one scale, no waits, exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_run_gpu import tensors_of
from torch import Tensor

from halfstep.errors import Interrupted
from halfstep.hardware.probe import probe
from halfstep.step.facts import PhasedReading
from halfstep.step.phases import PhasedStep
from halfstep.step.randomness import choose_algorithms
from halfstep_train.run.assemble import Assembly, assemble, build_workload, decide_plan
from halfstep_train.run.engine import PhasedEngine
from halfstep_train.run.train import train
from halfstep_train.tune.modes import UNCAPTURED
from halfstep_train.workloads import load
from no_waiting import no_host_wait
from tiny_training import assert_same_bits

pytestmark = pytest.mark.gpu

CUDA = {"data.dir": "anywhere", "data.num_workers": 0, "device": "cuda", "log.quiet": True, "train.batch_size": 4}
LATER = UNCAPTURED + 2
"""An iteration in which both phases are replayed."""


@pytest.fixture(autouse=True)
def repeatable() -> Any:
    with choose_algorithms(deterministic=True):
        yield


def overrides(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in {**CUDA, **settings}.items()]


class Iterations:
    """An engine on its own, fed with one batch over and over."""

    def __init__(self, mode: str, settings: dict[str, Any]) -> None:
        config = load("phased_workload:build", overrides=overrides(settings)).config
        workload = build_workload(config)
        self.parts: Assembly = assemble(config, workload, decide_plan(config, workload, probe("cuda")))
        self.engine = PhasedEngine(self.parts, mode, lambda text, level: pytest.fail(text))  # type: ignore[arg-type]
        self.window = [
            {name: value.cuda() for name, value in next(iter(self.parts.train_loader.iterate_epoch(0))).items()}
        ]

    def make(self, count: int) -> list[PhasedReading]:
        return [self.engine(self.window).read() for _ in range(count)]

    def own(self, phase: str) -> dict[str, Tensor]:
        """Weights, moments and counter of a phase."""
        assert isinstance(self.parts.step, PhasedStep)
        step = self.parts.step.steps[phase]
        weights = {name: p.detach() for name, p in self.parts.model.named_parameters() if name.startswith(phase)}
        moments = {f"{i}.{k}": v for i, s in enumerate(step.optimizers[0].state.values()) for k, v in s.items()}
        return {name: value.clone() for name, value in {**weights, **moments, "n": step.committed}.items()}


def test_both_phases_are_captured_and_train_as_eager_ones_do() -> None:
    turns = {"precision.default": "bf16", "model.options.critic": {"every": 2}, "ema.enabled": True,
             "model.options.dropout": 0.0}  # fmt: skip
    graphs, eager = Iterations("graph", turns), Iterations("eager", turns)
    found, expected = graphs.make(2 * LATER + 4), eager.make(2 * LATER + 4)
    assert len(graphs.engine.graphs) == 2
    assert graphs.engine.mode == "graph"
    for one, other in zip(found, expected, strict=True):
        assert list(one.phases) == list(other.phases)
        for name, own in one.phases.items():
            assert own.committed == other.phases[name].committed
            # The compiler rounds otherwise.
            assert own.loss == pytest.approx(other.phases[name].loss, rel=0.05)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_bad_step_of_one_captured_phase_is_dropped_alone(mode: str) -> None:
    bad = {"precision.default": "bf16", "model.options.poisoned": {"critic": [LATER]}}
    iterations = Iterations(mode, bad)
    assert not any(reading.is_bad for reading in iterations.make(LATER))
    critic, generator = iterations.own("critic"), iterations.own("generator")
    (reading,) = iterations.make(1)
    assert {name: own.is_bad for name, own in reading.phases.items()} == {"generator": False, "critic": True}
    assert_same_bits(critic, iterations.own("critic"))
    assert int(iterations.own("generator")["n"]) == int(generator["n"]) + 1
    assert not iterations.make(1)[0].is_bad


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_scale_falls_once_per_iteration(mode: str) -> None:
    scaled = {"precision.default": "fp16", "scaler.init_scale": 1024.0, "scaler.growth_interval": 1000}
    loud = {"model.options.loud": [LATER, LATER + 1], "model.options.poisoned": {"generator": [LATER + 1]}}
    iterations = Iterations(mode, {**scaled, **loud})
    assert {own.scale for reading in iterations.make(LATER) for own in reading.phases.values()} == {1024.0}
    found = iterations.make(3)
    bad = [[name for name, own in reading.phases.items() if own.is_bad] for reading in found]
    assert bad == [["critic"], ["generator", "critic"], []]
    assert [{own.scale for own in reading.phases.values()} for reading in found] == [{1024.0}, {512.0}, {256.0}]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_captured_iteration_waits_for_nothing(precision: str) -> None:
    iterations = Iterations("graph", {"precision.default": precision, "scaler.init_scale": 256.0})
    iterations.make(LATER)
    parts, prepared = iterations.parts, iterations.window
    prepared = [parts.workload.prepare_batch(batch, key=(0, 0, 0), training=True) for batch in prepared]
    torch.cuda.synchronize()
    with no_host_wait():
        for _ in range(20):
            parts.guard.watch(iterations.engine.step(prepared))


def test_a_captured_run_of_two_phases_resumes_to_the_bit(tmp_path: Path) -> None:
    flag = tmp_path / "signal"
    settings = {
        "precision.default": "bf16", "train.fast": "graph", "train.deterministic": True, "train.epochs": 10,
        "train.checkpoint_every": 2, "ema.enabled": True, "model.options.critic": {"every": 2, "from_step": 3},
        "model.options.poisoned": {"critic": [11], "generator": [12]}, "train.batch_size": 11,
        "model.options.signal_file": str(flag), "model.options.signal_step": 5,
    }  # fmt: skip
    whole = train(load("phased_workload:build", overrides=overrides(settings)), out=tmp_path / "whole")
    flag.touch()
    with pytest.raises(Interrupted):
        train(load("phased_workload:build", overrides=overrides(settings)), out=tmp_path / "parts")
    parts = train(load(str(tmp_path / "parts" / "config.yaml")), resume=tmp_path / "parts")
    assert_same_bits(tensors_of(whole), tensors_of(parts))
