"""plan.forward() and plan.backend(): what holds inside, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fake_driver import ALL_NATIVE, make_hardware
from halfstep.backend_flags import read_effective_leaves, read_flags
from halfstep.islands import fp32_island
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan

CPU = make_hardware("cpu", **(ALL_NATIVE | {"fp16": "emulated"}))


def state() -> tuple[Any, ...]:
    return (
        read_flags(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._len_torch_dispatch_stack(),
        torch.is_autocast_cache_enabled(),
    )


PLANS = [decide(name, CPU) for name in ("fp32", "tf32", "bf16", "bf16-true", "fp8")]
PLANS += [decide(name, CPU, simulate=True) for name in ("tf32", "bf16", "fp16", "fp8")]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.granted} {plan.simulated}")
@pytest.mark.parametrize("context", [Plan.forward, Plan.backend])
def test_one_context_may_be_kept_and_entered_again_also_inside_itself(plan: Plan, context: Any) -> None:
    before, kept = state(), context(plan)
    with kept:
        inside = state()[:-2]
        with kept:
            assert state()[:-2] == inside
        assert state()[:-2] == inside
    assert state() == before
    with pytest.raises(ZeroDivisionError), kept:
        _ = 1 / 0
    with kept:
        assert state()[:-2] == inside
    assert state() == before


def test_a_kept_context_may_be_entered_by_two_threads_and_decorate() -> None:
    kept = decide("bf16", CPU).forward()
    is_inside, may_leave = threading.Event(), threading.Event()

    @kept
    def dtype(*, waits: bool) -> torch.dtype:
        if waits:
            is_inside.set()
            may_leave.wait(10)
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(dtype, waits=True)
        is_inside.wait(10)
        # Flags of fp32 matmuls belong to the process: the thread that entered first leaves last.
        second = pool.submit(dtype, waits=False).result()
        may_leave.set()
    assert [first.result(), second] == [torch.bfloat16] * 2
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("bf16-true", torch.bfloat16)],
)
def test_matmuls_of_forward_alone_run_in_the_granted_format(name: str, dtype: torch.dtype) -> None:
    x, plan = torch.randn(2, 2), decide(name, CPU)
    with plan.forward():
        assert (x @ x).dtype == dtype
    with plan.backend():
        assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_fp32_plans_switch_an_outer_autocast_off(name: str) -> None:
    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16), decide(name, CPU).forward():
        assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize(("name", "value"), [("fp32", "ieee"), ("bf16", "ieee"), ("tf32", "tf32")])
def test_backend_flags_follow_the_plan(name: str, value: str) -> None:
    plan = decide(name, CPU)
    for context in (plan.forward(), plan.backend()):
        with context:
            assert set(read_effective_leaves().values()) == {value}


def test_activation_checkpointing_recomputes_the_same_simulated_numbers() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    plan = decide("bf16", CPU, layer, simulate=True)

    def gradient(*, is_checkpointed: bool) -> torch.Tensor:
        def block(x: torch.Tensor) -> torch.Tensor:
            return layer(x).softmax(-1).log()

        layer.zero_grad()
        with plan.forward():
            output = checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x)
            loss = output.square().sum()
        with plan.backend():
            loss.backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    assert torch.equal(gradient(is_checkpointed=True), gradient(is_checkpointed=False))


def output_after_doubling_the_weight(plan: Plan, layer: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return two steps' outputs, with the weight doubled in place between them, as an optimizer would."""
    outputs = []
    for _ in range(2):
        with plan.forward():
            outputs.append(layer(x).float())
        with torch.no_grad():
            layer.weight *= 2
    return tuple(outputs)


@pytest.mark.parametrize("is_simulated", [False, True])
def test_no_step_uses_stale_weights_after_autocast_was_left_open(is_simulated: bool) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    torch.autocast_increment_nesting()  # what an interrupt inside torch.autocast.__enter__ leaves behind
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)  # torch now keeps this copy of the weight
        with torch.no_grad():
            layer.weight *= 2
        assert torch.equal(layer(x) * 2, (x.bfloat16() @ layer.weight.bfloat16().T)), "torch uses the stale copy"
    first, second = output_after_doubling_the_weight(decide("bf16", CPU, simulate=is_simulated), layer, x)
    assert torch.equal(first, (x.bfloat16() @ (layer.weight / 4).bfloat16().T).float())
    assert torch.equal(second, 2 * first)


@pytest.mark.parametrize("function", ["set_autocast_cache_enabled", "autocast_decrement_nesting"])
@pytest.mark.parametrize("is_outer", [True, False])
def test_an_interrupt_inside_autocast_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, function: str, is_outer: bool
) -> None:
    """An interrupt may come right after any call in `torch.autocast.__enter__` and `__exit__`."""
    plan, before, real = decide("bf16", CPU), state(), getattr(torch, function)
    monkeypatch.setattr(torch, function, lambda *args: (real(*args), interrupt()))

    def interrupt() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    context = contextlib.nullcontext() if is_outer else fp32_island()
    with pytest.raises(KeyboardInterrupt), plan.forward(), context:
        pass
    assert state() == before
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


@pytest.mark.parametrize("is_simulated", [False, True])
def test_a_compiled_model_gives_the_numbers_of_the_context(is_simulated: bool) -> None:
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    compiled = torch.compile(model, fullgraph=not is_simulated, backend="aot_eager")
    with decide("bf16", CPU, model, simulate=is_simulated).forward():
        output = compiled(x)
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, model(x))


def test_the_context_may_stand_inside_a_compiled_region() -> None:
    model = nn.Linear(4, 4)
    plan = decide("bf16", CPU, model)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with plan.forward():
            return model(x).float().sum()

    x = torch.randn(2, 4)
    with plan.backend():
        torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), loss(x))


@pytest.mark.parametrize("plan", [decide("tf32", CPU), decide("bf16", CPU, simulate=True)], ids=["flags", "simulated"])
def test_a_compiled_region_refuses_what_it_cannot_hold(plan: Plan) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        with plan.forward():
            return x @ x

    with pytest.raises(Exception, match="torch.compile"):
        torch.compile(double, fullgraph=True, backend="aot_eager")(torch.randn(2, 2))


@pytest.mark.parametrize("is_simulated", [False, True])
def test_a_call_without_gradients_takes_none_from_the_next_one(is_simulated: bool) -> None:
    """Autocast keeps the cast weights of the first call, which have no gradients (pytorch/pytorch#112583)."""
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    with decide("bf16", CPU, simulate=is_simulated).forward():
        with torch.no_grad():
            target = model(x)
        loss = (model(x) - target - 1).float().square().mean()
    loss.backward()
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    # The difference is -1 for each of 8 x 4 outputs, whose gradient is 2 * -1 / 32.
    torch.testing.assert_close(model.bias.grad, torch.full((4,), -0.5), rtol=0.01, atol=0)
