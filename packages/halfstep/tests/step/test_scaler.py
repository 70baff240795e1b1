"""Our scaler against torch's GradScaler: same scales, same growth, same state."""

from __future__ import annotations

import pytest
import torch

from halfstep.errors import CheckpointError, ConfigError
from halfstep.step.scaler import Scaler, ScalerOptions
from halfstep.step.step import GuardedStep
from tiny_training import batch, loss_of, make_step

CPU = torch.device("cpu")
PATTERN = [0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def torch_scales(pattern: list[int]) -> list[tuple[float, int]]:
    """The same overflows fed through a real GradScaler and a real optimizer."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    seen = []
    for overflow in pattern:
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), scaler._growth_tracker.item()))
    return seen


def test_scale_and_growth_tracker_follow_torchs_gradscaler_step_by_step() -> None:
    scaler = Scaler(CPU, enabled=True, options=ScalerOptions(init_scale=1024.0, growth_interval=3))
    ours = []
    for overflow in PATTERN:
        scaler.update(torch.tensor(bool(overflow)))
        ours.append((scaler.value.item(), scaler.growth_tracker.item()))
    assert ours == torch_scales(PATTERN)


def test_the_scale_never_falls_below_its_floor() -> None:
    scaler = Scaler(CPU, enabled=True, options=ScalerOptions(init_scale=8.0, min_scale=2.0))
    for _ in range(5):
        scaler.update(torch.tensor(True))
    assert scaler.value.item() == 2.0


def test_a_torch_gradscaler_state_can_be_continued() -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=4096.0)
    torchs.scale(torch.ones(()))  # torch builds its tensors on first use
    scaler = Scaler(CPU, enabled=True)
    scaler.load_state_dict(torchs.state_dict())
    assert scaler.value.item() == 4096.0
    assert scaler.state_dict().keys() == torchs.state_dict().keys()


def test_a_half_precision_loss_is_scaled_in_fp32() -> None:
    loss = torch.tensor(8517.0, dtype=torch.float16)
    assert torch.isfinite(Scaler(CPU, enabled=True).scale(loss))


def test_a_disabled_scaler_is_the_identity_and_has_no_state() -> None:
    scaler = Scaler(CPU, enabled=False)
    loss = torch.tensor(2.0)
    scaler.update(torch.tensor(True))
    assert scaler.scale(loss) is loss
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


def test_a_checkpoint_of_another_precision_is_refused() -> None:
    with pytest.raises(CheckpointError, match="with loss scaling"):
        Scaler(CPU, enabled=False).load_state_dict({"scale": 1.0, "_growth_tracker": 0})
    with pytest.raises(CheckpointError, match="without loss scaling"):
        Scaler(CPU, enabled=True).load_state_dict({})


@pytest.mark.parametrize("wrong", [{"growth_factor": 1.0}, {"backoff_factor": 1.5}, {"min_scale": 0.0}])
def test_options_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ScalerOptions(**wrong)


@pytest.mark.parametrize(("accumulate", "start"), [(1, 65536), (2, 32768), (3, 16384), (4, 16384), (1 << 20, 1)])
def test_a_window_starts_with_the_scale_that_a_divided_loss_would_have(accumulate: int, start: float) -> None:
    assert Scaler(CPU, enabled=True, accumulate=accumulate).value.item() == start
    assert Scaler(CPU, enabled=False, accumulate=accumulate).value.item() == 1


@pytest.mark.parametrize("accumulate", [2, 4])
def test_as_many_first_steps_overflow_as_where_the_loss_is_divided_by_accumulate(accumulate: int) -> None:
    """torch's recipe calls scaler.scale(loss / accumulate).backward() for every micro-batch."""

    def num_skipped(step: GuardedStep, window: list[dict[str, torch.Tensor]], divisor: int) -> int:
        loss_fn = loss_of(step.model)
        readings = [step(lambda b: loss_fn(b) * 2e3 / divisor, window).read() for _ in range(16)]
        assert not readings[-1].is_bad
        return sum(reading.is_bad for reading in readings)

    windowed = num_skipped(make_step("sgd", "fp16", accumulate=accumulate), [batch(0)] * accumulate, 1)
    assert windowed == num_skipped(make_step("sgd", "fp16"), [batch(0)], accumulate)
    assert windowed > 0


@pytest.mark.parametrize(
    ("first", "accumulate", "low"), [(65536.0, 1, 64.0), (65536.0, 4, 16.0), (16.0, 1, 1.0), (2.0**32, 1, 64.0)]
)
def test_a_low_scale_is_far_below_the_first_one_or_the_usual_one(first: float, accumulate: int, low: float) -> None:
    options = ScalerOptions(init_scale=first)
    assert Scaler(torch.device("cpu"), enabled=True, options=options, accumulate=accumulate).low == low
