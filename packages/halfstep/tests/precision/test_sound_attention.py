"""Attention at lengths where cuDNN's backward fails: other kernels run there, and nothing is left behind."""

from __future__ import annotations

import runpy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep.precision import contexts
from halfstep.precision.contexts import torch_attention, use_sound_attention

Run = Callable[..., Tensor]


@pytest.fixture
def cudnn_was_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether torch could have taken cuDNN's kernel, call by call, on a device that has the fault."""
    seen: list[bool] = []

    def spying(*arguments: Any, **options: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch_attention(*arguments, **options)

    monkeypatch.setattr(contexts, "has_cudnn_fault", lambda device: True)
    monkeypatch.setattr(contexts, "torch_attention", spying)
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
    with use_sound_attention("cuda"):
        found = F.scaled_dot_product_attention(q, k, k, **options)
    assert cudnn_was_on == [is_left_to_cudnn]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.testing.assert_close(found, torch_attention(q, k, k, **options))


def test_a_user_who_allows_cudnn_alone_gets_it(cudnn_was_on: list[bool]) -> None:
    q, k = tokens(16), tokens(64)
    with use_sound_attention("cuda"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attend = partial(F.scaled_dot_product_attention, q, k, k)
        with pytest.raises(RuntimeError, match="viable"):  # on a CPU
            attend()
    assert cudnn_was_on == [True]


def test_layers_of_torch_use_it(cudnn_was_on: list[bool]) -> None:
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 64, 8)
    with use_sound_attention("cuda"):
        layer(x, x, x, need_weights=False)
    assert cudnn_was_on == [False]


def test_torchs_own_is_back_afterwards_and_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_sound_attention("cpu"):
        assert F.scaled_dot_product_attention is torch_attention
    monkeypatch.setattr(contexts, "has_cudnn_fault", lambda device: True)
    with use_sound_attention("cuda"):
        assert F.scaled_dot_product_attention is contexts.run_attention
        with pytest.raises(ZeroDivisionError), use_sound_attention("cuda"):
            _ = 1 / 0
    assert F.scaled_dot_product_attention is torch_attention
    theirs = lambda *arguments: arguments[0]  # noqa: E731
    with use_sound_attention("cuda"):
        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    assert F.scaled_dot_product_attention is theirs
    with use_sound_attention("cuda"):
        assert F.scaled_dot_product_attention is theirs


@pytest.mark.parametrize("keys", [64, 65])
def test_compiled_code_takes_it_without_a_break(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr(contexts, "has_cudnn_fault", lambda device: True)
    q, k = tokens(16).requires_grad_(), tokens(keys)
    called = list[str]()

    def keeping(module: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        called.extend(str(node.target) for node in module.graph.nodes)
        return module

    attend = torch.compile(lambda: F.scaled_dot_product_attention(q, k, k), fullgraph=True, backend=keeping)
    with use_sound_attention("cuda"):
        found = attend()
    torch.testing.assert_close(found, torch_attention(q, k, k))
    assert any("_sdpa_kernel" in target for target in called) == (keys == 64)  # the compiled code switches kernels, too


class Attending(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    "traced",
    [
        lambda model, x: torch.export.export(model, (x,), dynamic_shapes=({2: torch.export.Dim("tokens")},)).module(),
        lambda model, x: torch.jit.trace(model, x),
        lambda model, x: torch.fx.symbolic_trace(model),
    ],
    ids=["exported", "traced", "symbolic"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")  # since torch 2.14
def test_a_program_for_any_length_is_made_as_torch_makes_it(monkeypatch: pytest.MonkeyPatch, traced: Run) -> None:
    monkeypatch.setattr(contexts, "has_cudnn_fault", lambda device: True)
    with use_sound_attention("cuda"), warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        program = traced(Attending(), tokens(70))
    x = tokens(64)
    torch.testing.assert_close(program(x), torch_attention(x, x, x))


@pytest.mark.parametrize("wrong", [(), (0, None, 0), (torch.ones(2, 2), torch.ones(64), torch.ones(64, 2))])
def test_a_wrong_call_has_torchs_own_error(monkeypatch: pytest.MonkeyPatch, wrong: tuple[Any, ...]) -> None:
    monkeypatch.setattr(contexts, "has_cudnn_fault", lambda device: True)
    said = []
    for attend in (torch_attention, contexts.run_attention):
        with pytest.raises((TypeError, RuntimeError)) as caught:
            attend(*wrong)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_single_query_is_left_to_no_cudnn(cudnn_was_on: list[bool]) -> None:
    with use_sound_attention("cuda"):
        F.scaled_dot_product_attention(tokens(1), tokens(128), tokens(128))
    assert cudnn_was_on == [False]


def test_threads_leave_no_kernel_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to come in leaves first, while the second is inside: unless that one waits outside."""
    is_second_in, arrived = threading.Event(), list[str]()

    def slowly(*arguments: Tensor) -> Tensor:
        arrived.append("")
        if len(arrived) == 1:
            is_second_in.wait(0.3)
        else:
            is_second_in.set()
            threads[0].join()
        return torch_attention(*arguments)

    monkeypatch.setattr(contexts, "torch_attention", slowly)
    threads = [threading.Thread(target=contexts.run_attention, args=[tokens(64)] * 3) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(arrived) == 2
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_one_of_two_threads_that_leaves_takes_nothing_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "has_cudnn_fault", lambda device: True)
    first, second = use_sound_attention("cuda"), use_sound_attention("cuda")
    with first:
        second.__enter__()
    assert F.scaled_dot_product_attention is contexts.run_attention
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is torch_attention


def test_what_the_user_set_before_halfstep_came_is_not_taken_for_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, layout="HND", causal=False: q)
    assert runpy.run_path(str(contexts.__file__))["torch_attention"] is torch_attention
