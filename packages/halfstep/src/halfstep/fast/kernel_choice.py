"""Choose by measurement which kernels compute the attention and the depthwise convolutions of a traced step.

torch chooses attention kernels by a fixed order. Which one is the fastest depends on shape, strides and dropout: on an
H200 with torch 2.11, cuDNN's takes 0.54 ms per layer of a GPT-2 of transformers, whose heads are views of one
projection, and FlashAttention's 0.30; for dense heads it is the other way round. The gradient of a depthwise
convolution with respect to its input takes cuDNN twice as long as the convolution with the flipped kernel, which is the
same sum.

Each call of Dynamo's graph is timed in each way alone, forward and backward, on random numbers with the call's shapes
and strides. The graph's copy then computes it in the fastest one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import _sdpa_kernel as set_kernels
from torch.utils._pytree import tree_flatten, tree_map

from halfstep.hardware.driver import Driver
from halfstep.precision.contexts import has_bad_shape, list_allowed_kernels, torch_attention

Run = Callable[..., Tensor]
WORTH = 0.95
"""Share of the usual time that another way may take: less than that is not told apart from noise."""
UNTIMED = math.inf


def visit_calls(module: GraphModule, visit: Callable[[Node], None]) -> GraphModule:
    """Copy a graph, call `visit` with each of its calls, also in checkpointed blocks, and return the copy."""
    module = GraphModule(module, copy.deepcopy(module.graph))
    for node in module.graph.nodes:
        block = getattr(module, node.target, None) if node.op == "get_attr" else None
        if isinstance(block, GraphModule):
            setattr(module, node.target, visit_calls(block, visit))
        elif node.op == "call_function":
            visit(node)
    module.recompile()
    return module


def choose_kernels(module: GraphModule, device: torch.device) -> GraphModule:
    """Return a copy of Dynamo's graph in which each call is computed in the way that is the fastest on the device."""
    chosen: dict[str, Run] = {}

    def choose(node: Node) -> None:
        usual, *others = list_ways(node)
        if not others:
            return
        arguments, options = tree_map(read_example, (node.args, node.kwargs))
        key = f"{node.target} {tree_map(describe, (arguments, options))}"
        if key not in chosen:
            limit = WORTH * time_call(usual, arguments, options, device)
            times = {other: time_call(other, arguments, options, device) for other in others}
            best = min(others, key=times.__getitem__)
            chosen[key] = best if times[best] < limit else usual
        node.target = chosen[key]

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return visit_calls(module, choose)


def list_ways(node: Node) -> list[Any]:
    """Return the functions that compute a call of a graph, the usual one first."""
    if node.target is torch_attention:
        return [torch_attention, *list_attention(node)]
    if node.target is torch.conv2d and is_depthwise(node):
        return [torch.conv2d, convolve_depthwise]
    return [node.target]


# --- attention ---


def list_attention(node: Node) -> list[Run]:
    """Return attention by each kernel that the user allows. None where the graph itself selects kernels."""
    if any(other.target is set_kernels for other in node.graph.nodes):
        return []
    query, key = (read_example(one) for one in node.args[:2])
    is_causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    kernels = list_allowed_kernels()
    if torch.backends.cuda.cudnn_sdp_enabled() and not has_bad_shape(query, key, is_causal=bool(is_causal)):
        kernels.append(SDPBackend.CUDNN_ATTENTION)
    return [attend_by(kernel) for kernel in kernels if kernel is not SDPBackend.MATH]


def attend_by(kernel: SDPBackend) -> Run:
    def attend(*arguments: Any, **options: Any) -> Tensor:
        with sdpa_kernel(kernel):
            return torch_attention(*arguments, **options)

    attend.__name__ = f"attend_by_{kernel.name.lower()}"  # in the graph
    return attend


# --- depthwise convolutions ---


def is_depthwise(node: Node) -> bool:
    """True for one filter per channel and stride 1, with an input that needs a gradient."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, weight = read_example(given["input"]), read_example(given["weight"])
    sizes = [given.get("padding", (0, 0)), given.get("dilation", (1, 1))]
    if given.get("stride", (1, 1)) != (1, 1) or not all(isinstance(one, tuple) for one in sizes) or x.ndim != 4:
        return False
    fits = all(p <= d * (k - 1) for p, d, k in zip(*sizes, weight.shape[2:], strict=True))
    return fits and x.requires_grad and weight.shape[:2] == (given.get("groups", 1), 1) and weight.shape[0] > 1


def convolve_depthwise(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    output: Tensor = DepthwiseConvolution.apply(input, weight, bias, padding, dilation)  # type: ignore[no-untyped-call]
    return output


class DepthwiseConvolution(torch.autograd.Function):
    """A depthwise convolution; its input's gradient is the gradient of the output convolved with the flipped kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...], dilation: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.padding, ctx.dilation = bias is not None, padding, dilation
        return torch.conv2d(x, weight, bias, 1, padding, dilation, len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        sizes = zip(ctx.padding, ctx.dilation, weight.shape[2:], strict=True)
        around = [d * (k - 1) - p for p, d, k in sizes]
        of_x = torch.conv2d(gradient, weight.flip(2, 3), None, 1, around, ctx.dilation, len(weight))
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, x, weight, [len(weight)], [1, 1], ctx.padding, ctx.dilation, False, [0, 0], len(weight),
            [False, True, ctx.has_bias],
        )  # fmt: skip
        return of_x, of_weight, of_bias, None, None


# --- timing one call ---


def read_example(value: Any) -> Any:
    """Return the fake tensor that a node stood for in the trace, and other arguments as they are."""
    return value.meta["example_value"] if isinstance(value, Node) else value


def describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype, value.requires_grad


def time_call(run: Run, arguments: Any, options: Any, device: torch.device) -> float:
    """Return the seconds of forward and backward on random numbers; infinity if it does not run."""

    def make(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        made = made.normal_() if value.is_floating_point() else made.fill_(1)
        return nn.Parameter(made) if value.requires_grad else made

    arguments, options = tree_map(make, (arguments, options))
    inputs = [one for one in tree_flatten((arguments, options))[0] if isinstance(one, Tensor) and one.requires_grad]

    def forward_and_backward() -> None:
        output = run(*arguments, **options)
        if inputs:
            torch.autograd.grad(output, inputs, torch.ones_like(output))

    try:
        forward_and_backward()
        return Driver().time_run(forward_and_backward, str(device), work=str(run))
    except RuntimeError:  # no kernel for these shapes, or no memory
        return UNTIMED
