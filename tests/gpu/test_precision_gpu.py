"""The precision room on a real GPU: decisions, flags, autocast's own lists, compiled islands, fp8, graph capture."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocast_samples as samples
from capture import captured
from halfstep.backend_flags import read_effective_leaves, read_flags, set_fp32_mode
from halfstep.hardware.probe import probe
from halfstep.islands import fp32_island, to_fp32
from halfstep.precision.contexts import simulate
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.precision.simulate import round_to, simulate_kernels
from no_waiting import no_host_wait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning"),
    # inductor compiles in child processes, and some of its dependencies warn of their own imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
HALF = [torch.bfloat16, torch.float16]
BF16_SPACING = 2.0**-7


def capability_at_least(major: int, minor: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (major, minor)


needs_bf16 = pytest.mark.skipif(not capability_at_least(8, 0), reason="needs sm_80 for native bf16: NOT tested here")
needs_fp8 = pytest.mark.skipif(
    not capability_at_least(8, 9) or importlib.util.find_spec("torchao") is None,
    reason="needs sm_89 and torchao for fp8: NOT tested here",
)


def plan_for(name: str, model: nn.Module | None = None, **options: Any) -> Plan:
    return decide(name, probe("cuda"), model, **options)


@needs_bf16
def test_auto_is_bf16_on_this_gpu() -> None:
    plan = plan_for("auto")
    assert (plan.granted, plan.simulated, plan.warnings) == ("bf16", False, ())
    assert plan.device.startswith("cuda")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", samples.LOWER)
def test_cuda_autocast_lowers_what_our_list_says(name: str, dtype: torch.dtype) -> None:
    with torch.autocast("cuda", dtype):
        assert samples.first(samples.LOWER[name](samples.maker(torch.float32, "cuda"))).dtype == dtype


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", [*samples.FP32, *samples.FP32_BY_DTYPE])
def test_cuda_autocast_upcasts_what_our_list_says(name: str, dtype: torch.dtype) -> None:
    sample = {**samples.FP32, **samples.FP32_BY_DTYPE}[name]
    with torch.autocast("cuda", dtype):
        assert samples.first(sample(samples.maker(dtype, "cuda"))).dtype == torch.float32


@pytest.mark.parametrize("name", samples.PROMOTE)
def test_cuda_autocast_promotes_what_our_list_says(name: str) -> None:
    half, full = samples.maker(torch.float16, "cuda"), samples.maker(torch.float32, "cuda")
    with torch.autocast("cuda", torch.float16):
        assert samples.PROMOTE[name](half, full).dtype == torch.float32
        assert samples.PROMOTE[name](half, half).dtype == torch.float16


def test_cuda_autocast_refuses_binary_cross_entropy() -> None:
    with torch.autocast("cuda", torch.float16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        samples.binary_cross_entropy(samples.maker(torch.float32, "cuda"))


def products() -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Each gives the fp32 result on the GPU and the fp64 one."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(512, 512, device="cuda", generator=generator) for _ in range(2))
    # Large enough for the matrix units: cuDNN answers small convolutions with other kernels, TF32 allowed or not.
    image = torch.randn(8, 128, 64, 64, device="cuda", generator=generator)
    kernel = torch.randn(128, 128, 3, 3, device="cuda", generator=generator)
    return {
        "matmul": lambda: (x @ w, x.double() @ w.double()),
        "convolution": lambda: (F.conv2d(image, kernel), F.conv2d(image.double(), kernel.double())),
    }


def relative_error(pair: tuple[Tensor, Tensor]) -> float:
    return ((pair[0] - pair[1]).norm() / pair[1].norm()).item()


@needs_bf16
@pytest.mark.parametrize("name", ["matmul", "convolution"])
def test_flags_do_on_the_chip_what_they_say(name: str) -> None:
    product = products()[name]
    before = read_flags()
    with set_fp32_mode("ieee"):
        strict = relative_error(product())
    with set_fp32_mode("tf32"):
        loose = relative_error(product())
    # fp32 rounds at 2^-24, tf32 operands at 2^-11; sums of random signs keep the relative error near that.
    assert strict < 2e-6 < 1e-4 < loose < 2e-3
    assert read_flags() == before


@needs_bf16
def test_tf32_of_the_chip_is_within_one_spacing_of_round_to() -> None:
    x = torch.randn(256, 256, device="cuda")
    with set_fp32_mode("tf32"):
        chip = x @ torch.eye(256, device="cuda")
    ours = round_to(x, "tf32")
    spacing = 2.0**-10 * 2.0 ** ours.abs().log2().floor()
    gap = ((chip - ours).abs() / spacing)[ours != 0]
    print(f"tf32 on {torch.cuda.get_device_name()}: {(gap > 0).float().mean():.1%} of values differ from nearest even")
    assert gap.max() <= 1.0
    assert not torch.equal(chip, x)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "tf32"])
def test_contexts_on_cuda_leave_nothing_behind(name: str) -> None:
    plan = plan_for(name)

    def state() -> tuple[Any, ...]:
        return (
            read_flags(),
            read_effective_leaves(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
        )

    before = state()
    with plan.forward(), plan.forward():
        pass
    with plan.backend():
        pass
    assert state() == before


class Net(nn.Module):
    """A convolution, a norm, an island and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.conv(x)).relu().mean((2, 3))
        with fp32_island():
            gram = to_fp32(hidden) @ to_fp32(hidden).t()
        return self.head(hidden), gram


@needs_bf16
@pytest.mark.parametrize("modules", [{}, {"head": "fp32"}], ids=["plain", "fp32 head"])
def test_plan_forward_and_islands_hold_under_torch_compile(modules: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    plan = plan_for("bf16", model, modules=modules)
    plan.apply(model)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(8, 3, 32, 32, device="cuda")
    with plan.forward():
        logits, gram = compiled(x)
        expected_logits, expected_gram = model(x)
        loss = logits.float().sum() + gram.sum()
    with plan.backend():
        loss.backward()
    assert logits.dtype == (torch.float32 if modules else torch.bfloat16)
    assert gram.dtype == torch.float32
    torch.testing.assert_close(logits.float(), expected_logits.float(), rtol=4 * BF16_SPACING, atol=4 * BF16_SPACING)
    torch.testing.assert_close(gram, expected_gram, rtol=4 * BF16_SPACING, atol=4 * BF16_SPACING)
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in model.parameters())


@needs_bf16
def test_plan_forward_inside_a_compiled_region() -> None:
    model = nn.Linear(32, 32).cuda()
    plan = plan_for("bf16", model)

    def loss(x: Tensor) -> Tensor:
        with plan.forward():
            return model(x).float().square().mean()

    x = torch.randn(8, 32, device="cuda")
    with plan.backend():
        compiled = torch.compile(loss, fullgraph=True)(x)
    torch.testing.assert_close(compiled, loss(x), rtol=4 * BF16_SPACING, atol=1e-3)


@needs_bf16
@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_fp32_and_tf32_plans_compile(name: str) -> None:
    """inductor reads the old switches, and torch refuses that when they and the new flags disagree."""
    model = nn.Linear(256, 256).cuda()
    x = torch.randn(256, 256, device="cuda")
    plan = plan_for(name, model)
    compiled = torch.compile(model, fullgraph=True)
    with plan.forward():
        output = compiled(x)
    exact = F.linear(x.double(), model.weight.double(), model.bias.double())
    error = ((output - exact).norm() / exact.norm()).item()
    assert error < 2e-6 if name == "fp32" else 1e-5 < error < 2e-3


@needs_bf16
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream:UserWarning")  # the eager step after the capture
def test_forward_and_backward_can_be_captured_in_a_cuda_graph() -> None:
    model = Net().cuda()
    plan = plan_for("bf16", model)
    x = torch.randn(4, 3, 16, 16, device="cuda")

    def step() -> Tensor:
        model.zero_grad(set_to_none=False)
        with plan.forward():
            logits, gram = model(x)
            loss = logits.float().sum() + gram.sum()
        with plan.backend():
            loss.backward()
        return loss

    graph, found = captured(step)
    graph.replay()
    torch.testing.assert_close(found.detach(), step().detach(), rtol=4 * BF16_SPACING, atol=1e-2)


@needs_bf16
def test_the_contexts_make_no_host_synchronisation() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16)).cuda()
    plan = plan_for("bf16", model, modules={"2": "fp32"})
    plan.apply(model)
    x = torch.randn(8, 32, device="cuda")
    with no_host_wait():
        with plan.forward():
            loss = model(x).sum()
        with plan.backend():
            loss.backward()


@needs_bf16
def test_simulation_on_cuda_gives_the_numbers_of_real_autocast() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 128, device="cuda")
    w = torch.randn(32, 128, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        native = F.linear(x, w)
    (native_grad,) = torch.autograd.grad(native.sum(), w)
    with simulate("bf16", "cuda"):
        ours = F.linear(x, w)
    with simulate_kernels():
        (our_grad,) = torch.autograd.grad(ours.sum(), w)
    assert ours.dtype == torch.bfloat16
    assert (ours != native).float().mean() <= 0.01
    torch.testing.assert_close(ours, native, rtol=BF16_SPACING, atol=BF16_SPACING)
    torch.testing.assert_close(our_grad, native_grad, rtol=BF16_SPACING, atol=BF16_SPACING)


LEFT_OUT = 2.0**-5
"""What compiled code may be off by that leaves a rounding to bf16 before fp8 out. It shifts value and largest value by
at most 2^-9 of themselves each; an e4m3 spacing is at least 2^-4 of a value, so at most 1 in 16 falls to a neighbour,
at most 2^-3 away: sqrt(1/16) * 2^-3. (1.3 % through inductor on a CPU; e4m3's own rounding is 2.7 %.)"""
SUMMED = 0.01
"""Products are summed in another order, and cuBLAS keeps fewer bits in fp8 sums: well under fp8's own 2^-4."""
COMPILED: dict[str, dict[str, bool] | None] = {
    "eager": None,
    "compiled": {},
    "compiled with every cast": {"emulate_precision_casts": True},
}


@needs_fp8
@pytest.mark.parametrize("tokens", [64, 37])
@pytest.mark.parametrize("how", COMPILED)
def test_native_fp8_gives_the_numbers_of_simulated_fp8(
    tokens: int, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled code keeps the tokens' bf16 in fp32; told to round as eager code does, it gives its numbers."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 128, device="cuda")
    grad = torch.randn(tokens, 64, device="cuda").bfloat16()
    weight, results = torch.randn(64, 128, device="cuda"), []
    options = COMPILED[how]
    for simulated in (False, True):
        model = nn.Sequential(nn.Linear(128, 64)).cuda()
        with torch.no_grad():
            model[0].weight.copy_(weight)
            model[0].bias.zero_()
        plan = plan_for("fp8", model, simulate=simulated, strict=True)
        plan.apply(model)
        assert type(model[0]).__name__ == ("LinearInFp8" if simulated else "LinearInTorchaoFp8")
        run = model if simulated or options is None else torch.compile(model, options=options)
        tokens_in = x.clone().requires_grad_()
        with plan.forward():
            output = run(tokens_in)
        with plan.backend():
            output.backward(grad)
        results.append((output.detach().float(), tokens_in.grad, model[0].weight.grad))
    errors = [relative_error((a, b)) for a, b in zip(*results, strict=True)]
    with capsys.disabled():
        print(f"\nfp8 {how}, {tokens} tokens: output, grad of tokens, grad of weight off by {errors}")
    of_output, of_tokens, of_weight = errors
    assert of_tokens < SUMMED  # of the gradient and the weight, which no cast to bf16 precedes
    assert max(of_output, of_weight) < (LEFT_OUT if how == "compiled" else SUMMED)


@needs_fp8
def test_fp8_makes_no_host_synchronisation() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).cuda()
    plan = plan_for("fp8", model)
    plan.apply(model)
    x = torch.randn(32, 64, device="cuda")
    with plan.forward():
        model(x).sum().backward()  # cuBLAS sets its workspace up on first use
    with no_host_wait():
        with plan.forward():
            loss = model(x).sum()
        with plan.backend():
            loss.backward()
