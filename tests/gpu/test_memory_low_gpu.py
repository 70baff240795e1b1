"""train.memory=low on a real GPU: real peaks and times of its levers, safe skips, capture in a CUDA graph."""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture import captured
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.recompute import Recompute, set_recompute
from halfstep.step.optim import adamw8bit_triton
from halfstep.step.optim.adamw8bit import AdamW8bit, make_state, update
from halfstep.step.optim.adamw_bf16 import Setting
from halfstep_train.tune.trials import NORMAL, Cost, MemorySetting, choose_memory, list_levers, make_optimizer
from halfstep_train.workloads.segmentation.unet import UNet
from memory_settings import memory_setting
from no_waiting import no_host_wait
from tiny_training import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream:UserWarning"),
]
POINTWISE = MemorySetting(recompute="pointwise")
LIMIT = 1.09


def unet(width: int, depth: int) -> UNet:
    torch.manual_seed(0)
    model = UNet(base_channels=width, depth=depth).cuda()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def images(batch: int, side: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(batch, 3, side, side, device="cuda").contiguous(memory_format=torch.channels_last)
    return x, torch.randint(0, 2, (batch, side, side), device="cuda")


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    plan = decide("bf16", probe("cuda"), model)
    region = torch.compile(lambda x, y: F.cross_entropy(model(x).float(), y), dynamic=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with plan.forward():
            loss = region(x, y)
        with plan.backend():
            loss.backward()
        optimizer.step()

    return step


def measured(setting: MemorySetting, *, width: int, depth: int, batch: int, side: int) -> Cost:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    of_others = torch.cuda.memory_allocated()  # what tests before this one left in the process
    model = unet(width, depth)
    optimizer = make_optimizer(setting, "adamw", [{"params": list(model.parameters())}], lr=1e-3)
    step = a_step(model, optimizer, *images(batch, side))
    with memory_setting(model, setting):  # to the end: outside of it the model is another, and compiled again
        for _ in range(3):
            step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - of_others
        return Cost(statistics.median(milliseconds(step) for _ in range(5)), peak)


def milliseconds(step: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 5


def test_the_choice_has_less_memory_within_the_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    offered = list_levers(("pointwise", "blocks"), "adamw", is_compiled=True).positions
    tried = [(POINTWISE,), (MemorySetting(optimizer_bits=8),), (MemorySetting(activation_budget=0.5),)]
    assert all(setting in sum(map(list, offered), []) for (setting,) in tried)

    def measure(setting: MemorySetting) -> Cost:
        return measured(setting, width=32, depth=2, batch=8, side=256)

    choice = choose_memory(measure, tried, time_limit=LIMIT)
    with capsys.disabled():
        print("\n" + "\n".join(choice.format_lines()))
    costs = choice.trials
    normal, pointwise, taken = costs[NORMAL], costs[POINTWISE], costs[choice.setting]
    assert isinstance(normal, Cost)
    assert isinstance(pointwise, Cost)
    assert isinstance(taken, Cost)
    assert pointwise.peak_bytes < 0.75 * normal.peak_bytes
    assert taken.ms <= LIMIT * normal.ms


@pytest.mark.slow
def test_unet_at_512_takes_at_most_3900_megabytes_when_what_is_bound_by_memory_is_recomputed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Time is printed, not asserted: `halfstep bench` measures that, in one run with the rest."""
    for setting in (NORMAL, POINTWISE, MemorySetting(activation_budget=0.5)):
        cost = measured(setting, width=64, depth=4, batch=8, side=512)
        with capsys.disabled():
            print(f"\n{setting}: {cost.peak_bytes / 1e9:.2f} GB, {cost.ms:.1f} ms")
        if setting == POINTWISE:
            assert cost.peak_bytes <= 3.9e9


def errors(found: list[Tensor], exact: tuple[Tensor, ...]) -> list[float]:
    """Of each gradient, beside its size."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("how", ["pointwise", "alternate", "blocks"])
def test_compiled_gradients_are_as_near_to_fp32_as_those_of_the_plain_model(how: Recompute) -> None:
    """Not to each other: the two are compiled to other kernels, each rounds its maps in its own way, and a value that
    rounding turns over at a ReLU has a wholly different gradient. The measure is how far the plain model is off."""
    torch.compiler.reset()
    plain = unet(32, 2)
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain)
    set_recompute(model, how)
    x, y = images(2, 128)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        truth = torch.autograd.grad(F.cross_entropy(exact(x), y), list(exact.parameters()))
    found = []
    for net in (plain, model):
        a_step(net, torch.optim.SGD(net.parameters(), lr=0.0), x, y)()
        found.append(errors([p.grad for p in net.parameters() if p.grad is not None], truth))
    usual = max(found[0])
    assert usual < 0.3  # a gradient that is wrong or missing is off by about 1
    assert max(found[1]) < 2 * usual
    assert statistics.median(found[1]) < 1.5 * statistics.median(found[0])
    for a, b in zip(plain.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def layer_and_gradient() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(512, 512).cuda()
    return layer, torch.randn(512, 512, device="cuda")


def give(layer: nn.Linear, gradient: Tensor) -> None:
    layer.weight.grad, layer.bias.grad = gradient, gradient[0].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_the_kernel_has_the_bits_of_its_twin(dtype: torch.dtype, scale: float | None) -> None:
    weights = torch.randn(4099 * 256, device="cuda").to(dtype)  # not a whole number of programs
    setting = Setting(
        lr=torch.full((), 1e-2, device="cuda"), found_inf=torch.zeros((), device="cuda"), betas=(0.9, 0.999), eps=1e-8,
        weight_decay=0.1, grad_scale=None if scale is None else torch.full((), scale, device="cuda"),
    )  # fmt: skip
    ours, theirs = ({"weights": weights.clone(), **make_state(weights)} for _ in range(2))
    size = torch.logspace(-9, 3, 4099, device="cuda").repeat_interleave(256)
    for step in range(1, 6):
        gradient = (torch.randn_like(size) * size).to(dtype)
        corrections = [1 - beta ** torch.full((), float(step), device="cuda") for beta in setting.betas]
        for found, run in ((ours, adamw8bit_triton.update), (theirs, update)):
            found["gradient"] = gradient.clone()
            run(found["weights"], found["gradient"], found, corrections, setting)
        assert_same_bits(ours, theirs)


def test_one_byte_moments_on_the_gpu_follow_those_of_the_cpu() -> None:
    layer, gradient = layer_and_gradient()
    other = copy.deepcopy(layer).cpu()
    on_gpu, on_cpu = AdamW8bit(layer.parameters(), lr=1e-2), AdamW8bit(other.parameters(), lr=1e-2)
    for k in range(5):
        give(layer, gradient.sin() * (k + 1))
        give(other, gradient.cpu().sin() * (k + 1))
        on_gpu.step()
        on_cpu.step()
    # A value on the border of two codes may fall to either side.
    assert (layer.weight.detach().cpu() - other.weight.detach()).abs().max() < 2e-3


def test_one_byte_moments_can_be_captured_skipped_and_count_their_steps() -> None:
    layer, gradient = layer_and_gradient()
    rate, flag = torch.tensor(1e-2, device="cuda"), torch.zeros((), device="cuda")
    optimizer = AdamW8bit(layer.parameters(), lr=rate)
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    give(layer, gradient)
    graph, _ = captured(optimizer.step)  # after three steps
    graph.replay()
    assert [optimizer.state[p]["step"].item() for p in layer.parameters()] == [4, 4]
    before = all_of(layer, optimizer)
    flag.fill_(1)
    gradient.fill_(float("nan"))
    graph.replay()
    assert_same_bits(before, all_of(layer, optimizer))


def all_of(layer: nn.Linear, optimizer: AdamW8bit) -> dict[str, Tensor]:
    state = {f"{k}.{name}": v for k, p in enumerate(layer.parameters()) for name, v in optimizer.state[p].items()}
    return {name: value.clone() for name, value in {**layer.state_dict(), **state}.items()}


def test_one_byte_moments_make_no_host_synchronisation() -> None:
    layer, gradient = layer_and_gradient()
    optimizer = AdamW8bit(layer.parameters(), lr=torch.tensor(1e-2, device="cuda"))
    optimizer.found_inf = torch.zeros((), device="cuda")  # type: ignore[attr-defined]
    give(layer, gradient)
    optimizer.step()
    with no_host_wait():
        for _ in range(3):
            optimizer.step()
