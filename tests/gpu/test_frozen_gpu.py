"""Frozen parts, scheduled values and keyed noise on a real GPU: captured steps compute what eager ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.hardware.probe import probe
from halfstep.step import tables as tabulated
from halfstep.step.randomness import choose_algorithms
from halfstep_train.data import noise
from halfstep_train.data.loader import Key
from halfstep_train.run.assemble import Assembly, assemble, build_workload, decide_plan
from halfstep_train.run.engine import Engine
from halfstep_train.workloads import from_dict
from no_waiting import no_host_wait

pytestmark = pytest.mark.gpu

STEPS = 9


@pytest.fixture(autouse=True)
def repeatable() -> Any:
    with choose_algorithms(deterministic=True):
        yield


def assembled(**values: Any) -> Assembly:
    settings = {"device": "cuda", "data.num_workers": 0, "train.batch_size": 4, "train.fast": "graph",
                "ema.enabled": True, "precision.default": "bf16", "optimizer.lr": 0.01}  # fmt: skip
    changed = {name.replace("__", "."): value for name, value in values.items()}
    config = from_dict("frozen_workload:build", {**settings, **changed}).config
    workload = build_workload(config)
    return assemble(config, workload, decide_plan(config, workload, probe("cuda")))


def batch(k: int) -> dict[str, Tensor]:
    drawn = noise.uniform((k,), 4, (6,), "cuda")
    return {"x": drawn, "index": torch.arange(4, device="cuda")}


def trained(parts: Assembly, mode: Any, steps: int = STEPS) -> tuple[list[float], list[float], Engine]:
    """Losses, and the value that each step read."""
    engine = Engine(parts, mode, lambda text, level: pytest.fail(text))
    losses, values = [], []
    for k in range(steps):
        losses.append(engine([batch(k)]).read().loss)
        values.append(float(parts.workload.values["beta"].value))
    return losses, values, engine


@pytest.mark.parametrize("modules", [{}, {"encoder": "fp32"}, {"encoder": "fp16"}])
def test_a_captured_step_runs_its_frozen_part_and_reads_its_values(modules: dict[str, str]) -> None:
    """Within bf16's rounding of what the compiler fuses."""
    eager, eager_values, _ = trained(assembled(precision__modules=modules), "eager")
    parts = assembled(precision__modules=modules)
    before = [p.clone() for p in parts.workload.frozen["encoder"].module.parameters()]
    losses, values, engine = trained(parts, "graph")
    assert engine.graphs
    assert values == eager_values == pytest.approx([1 - k / 100 for k in range(STEPS)])
    assert losses == pytest.approx(eager, rel=2e-2)
    after = list(parts.workload.frozen["encoder"].module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.is_cuda and p.grad is None for p in after)


def test_a_captured_step_outlives_the_table_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabulated, "TABLE_CHUNK", 6)
    # The table grows after step 6; three steps run uncaptured again before the next capture.
    _, values, engine = trained(assembled(), "graph", steps=11)
    assert engine.graphs
    assert values == pytest.approx([1 - k / 100 for k in range(11)])


def test_noise_has_the_same_bits_as_on_the_cpu_and_waits_for_nothing() -> None:
    key = Key.for_training(1, 2, 0, 3)
    noise.normal(key, 4, (5,), "cuda")
    with no_host_wait():
        drawn = [noise.uniform(key, 64, (33,), "cuda"), noise.integers(key, 64, 1000, "cuda"),
                 noise.normal(key, 64, (33,), "cuda")]  # fmt: skip
    twins = [noise.uniform(key, 64, (33,), "cpu"), noise.integers(key, 64, 1000, "cpu"),
             noise.normal(key, 64, (33,), "cpu")]  # fmt: skip
    for found, twin in zip(drawn[:2], twins[:2], strict=True):
        assert torch.equal(found.cpu(), twin)
    for found, twin in zip(drawn[2:], twins[2:], strict=True):
        torch.testing.assert_close(found.cpu(), twin, rtol=1e-5, atol=1e-6)
