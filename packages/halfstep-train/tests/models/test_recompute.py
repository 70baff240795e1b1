"""Recomputing in backward: bit-equal numbers, less memory, on a model that is already built."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.hardware.memory import LiveBytes
from halfstep.recompute import COMPUTE_BOUND_TERMS, Recompute, get_recompute, set_recompute
from halfstep_train.kernels.fast_forms import force
from halfstep_train.models.vit import build_vit
from halfstep_train.workloads.classification.resnet import build_resnet
from halfstep_train.workloads.language.gpt2 import GPT2, build_gpt2
from halfstep_train.workloads.radio.config import PyramidConfig, RadioDiffModelConfig
from halfstep_train.workloads.radio.unet import RadioUNet
from halfstep_train.workloads.segmentation.unet import UNet


def build_radio_unet() -> RadioUNet:
    pyramid = PyramidConfig(width=8, depths=(1, 2), num_heads=(1, 2), window=4, stochastic_depth=0.0)
    settings = RadioDiffModelConfig(pyramid=pyramid, width=8, multipliers=(1, 2), windows=((8, 8), (4, 4)), dropout=0.0)
    return RadioUNet(settings, channels=3, latent_size=(16, 16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": lambda: UNet(base_channels=4, depth=2),
    "unet-bilinear": lambda: UNet(base_channels=4, depth=2, bilinear=True),
    "resnet": lambda: build_resnet("resnet50", blocks=(1, 1), width=4, num_classes=3),
    "vit": lambda: build_vit("vit_s_16", depth=2, heads=2, dim=16, patch=4, image_size=16, num_classes=3),
    "gpt2": lambda: build_gpt2("gpt2", depth=2, heads=2, dim=16, context=12, vocab=70, dropout=0.5),
    "radio": build_radio_unet,
}
HOW: list[Recompute] = ["pointwise", "alternate", "blocks"]
WIDTH = 24
"""9 * 24 products a value: enough to make 3x3 convolutions expensive."""


def image() -> Tensor:
    torch.manual_seed(7)
    return torch.randn(2, 3, 16, 16)


def inputs(model: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(model, GPT2):
        return (torch.arange(24).view(2, 12),)
    if isinstance(model, RadioUNet):
        return torch.randn(2, 3, 16, 16), torch.tensor([0.2, 0.9]), torch.randn(2, 3, 64, 64)
    return (image().to(memory_format=torch.channels_last),)


def step(run: Callable[..., Any], model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    torch.manual_seed(3)
    outputs = run(*inputs(model))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(output.square().mean() for output in outputs).backward()
    return model.state_dict(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_statistics_are_those_of_the_plain_model_to_the_bit(name: str, how: Recompute) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]()
    model = copy.deepcopy(plain)
    assert set_recompute(model, how)
    (state, gradients), (other_state, other_gradients) = step(plain, plain), step(model, model)
    assert all(torch.equal(state[key], other_state[key]) for key in state)
    for key, gradient in gradients.items():
        other = other_gradients[key]
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other), key


def bf16_gradients(net: nn.Module, num_forwards: int) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = sum((net(image() + k).float().square().mean() for k in range(num_forwards)), torch.zeros(()))
    loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("how", HOW)
def test_bf16_autocast_gives_the_same_bits_too(how: Recompute) -> None:
    torch.manual_seed(0)
    plain = MODELS["unet"]()
    model = copy.deepcopy(plain)
    set_recompute(model, how)
    pairs = zip(bf16_gradients(plain, 1), bf16_gradients(model, 1), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("how", HOW)
def test_two_forwards_under_one_autocast_are_recomputed_although_its_cache_is_gone(how: Recompute) -> None:
    torch.manual_seed(0)
    plain = MODELS["unet"]()
    model = copy.deepcopy(plain)
    set_recompute(model, how)
    for a, b in zip(bf16_gradients(plain, 2), bf16_gradients(model, 2), strict=True):
        # Without the cache both forwards' gradients are summed in fp32 instead of bf16.
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-8)


SLOW = [(name, how) for name in ("unet", "resnet", "vit") for how in ("none", "blocks")]
SLOW += [("unet", "pointwise"), ("vit", "alternate")]


@pytest.mark.parametrize(
    ("name", "how"), [("vit", "pointwise"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_the_compiled_model_recomputes_and_gives_the_same_gradients(name: str, how: Recompute) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = MODELS[name]().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = copy.deepcopy(plain)
    set_recompute(model, how)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    state, gradients = step(plain, plain)
    with force(False):
        other_state, other_gradients = step(compiled, model)
    for key, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[key], gradient, rtol=1e-4, atol=1e-6)
    for key in state:
        torch.testing.assert_close(other_state[key], state[key])


def live_peak(how: Recompute) -> int:
    torch.manual_seed(0)
    model = UNet(base_channels=24, depth=2)
    set_recompute(model, how)
    gc.collect()
    with LiveBytes() as live:
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    peak: int = live.peak
    return peak


def test_each_step_down_lowers_the_bytes_alive() -> None:
    none, pointwise, blocks = live_peak("none"), live_peak("pointwise"), live_peak("blocks")
    assert pointwise < 0.85 * none
    assert blocks < none


def saved_bytes(how: Recompute) -> int:
    """What a compiled forward keeps for its backward, as the partitioner cut it."""
    import torch._inductor.lowering  # its tables are used by the decompositions  # noqa: F401
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    kept: list[int] = []

    def forward_compiler(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        computed = {node for node in outputs if isinstance(node, torch.fx.Node) and node.op != "placeholder"}
        kept.append(sum(node.meta["val"].nbytes for node in computed if isinstance(node.meta["val"], Tensor)))
        return make_boxed_func(graph)

    with torch.device("meta"):  # shapes without content: nothing is computed
        model, x = UNet(base_channels=WIDTH, depth=2), torch.empty(8, 3, 128, 128)
    set_recompute(model, how)
    backend = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=lambda graph, _inputs: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compiler.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    return kept[0]


@pytest.mark.slow
def test_a_compiled_model_keeps_the_outputs_of_its_expensive_convolutions_and_nothing_else() -> None:
    # (channels, side) of each 3x3 convolution but the first, which reads three channels; then the logits, which are
    # small compared with their inputs. Upsampling sums 2 * WIDTH or 4 * WIDTH products per value: cheap, so not kept.
    w = WIDTH
    assert 4 * w < COMPUTE_BOUND_TERMS <= 9 * w
    kept = [(w, 128), (2 * w, 64), (2 * w, 64), (4 * w, 32), (4 * w, 32), (2 * w, 64), (2 * w, 64), (w, 128), (w, 128)]
    convolutions = sum(8 * 4 * channels * side**2 for channels, side in [*kept, (2, 128)])
    statistics = 64 * 1024
    pointwise = saved_bytes("pointwise")
    assert convolutions <= pointwise < convolutions + statistics
    assert pointwise < 0.5 * saved_bytes("none")
    assert saved_bytes("blocks") < saved_bytes("alternate") < pointwise


def test_a_model_that_cannot_recompute_says_so() -> None:
    assert not set_recompute(nn.Linear(2, 2), "blocks")
    assert get_recompute(nn.Linear(2, 2)) == "none"
    assert get_recompute(UNet(base_channels=2, depth=1, checkpointing=True)) == "blocks"
