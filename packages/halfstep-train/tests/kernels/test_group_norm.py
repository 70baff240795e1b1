"""GroupNorm and SiLU by our own kernels against torch's, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep_train.kernels.fast_forms import force
from halfstep_train.kernels.group_norm import add_branch, apply_group_norm_silu, can_fuse_group_norm

pytest.importorskip("triton", reason="Triton is not installed: NOT tested")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(channels: int, side: int, groups: int, *, scaled: bool) -> tuple[nn.GroupNorm, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    norm = nn.GroupNorm(groups, channels).to(DEVICE)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    # A mean far from 0 with a small deviation: sums of squares would cancel.
    x = (torch.randn(2, channels, side, side, device=DEVICE) + 30).contiguous(memory_format=torch.channels_last)
    between = [torch.randn(2, channels, device=DEVICE, requires_grad=True) for _ in range(2 * scaled)]
    return norm, x.requires_grad_(), between


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize(
    ("channels", "side", "groups", "scaled", "is_added"),
    [(80, 9, 8, True, True), (6, 1, 6, False, False)],
)
def test_values_and_all_gradients_are_torchs(
    channels: int, side: int, groups: int, scaled: bool, is_added: bool
) -> None:
    norm, x, between = made(channels, side, groups, scaled=scaled)
    added = torch.randn(2, channels, device=DEVICE, requires_grad=True) if is_added else None
    scale, shift = between or (None, None)
    # In fp64: torch's own sums cancel in fp32.
    map_ = x.double() if added is None else x.double() + added.double()[:, :, None, None]
    plain = F.group_norm(map_, groups, norm.weight.double(), norm.bias.double(), norm.eps)
    if scale is not None and shift is not None:
        plain = plain * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
    expected, found = F.silu(plain).float(), apply_group_norm_silu(norm, x, added, scale, shift)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    wanted = [x, norm.weight, norm.bias, *between, *([] if added is None else [added])]
    ahead = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, wanted, ahead), torch.autograd.grad(expected, wanted, ahead), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_it_runs_where_it_is_asked_for_and_the_map_and_its_layer_are_plain() -> None:
    norm, x, _ = made(8, 4, 4, scaled=False)
    assert not can_fuse_group_norm(x, norm)
    with force(True, "group_norm"):
        assert can_fuse_group_norm(x, norm) or DEVICE == "cuda", "on a GPU under autocast alone"
        assert not can_fuse_group_norm(x.contiguous(), norm)
        assert not can_fuse_group_norm(x, nn.GroupNorm(4, 8, affine=False).to(DEVICE))
        norm.register_forward_hook(lambda *_: None)
        assert not can_fuse_group_norm(x, norm)


@pytest.mark.parametrize(("channels", "side"), [(80, 9), (6, 1)])
def test_a_branch_is_added_with_its_bias_and_all_gradients(channels: int, side: int) -> None:
    torch.manual_seed(0)
    shape = (3, channels, side, side)
    x, branch = (torch.randn(shape, device=DEVICE).contiguous(memory_format=torch.channels_last) for _ in range(2))
    bias, wanted = torch.randn(channels, device=DEVICE), torch.randn(shape, device=DEVICE)
    inputs = [one.requires_grad_() for one in (x, branch, bias)]
    found, expected = add_branch(*inputs), x + branch + bias[:, None, None]
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, wanted), torch.autograd.grad(expected, inputs, wanted), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
