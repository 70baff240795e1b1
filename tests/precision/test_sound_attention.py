"""Attention at lengths where cuDNN's backward fails: other kernels run there, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep.precision import attention_kernels
from halfstep.precision.attention_kernels import by_torch, sound_attention

Run = Callable[..., Tensor]


@pytest.fixture
def cudnn_was_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether torch could have taken cuDNN's kernel, call by call, on a device that has the fault."""
    seen: list[bool] = []

    def spying(*arguments: Any, **options: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return by_torch(*arguments, **options)

    monkeypatch.setattr(attention_kernels, "is_at_fault", lambda device: True)
    monkeypatch.setattr(attention_kernels, "by_torch", spying)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spying)
    return seen


def tokens(number: int) -> Tensor:
    return torch.randn(2, 2, number, 8)


@pytest.mark.parametrize(
    ("keys", "options", "is_left_to_cudnn"),
    [
        (64, {}, False),
        (192, {}, False),
        (128, {}, True),
        (197, {}, True),
        (64, {"is_causal": True}, True),
        (64, {"attn_mask": torch.ones(16, 64, dtype=torch.bool)}, False),
    ],
)
def test_cudnn_is_left_out_at_lengths_where_it_fails(
    cudnn_was_on: list[bool], keys: int, options: dict[str, Any], is_left_to_cudnn: bool
) -> None:
    q, k = tokens(16), tokens(keys)
    with sound_attention("cuda"):
        found = F.scaled_dot_product_attention(q, k, k, **options)
    assert cudnn_was_on == [is_left_to_cudnn]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.testing.assert_close(found, by_torch(q, k, k, **options))


def test_a_user_who_allows_cudnn_alone_gets_it(cudnn_was_on: list[bool]) -> None:
    q, k = tokens(16), tokens(64)
    with sound_attention("cuda"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attend = partial(F.scaled_dot_product_attention, q, k, k)
        with pytest.raises(RuntimeError, match="viable"):  # on a CPU
            attend()
    assert cudnn_was_on == [True]


def test_layers_of_torch_use_it(cudnn_was_on: list[bool]) -> None:
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 64, 8)
    with sound_attention("cuda"):
        layer(x, x, x, need_weights=False)
    assert cudnn_was_on == [False]


def test_torchs_own_is_back_afterwards_and_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with sound_attention("cpu"):
        assert F.scaled_dot_product_attention is by_torch
    monkeypatch.setattr(attention_kernels, "is_at_fault", lambda device: True)
    with sound_attention("cuda"):
        assert F.scaled_dot_product_attention is attention_kernels.attention
        with pytest.raises(ZeroDivisionError), sound_attention("cuda"):
            _ = 1 / 0
    assert F.scaled_dot_product_attention is by_torch
    theirs = lambda *arguments: arguments[0]  # noqa: E731
    with sound_attention("cuda"):
        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    assert F.scaled_dot_product_attention is theirs
    with sound_attention("cuda"):
        assert F.scaled_dot_product_attention is theirs


@pytest.mark.parametrize("keys", [64, 65])
def test_compiled_code_takes_it_without_a_break(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr(attention_kernels, "is_at_fault", lambda device: True)
    q, k = tokens(16).requires_grad_(), tokens(keys)
    attend = torch.compile(lambda: F.scaled_dot_product_attention(q, k, k), fullgraph=True, backend="eager")
    with sound_attention("cuda"):
        found = attend()
    torch.testing.assert_close(found, by_torch(q, k, k))
