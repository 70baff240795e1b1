"""Blocks of a user's own model on a real GPU: the check where kernels sum in any order, and captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.hardware.probe import probe
from halfstep_train.run.assemble import build_workload, decide_plan
from halfstep_train.run.engine import RunRehearsal, make_engine
from halfstep_train.tune.choose import find_recomputable, tune_plan
from halfstep_train.workloads import from_dict
from models_of_others import BLOCKS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def made(net: str, precision: str, **more: Any) -> Any:
    values = {"precision.default": precision, "model.options": {"net": net}, "device": "cuda", "data.num_workers": 0}
    config = from_dict("models_of_others:build", {**values, "train.batch_size": 16, **more}).config
    workload = build_workload(config)
    return config, workload, decide_plan(config, workload, probe("cuda"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("net", ["transformer", "resnet", "recurrent"])
def test_blocks_that_may_be_recomputed_pass_the_check(net: str, precision: str) -> None:
    config, workload, plan = made(net, precision)
    found = find_recomputable(plan, RunRehearsal(config, workload))
    assert found.names == tuple(BLOCKS[net]), found.notes
    assert "blocks" in found.ways
    assert not found.notes, found.notes


def test_a_block_that_writes_a_buffer_is_refused() -> None:
    config, workload, plan = made("writing", "bf16")
    found = find_recomputable(plan, RunRehearsal(config, workload))
    assert found.names == ("second.0", "second.1")
    assert "first.0.mean" in found.notes[0]


@pytest.mark.parametrize("mode", ["compile", "graph"])
@pytest.mark.parametrize("net", ["resnet", "transformer"])
def test_a_step_that_recomputes_blocks_is_compiled_and_captured(net: str, mode: str) -> None:
    config, workload, plan = made(net, "bf16", **{"train.fast": mode, "train.activation_checkpointing": True})
    plan = tune_plan(plan, RunRehearsal(config, workload), lambda line: None)
    assert plan.blocks == tuple(BLOCKS[net])
    with RunRehearsal(config, workload).begin(plan) as trial:
        said: list[str] = []
        engine = make_engine(trial.parts, mode, lambda text, level: said.append(text))  # type: ignore[arg-type]
        losses = [float(engine(trial.window).read().loss) for _ in range(8)]
        assert engine.mode == mode, said
        engine.forget_graphs()
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < losses[0]
