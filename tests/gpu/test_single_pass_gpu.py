"""Our kernel for Adam and AdamW on a real GPU: torch's bits over many steps, and who is left to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.step.graph import GraphedStep
from halfstep.step.optim.adamw_triton import LOW
from halfstep.step.optim.single_pass import SinglePass, can_run_single_pass
from halfstep.step.step import GuardedStep
from halfstep_train.tune.modes import UNCAPTURED
from tiny_training import assert_same_bits, batch, loss_of, make_step

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SHAPES = ((1000, 777), (64, 32, 3, 3), (256, 64, 1, 1), (4096,), (5,), ())
KINDS: dict[str, Callable[..., Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def made(kind: str = "adamw", **options: Any) -> tuple[list[Tensor], Optimizer]:
    """After a first step by torch: there is state."""
    generator = torch.Generator(CUDA).manual_seed(0)
    parameters: list[Tensor] = []
    for shape in SHAPES:
        value = torch.randn(shape, device=CUDA, generator=generator)
        layout = torch.channels_last if value.ndim == 4 else torch.contiguous_format
        parameters.append(nn.Parameter(value.contiguous(memory_format=layout)))
    rate = torch.full((), 3e-3, device=CUDA)
    optimizer = KINDS[kind](parameters, lr=rate, **{"fused": True, **options})
    give(parameters, 0)
    optimizer.step()
    return parameters, optimizer


def give(parameters: list[Tensor], seed: int) -> None:
    """Gradients of very different size from step to step, always in the same place."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        values = torch.randn(parameter.shape, device=CUDA, generator=generator)
        parameter.grad.copy_(values * 10.0 ** (seed % 5 - 3))


def everything(parameters: list[Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    found = {f"{k}": parameter.detach().clone() for k, parameter in enumerate(parameters)}
    for k, parameter in enumerate(parameters):
        found |= {f"{k}.{name}": value.clone() for name, value in optimizer.state[parameter].items()}
    return found


def filled(optimizer: Optimizer) -> SinglePass:
    single_pass = SinglePass(optimizer, CUDA)
    single_pass.record(torch.zeros((), dtype=torch.bool, device=CUDA), None)
    single_pass.fill()
    return single_pass


def run(single_pass: SinglePass, factor: Tensor | None, *, bad: bool = False) -> None:
    for group in single_pass.groups:
        group.run(torch.full((), bad, device=CUDA), factor)


@pytest.mark.parametrize("factor", [None, 0.37, 2.0**-16])
@pytest.mark.parametrize(("kind", "weight_decay"), [("adam", 0.0), ("adamw", 0.0), ("adamw", 0.1)])
def test_a_hundred_steps_have_the_bits_of_torchs_kernel(kind: str, weight_decay: float, factor: float | None) -> None:
    """Good and bad steps: what a run in a graph and one outside of it may not differ in."""
    (ours, mine), (parameters, theirs) = (made(kind, weight_decay=weight_decay) for _ in range(2))
    single_pass = filled(mine)
    share = None if factor is None else torch.full((), factor, device=CUDA)
    for k in range(1, 101):
        give(ours, k)
        give(parameters, k)
        run(single_pass, share, bad=k % 7 == 0)
        said = {"found_inf": torch.full((), float(k % 7 == 0), device=CUDA)}
        if share is not None:
            said["grad_scale"] = share.reciprocal()
        vars(theirs).update(said)
        theirs.step()
    assert_same_bits(everything(ours, mine), everything(parameters, theirs))


def test_adams_coupled_decay_is_left_to_torch() -> None:
    assert can_run_single_pass(made("adam", weight_decay=0.0)[1], CUDA)
    assert not can_run_single_pass(made("adam", weight_decay=0.1)[1], CUDA)
    assert not captured("adam")[1].passes


def test_a_bad_step_leaves_every_bit_alone_and_a_good_one_the_gradients() -> None:
    parameters, optimizer = made()
    single_pass = filled(optimizer)
    gradients = {str(k): p.grad.clone() for k, p in enumerate(parameters) if p.grad is not None}
    run(single_pass, torch.full((), 0.3, device=CUDA))
    assert_same_bits(gradients, {str(k): p.grad for k, p in enumerate(parameters) if p.grad is not None})
    before = everything(parameters, optimizer)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))
    run(single_pass, torch.full((), float("nan"), device=CUDA), bad=True)
    assert_same_bits(before, everything(parameters, optimizer))


def captured(optimizer: str) -> tuple[GuardedStep, GraphedStep]:
    """Of a model some of whose weights decay."""
    step = make_step(optimizer, "bf16", device="cuda")
    for k in range(UNCAPTURED):
        step(loss_of(step.model), [batch(k, device="cuda")])
    return step, GraphedStep(step, loss_of(step.model), [batch(0, device="cuda")], torch.cuda.graph_pool_handle())


def test_a_captured_step_commits_by_our_kernel() -> None:
    step, graph = captured("adamw")
    assert len(graph.passes) == 1
    addresses = [group.table[:LOW] for group in graph.passes[0].groups]  # weights in fp32 have no low halves
    assert all(bool((table != 0).all()) for table in addresses)
    assert all(committer.single_pass is None for committer in step.committers)


def test_other_forms_are_left_to_torch() -> None:
    assert can_run_single_pass(made()[1], CUDA)
    assert not can_run_single_pass(made(amsgrad=True)[1], CUDA)
    assert not can_run_single_pass(made(maximize=True)[1], CUDA)
    assert not can_run_single_pass(made(fused=False, capturable=True)[1], CUDA)
    half = nn.Parameter(torch.zeros(8, device=CUDA, dtype=torch.bfloat16))
    assert not can_run_single_pass(torch.optim.AdamW([half], fused=True), CUDA)
    hooked = made()[1]
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_run_single_pass(hooked, CUDA)
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(8, device=CUDA))], fused=True)
    assert not can_run_single_pass(sgd, CUDA)


def test_gradients_that_lie_otherwise_are_committed_by_torch_inside_the_graph() -> None:
    parameters, optimizer = made()
    single_pass = SinglePass(optimizer, CUDA)
    assert single_pass.fits_gradients
    parameters[1].grad = torch.zeros(SHAPES[1], device=CUDA)
    assert not single_pass.fits_gradients
