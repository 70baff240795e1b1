"""Values that follow the steps, groups with rates of their own, averages of chosen parts: in runs and in steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.step import tables as tabulated
from halfstep.step.ema import Ema
from halfstep.step.tables import Values, write_values_
from halfstep_train.run.assemble import Assembly, build_workload
from halfstep_train.run.engine import Engine
from halfstep_train.run.folder import Changes
from halfstep_train.run.stored_state import capture_state, restore_state
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.base.workload import Group, Scheduled
from whole_runs import assemble_run

CPU = torch.device("cpu")


def assembled(workload_changes: dict[str, Any] | None = None, **values: Any) -> Assembly:
    settings = {"device": "cpu", "data.num_workers": 0, "train.batch_size": 4, "train.fast": "off",
                "precision.default": "fp32", "schedule.name": "linear", "schedule.warmup_steps": 0}  # fmt: skip
    changed = {name.replace("__", "."): value for name, value in values.items()}
    config = from_dict("frozen_workload:build", {**settings, **changed}).config
    return assemble_run(config, dataclasses.replace(build_workload(config), **(workload_changes or {})))


def beta(parts: Assembly) -> float:
    return float(parts.workload.values["beta"].value)


def train(parts: Assembly, steps: int) -> list[float]:
    """The value that each step's loss read."""
    seen: list[float] = []
    engine = Engine(
        parts, "eager", lambda text, level: pytest.fail(text), lambda outputs, batch: seen.append(beta(parts))
    )
    for batch in list(parts.train_loader.iterate_epoch(0))[:steps]:
        engine([batch])
    return seen


# --- values ---


def test_each_step_reads_the_value_of_its_own_committed_count() -> None:
    parts = assembled()
    assert train(parts, 3) == pytest.approx([1.0, 0.99, 0.98])


def test_a_skipped_step_does_not_move_it() -> None:
    parts = assembled()
    train(parts, 2)
    parts.step(lambda batch: parts.model(torch.ones(2, 5)).sum() * float("nan"), [torch.ones(2)])
    assert int(parts.step.committed) == 2
    parts.values.refresh()
    assert beta(parts) == pytest.approx(0.98)


def test_before_validation_it_is_that_of_the_step_to_come_and_a_resumed_step_has_it() -> None:
    parts, other = assembled(), assembled()
    train(parts, 3)
    parts.values.refresh()
    assert beta(parts) == pytest.approx(0.97)
    restore_state(other, capture_state(parts, {}), Changes())
    other.values.refresh()
    assert beta(other) == pytest.approx(0.97)


def test_the_tensor_stays_the_same_one_and_the_table_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabulated, "CPU_CHUNK", 2)
    tau = Scheduled(lambda step: float(step))
    values = Values({"tau": tau}, CPU)
    counts = type("Counts", (), {"attempted": 0, "committed": torch.tensor(0)})()
    values.follow(counts)
    own, table = tau.value, values.table
    for step in range(9):
        counts.attempted = step
        counts.committed.fill_(step)
        values.refresh()
        assert float(tau.value) == step
    assert tau.value is own
    assert values.table is not table


def test_a_value_that_ends_is_an_error_only_when_a_step_needs_it() -> None:
    tau = Scheduled(lambda step: [3.0, 2.0][step])
    values = Values({"tau": tau}, CPU)
    counts = type("Counts", (), {"attempted": 1, "committed": torch.tensor(1)})()
    values.follow(counts)
    values.refresh()
    assert float(tau.value) == 2.0
    counts.attempted, counts.committed = 2, torch.tensor(2)
    with pytest.raises(ConfigError, match="tau has no value for step 2"):
        values.refresh()


def test_a_trained_model_in_use_has_the_values_of_its_last_step() -> None:
    tau = Scheduled(lambda step: 10.0 - step)
    write_values_({"tau": tau}, 4, CPU)
    assert float(tau.value) == 6.0


# --- groups ---


def rates(parts: Assembly) -> dict[str, float]:
    names = {id(p): name for name, p in parts.model.named_parameters()}
    parts.step.rates.refresh(parts.step.committed)
    now = parts.step.rates.now.tolist()
    groups = parts.step.optimizers[0].param_groups
    return {names[id(p)]: lr for group, lr in zip(groups, now, strict=True) for p in group["params"]}


def test_a_group_has_its_own_rate_schedule_and_decay() -> None:
    parts = assembled(model__options={"groups": True}, optimizer__lr=0.01, train__max_steps=10)
    first = rates(parts)
    assert first["head.weight"] == first["head.bias"] == 0.5
    assert first["body.weight"] == pytest.approx(0.01)
    train(parts, 4)
    later = rates(parts)
    assert later["head.weight"] == 0.5, "constant"
    assert later["body.weight"] < 0.01, "the config's schedule"
    decays = {id(p): group["weight_decay"] for group in parts.step.optimizers[0].param_groups for p in group["params"]}
    assert decays[id(parts.model.head.weight)] == 0.25
    assert decays[id(parts.model.head.bias)] == 0.0
    assert sum(len(group["params"]) for group in parts.step.optimizers[0].param_groups) == 6


def test_the_first_group_that_fits_has_a_parameter_and_all_may_be_in_groups() -> None:
    groups = (Group(modules=("head.bias",), lr=0.3), Group(modules=("head", "body", "norm"), lr=0.2))
    found = rates(assembled({"groups": groups}))
    assert found["head.bias"] == pytest.approx(0.3)
    assert {round(lr, 6) for name, lr in found.items() if name != "head.bias"} == {0.2}


@pytest.mark.parametrize(
    ("group", "fact"),
    [
        (Group(modules=("haed",)), "head"),
        (Group(modules=("head",), schedule={"name": "plateau"}), "plateau"),
        (Group(modules=("head",), schedule={"warmup_steps": -1}), "warmup_steps"),
    ],
)
def test_a_group_that_cannot_be_is_refused(group: Group, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        assembled({"groups": (group,)})


# --- the average ---


def test_only_the_chosen_parts_are_averaged() -> None:
    parts = assembled(ema__enabled=True, model__options={"ema_parts": ["norm", "head.weight"]})
    assert isinstance(parts.step.ema, Ema)
    names = set(parts.step.ema.state_dict())
    assert names == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
                     "head.weight"}  # fmt: skip
    before = parts.model.body.weight.detach().clone()
    with parts.step.ema.swap_in():
        assert torch.equal(parts.model.body.weight, before)
