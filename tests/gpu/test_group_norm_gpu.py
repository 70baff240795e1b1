"""GroupNorm and SiLU by our own kernels, compiled, in the formats of a captured step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep_train.kernels.fast_forms import force
from halfstep_train.kernels.group_norm import apply_group_norm_silu, can_fuse_group_norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("channels", "side", "groups"), [(320, 64, 32), (2560, 8, 32), (128, 37, 8), (24, 5, 8)])
def test_values_and_gradients_are_within_the_formats_rounding(
    channels: int, side: int, groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(groups, channels).cuda()
    nn.init.normal_(norm.weight)
    x = torch.randn(4, channels, side, side, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    scale, shift = (torch.randn(4, channels, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    wanted = [x, norm.weight, norm.bias, scale, shift]
    with torch.autocast("cuda", dtype=dtype), force(True, "group_norm"):
        assert can_fuse_group_norm(x, norm)
        found = apply_group_norm_silu(norm, x, None, scale, shift)
    plain = F.group_norm(x.double(), groups, norm.weight.double(), norm.bias.double(), norm.eps)
    expected = F.silu(plain * (1 + scale.double()[:, :, None, None]) + shift.double()[:, :, None, None])
    ahead = torch.randn_like(found)
    rounding = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-9
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=rounding)
    ours = torch.autograd.grad(found, wanted, ahead)
    exact = torch.autograd.grad(expected, wanted, ahead.double())
    for one, other in zip(ours, exact, strict=True):
        error = (one.double() - other.double()).abs().max() / other.double().abs().max()
        assert float(error) < 2 * rounding
