"""A run of a model that knows nothing of recomputing: asked for outright, chosen by trials, planned, and told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import build_workload, decide_plan
from halfstep_train.run.engine import RunRehearsal
from halfstep_train.run.memory.sizing import make_peak_predictor
from halfstep_train.run.memory.traceable_step import TraceableStep, build_traceable_step
from halfstep_train.tune import choose
from halfstep_train.tune.choose import tune_plan
from halfstep_train.tune.trials import Cost, MemorySetting, Rehearsal, load_first_batch
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.base.workload import Workload
from models_of_others import BLOCKS, BasicBlock
from whole_runs import final_state, resume, run

OTHERS = "models_of_others:build"


def settings(net: str, **more: Any) -> dict[str, Any]:
    return {
        "model.options": {"net": net},
        "train.max_steps": 4,
        "schedule.name": "constant",
        "log.quiet": False,
        **more,
    }


def test_asked_for_outright_a_run_recomputes_resumes_and_ends_with_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outright = settings("resnet", **{"train.activation_checkpointing": True})
    plain = run(tmp_path / "plain", settings("resnet"), OTHERS)
    assert "recomputed" not in capsys.readouterr().out
    whole = run(tmp_path / "whole", outright, OTHERS)
    assert "recomputed: blocks: 4 x BasicBlock (layer1.0 ... layer2.1)" in capsys.readouterr().out
    cut = run(tmp_path / "cut", {**outright, "train.max_steps": 2}, OTHERS)
    capsys.readouterr()
    resume(cut, "train.max_steps=4")
    assert "recomputed: blocks: 4 x BasicBlock" in capsys.readouterr().out
    assert json.loads((cut / "plan.json").read_text())["blocks"] == BLOCKS["resnet"]
    one, *others = (final_state(folder)[0] for folder in (plain, whole, cut))
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in one.items() if name.startswith("model."))


def test_what_cannot_be_recomputed_is_a_warning_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for net, left in {"checkpointed": "3 x Block", "writing": "first.0.mean"}.items():
        run(tmp_path / net, settings(net, **{"train.activation_checkpointing": True}), OTHERS)
        told = capsys.readouterr()
        [warning] = [line for line in told.err.splitlines() if "train.activation_checkpointing=true leaves" in line]
        assert left in warning
        assert ("recomputed: blocks: 2 x Sequential (second.0 ... second.1)" in told.out) == (net == "writing")


def made(net: str, **more: Any) -> tuple[RunConfig, Workload, Plan]:
    values = {"precision.default": "fp32", "model.options": {"net": net}, "train.memory": "low", **more}
    config = from_dict(OTHERS, values).config
    workload = build_workload(config)
    return config, workload, decide_plan(config, workload, probe("cpu"))


def predictor(config: RunConfig, workload: Workload) -> Callable[[Plan, MemorySetting], int | None]:
    return make_peak_predictor(config.train, lambda: build_traceable_step(config, workload.store))


def test_low_memory_tries_it_in_the_planners_order_and_keeps_what_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def cost(mode: str, plan: Plan, rehearsal: Rehearsal) -> Cost:
        setting = MemorySetting(**plan.memory)
        tried.append(str(setting))
        return Cost(1.0, 10**6 - 10**5 * (setting.recompute == "pointwise") - 10 * (setting.optimizer_bits == 8))

    monkeypatch.setattr(choose, "measure_cost", cost)
    config, workload, plan = made("transformer")
    said: list[str] = []
    chosen = tune_plan(plan, RunRehearsal(config, workload), said.append, peak=predictor(config, workload))
    assert tried[:2] == ["normal", "recompute pointwise"]
    assert chosen.memory["recompute"] == "pointwise"
    assert chosen.blocks == tuple(BLOCKS["transformer"])
    assert "may be recomputed: 3 x Block (layers.0 ... layers.2)" in said
    assert Plan.from_json(chosen.to_json()) == chosen


def test_blocks_with_forms_of_their_own_are_not_planned() -> None:
    config, workload, _ = made("resnet")
    batch = load_first_batch(config.train, workload)
    assert TraceableStep(config, workload, batch).recomputes
    own = dataclasses.replace(workload, blocks={BasicBlock: None})
    assert not TraceableStep(config, own, batch).recomputes


def test_a_run_that_is_about_to_begin_plans_with_what_passed_the_check() -> None:
    config, workload, plan = made("transformer", **{"train.batch_size": 64})
    peak, blocks = predictor(config, workload), MemorySetting(recompute="blocks")
    assert peak(plan, blocks) == peak(plan, MemorySetting())
    passed = dataclasses.replace(plan, blocks=tuple(BLOCKS["transformer"]))
    found = predictor(config, workload)(passed, blocks)
    assert found is not None
    assert found < (peak(plan, blocks) or 0)


def test_a_copy_for_a_trial_has_functions_over_its_own_modules() -> None:
    config, workload, plan = made("transformer")
    part = workload.model.layers[0].mlp  # type: ignore[union-attr, index]
    workload.model.layers[0].mlpf = lambda x: part(x)  # type: ignore[union-attr, index]
    with RunRehearsal(config, workload).begin(plan) as trial:
        own = trial.parts.model.layers[0]  # type: ignore[union-attr, index]
        own.mlpf(torch.randn(1, 16)).sum().backward()  # type: ignore[union-attr, operator]
        assert own.mlp[0].weight.grad is not None  # type: ignore[union-attr, index]
    assert part[0].weight.grad is None
