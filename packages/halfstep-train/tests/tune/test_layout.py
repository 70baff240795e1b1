"""The memory layout of custom models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor, nn

import tiny_workload
from halfstep.hardware.probe import probe
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import build_workload, decide_plan
from halfstep_train.run.engine import RunRehearsal
from halfstep_train.tune.channels_last import is_channels_last
from halfstep_train.tune.trials import CannotRun
from halfstep_train.workloads import KINDS, load
from halfstep_train.workloads.base.kind import Kind
from halfstep_train.workloads.base.workload import Workload
from whole_runs import assemble_run

SMALL = ("device=cpu", "train.fast=off", "data.num_workers=0", "train.batch_size=4", "precision=fp32")


class Viewed(nn.Module):
    """Flattens as most public code does, which channels_last does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.head(x.view(x.size(0), -1))


def build(config: RunConfig, store: Mapping[str, Any] | None = None) -> Workload:
    return dataclasses.replace(tiny_workload.build(config, store), model=Viewed())


TAKES_IT = Kind(builder=tiny_workload.build, takes_channels_last=True)


def assembled(workload: str, *words: str) -> Any:
    return assemble_run(load(f"test_layout:{workload}", overrides=[*SMALL, *words]).config)


def test_a_kind_says_that_its_model_takes_channels_last_and_our_families_do() -> None:
    assert is_channels_last(assembled("TAKES_IT").model)
    assert all(KINDS.of(name).takes_channels_last for name in KINDS)
    assert is_channels_last(assembled("build", "train.channels_last=true").model), "asked for"


def test_a_layout_that_the_model_does_not_run_in_is_no_candidate() -> None:
    config = load("test_layout:build", overrides=list(SMALL)).config
    workload = build_workload(config)
    plan = decide_plan(config, workload, probe("cpu"))
    turned = dataclasses.replace(plan, channels_last=True)
    with RunRehearsal(config, workload).begin(turned) as trial, pytest.raises(CannotRun, match="view size"):
        trial.measure("eager")
    with RunRehearsal(config, workload).begin(dataclasses.replace(plan, channels_last=False)) as trial:
        assert trial.measure("eager").ms > 0
