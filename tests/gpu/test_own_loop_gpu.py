"""`hs.Step` on a real GPU: schedules and logging without a wait, penalties in real fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.step.graph import GraphedStep
from no_waiting import no_host_wait
from operations import count_extra_operations, make_mlp, make_normed
from tiny_training import batch, loss_of, make_model

pytestmark = pytest.mark.gpu
TORCH = torch.optim.lr_scheduler


@pytest.mark.parametrize("fast", ["off", "graph"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_schedules_and_logs_make_no_host_synchronisation(precision: str, fast: Any) -> None:
    model = make_model(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    seen: list[float] = []
    step = hs.Step(
        model, optimizer, precision, schedule=TORCH.CosineAnnealingLR(optimizer, 10_000), clip_norm=1.0,
        on_outcome=lambda outcome: seen.append(outcome.lr), fast=fast,
    )  # fmt: skip
    batches, loss_fn = [batch(k, device="cuda") for k in range(10)], loss_of(model)
    for k in range(10):  # the first commit is decided on the host, a new loss function is looked at and captured
        step(loss_fn, [batches[k]])
    assert step.mode == ("eager" if fast == "off" else "graph")
    with no_host_wait():
        for k in range(300):  # longer than a user's schedule is asked for ahead
            step(loss_fn, [batches[k % 10]])
    step.finish()
    assert len(seen) == 310
    assert seen == sorted(seen, reverse=True)


def test_a_step_adds_a_fixed_number_of_operations_to_a_plain_loop() -> None:
    x, y = torch.randn(6, 8, device="cuda"), torch.tensor([0, 1, 2, 3, 0, 1], device="cuda")
    assert count_extra_operations(make_mlp, x, y) <= 16
    few, many = (count_extra_operations(lambda depth=depth: make_normed(depth), x, y) for depth in (2, 20))
    assert few == many <= 36


def test_epochs_and_plateaus_are_torchs() -> None:
    model = nn.Linear(4, 4).cuda()
    halves = [torch.optim.SGD([parameter], 0.1, fused=True) for parameter in model.parameters()]
    twins = [torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1) for _ in range(2)]
    theirs = [TORCH.StepLR(twins[0], 2, 0.5), TORCH.ReduceLROnPlateau(twins[1], patience=1)]
    schedule = [hs.per_epoch(TORCH.StepLR(halves[0], 2, 0.5)), TORCH.ReduceLROnPlateau(halves[1], patience=1)]
    step = hs.Step(model, halves, "fp32", schedule=schedule)
    for metric in (1.0, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99):
        step(lambda x: model(x).square().mean(), [torch.ones(2, 4, device="cuda")])
        for own, twin in zip(halves, twins, strict=True):
            assert float(own.param_groups[0]["lr"]) == pytest.approx(twin.param_groups[0]["lr"])
        step.epoch_ended()
        step.validated(metric)
        twins[0].step()
        theirs[0].step()
        theirs[1].step(metric)


def test_the_inner_gradient_of_a_penalty_survives_real_fp16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 1e-4)
    x = torch.randn(16, 8, device="cuda")
    tracked = x.clone().requires_grad_()
    truth = torch.autograd.grad(model(tracked).sum(), tracked)[0]
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.0, fused=True), "fp16")
    found: list[Tensor] = []

    def loss_fn(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        found.append(step.grad(model(x), x))
        return (found[-1].norm(dim=1) - 1).square().mean()

    committed = [step(loss_fn, [x]).committed for _ in range(12)]
    assert committed[-1]
    torch.testing.assert_close(found[-1].detach(), truth, rtol=2e-2, atol=2e-10)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_recurrent_model_trains(precision: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(8, 16), "head": nn.Linear(16, 8)}).cuda()
    modules = {"lstm": "fp32"} if precision == "bf16" else {}  # as the plan's warning advises
    step = hs.Step(
        model, torch.optim.AdamW(model.parameters(), 2e-2, fused=True), hs.Precision(precision, modules=modules)
    )
    x = torch.randn(6, 4, 8, device="cuda")

    def loss_fn(x: Tensor) -> Tensor:
        return nn.functional.mse_loss(model["head"](model["lstm"](x[:-1])[0]), x[1:])

    outcomes = [step(loss_fn, [x]) for _ in range(60)]
    assert outcomes[-1].loss < 0.5 * outcomes[0].loss


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_teacher_moved_in_on_commit_makes_no_host_synchronisation_and_stays_after_a_bad_step(precision: str) -> None:
    model, teacher = make_model(device="cuda"), make_model(device="cuda").requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def move(model: nn.Module) -> None:
        torch._foreach_lerp_(list(teacher.parameters()), list(model.parameters()), 0.1)

    step = hs.Step(
        model, optimizer, precision, also=[teacher], on_commit=move, clip_norm=1.0, scaler={"init_scale": 256}
    )
    batches, loss_fn = [batch(k, device="cuda") for k in range(10)], loss_of(model)
    for k in range(10):
        step(loss_fn, [batches[k]])
    with no_host_wait():
        for k in range(50):
            step(loss_fn, [batches[k % 10]])
    before = [weight.clone() for weight in teacher.parameters()]
    with no_host_wait():
        step(lambda b: loss_fn(b) * float("nan"), [batches[0]])
    assert all(map(torch.equal, before, teacher.parameters()))
    step(loss_fn, [batches[1]])
    assert not any(map(torch.equal, before, teacher.parameters()))


def test_sparse_gradients_train_on_a_gpu() -> None:
    words = nn.Embedding(50, 8, sparse=True).cuda()
    step = hs.Step(words, torch.optim.SparseAdam(list(words.parameters()), 0.1), "fp16", clip_norm=1.0)
    ids = torch.arange(10, device="cuda")
    outcomes = [step(lambda x: (words(x) - 1).square().mean(), [ids]) for _ in range(40)]
    assert outcomes[-1].loss < 0.5 * outcomes[0].loss
    before = words.weight.clone()
    step(lambda x: words(x).mean() * float("nan"), [ids])
    assert torch.equal(words.weight, before)


def loss_with_shared_teacher(model: nn.Module, x: Tensor) -> Tensor:
    """The teacher is the same network, called first and without gradients."""
    with torch.no_grad():
        target = model(x).softmax(1)
    return -(target * model(x + 0.1).log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("mode", ["eager", "compiled", "captured"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_teacher_with_the_same_weights_takes_no_gradients_away(precision: str, mode: str) -> None:
    """Autocast keeps the cast weights of a call without gradients, and they have none (pytorch/pytorch#112583)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).cuda()
    x = torch.randn(64, 16, device="cuda")
    expected = torch.autograd.grad(loss_with_shared_teacher(model, x), list(model.parameters()))
    loss_fn = lambda batch: loss_with_shared_teacher(model, batch["x"])  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=True)
    scaler = {"init_scale": 1024.0} if precision == "fp16" else None
    step = hs.Step(model, optimizer, precision, scaler=scaler)
    optimizer.param_groups[0]["lr"] = 0.0
    assert step(torch.compile(loss_fn) if mode == "compiled" else loss_fn, [{"x": x}]).committed
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 1.0
    if mode == "captured":
        run = GraphedStep(step._step, loss_fn, [{"x": x}], torch.cuda.graph_pool_handle())
        run([{"x": x}])
    else:
        step(torch.compile(loss_fn) if mode == "compiled" else loss_fn, [{"x": x}])
    for then, now, gradient in zip(before, model.parameters(), expected, strict=True):
        # Half precision rounds each product by 2**-8 or less; sums of 64 samples do not cancel here.
        assert float((then - now.detach() - gradient).norm()) < 0.05 * float(gradient.norm())
