"""A block on whose side stream weights' gradients run: how long it keeps what they read."""

from __future__ import annotations

import weakref

import torch

from halfstep_train.kernels.chain import SideStream, convolve_backward


def test_what_the_second_stream_reads_is_kept_until_the_block_ends_and_no_longer() -> None:
    with SideStream(torch.device("cpu")) as side:
        tensor = torch.zeros(3)
        seen = weakref.ref(tensor)
        side.keep(tensor)
        del tensor
        assert seen() is not None
    assert seen() is None


def test_a_gradient_that_was_copied_is_kept_until_the_block_ends() -> None:
    z = torch.randn(2, 6, 7, 6).to(memory_format=torch.channels_last)
    w, dy = torch.randn(5, 6, 1, 1), torch.randn(2, 5, 7, 6)
    with SideStream(z.device) as side:
        convolve_backward(side, dy, z, w, 1, 0)
        (kept,) = side._kept
        assert kept.data_ptr() != dy.data_ptr()
        assert torch.equal(kept, dy)
