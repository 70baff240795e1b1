"""Finite state that no operation can use, custom kernels, chance, and one fault behind another."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from faulty_steps import Batch, numbers, replay_fault
from torch import Tensor, nn

import halfstep as hs
from halfstep.evidence import causes
from halfstep.evidence.capsule import list_capsules


def network(*behind: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *behind, nn.Linear(8, 4))


class Frozen(nn.Module):
    """Statistics of a checkpoint, as detectors write it."""

    def __init__(self, variance: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((8,), -0.5))
        self.register_buffer("variance", torch.full((8,), variance))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * (self.variance + 1e-5).rsqrt()


class Counted(nn.Module):
    """A mean over what was seen, whose count stays 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.total / self.count


@pytest.mark.parametrize(
    ("part", "tensor", "shown"),
    [
        (Frozen(-0.1), "1.variance", "contains -0.1"),
        (Counted(), "1.count", "nothing but zeros"),
    ],
)
def test_a_finite_buffer_that_an_operation_cannot_use_is_bad_state(
    tmp_path: Path, part: nn.Module, tensor: str, shown: str
) -> None:
    model = network(part)
    found = replay_fault(tmp_path, model, lambda b: model(b["x"]).square().mean(), {"x": numbers(6, 8)})
    assert found.cause == causes.BAD_STATE, str(found)
    assert f"{tensor} " in found.diagnosis.shown[0]
    assert shown in found.diagnosis.shown[0]
    assert found.remedy.works
    assert tensor in found.remedy.change


def test_a_buffer_of_a_teacher_is_named_by_the_teachers_name(tmp_path: Path) -> None:
    student, teacher = network(), network(Frozen(-0.1)).requires_grad_(False)
    batch = {"x": numbers(6, 8)}
    found = replay_fault(tmp_path, student, lambda b: F.mse_loss(student(b["x"]), teacher(b["x"])), batch)
    assert (found.cause, *found.diagnosis.tensors) == (causes.BAD_STATE, "teacher.1.variance"), str(found)


def test_negative_means_next_to_a_division_by_zero_are_not_bad_state(tmp_path: Path) -> None:
    model = network(Frozen(1.0))
    found = replay_fault(
        tmp_path, model, lambda b: (model(b["x"]) / b["n"]).mean(), {"x": numbers(6, 8), "n": torch.zeros(6, 1)}
    )
    assert found.cause == causes.UNDERFLOW, str(found)


def test_a_normalised_weight_of_zeros_needs_another_start(tmp_path: Path) -> None:
    model = network()
    nn.init.zeros_(model[1].weight)
    nn.utils.parametrizations.weight_norm(model[1])
    found = replay_fault(tmp_path, model, lambda b: model(b["x"]).square().mean(), {"x": numbers(6, 8)})
    assert found.cause == causes.UNDERFLOW
    assert found.remedy.works
    assert found.remedy.change == "initialise 1.parametrizations.weight.original1, here with 1"


@torch.library.custom_op("several::by_fours", mutates_args=())
def by_fours(x: Tensor) -> Tensor:
    """A kernel that leaves large finite numbers in the rows behind its last whole block."""
    out = torch.full_like(x, 1e25)
    whole = len(x) // 4 * 4
    out[:whole] = x[:whole]
    return out


by_fours.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize(("rows", "gain", "cause"), [(6, 1.0, causes.KERNEL), (4, 1e25, causes.OVERFLOW)])
def test_a_kernel_is_at_fault_where_large_numbers_begin_in_it(
    tmp_path: Path, rows: int, gain: float, cause: str
) -> None:
    model = network()
    found = replay_fault(
        tmp_path, model, lambda b: by_fours(gain * model(b["x"])).square().mean(), {"x": numbers(rows, 8)}
    )
    assert found.cause == cause, str(found)
    assert (found.diagnosis.origin is not None and found.diagnosis.origin.name == "by_fours") == (
        cause == causes.KERNEL
    )


def test_a_kernel_that_makes_a_finite_spike_is_at_fault(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=True)

    def loss_fn(batch: Batch) -> Tensor:
        return by_fours(model(batch["x"])).abs().mean()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was saved; find the cause.*|.*spike.*")
        with hs.Step(model, optimizer, "fp32", skip_spikes=True, capsules=tmp_path) as step:
            for rows in [4] * 70 + [6]:
                step(loss_fn, [{"x": numbers(rows, 8)}])
    assert hs.replay(list_capsules(tmp_path)[0], model, loss_fn).cause == causes.KERNEL


def test_targets_longer_than_their_input_are_a_pole_in_every_format(tmp_path: Path) -> None:
    model = network()
    batch = {"x": numbers(3, 6, 8), "y": torch.ones(3, 5, dtype=torch.long), "length": torch.full((3,), 5)}

    def loss_fn(b: Batch) -> Tensor:
        chances = model(b["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, b["y"], torch.full_like(b["length"], 6), b["length"])

    found = replay_fault(tmp_path, model, loss_fn, batch)
    assert found.cause == causes.UNDERFLOW, str(found)
    assert "zero_infinity=True" in found.remedy.change


def test_a_square_past_fp32_is_overflow_though_some_inputs_are_zero(tmp_path: Path) -> None:
    model = network()
    found = replay_fault(tmp_path, model, lambda b: (1e30 * model(b["x"]).relu()).pow(2).mean(), {"x": numbers(6, 8)})
    assert found.cause == causes.OVERFLOW, str(found)


def test_attention_without_its_maximum_gets_the_change_that_leaves_the_loss_as_it_is(tmp_path: Path) -> None:
    model = network()

    def loss_fn(batch: Batch) -> Tensor:
        powers = torch.exp(1000 * model(batch["x"]))
        return (powers / powers.sum(-1, keepdim=True)).square().mean()

    found = replay_fault(tmp_path, model, loss_fn, {"x": numbers(6, 8)})
    assert found.cause == causes.OVERFLOW
    assert found.remedy.works
    assert "rewrite as torch.softmax(z, dim) at " in found.remedy.change, str(found)


def test_a_step_that_fails_by_chance_is_not_reproduced(tmp_path: Path) -> None:
    model = network()
    denominators = itertools.chain([0.0, 0.0], itertools.repeat(1.0))  # of the step, and of the first time again
    found = replay_fault(tmp_path, model, lambda b: model(b["x"]).mean() / next(denominators), {"x": numbers(6, 8)})
    assert found.cause == causes.NOT_REPRODUCED, str(found)
    assert "once" in found.diagnosis.shown[0]


@pytest.mark.filterwarnings("ignore:not finite before the first step:UserWarning")
def test_one_fault_behind_another_is_named_as_well(tmp_path: Path) -> None:
    model, x = network(), numbers(6, 8)
    x[3, 2] = torch.nan
    with torch.no_grad():
        model[1].weight[1, 1] = torch.inf
    found = replay_fault(tmp_path, model, lambda b: model(b["x"]).square().mean(), {"x": x, "index": torch.arange(6)})
    assert (found.cause, found.diagnosis.samples) == (causes.BAD_INPUT, ["3"])
    assert (found.behind.cause, *found.behind.diagnosis.tensors) == (causes.BAD_STATE, "1.weight")
    assert found.behind.remedy.works
    assert "behind it\ncause: bad state" in str(found)
    assert found.to_json()["behind"]["cause"] == causes.BAD_STATE


def test_two_samples_with_different_faults_are_both_named(tmp_path: Path) -> None:
    model, x, y = network(), numbers(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    x[3, 2], y[5] = torch.nan, 9
    batch = {"x": x, "y": y, "index": torch.arange(6)}
    found = replay_fault(tmp_path, model, lambda b: F.cross_entropy(model(b["x"]), b["y"]), batch)
    assert (found.cause, found.diagnosis.samples) == (causes.BAD_INPUT, ["3", "5"]), str(found)
    assert found.remedy.works


def test_marks_that_the_loss_leaves_out_do_not_hide_a_fault(tmp_path: Path) -> None:
    model, y = network(), numbers(6, 4)
    y[2] = torch.nan

    def loss_fn(batch: Batch) -> Tensor:
        known = batch["y"].isfinite().all(1)
        return (F.mse_loss(model(batch["x"])[known], batch["y"][known]) / (batch["x"] * 0).sum()).mean()

    found = replay_fault(tmp_path, model, loss_fn, {"x": numbers(6, 8), "y": y})
    assert (found.cause, found.behind) == (causes.UNDERFLOW, None), str(found)
