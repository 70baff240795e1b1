"""Compute calls of a traced step in another way where that is measured to be faster.

- `nn.MultiheadAttention` copies queries, keys and values before it attends. The kernels read views as fast.
- The outputs of a linear layer whose width is not a multiple of 8, such as the 50,257 tokens of GPT-2, have rows that
  are not aligned. Inductor pads them for each product, which writes the gradient of the logits twice; a padded weight
  avoids that.
- The gradient of a depthwise convolution with respect to its input takes cuDNN up to twice as long as the convolution
  with the flipped kernel, which is the same sum.

Each call of Dynamo's graph is timed in both ways alone, forward and backward, on random numbers with the call's shapes
and strides. The graph's copy then computes it in the faster one. Other kernels for attention were tried, too: on an
H200 none was faster than torch's choice, cuDNN's, for the shapes of GPT-2, ViT and Llama without a mask.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from halfstep.hardware.driver import Driver

Run = Callable[..., Any]
WORTH = 0.95
"""Share of the usual time that another way may take: less than that is not told apart from noise."""
UNTIMED = math.inf
TENSOR_CORE, ALIGNMENT = 8, 64  # numbers of 16 bits: what products need, and a cache line
SETTINGS = (("stride", 1), ("padding", 0), ("dilation", 1))


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
    """Return a copy of Dynamo's graph in which each call is computed in the way that is faster on the device."""
    chosen: dict[str, Run] = {}

    def choose(node: Node) -> None:
        other = find_other_way(node)
        if other is None:
            return
        dtype = find_output(node.meta["example_value"]).dtype
        given = tree_map(read_example, (node.args, node.kwargs))
        key = f"{node.target} {dtype} {tree_map(describe, given)}"
        if key not in chosen:
            usual: Any = node.target
            is_faster = time_call(other, given, dtype, device) < WORTH * time_call(usual, given, dtype, device)
            chosen[key] = other if is_faster else usual
        node.target = chosen[key]

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return visit_calls(module, choose)


def find_other_way(node: Node) -> Run | None:
    """Return another function that computes a call of a graph, if there is one."""
    # Under torch.func an autograd.Function would need more rules.
    if any("increment_nesting" in str(other.target) for other in node.graph.nodes):
        return None
    if node.target is F.multi_head_attention_forward and is_plain_self_attention(node):
        return attend_packed
    if node.target is F.linear and is_unaligned(node):
        return multiply_padded
    return make_depthwise(node) if node.target is torch.conv2d else None


def read_arguments(node: Node, *names: str) -> dict[str, Any]:
    return {**dict(zip(names, map(read_example, node.args), strict=False)), **tree_map(read_example, node.kwargs)}


# --- self-attention ---


def bind_attention(*arguments: Any, **options: Any) -> SimpleNamespace:
    """Return the arguments of F.multi_head_attention_forward by name."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*arguments, **options)
    given.apply_defaults()
    return SimpleNamespace(**given.arguments)


def is_plain_self_attention(node: Node) -> bool:
    """True for nn.MultiheadAttention of one tensor with itself, without weights returned or a mask that is read."""
    one = bind_attention(*node.args, **node.kwargs)
    is_self = one.query is one.key is one.value and not one.use_separate_proj_weight
    is_masked = one.attn_mask is not None and not one.is_causal
    others = (one.bias_k, one.key_padding_mask, one.static_k, one.static_v)
    is_plain = not (is_masked or one.need_weights or one.add_zero_attn) and others == (None,) * 4
    return is_self and is_plain and read_example(one.query).ndim == 3


def attend_packed(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """Attend as F.multi_head_attention_forward does, to views of the projection instead of copies."""
    one = bind_attention(*arguments, **options)
    length, num, width = one.query.shape
    packed = F.linear(one.query.transpose(0, 1), one.in_proj_weight, one.in_proj_bias)
    q, k, v = packed.view(num, length, 3, one.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
    dropout_p = one.dropout_p if one.training else 0.0
    output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=one.is_causal)
    output = output.transpose(1, 2).reshape(num, length, width)
    # What follows may rely on the strides. Compiled code copies nothing for them.
    return F.linear(output, one.out_proj_weight, one.out_proj_bias).transpose(0, 1).contiguous(), None


# --- linear layers whose outputs are not aligned ---


def is_unaligned(node: Node) -> bool:
    """True for a product in half precision with rows that tensor cores cannot read as they are."""
    weight, dtype = read_arguments(node, "input", "weight")["weight"], node.meta["example_value"].dtype
    return dtype.itemsize == 2 and weight.ndim == 2 and len(weight) % TENSOR_CORE != 0


def multiply_padded(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear with a weight that is padded with zeros, and leave out the outputs of these."""
    padding = -len(weight) % ALIGNMENT
    weight = F.pad(weight, (0, 0, 0, padding))
    bias = None if bias is None else F.pad(bias, (0, padding))
    return F.linear(input, weight, bias)[..., : len(weight) - padding].contiguous()  # as above


# --- depthwise convolutions ---


def make_depthwise(node: Node) -> Run | None:
    """Return another way for a convolution with one filter per channel and stride 1 whose input needs a gradient."""
    given = read_arguments(node, "input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, dtype = given["input"], given["weight"], node.meta["example_value"].dtype
    if isinstance(given.get("padding"), str) or x.ndim != 4 or not x.requires_grad:
        return None
    stride, padding, dilation = (make_pair(given.get(name, usual)) for name, usual in SETTINGS)
    fits = all(p <= d * (k - 1) for p, d, k in zip(padding, dilation, weight.shape[2:], strict=True))
    is_depthwise = weight.shape[:2] == (given.get("groups", 1), 1) and weight.shape[0] > 1
    if stride != (1, 1) or not fits or not is_depthwise:
        return None

    def convolve_depthwise(input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        bias = None if bias is None else bias.to(dtype)  # as autocast does, where it is on
        output: Tensor = DepthwiseConvolution.apply(  # type: ignore[no-untyped-call]
            input.to(dtype), weight.to(dtype), bias, padding, dilation
        )
        return output

    return convolve_depthwise


def make_pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


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


def find_output(value: Any) -> Tensor:
    return next(one for one in tree_flatten(value)[0] if isinstance(one, Tensor))


def time_call(run: Run, given: tuple[Any, Any], dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of forward and backward on random numbers in `dtype`; infinity if it does not run."""

    def make(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_number = value.is_floating_point()
        sizes = [size if stride else 1 for size, stride in zip(value.shape, value.stride(), strict=True)]
        made = torch.empty_strided(sizes, value.stride(), dtype=dtype if is_number else value.dtype, device=device)
        made = (made.normal_() if is_number else made.fill_(1)).expand(value.shape)
        return made.requires_grad_(value.requires_grad)

    try:
        arguments, options = tree_map(make, given)
        leaves = tree_flatten((arguments, options))[0]
        inputs = [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]

        def forward_and_backward() -> None:
            output = find_output(run(*arguments, **options))
            if inputs:
                torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)

        forward_and_backward()
        return Driver().time_run(forward_and_backward, str(device), work="a call")
    except Exception:  # no kernel for these shapes, no memory, or arguments in another form
        return UNTIMED
