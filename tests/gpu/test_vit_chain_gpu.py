"""ViT's chain on the GPU: as near to fp64 as the layers are, chosen by itself in compiled code, and captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from capture import captured
from halfstep.recompute import Recompute, set_recompute
from halfstep_train.kernels.fast_forms import force
from halfstep_train.models.vit import ViT, build_vit

pytestmark = pytest.mark.gpu


def model_and_images() -> tuple[ViT, Tensor]:
    """5 · 17 tokens of 192 channels: neither fills a tile."""
    torch.manual_seed(0)
    model = build_vit("vit_s_16", depth=3, heads=3, dim=192, patch=16, image_size=64, num_classes=10).cuda()
    for parameter in model.parameters():  # a gain or a head of zero would hide what stands before it
        nn.init.normal_(parameter, std=0.2) if not parameter.any() else None
    return model, torch.rand(5, 3, 64, 64, device="cuda")


def outcome(model: nn.Module, images: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Logits and gradients in fp64, under autocast to a half dtype or in fp64 itself."""
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float64):
        logits = model(images).double()
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.double().clone() for p in model.parameters() if p.grad is not None)]


def mean_error(found: list[Tensor], exact: list[Tensor]) -> float:
    return sum(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)) / len(exact)


@pytest.mark.parametrize("how", ["none", "pointwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_chain_is_as_near_to_fp64_as_the_layers(dtype: torch.dtype, how: Recompute) -> None:
    model, images = model_and_images()
    with force(False):
        exact = outcome(copy.deepcopy(model).double(), images.double(), torch.float64)
        plain = outcome(model, images, dtype)
    set_recompute(model, how)
    with force(True, "chain", "class_token"):
        chained = outcome(model, images, dtype)
    assert mean_error(chained, exact) < 1.3 * mean_error(plain, exact)


def test_compiled_code_chooses_it_and_a_captured_step_gives_the_same_every_time() -> None:
    model, images = model_and_images()
    with force(False):
        exact = outcome(copy.deepcopy(model).double(), images.double(), torch.float64)
    compiled = torch.compile(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        found = outcome(compiled, images, torch.bfloat16)
        torch.cuda.synchronize()
    ours = {"_add_norm", "_add_norm_backward", "_gelu", "_gelu_backward", "_attention_gradients"}
    assert ours <= {e.name for e in seen.events()}
    assert mean_error(found, exact) < 0.05  # bf16 rounds by 2⁻⁹, three blocks deep
    graph, graphed = captured(lambda: outcome(compiled, images, torch.bfloat16))
    for _ in range(2):
        graph.replay()
        for ours, theirs in zip(graphed, found, strict=True):
            # The last block's attention, torch's, adds in any order, and what that changes is rounded to bf16 later.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-8 * float(theirs.abs().max()))
