"""The average: fp32, per committed step, buffers included, bits given back after validation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from golden import assert_golden, golden
from halfstep.errors import CheckpointError
from halfstep.step import ema as ema_module
from halfstep.step.ema import Ema, EmaPass
from halfstep.step.norm_averages import NormAverages
from halfstep.step.step import GuardedStep
from tiny_training import assert_same_bits, batch, everything, loss_of, make_model, make_step, poisoned

GOOD = torch.tensor(False)


def test_the_average_follows_its_formula_for_weights_and_buffers() -> None:
    model = make_model()
    ema = Ema(model, decay=0.9, warmup_power=1.0)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for n in range(1, 5):
        with torch.no_grad():
            for value in model.state_dict().values():
                value.add_(1)
        ema.update(torch.tensor(n), GOOD)
        decay = min(0.9, 1 - 1 / n)
        for name, value in model.state_dict().items():
            average = decay * expected[name] + (1 - decay) * value
            expected[name] = average if value.is_floating_point() else value.clone()
    state = ema.state_dict()
    assert state["norm.num_batches_tracked"].item() == 4
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


def test_a_bf16_model_is_averaged_in_fp32_and_the_average_moves() -> None:
    """In bf16 an update of 1e-4 of the value is below the spacing of 2^-8: the average would stand still."""
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.ones_(model.weight)
    ema = Ema(model, decay=0.9999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(10):
        ema.update(torch.tensor(10**9), GOOD)
    assert ema.state_dict()["weight"].dtype == torch.float32
    assert ema.state_dict()["weight"].item() == pytest.approx(2 - 0.9999**10, rel=1e-5)


def test_an_average_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="conv.bias does not fit: missing in the checkpoint"):
        Ema(make_model()).load_state_dict({"x": torch.zeros(1)})


def test_a_large_model_is_moved_in_pieces_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    whole = Ema(model)
    monkeypatch.setattr(ema_module, "CHUNK_ELEMENTS", 5)
    pieces = Ema(model)
    assert len(pieces.groups) > len(whole.groups)
    for step in range(1, 4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        for average in (whole, pieces):
            average.update(torch.tensor(step), torch.tensor(False))
    expected, found = whole.state_dict(), pieces.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with pieces.swap_in():
        assert torch.equal(model[2].weight, expected["2.weight"])
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("name", "power"), [("warmup", 2 / 3), ("warmup_ddpm_example", 3 / 4)])
def test_golden_average_of_diffusers_with_its_warm_up(name: str, power: float) -> None:
    tensors, facts = golden("diffusers_tiny")
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(tensors["ema/params"][0].clone())})
    average = Ema(model, decay=facts["config"]["ema"]["decay"], warmup_power=power)
    for step in range(1, 21):
        with torch.no_grad():
            model["weight"].copy_(tensors["ema/params"][step])
        average.update(torch.tensor(step), torch.tensor(False))
        assert_golden(average.state_dict()["weight"], tensors[f"ema/{name}"][step - 1], name=f"step {step}")
        decay = float(average._compute_decay(torch.tensor(step, dtype=torch.float64)))
        assert decay == pytest.approx(facts["ema_decay"][name][step - 1], abs=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it, compiled")
@pytest.mark.parametrize("decay", [0.0, 0.25, 0.9, 0.9999])
def test_one_launch_moves_all_averages_as_lerp_does_and_none_in_a_bad_step(decay: float) -> None:
    """An end that is a multiple of nothing, weights of bf16, an average that begins in the middle of 16 bytes."""
    torch.manual_seed(0)
    shapes = ((67, 71), (6, 5, 3, 3), (), (4,))
    weights = [torch.randn(shape) for shape in shapes] + [torch.randn(5000).bfloat16()]
    flat = torch.randn(sum(weight.numel() for weight in weights) + 1)[1:]
    pieces = flat.split([weight.numel() for weight in weights])
    expected = [
        torch.lerp(w.flatten().float(), piece, torch.tensor(decay)) for w, piece in zip(weights, pieces, strict=True)
    ]
    one_launch, before = EmaPass(), flat.clone()
    one_launch.move(list(zip(weights, pieces, strict=True)), torch.tensor(decay), torch.tensor(True))
    assert torch.equal(flat, before)
    one_launch.move(list(zip(weights, pieces, strict=True)), torch.tensor(decay), GOOD)
    torch.testing.assert_close(torch.cat(expected), flat, rtol=2**-22, atol=2**-24)
    assert len(one_launch.launches) > 1


# --- BatchNorm's running statistics: averaged faster in the first steps ---


def make_averaging_step(**more: object) -> GuardedStep:
    step = make_step(**more)  # type: ignore[arg-type]
    step.norms = NormAverages(step.model)
    return step


def statistics(model: nn.Module) -> tuple[Tensor, Tensor]:
    norm: nn.BatchNorm2d = model.norm  # type: ignore[assignment]
    return norm.running_mean.clone(), norm.running_var.clone()


def test_the_first_steps_give_what_a_falling_momentum_gives() -> None:
    step, plain = make_averaging_step(), make_step()
    for number in range(1, 15):
        plain.model.norm.momentum = max(0.1, 8 / (number + 7))  # type: ignore[assignment]
        for own in (step, plain):
            assert not own(loss_of(own.model), [batch(number)]).read().is_bad
        for found, wanted in zip(statistics(step.model), statistics(plain.model), strict=True):
            # The first step subtracts numbers up to 1: ten times fp32's rounding of them.
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_from_step_73_on_no_bit_differs_from_torchs() -> None:
    step = make_averaging_step()
    for number in range(73):
        step(loss_of(step.model), [batch(number)])
    plain = make_step()
    plain.model.load_state_dict(step.model.state_dict())
    loaded = copy.deepcopy(step.state_dict())
    plain.load_state_dict(loaded)
    for number in range(73, 77):
        for own in (step, plain):
            own(loss_of(own.model), [batch(number)])
    assert_same_bits(everything(step), everything(plain))


@pytest.mark.parametrize("good_before", [0, 3])
def test_a_bad_step_leaves_the_statistics_alone(good_before: int) -> None:
    step = make_averaging_step()
    for number in range(good_before):
        step(loss_of(step.model), [batch(number)])
    before = everything(step)
    assert step(loss_of(step.model), [poisoned()]).read().is_bad
    assert_same_bits(before, everything(step))


def test_several_micro_batches_and_shared_layers_never_overshoot() -> None:
    step = make_averaging_step(accumulate=4)
    images = [batch(number) for number in range(4)]
    with torch.no_grad():
        seen = torch.cat([step.model.conv(one["image"]) for one in images])  # type: ignore[operator]
    step(loss_of(step.model), images)
    mean, variance = statistics(step.model)
    # All four moved them, 1 - (1 - 8/11)^4 = 0.994 of the way from 0, and weigh 24 to 28 % each.
    torch.testing.assert_close(mean, 0.994 * seen.mean((0, 2, 3)), rtol=0.1, atol=0)
    assert torch.all(variance < 1)
    assert torch.all(variance > 0)


def test_layers_that_run_elsewhere_or_count_for_themselves_are_left_alone() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2, momentum=0.0), nn.BatchNorm1d(2, track_running_stats=False)
    )
    assert not NormAverages(model).norms
    frozen = nn.BatchNorm1d(2).eval()
    averages = NormAverages(frozen)
    averages.save()
    frozen(torch.randn(4, 2))
    averages.settle()
    assert torch.equal(frozen.running_var, torch.ones(2))  # type: ignore[arg-type]
