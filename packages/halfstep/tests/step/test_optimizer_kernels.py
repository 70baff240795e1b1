"""Kernels of optimizers, interpreted: Adam and AdamW in a single pass, as a captured step runs it, bf16 weights, and
one-byte moments. They have the results of torch and of their twins; tests/gpu compiles them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.step import commit
from halfstep.step.commit import Committer
from halfstep.step.graph import CaptureFailed, open_for_capture
from halfstep.step.optim.adamw8bit import make_state, update
from halfstep.step.optim.adamw_bf16 import LOW, AdamWBf16, Setting
from halfstep.step.optim.half_weights import join, make_key, round_stochastically, split
from halfstep.step.optim.single_pass import SinglePass, can_run_single_pass
from halfstep.step.step import GuardedStep
from tiny_training import assert_same_bits, batch, copy_tensors, loss_of, make_model, plan

pytest.importorskip("halfstep.step.optim.adamw_triton", reason="Triton is not installed: NOT tested")
from halfstep.step.optim import adamw8bit_triton  # noqa: E402

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(False), torch.tensor(True)
SPACING = 2.0**-23

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it, compiled")


class Parts(nn.Module):
    """A matrix of one whole chunk and an end that is not a multiple of anything, a channels_last kernel, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(67, 71))
        self.kernel = nn.Parameter(torch.randn(6, 5, 3, 3).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.randn(4))


def made(kind: type[Optimizer] = torch.optim.AdamW, **options: Any) -> tuple[Parts, Optimizer]:
    """After two steps by torch, so that there is state."""
    torch.manual_seed(0)
    model = Parts()
    groups = [{"params": [model.matrix, model.kernel]}, {"params": [model.scalar, model.unused], "weight_decay": 0.0}]
    decay = 0.1 if kind is torch.optim.AdamW else 0.0  # Adam's is left to torch
    optimizer = kind(groups, lr=1e-2, weight_decay=decay, fused=True, **options)  # type: ignore[call-arg]
    for seed in range(2):
        give(model, seed)
        optimizer.step()
    return model, optimizer


def give(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in (parameter for name, parameter in model.named_parameters() if name != "unused"):
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradient)  # in place: a graph's gradients stay where they are


def captured(optimizer: Optimizer) -> SinglePass:
    single_pass = SinglePass(optimizer, CPU)
    single_pass.record(GOOD, None)  # nothing happens: the table is empty
    single_pass.fill()
    return single_pass


def replay(single_pass: SinglePass, bad: Tensor, factor: Tensor | None) -> None:
    for group in single_pass.groups:
        group.run(bad, factor)


@interpreted
@pytest.mark.parametrize(("kind", "factor"), [(torch.optim.Adam, None), (torch.optim.AdamW, 0.3)])
def test_three_steps_are_a_few_roundings_from_torchs(kind: type[Optimizer], factor: float | None) -> None:
    """The interpreter and torch's CPU kernel fuse no multiply-adds alike; on CUDA the bits are equal (tests/gpu)."""
    (ours, mine), (model, theirs) = made(kind), made(kind)
    single_pass = captured(mine)
    for seed in range(2, 5):
        give(ours, seed)
        give(model, seed)
        scale = None if factor is None else torch.tensor(factor)
        replay(single_pass, GOOD, scale)
        if scale is not None:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], scale)
        theirs.step()
    found, expected = copy_tensors(ours, mine), copy_tensors(model, theirs)
    assert found.keys() == expected.keys()
    for name in (name for name in expected if not name.endswith(".grad")):
        # Weights and moments are below 4, a step below 0.05: three steps of a rounding or two each.
        assert (found[name] - expected[name]).abs().max() <= 8 * SPACING, name
    assert all(float(found[f"{name}.step"]) == 5 for name in ("matrix", "kernel", "scalar"))


@interpreted
def test_recording_changes_nothing_and_gradients_keep_their_bits() -> None:
    model, optimizer = made()
    before = copy_tensors(model, optimizer)
    single_pass = captured(optimizer)
    assert_same_bits(before, copy_tensors(model, optimizer))
    replay(single_pass, GOOD, torch.tensor(0.3))
    after = copy_tensors(model, optimizer)
    assert_same_bits(*({k: v for k, v in each.items() if k.endswith("grad")} for each in (before, after)))
    assert not torch.equal(before["matrix"], after["matrix"])
    assert torch.equal(before["unused"], after["unused"])


@interpreted
def test_a_bad_step_changes_nothing_though_gradients_and_factor_are_not_numbers() -> None:
    model, optimizer = made()
    single_pass = captured(optimizer)
    model.matrix.grad.fill_(float("nan"))
    before = copy_tensors(model, optimizer)
    replay(single_pass, BAD, torch.tensor(float("nan")))
    assert_same_bits(before, copy_tensors(model, optimizer))


@interpreted
def test_the_learning_rate_is_read_from_the_tensor_at_every_step() -> None:
    model, optimizer = made()
    rate = torch.zeros(())
    for group in optimizer.param_groups:
        group["lr"] = rate
    single_pass = captured(optimizer)
    start = model.matrix.detach().clone()
    replay(single_pass, GOOD, None)
    assert torch.equal(model.matrix, start)
    rate.fill_(1e-2)
    replay(single_pass, GOOD, None)
    assert not torch.equal(model.matrix, start)


@interpreted
def test_gradients_with_another_memory_layout_are_left_to_torch() -> None:
    model, optimizer = made()
    single_pass = SinglePass(optimizer, CPU)
    assert single_pass.fits_gradients
    model.kernel.grad = torch.randn(6, 5, 3, 3)  # not channels_last
    assert not single_pass.fits_gradients
    model.kernel.grad = None
    model.matrix.grad = torch.randn(67 * 71 + 1)[1:].view(67, 71)  # begins between two accesses
    assert not single_pass.fits_gradients


def test_only_a_cuda_device_has_the_kernel() -> None:
    _, optimizer = made()
    assert not can_run_single_pass(optimizer, CPU)
    assert Committer(optimizer, None).open_capture(CPU) is None


@interpreted
def test_where_one_optimizer_cannot_be_opened_the_others_are_closed_and_go_on_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    *body, last = model.parameters()
    step = GuardedStep(model, [torch.optim.AdamW(body, fused=True), torch.optim.AdamW([last], fused=True)], plan())
    step(loss_of(model), [batch(0)])

    def single_pass(optimizer: Optimizer, device: torch.device) -> SinglePass:
        if optimizer is step.optimizers[1]:
            raise torch.OutOfMemoryError("no room for the table")
        return SinglePass(optimizer, device)

    monkeypatch.setattr(commit, "can_run_single_pass", lambda optimizer, device: True)
    monkeypatch.setattr(commit, "SinglePass", single_pass)
    with pytest.raises(CaptureFailed, match="no room for the table"), open_for_capture(step):
        pytest.fail("it was opened")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(loss_of(model), [batch(1)])
    assert not any(map(torch.equal, before, model.parameters()))


# --- weights in bf16 and one-byte moments against their twins in torch ---


def setting(scale: float | None = None, *, bad: bool = False) -> Setting:
    given = None if scale is None else torch.tensor(scale)
    return Setting(torch.tensor(1e-3), torch.tensor(float(bad)), given, (0.9, 0.999), 1e-8, 0.1)


def corrections(step: int) -> Sequence[Tensor]:
    return [1 - torch.tensor(beta) ** torch.tensor(float(step)) for beta in (0.9, 0.999)]


def spread_gradient(step: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return blocks of very different size, of which one is zero."""
    generator = torch.Generator().manual_seed(step)
    blocks = torch.randn(count // 256, 256, generator=generator) * torch.logspace(-9, 3, count // 256)[:, None]
    blocks[1] = 0
    return blocks.flatten().to(dtype)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "how", "scale"),
    [
        (torch.float32, "", None),
        (torch.float16, "", 3.0),
        (torch.bfloat16, "split", None),
        (torch.bfloat16, "stochastic", 3.0),
    ],
)
def test_8_bit_moments_have_the_bits_of_the_twin(dtype: torch.dtype, how: str, scale: float | None) -> None:
    torch.manual_seed(0)
    count = 19 * 256  # not a whole number of programs
    start = torch.randn(count).to(dtype)
    ours = {"weights": start.clone(), **make_state(start)}
    if how == "split":
        ours[LOW] = torch.randint(-32768, 32768, (count,)).to(torch.int16)
    theirs = {name: value.clone() for name, value in ours.items()}
    for step in range(1, 5):
        gradient = spread_gradient(step, count, dtype) * (float("nan") if step == 3 else 1)
        key = make_key(0, 2, torch.tensor(float(step)))
        given = setting(scale, bad=step == 3)
        adamw8bit_triton.update(
            ours["weights"], gradient.clone(), ours, corrections(step), given, key if how == "stochastic" else None
        )
        theta = join(theirs["weights"], theirs[LOW]) if how == "split" else theirs["weights"]
        theta = theta.float() if how == "stochastic" else theta
        update(theta, gradient.clone(), theirs, corrections(step), given)
        if how == "split":
            theirs["weights"], theirs[LOW] = split(theta)
        else:
            theirs["weights"] = round_stochastically(theta, key) if how else theta
    assert not torch.equal(ours["weights"], start)
    assert_same_bits(ours, theirs)


def trained_by_torch(rounding: Any) -> tuple[nn.ParameterList, AdamWBf16]:
    torch.manual_seed(0)
    start = [torch.randn(67, 71), torch.randn(6, 5, 3, 3).to(memory_format=torch.channels_last), torch.randn(40)]
    model = nn.ParameterList([nn.Parameter(t.bfloat16()) for t in start])
    optimizer = AdamWBf16(model, lr=1e-2, weight_decay=0.1, rounding=rounding, seed=3)
    for step in range(2):
        give(model, step)
        optimizer.step()
    return model, optimizer


@interpreted
@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_one_pass_of_our_kernel_stores_what_torchs_and_the_twin_store(rounding: Any) -> None:
    """A few roundings of fp32 apart: the interpreter fuses no multiply-adds. On a GPU the bits are the same."""
    (ours, passed), (theirs, stepped) = trained_by_torch(rounding), trained_by_torch(rounding)
    single_pass = captured(passed)
    assert single_pass.fits_gradients
    for step in range(5, 8):
        give(ours, step)
        give(theirs, step)
        replay(single_pass, GOOD, None)
        stepped.step()
    for one, other in zip(ours, theirs, strict=True):
        if rounding == "split":
            exact = [join(p.detach(), o.state[p][LOW]) for p, o in ((one, passed), (other, stepped))]
            torch.testing.assert_close(exact[0], exact[1], rtol=1e-5, atol=1e-6)
        else:
            same = (one == other).float().mean()
            assert same > 0.99, "the same draws: another one only where a last bit of fp32 differs"
        assert passed.state[one]["step"] == stepped.state[other]["step"]
    before = copy_tensors(ours, passed)
    replay(single_pass, BAD, None)
    assert_same_bits(before, copy_tensors(ours, passed))
