"""Links of a chain on the GPU, in bf16, against torch's layers in fp64; and captured as a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from capture import captured
from halfstep_train.kernels.chain import NormReluConv, SideStream

pytestmark = pytest.mark.gpu


def parts(channels: int, out_channels: int) -> tuple[nn.BatchNorm2d, nn.Conv2d]:
    torch.manual_seed(0)
    norm, conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, out_channels, 3, padding=1, bias=False)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    return norm.cuda(), conv.cuda()


def link(y: Tensor, norm: nn.BatchNorm2d, conv: nn.Conv2d, *, keep: bool = True) -> Tensor:
    result = NormReluConv.apply(y, norm.weight, norm.bias, conv.weight, norm, 1, 1, keep)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


def raw_map(*shape: int) -> Tensor:
    torch.manual_seed(1)
    y = (torch.randn(*shape, device="cuda") * 2 + 1).bfloat16()
    return y.contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [(4, 64, 48, 40), (2, 128, 31, 17), (3, 70, 5, 7)])
def test_a_link_is_batch_norm_relu_and_convolution(shape: tuple[int, ...], keep: bool) -> None:
    y, (norm, conv) = raw_map(*shape), parts(shape[1], 64)
    exact, (exact_norm, exact_conv) = y.detach().double().requires_grad_(), parts(shape[1], 64)
    theirs = exact_conv.double()(exact_norm.double()(exact).relu())
    ours = link(y, norm, conv, keep=keep)
    gradient = torch.randn_like(ours)
    found = torch.autograd.grad(ours, [y, norm.weight, norm.bias, conv.weight], gradient)
    truth = torch.autograd.grad(
        theirs, [exact, exact_norm.weight, exact_norm.bias, exact_conv.weight], gradient.double()
    )
    for value, expected in zip((ours, *found), (theirs, *truth), strict=True):
        # Maps and weights are rounded to 2⁻⁹ on the way, in four places at most.
        assert (value.double() - expected).norm() <= 4 * 2**-8 * expected.norm()
    for value, expected in zip(norm.buffers(), exact_norm.buffers(), strict=True):
        torch.testing.assert_close(value.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_a_captured_link_computes_the_same_and_counts_its_batches() -> None:
    y, (norm, conv) = raw_map(4, 64, 32, 32), parts(64, 64)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(link(y, norm, conv).square().sum(), [y, norm.weight, norm.bias, conv.weight])

    with torch.backends.cudnn.flags(deterministic=True):
        eager = step()
        graph, graphed = captured(step)
    assert norm.num_batches_tracked is not None
    before = norm.num_batches_tracked.item()
    graph.replay()
    assert all(map(torch.equal, graphed, eager))
    assert norm.num_batches_tracked.item() == before + 1


def test_the_second_stream_reads_nothing_that_was_given_away_meanwhile() -> None:
    """A row of links with large maps, whose memory is used again at once: a race would change some bits."""
    y, links = raw_map(8, 64, 256, 256), [parts(64, 64) for _ in range(4)]

    def step() -> tuple[Tensor, ...]:
        z = y
        for norm, conv in links:
            z = link(z, norm, conv, keep=False)
        return torch.autograd.grad(z.square().sum(), [y, *(conv.weight for _, conv in links)])

    with torch.backends.cudnn.flags(deterministic=True):
        expected = step()
        for _ in range(10):
            assert all(map(torch.equal, step(), expected))
        graph, graphed = captured(step)
    for _ in range(10):
        graph.replay()
        assert all(map(torch.equal, graphed, expected))


def test_a_capture_may_begin_with_a_block_that_puts_nothing_aside() -> None:
    y, (norm, conv) = raw_map(4, 64, 32, 32), parts(64, 64)

    def step() -> tuple[Tensor, ...]:
        with SideStream(y.device):
            doubled = y.detach() * 2
        return doubled, *torch.autograd.grad(link(y, norm, conv).square().sum(), [y, conv.weight])

    with torch.backends.cudnn.flags(deterministic=True):
        eager = step()
        graph, graphed = captured(step)
    graph.replay()
    assert all(map(torch.equal, graphed, eager))
