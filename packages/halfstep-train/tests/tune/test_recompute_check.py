"""What may be recomputed is tried before a run: on copies, with two small steps, and refused with the reason."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import build_workload, decide_plan
from halfstep_train.run.engine import RunRehearsal
from halfstep_train.tune.choose import Recomputable, compare_states, find_recomputable, list_state
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.base.workload import Workload
from models_of_others import BLOCKS, ResNet, Writing
from phased_workload import SIZE


@pytest.fixture(autouse=True, scope="module")
def quick_garbage() -> Iterator[None]:
    """Each trial collects garbage; what is there already need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


def made(precision: str = "fp32", **options: Any) -> tuple[RunConfig, Workload, Plan]:
    settings = {"precision.default": precision, "precision.simulate": precision != "fp32", "train.batch_size": 8}
    config = from_dict("models_of_others:build", {**settings, "model.options": options}).config
    workload = build_workload(config)
    return config, workload, decide_plan(config, workload, probe("cpu"))


def found(precision: str = "fp32", **options: Any) -> Recomputable:
    config, workload, plan = made(precision, **options)
    return find_recomputable(plan, RunRehearsal(config, workload))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_blocks_with_dropout_and_statistics_pass_in_each_precision(precision: str) -> None:
    for name in ("resnet", "gpt2") if precision == "fp32" else ("resnet",):
        assert found(precision, net=name) == (tuple(BLOCKS[name]), ("pointwise", "alternate", "blocks"), ())


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("buffer", "first.0.mean"),
        ("count", "first.0.count"),
        ("list", "first.0.seen"),
        ("input", "gradient of first.0"),
        ("python", "python's random"),
        ("weight", "first.0"),
        ("spectral", "_u"),
    ],
)
def test_blocks_that_write_state_are_refused_by_name_and_the_others_stay(how: str, what: str) -> None:
    names, ways, notes = found(net="writing", how=how)
    assert names == ("second.0", "second.1")
    assert ways == ("pointwise", "alternate", "blocks")
    [note] = notes
    assert "2 x Writing (first.0 ... first.1)" in note
    assert what in note


def test_a_model_that_recomputes_itself_is_left_to_it() -> None:
    names, ways, [note] = found(net="checkpointed")
    assert not names
    assert not ways
    assert "3 x Block" in note
    assert "already recomputes by itself" in note


def test_parts_of_blocks_that_are_never_called_are_found_by_calling() -> None:
    assert found(net="uncalled").names == ("layers.0.downsample", "layers.1.downsample")


def test_weights_used_twice_under_autocast_are_recomputed_by_blocks_alone() -> None:
    _, ways, [note] = found("bf16", net="shared")  # without autocast's cache their gradients add up in fp32
    assert ways == ("blocks",)
    assert "recompute pointwise" in note


def test_a_step_that_fails_or_is_not_finite_checks_nothing() -> None:
    config, workload, plan = made(net="resnet")
    nan = dataclasses.replace(workload, loss=lambda outputs, batch: (outputs.sum() * float("nan"), len(outputs)))
    assert "not finite" in find_recomputable(plan, RunRehearsal(config, nan)).notes[0]

    def needs_four(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["image"].reshape(4, -1, 2, 8, 8).flatten(0, 1))  # type: ignore[no-any-return]

    whole = dataclasses.replace(workload, forward=needs_four)
    names, ways, [note] = find_recomputable(plan, RunRehearsal(config, whole))
    assert not names
    assert not ways
    assert "a step of 2 samples ends in RuntimeError" in note


def test_a_mask_of_infinities_is_compared_as_well() -> None:
    block = Writing()
    block.mean.fill_(float("-inf"))
    one = dict(list_state(block))
    assert not any(compare_states(one, dict(list_state(block))).values())
    block.mean[3] = 0
    assert compare_states(one, dict(list_state(block)))["mean"] > 0


def test_frozen_blocks_have_nothing_to_save() -> None:
    config, workload, plan = made(net="resnet")
    for part in (workload.model.stem, workload.model.layer1):
        part.requires_grad_(False)  # type: ignore[operator]
    assert find_recomputable(plan, RunRehearsal(config, workload)).names == ("layer2.0", "layer2.1")
    workload.model.requires_grad_(False)
    workload.model.fc.requires_grad_(True)  # type: ignore[union-attr]
    assert "nothing in them or before" in find_recomputable(plan, RunRehearsal(config, workload)).notes[0]


def test_a_frozen_block_behind_what_trains_is_recomputed() -> None:
    config, workload, plan = made(net="resnet")
    workload.model.layer2.requires_grad_(False)  # type: ignore[operator]
    assert find_recomputable(plan, RunRehearsal(config, workload)).names == tuple(BLOCKS["resnet"])


def test_the_check_leaves_the_model_alone() -> None:
    config, workload, plan = made(net="resnet")
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    find_recomputable(plan, RunRehearsal(config, workload))
    assert all(torch.equal(before[name], value) for name, value in workload.model.state_dict().items())
    assert all(p.grad is None for p in workload.model.parameters())
    assert type(workload.model.layer1[0]).__name__ == "BasicBlock"  # type: ignore[index]


def test_one_changed_bit_anywhere_shows() -> None:
    model = ResNet()
    one = dict(list_state(model))
    assert not any(compare_states(one, dict(list_state(model))).values())
    with torch.no_grad():
        model.fc.weight[2, 7] = torch.nextafter(model.fc.weight[2, 7], torch.tensor(9.0))
    gaps = compare_states(one, dict(list_state(model)))
    assert [name for name, gap in gaps.items() if gap] == ["fc.weight"]
    assert 0 < gaps["fc.weight"] < 1e-6


def test_networks_that_train_in_turn_are_checked_in_all_their_phases() -> None:
    config = from_dict("phased_workload:build", {"precision.default": "fp32", "train.batch_size": 8}).config
    workload = build_workload(config)
    for name, last in {"generator": nn.Identity(), "critic": nn.Linear(SIZE, 1)}.items():
        blocks = (nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.ReLU(inplace=True)) for _ in range(2))
        setattr(workload.model, name, nn.Sequential(*blocks, last))
    found = find_recomputable(decide_plan(config, workload, probe("cpu")), RunRehearsal(config, workload))
    assert found == (("generator.0", "generator.1", "critic.0", "critic.1"), ("pointwise", "alternate", "blocks"), ())
