"""LSTM, GRU and RNN layers in traced code: cuDNN's kernels as one operator.

torch's compiler splits a recurrent layer into matmuls of single time steps, which takes minutes to compile and runs
slower than cuDNN. Here the layers of Dynamo's graph call the operator `halfstep::cudnn_rnn` instead, which runs what
eager steps run: the same cuDNN kernels, in fp16 under autocast. Dropout between layers stays out: cuDNN draws its mask
from a state of its own, which a replay would not advance.

The operator's fake version needs the size of the reserve, in which cuDNN keeps activations for backward. Only cuDNN
knows it, so the operator runs once on empty tensors of the same shapes while the code is traced.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from halfstep.fast.windows import NotTraced

MODES: dict[object, int] = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}
"""cuDNN's numbers of the kinds of layers."""
LSTM = 2
Layout = list[int]
"""mode, tensors per layer and direction, layers, batch first, training, bidirectional."""


def use_cudnn_operator(module: GraphModule) -> GraphModule:
    """Let the recurrent layers of Dynamo's graph, in place, call the operator below."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in MODES:
            is_packed = not isinstance(node.args[2], Sequence)
            if is_packed:
                raise NotTraced("a recurrent layer reads packed sequences")
            node.args = (MODES[node.target], *node.args)
            node.target = run_layers
    module.recompile()
    return module


def run_layers(
    mode: int,
    x: Tensor,
    hidden: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    is_training: bool,
    is_bidirectional: bool,
    is_batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return what torch.lstm, torch.gru and the others return, for their arguments."""
    if dropout and is_training and num_layers > 1:
        raise NotTraced("a recurrent layer has dropout between its layers")
    if not torch.backends.cudnn.is_acceptable(x):
        raise NotTraced(f"cuDNN does not run a recurrent layer in {x.dtype} on {x.device}")
    states = list(hidden) if mode == LSTM else [hidden]
    weights = list(weights)
    is_projected = mode == LSTM and states[0].shape[2] != states[1].shape[2]
    layout = [mode, (4 if has_biases else 2) + is_projected, num_layers, is_batch_first, is_training, is_bidirectional]
    if torch.is_autocast_enabled(x.device.type):  # CUDA's autocast runs these layers in fp16, whatever its format
        x, *rest = (tensor.to(torch.float16) for tensor in (x, *states, *weights))
        states, weights = rest[: len(states)], rest[len(states) :]
    with torch.autocast(x.device.type, enabled=False):
        output, *after = torch.ops.halfstep.cudnn_rnn(x, states, weights, list(map(int, layout)))[:3]
    return (output, *after[: len(states)])


def _list_settings(states: Sequence[Tensor], layout: Layout) -> list[Any]:
    """Return what the forward and the backward kernel both take after the states."""
    mode, _, num_layers, is_batch_first, is_training, is_bidirectional = layout
    hidden_size, output_size = states[-1].shape[2], states[0].shape[2]
    projection = output_size if output_size != hidden_size else 0
    flags = [bool(one) for one in (is_batch_first, is_training, is_bidirectional)]
    return [mode, hidden_size, projection, num_layers, flags[0], 0.0, flags[1], flags[2], [], None]


def _compute(x: Tensor, states: list[Tensor], weights: list[Tensor], layout: Layout) -> list[Tensor]:
    """Return output, last hidden state, last cell state (empty without one), reserve, and the weights as one tensor."""
    first, cell = _split_states(states)
    settings = _list_settings(states, layout)
    with ignore_warning():
        # Not torch.ops.aten: a warning of its operators appears when its caller's caller returns.
        return list(torch._cudnn_rnn(x, weights, layout[1], None, first, cell, *settings))


@contextlib.contextmanager
def ignore_warning() -> Iterator[None]:
    """Hide torch's advice to call flatten_parameters(), which does not apply: weights are copied into one tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", UserWarning)
        yield


def _compute_gradients(
    x: Tensor, states: list[Tensor], weights: list[Tensor], layout: Layout, kept: list[Tensor], gradients: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of x, of the states and of the weights. `kept` are output, reserve and the weights as one
    tensor; `gradients` those of output and last states."""
    output, reserve, buffer = kept
    wanted = [True, True, len(states) > 1, True]
    of_x, of_first, of_cell, of_weights = torch.ops.aten._cudnn_rnn_backward(
        x, weights, layout[1], buffer, *_split_states(states), output, gradients[0], *_split_states(gradients[1:]),
        *_list_settings(states, layout), reserve, wanted,
    )  # fmt: skip
    # cuDNN gives views of one tensor, and the results of an operator must not share memory.
    return [of_x, of_first, *[of_cell][: len(states) - 1], *(gradient.clone() for gradient in of_weights)]


def _split_states(states: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the hidden state, and the cell state if there is one."""
    return states[0].contiguous(), states[1].contiguous() if len(states) > 1 else None


def _define(name: str, compute: Callable[..., list[Tensor]], more: str = "") -> Any:
    """Define an operator, whose fake version runs it on empty tensors for the sizes of its results."""
    schema = f"(Tensor x, Tensor[] states, Tensor[] weights, int[] layout{more}) -> Tensor[]"
    defined = torch.library.custom_op(f"halfstep::{name}", compute, mutates_args=(), schema=schema)

    def imitate(*arguments: Any) -> list[Tensor]:
        with _disable_current_modes():
            results = compute(*tree_map_only(Tensor, _make_empty, arguments))
        return [_make_empty(result) for result in results]

    defined.register_fake(imitate)
    return defined


def _make_empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


_forward = _define("cudnn_rnn", _compute)
_define("cudnn_rnn_backward", _compute_gradients, ", Tensor[] kept, Tensor[] gradients")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, states, weights, ctx.layout = inputs
    ctx.num_states = len(states)
    ctx.save_for_backward(x, *states, *weights, *output)


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    *inputs, output, hidden, cell, reserve, buffer = ctx.saved_tensors
    x, states, weights = inputs[0], inputs[1 : 1 + ctx.num_states], inputs[1 + ctx.num_states :]
    results = (output, hidden, cell)[: 1 + ctx.num_states]
    known = [
        torch.zeros_like(result) if gradient is None else gradient
        for result, gradient in zip(results, gradients, strict=False)
    ]
    found = torch.ops.halfstep.cudnn_rnn_backward(x, states, weights, ctx.layout, [output, reserve, buffer], known)
    return found[0], found[1 : 1 + ctx.num_states], found[1 + ctx.num_states :], None


_forward.register_autograd(_differentiate, setup_context=_keep)
