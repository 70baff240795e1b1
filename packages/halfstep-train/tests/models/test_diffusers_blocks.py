"""diffusers' residual blocks by our own kernels: which blocks run so, and that they compute the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from halfstep_train.kernels.fast_forms import force
from halfstep_train.workloads.diffusion import diffusers_blocks
from halfstep_train.workloads.diffusion.diffusers_blocks import find_blocks

pytest.importorskip("triton", reason="Triton is not installed: NOT tested")


def unet(dropout: float = 0.0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from diffusers import UNet2DModel

    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    net = UNet2DModel(
        8,
        3,
        3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        add_attention=False,
        dropout=dropout,
        **kinds,
    )
    return net, (torch.randn(1, 3, 4, 4), torch.tensor([3]))


def vae() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from diffusers import AutoencoderKL

    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, **kinds), (torch.randn(1, 3, 4, 4),)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the CPU only in the interpreter: NOT tested")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("make", [partial(unet, 0.3), vae], ids=["unet with dropout", "vae"])
def test_every_residual_block_runs_by_our_kernels_and_computes_the_same(
    make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models.resnet import ResnetBlock2D

    torch.manual_seed(0)
    net, inputs = make()  # type: ignore[operator]
    net = net.to(memory_format=torch.channels_last)
    net.train()
    torch.manual_seed(1)
    expected = net(*inputs).sample

    ours, residual = list[bool](), diffusers_blocks.run_residual_block
    monkeypatch.setattr(diffusers_blocks, "run_residual_block", lambda *given: ours.append(True) or residual(*given))
    for kind, forward in find_blocks(net).items():
        monkeypatch.setattr(kind, "forward", forward)
    with force(True, "group_norm"):
        torch.manual_seed(1)
        found = net(*inputs).sample

    assert len(ours) == sum(isinstance(module, ResnetBlock2D) for module in net.modules())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    wanted = [weight for weight in net.parameters() if weight.requires_grad]
    ahead = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(found, wanted, ahead), torch.autograd.grad(expected, wanted, ahead), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
