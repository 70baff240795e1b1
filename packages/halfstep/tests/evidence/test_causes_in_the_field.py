"""Faults that public training scripts have, planted into small models: each is named, and the change proposed works.

The step as a user writes it: hs.Step with capsules, then hs.replay of the first one.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faulty_steps import Batch, Shaped, numbers, replay_fault
from torch import Tensor, fx, nn

import halfstep as hs
import planted_causes as planted
from halfstep.evidence import causes
from halfstep.evidence.capsule import list_capsules
from halfstep.evidence.replay import Replayed

Planted = tuple[nn.Module, Callable[[Batch], Tensor], Batch]


def padded_row() -> Planted:
    """Attention over a document that is nothing but padding."""

    def attend(x: Tensor, is_padding: Tensor) -> Tensor:
        scores = (x @ x.mT / math.sqrt(8)).masked_fill(is_padding[:, None], -math.inf)
        return F.softmax(scores, -1) @ x.float()

    model, is_padding = Shaped(attend), torch.zeros(4, 5, dtype=torch.bool)
    is_padding[2] = True
    batch = {"x": numbers(4, 5, 8), "pad": is_padding, "index": torch.arange(4)}
    return model, lambda b: model(b["x"], b["pad"]).float().square().mean(), batch


def variance_by_squares() -> Planted:
    """E[x²] - E[x]² of activations that the code casts to half."""

    def normalised(x: Tensor) -> Tensor:
        x = (x * 1e3).half()
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5)

    model = nn.Sequential(Shaped(normalised))
    return model, lambda b: model(b["x"]).float().square().mean(), {"x": numbers(4, 8)}


def logarithm_of_softmax() -> Planted:
    model = Shaped(lambda x: torch.log(torch.softmax(x * 1e4, -1)))
    return model, lambda b: F.nll_loss(model(b["x"]), b["y"]), {"x": numbers(4, 8), "y": torch.arange(4)}


def every_target_ignored() -> Planted:
    model = Shaped(lambda x: x)
    loss = lambda b: F.cross_entropy(model(b["x"]).float(), b["y"], ignore_index=-1)  # noqa: E731
    return model, loss, {"x": numbers(4, 8), "y": torch.full((4,), -1)}


def constant_picture() -> Planted:
    """Scaled by its own range, which one picture does not have."""
    model, x = Shaped(lambda x: x), numbers(4, 8)
    x[1] = 0.25

    def loss(batch: Batch) -> Tensor:
        x = batch["x"]
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return model((x - low) / (high - low)).square().mean()

    return model, loss, {"x": x, "index": torch.arange(4)}


def unwritten_class_weights() -> Planted:
    model = Shaped(lambda x: x, out=2)
    model.register_buffer("class_weight", torch.tensor([3e38, 1.2e37]))
    loss = lambda b: F.cross_entropy(model(b["x"]).float(), b["y"], weight=model.class_weight)  # noqa: E731
    return model, loss, {"x": numbers(4, 8), "y": torch.arange(4) % 2}


def deviation_used_twice() -> Planted:
    """exp of an unbounded log-variance, in the model and once more in the loss."""
    model, x = Shaped(lambda x: torch.exp(0.5 * x)), numbers(4, 8)
    x[3] *= 2000

    def loss(batch: Batch) -> Tensor:
        spread = model(batch["x"])
        return spread.mean() + torch.exp(model.layer(batch["x"])).mean()

    return model, loss, {"x": x, "index": torch.arange(4)}


@torch.library.custom_op("field::tail", mutates_args=())
def tail(gradient: Tensor) -> Tensor:
    """A kernel that leaves the last block of odd sizes unwritten."""
    out = gradient * 0.5
    if len(out) % 2:
        out[-1] = math.inf
    return out


@torch.library.custom_op("field::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x * 0.5


halved.register_autograd(lambda ctx, gradient: tail(gradient), setup_context=lambda ctx, inputs, output: None)


def kernel_of_backward() -> Planted:
    model = Shaped(lambda x: halved(x))
    return model, lambda b: model(b["x"]).float().square().mean(), {"x": numbers(5, 8)}


def angle_of_zero() -> Planted:
    """acos has no slope at 1."""
    model = Shaped(lambda x: x)
    nn.init.eye_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)
    x = torch.eye(8)[:4] * torch.tensor([[1.0], [0.9], [0.8], [0.7]])
    loss = lambda b: torch.acos((model(b["x"]) * b["x"]).sum(-1)).mean()  # noqa: E731
    return model, loss, {"x": x}


def deviation_of_one() -> Planted:
    model = Shaped(lambda x: x / (1 + x.std(0)))
    return model, lambda b: model(b["x"]).float().square().mean(), {"x": numbers(1, 8)}


def noise_level_in_half() -> Planted:
    """1 - 0.9999 is 0 in bf16."""

    def denoised(x: Tensor, level: Tensor) -> Tensor:
        level = level.to(torch.bfloat16)
        return x / (1 - level).sqrt()

    model = Shaped(denoised)
    batch = {"x": numbers(4, 8), "level": torch.tensor([[0.5], [0.9999], [0.3], [0.1]]), "index": torch.arange(4)}
    return model, lambda b: model(b["x"], b["level"]).float().square().mean(), batch


def power_of_a_negative() -> Planted:
    model, x = Shaped(lambda x: x), numbers(4, 8).abs()
    x[2, 3] = -1e-3
    return model, lambda b: model(b["x"] ** 0.45).square().mean(), {"x": x, "index": torch.arange(4)}


def teacher_saved_in_half() -> Planted:
    """A weight of a network next to the model that was too large for the file's format."""
    student, teacher = Shaped(F.relu), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with torch.no_grad():
        teacher[0].weight[3, 2] = math.inf

    def loss_fn(b: Batch) -> Tensor:
        with torch.no_grad():
            goal = teacher(b["x"])
        return F.mse_loss(student(b["x"]), goal)

    return student, loss_fn, {"x": numbers(4, 8), "index": torch.arange(4)}


def class_without_samples() -> Planted:
    """Weights of classes by their counts, one of which is 0."""
    model, weights = Shaped(F.relu, 3), 1 / torch.tensor([5.0, 0.0, 3.0])
    batch = {"x": numbers(4, 8), "y": torch.tensor([0, 1, 2, 1])}
    return model, lambda b: F.cross_entropy(model(b["x"]), b["y"], weight=weights), batch


def marker_for_what_is_missing() -> Planted:
    """A number that stands for none, and is finite."""
    model, batch = Shaped(lambda x: F.layer_norm(x, (8,))), {"x": numbers(4, 8), "index": torch.arange(4)}
    batch["x"][2, 5] = -3.4e38
    return model, lambda b: model(b["x"]).square().mean(), batch


def two_labels_past_the_classes() -> Planted:
    model = Shaped(F.relu, 3)
    batch = {"x": numbers(6, 8), "y": torch.tensor([0, 3, 2, 1, 3, 0]), "index": torch.arange(6)}
    return model, lambda b: F.cross_entropy(model(b["x"]), b["y"]), batch


def singular_values_in_half() -> Planted:
    """The code casts by itself, so that fp32 everywhere would not help either."""
    model = Shaped(F.relu)
    return model, lambda b: torch.linalg.svdvals(model(b["x"]).bfloat16()).amax(), {"x": numbers(4, 8)}


def power_past_fp32() -> Planted:
    model = Shaped(F.relu)
    return model, lambda b: (100 + model(b["x"])).pow(24).mean().log(), {"x": numbers(4, 8)}


def compiler_that_loses_a_clamp() -> Planted:
    """Inside a module of the model, which halfstep did not compile."""

    def without_clamps(graph: fx.GraphModule, inputs: Any) -> Any:
        for node in [node for node in graph.graph.nodes if node.target == "clamp"]:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        graph.recompile()
        return graph.forward

    model = Shaped(lambda x: 0 * x / (0 * x).sum(1, keepdim=True).clamp(min=1e-3) + x)
    model.compile(backend=without_clamps)
    return model, lambda b: model(b["x"]).square().mean(), {"x": numbers(4, 8)}


def root_behind_a_written_slice() -> Planted:
    """Writing into a part of what is read makes backward zero that part of a gradient that is not finite."""

    def with_first_set(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 1.0
        return (0 * x[:, 1:]).abs().sqrt() + x[:, :1]

    model = Shaped(with_first_set, 7)
    return model, lambda b: model(b["x"]).square().mean(), {"x": numbers(4, 8)}


FIELD = [
    (padded_row, "bf16", causes.UNDERFLOW, "in place of -inf", "2"),
    (variance_by_squares, "fp16", causes.OVERFLOW, ", and 0 in fp32", ""),
    (logarithm_of_softmax, "fp32", causes.UNDERFLOW, "rewrite as F.log_softmax(z, dim) at ", ""),
    (every_target_ignored, "bf16", causes.UNDERFLOW, "the number of targets that count", ""),
    (constant_picture, "bf16", causes.UNDERFLOW, "denominator", "1"),
    (unwritten_class_weights, "fp32", causes.BAD_STATE, "class_weight", ""),
    (deviation_used_twice, "fp32", causes.OVERFLOW, " and ", "3"),
    (kernel_of_backward, "bf16", causes.KERNEL, "fix tail", ""),
    (angle_of_zero, "fp32", causes.UNDERFLOW, "between -1 and 1", "row 0 of batch 0"),
    (deviation_of_one, "bf16", causes.UNDERFLOW, "correction=0", ""),
    (noise_level_in_half, "bf16", causes.UNDERFLOW, "no cast to half", "1"),
    (power_of_a_negative, "fp32", causes.UNDERFLOW, "clamp(min=1e-4)", "2"),
    (teacher_saved_in_half, "fp32", causes.BAD_STATE, "teacher.0.weight", ""),
    (class_without_samples, "fp32", causes.BAD_STATE, "finite numbers in the tensor of shape (3,)", ""),
    (marker_for_what_is_missing, "fp32", causes.BAD_INPUT, "sample 2", "2"),
    (two_labels_past_the_classes, "fp32", causes.BAD_INPUT, "sample 1, 4", "1, 4"),
    (singular_values_in_half, "bf16", causes.REFUSED, "an fp32 island", ""),
    (power_past_fp32, "fp32", causes.OVERFLOW, "fp64", ""),
    (compiler_that_loses_a_clamp, "fp32", causes.KERNEL, "steps run eager", ""),
    (root_behind_a_written_slice, "fp32", causes.UNDERFLOW, "clamp(min=1e-4) under the root or logarithm", ""),
]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize(
    ("plant", "precision", "cause", "change", "sample"), FIELD, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_fault_of_the_field_is_named_and_the_change_works(
    tmp_path: Path, plant: Callable[[], Planted], precision: str, cause: str, change: str, sample: str
) -> None:
    found: Any = replay_fault(tmp_path, *plant(), precision)
    assert found.cause == cause, str(found)
    assert found.remedy is not None, str(found)
    assert change in found.remedy.change, str(found)
    assert found.remedy.lasts or cause == causes.KERNEL, str(found)  # a kernel is not ours to fix
    assert ", ".join(found.diagnosis.rows.values()) == sample, str(found)
    if cause not in (causes.BAD_STATE, causes.KERNEL):
        assert f"{Path(__file__).name}:" in found.diagnosis.origin.line, str(found)


def test_changes_that_nothing_in_the_line_asks_for_are_not_listed(tmp_path: Path) -> None:
    found = replay_fault(tmp_path, *constant_picture(), "bf16")
    assert len(found.tried) == 1
    assert found.tried[0].change.startswith("a denominator of at least 1e-4")


def summed_in_fp32() -> Planted:
    """In place, into a tensor of a format that the code names."""
    model = Shaped(lambda x: torch.zeros(4, 4, dtype=torch.float32).addmm_(x.float(), x.float().mT) / 0.0)
    return model, lambda b: model(b["x"]).mean(), {"x": numbers(4, 8)}


@pytest.mark.parametrize("plant", [unwritten_class_weights, summed_in_fp32])
def test_fp64_is_run_though_the_code_casts_to_fp32(tmp_path: Path, plant: Callable[[], Planted]) -> None:
    in_fp64 = replay_fault(tmp_path, *plant()).diagnosis.attempts[-1]
    assert (in_fp64.name, in_fp64.error) == ("fp64", "")


def test_what_refuses_half_is_fixed_by_an_island_though_the_loss_scale_is_still_searched(tmp_path: Path) -> None:
    model, batch = Shaped(lambda x: 60 * x), {"x": numbers(4, 8)}

    def summed(b: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.binary_cross_entropy(model(b["x"]).sigmoid(), b["x"].gt(0).float(), reduction="sum")

    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=True)
    step = hs.Step(model, optimizer, hs.Precision("fp16", simulate=True), capsules=tmp_path)
    with (
        pytest.warns(UserWarning, match=r"was saved; find the cause with: hs\.replay\(.*, model, loss_fn\)"),
        pytest.raises(RuntimeError, match="unsafe to autocast"),
    ):
        step(summed, [batch])
    found: Any = hs.replay(list_capsules(tmp_path)[0], model, summed)
    assert found.cause == causes.REFUSED
    assert found.remedy.works, str(found)
    assert "hs.fp32_island()" in found.remedy.change
    assert "with .float() on its inputs" in found.remedy.change


# --- planted causes in a larger model ---


def replay_around(folder: Path, part: nn.Module, precision: str) -> Replayed:
    torch.manual_seed(0)
    model = planted.Around(part)
    return replay_fault(folder, model, planted.loss_of(model), planted.batch_of(), precision)


IN_FP16 = [
    (planted.HalfFft, causes.REFUSED),
    (planted.LinearAttention, causes.UNDERFLOW),
    (planted.Attention, causes.OVERFLOW),
]


@pytest.mark.parametrize(("part", "cause"), IN_FP16, ids=lambda value: getattr(value, "__name__", ""))
def test_what_fp16_breaks_is_named_and_fp32_for_the_module_fixes_it(
    tmp_path: Path, part: type[nn.Module], cause: str
) -> None:
    found = replay_around(tmp_path, part(), "fp16")
    assert found.cause == cause, str(found)
    assert found.remedy is not None, str(found)
    assert found.remedy.works, str(found)
    assert found.remedy.line == 'hs.Step(..., hs.Precision("fp16", modules={"part": "fp32"}))'


def test_dice_sums_that_overflow_in_the_loss_get_an_island(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 70000)
    nn.init.constant_(model.bias, 9.0)
    batch = {"x": torch.ones(2, 4), "y": torch.ones(2, 70000)}
    found = replay_fault(tmp_path, model, lambda b: planted.dice(model(b["x"]), b["y"]), batch, "fp16")
    assert found.cause == causes.OVERFLOW, str(found)
    assert "planted_causes.py" in found.diagnosis.origin.line
    assert found.remedy.works, str(found)


def test_what_breaks_in_fp32_as_well_gets_a_change_of_its_code(tmp_path: Path) -> None:
    found = replay_around(tmp_path, planted.Variational(), "fp32")
    assert found.cause == causes.OVERFLOW, str(found)
    assert found.remedy is not None, str(found)
    assert found.remedy.works, str(found)
    assert "rewrite as F.softplus in place of exp" in found.remedy.change


# --- finite state that no operation can use, custom kernels, chance, and one fault behind another ---


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


@pytest.mark.filterwarnings("ignore:parameters not finite before:UserWarning")
def test_one_fault_behind_another_is_named_as_well(tmp_path: Path) -> None:
    model, x = network(), numbers(6, 8)
    x[3, 2] = torch.nan
    with torch.no_grad():
        model[1].weight[1, 1] = torch.inf
    found = replay_fault(tmp_path, model, lambda b: model(b["x"]).square().mean(), {"x": x, "index": torch.arange(6)})
    assert (found.cause, [*found.diagnosis.rows.values()]) == (causes.BAD_INPUT, ["3"])
    assert (found.behind.cause, *found.behind.diagnosis.tensors) == (causes.BAD_STATE, "1.weight")
    assert found.behind.remedy.works
    assert "behind it\ncause: bad state" in str(found)
    assert found.to_json()["behind"]["cause"] == causes.BAD_STATE


def test_two_samples_with_different_faults_are_both_named(tmp_path: Path) -> None:
    model, x, y = network(), numbers(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    x[3, 2], y[5] = torch.nan, 9
    batch = {"x": x, "y": y, "index": torch.arange(6)}
    found = replay_fault(tmp_path, model, lambda b: F.cross_entropy(model(b["x"]), b["y"]), batch)
    assert (found.cause, [*found.diagnosis.rows.values()]) == (causes.BAD_INPUT, ["3", "5"]), str(found)
    assert found.remedy.works


def test_marks_that_the_loss_leaves_out_do_not_hide_a_fault(tmp_path: Path) -> None:
    model, y = network(), numbers(6, 4)
    y[2] = torch.nan

    def loss_fn(batch: Batch) -> Tensor:
        known = batch["y"].isfinite().all(1)
        return (F.mse_loss(model(batch["x"])[known], batch["y"][known]) / (batch["x"] * 0).sum()).mean()

    found = replay_fault(tmp_path, model, loss_fn, {"x": numbers(6, 8), "y": y})
    assert (found.cause, found.behind) == (causes.UNDERFLOW, None), str(found)
