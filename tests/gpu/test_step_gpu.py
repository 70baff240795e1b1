"""The step on a real GPU: bad steps leave every bit alone in real formats, and the host never waits in between."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from halfstep.step.clip import Clip
from halfstep.step.guard import Guard
from halfstep.step.optim.by_name import OPTIMIZERS, build_optimizer, make_parameter_groups
from halfstep.step.randomness import choose_algorithms
from halfstep.step.schedule import ScheduleOptions, build_schedule
from halfstep.step.step import GuardedStep
from no_waiting import no_host_wait
from tiny_training import OPTIONS, assert_same_bits, batch, everything, loss_of, make_model, make_step, plan, poisoned

pytestmark = pytest.mark.gpu

WAITS_BY_ITSELF = {"adafactor", "adagrad"}
"""torch's own implementations keep or read values on the host on CUDA, so their commit is decided there too."""


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("good_before", [0, 3], ids=["first", "middle"])
def test_two_bad_steps_in_a_row_leave_every_bit_alone(optimizer: str, precision: str, good_before: int) -> None:
    step = make_step(optimizer, precision, device="cuda")
    loss_fn = loss_of(step.model)
    for k in range(good_before):
        assert not step(loss_fn, [batch(k, device="cuda")]).read().is_bad
    before = everything(step)
    for _ in range(2):
        assert step(loss_fn, [poisoned(device="cuda")]).read().is_bad
        assert_same_bits(before, everything(step))
    assert step(loss_fn, [batch(50, device="cuda")]).read().committed == good_before + 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - WAITS_BY_ITSELF))
def test_fifty_steps_make_no_host_synchronisation(optimizer: str, precision: str) -> None:
    step = make_step(optimizer, precision, device="cuda", accumulate=2)
    loss_fn, guard = loss_of(step.model), Guard(scaling=precision == "fp16")
    batches = [batch(k, device="cuda") for k in range(10)]
    for k in range(3):  # the first commit is decided on the host, by design
        guard.watch(step(loss_fn, [batches[k]]))
    with no_host_wait():
        for k in range(50):
            guard.watch(step(loss_fn, [batches[k % 10], batches[(k + 1) % 10]]))


@pytest.mark.parametrize("limit", [1e9, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_clipping_inside_the_optimizers_kernel_is_a_rounding_away_from_a_plain_loop(
    optimizer: str, limit: float
) -> None:
    """Unclipped, Adam's to the bit. SGD's kernel divides by 1 then, which changes nothing, but it computes in fp32
    since torch 2.11, and which multiplications and additions are fused is the CUDA compiler's choice, branch by branch:
    a rounding of the momentum. Clipped, gradients are a spacing (1e-7) off, and Adam divides by their size; a factor
    applied twice or never would be off by its own size."""
    with choose_algorithms(deterministic=True):
        model = make_model(device="cuda")
        reference = copy.deepcopy(model)
        mine, theirs = (
            build_optimizer(optimizer, make_parameter_groups(m, 0.01), lr=1e-2, options=OPTIONS.get(optimizer))
            for m in (model, reference)
        )
        step = GuardedStep(model, mine, plan("fp32", "cuda"), clip=Clip(limit=limit))
        for k in range(5):
            facts = step(loss_of(model), [batch(k, device="cuda")])
            assert facts.factor is not None
            theirs.zero_grad()
            with step.plan.forward():
                loss = loss_of(reference)(batch(k, device="cuda"))
            with step.plan.backend():
                loss.backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
            theirs.step()
    if limit > 1 and optimizer != "sgd":
        assert_same_bits(model.state_dict(), reference.state_dict())
    bound = 1e-4 if limit > 1 else 1e-3
    start = dict(make_model(device="cuda").named_parameters())
    expected = dict(reference.named_parameters())
    for name, ours in model.named_parameters():
        theirs_now, began = expected[name], start[name]
        assert ours.grad is not None
        assert theirs_now.grad is not None
        if name != "conv.bias":  # BatchNorm takes it away again: its gradient is noise
            assert (ours - theirs_now).norm() <= bound * (theirs_now - began).norm()
            assert (ours.grad - theirs_now.grad).norm() <= bound * theirs_now.grad.norm()


def test_a_parameter_in_two_optimizers_is_clipped_once_on_cuda() -> None:
    model = torch.nn.Linear(2, 1, bias=False).cuda()
    torch.nn.init.zeros_(model.weight)
    twice = [torch.optim.SGD(model.parameters(), lr=1.0, fused=True) for _ in range(2)]
    step = GuardedStep(model, twice, plan("fp32", "cuda"), clip=Clip(limit=0.5))
    for k in range(1, 4):  # the first commit is the host's
        assert not step(lambda x: model(x).sum(), [torch.tensor([[3.0, 4.0]], device="cuda")]).read().is_bad
        torch.testing.assert_close(model.weight.detach().cpu(), -k * torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("weights", [(2.0, 6.0), (0.0, 4.0), (0.0, 0.0)])
def test_weights_may_lie_on_the_host(weights: tuple[float, ...]) -> None:
    """As of a batch that was not moved: what is told, and whether the window is empty."""
    step = make_step("sgd", "fp32", device="cuda", accumulate=2)
    loss_fn = loss_of(step.model)
    window = [batch(k, device="cuda") | {"weight": torch.tensor(weight)} for k, weight in enumerate(weights)]
    reading = step(lambda b: (loss_fn(b), b["weight"]), window).read()
    assert reading.is_empty == (not any(weights))
    assert reading.is_bad == (not any(weights))


@pytest.mark.parametrize("second", [0.0, 3.0])
def test_only_some_weights_may_lie_on_the_host(second: float) -> None:
    step = make_step("sgd", "fp32", device="cuda", accumulate=2)
    loss_fn, weights = loss_of(step.model), iter((1.0, torch.tensor(second)))
    window = [batch(k, device="cuda") for k in range(2)]
    assert not step(lambda b: (loss_fn(b), next(weights)), window).read().is_bad


@pytest.mark.parametrize("num_batches", [1, 2])
def test_a_loss_may_be_computed_on_the_host(num_batches: int) -> None:
    step, plain = (make_step("sgd", "fp32", device="cuda", accumulate=num_batches) for _ in range(2))
    loss_fn, plain_fn = loss_of(step.model), loss_of(plain.model)
    window = [batch(k, device="cuda") for k in range(num_batches)]
    reading = step(lambda b: loss_fn(b).cpu(), window).read()
    assert not reading.is_bad
    assert reading.loss == pytest.approx(plain(plain_fn, window).read().loss)


def busy_share(run: Callable[[], None]) -> float:
    """Of the time from the first kernel to the last; the first tenth fills the queue again after a synchronize."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    )
    first = spans[0][0] + 0.1 * (spans[-1][1] - spans[0][0])
    busy, end = 0.0, first
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - first)


def test_the_gpu_does_not_idle_between_steps() -> None:
    """A trace of a model whose kernels outlast their launches: the gaps between kernels stay under 5 % of the time."""
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(4096, 4096), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = build_optimizer("adamw", make_parameter_groups(model, 0.01), lr=1e-4)
    schedule = build_schedule(ScheduleOptions(name="cosine", total_steps=100))
    step = GuardedStep(model, optimizer, plan("bf16", "cuda"), clip=Clip(limit=1.0), schedules=[schedule])
    guard, data = Guard(scaling=False), torch.randn(32768, 4096, device="cuda")
    loss_fn = lambda x: model(x).float().square().mean()  # noqa: E731
    for _ in range(5):
        guard.watch(step(loss_fn, [data]))
    torch.cuda.synchronize()

    def ten_steps() -> None:
        for _ in range(10):
            guard.watch(step(loss_fn, [data]))

    # Other processes take the host's time: the best of three tells what the step itself does.
    share = max(busy_share(ten_steps) for _ in range(3))
    assert share > 0.95, f"the GPU was busy {share:.1%} of the time"
