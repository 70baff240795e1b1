"""What a model keeps for its backward pass, and what it computes again there. Can be changed on a built model.

    none        everything the kernels ask for is kept: fastest
    pointwise   outputs of what is bound by arithmetic are kept: attention, matmuls and most convolutions. What is bound
                by memory is computed again: normalisation, activation, concatenation, pooling, a convolution of RGB.
                Less than half the memory of a convolutional model, for a few passes over what was kept
    alternate   every other block is recomputed whole, those between pointwise: half of what the next one costs
    blocks      only the inputs of blocks are kept, their forward pass runs twice: least memory

Blocks with dropout draw the same numbers again: eager mode keeps the generators' state for that, compiled code seeds.

Eager and compiled code differ twice. A compiled model is one region, in which the partitioner interleaves recomputing
with backward; in eager mode a region is recomputed at once, so it must not be larger than a block, or everything it
recomputes would be alive together. And a compiled region recomputes only pure values, while in eager mode BatchNorm
runs a second time and its running statistics need shielding.

Loops over chunks save memory in a similar way, and must stay out of compiled code: a compiler unrolls the loop, which
takes minutes, and fuses what the iterations share, so that the activations of all chunks are alive together.
`make_iteration` compiles one iteration instead.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "pointwise", "alternate", "blocks"]
Run = Callable[..., Tensor]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

aten = torch.ops.aten
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
MATMULS = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten._scaled_mm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}
"""Matrix products, and the position of their left factor among the arguments."""

COMPUTE_BOUND_TERMS = 200
"""Number of products summed per output value from which arithmetic takes longer than memory traffic. In bf16 a value
has 2 bytes and a product is 2 operations, so this is operations per byte: an H200 does 790 TFLOP/s over 4 TB/s, an A100
250 over 1.5."""

WITH_STATISTICS = frozenset(
    {
        aten.native_batch_norm.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
        aten._batch_norm_with_update.default,
        aten._native_batch_norm_legit.default,
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten.var_mean.correction,
        aten.sum.dim_IntList,
        aten.mean.dim,
    }
)
"""Normalisations and sums: computing a mean or a variance is a pass over the input, keeping it takes a few kilobytes.
"""

FEW_VALUES = 2**16
"""Results computed from fewer values are kept or recomputed, whatever is easier: statistics, scales, small weights."""


class Recomputing(nn.Module):
    recompute: Recompute = "none"


def set_recompute(model: nn.Module, how: Recompute) -> bool:
    """Change how a built model recomputes; return False if it has no such modules. Compiled models need recompiling."""
    able = [module for module in model.modules() if isinstance(module, Recomputing)]
    for module in able:
        module.recompute = how
        for relu in (part for part in module.modules() if isinstance(part, nn.ReLU)):
            relu.inplace = not is_selective(how)  # such a region may hold no in-place operation when compiled
    if is_selective(how):
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_not_reminder)
    return bool(able)


def is_selective(how: Recompute) -> bool:
    """True if some blocks keep their expensive intermediate results."""
    return how in ("pointwise", "alternate")


def keeps_every_product(how: Recompute) -> bool:
    """True if no block is recomputed whole, so that blocks may run as a chain of kernels."""
    return how in ("none", "pointwise")


def get_recompute(model: nn.Module) -> Recompute:
    """Return what `set_recompute` set last, or what the model was built with."""
    return next((module.recompute for module in model.modules() if isinstance(module, Recomputing)), "none")


class Blocks(Recomputing, nn.Sequential):
    def __init__(self, blocks: Mapping[str, nn.Module], *, checkpointing: bool) -> None:
        super().__init__(OrderedDict(blocks))
        self.recompute = "blocks" if checkpointing else "none"

    def forward(self, x: Tensor) -> Tensor:
        return choose_region_runner(self.recompute)(self._one_by_one, x)

    def _one_by_one(self, x: Tensor) -> Tensor:
        run = choose_block_runner(self.recompute, _each_by)
        for block in self:
            x = run(block, x)
        return x


_each_by: Callable[[Run], Run] | None = None


@contextlib.contextmanager
def compile_each_block(compiler: Callable[[Run], Run]) -> Iterator[None]:
    """Let `Blocks` compile one block for all inside; not for code that is compiled as a whole."""
    global _each_by
    before, _each_by = _each_by, compiler
    try:
        yield
    finally:
        _each_by = before


def choose_region_runner(how: Recompute) -> Run:
    """Choose how a model's forward calls all its blocks together."""
    is_one_region = how == "pointwise" and torch.compiler.is_compiling() and torch.is_grad_enabled()
    return run_pointwise_compiled if is_one_region else run


def choose_block_runner(how: Recompute, compiler: Callable[[Run], Run] | None = None) -> Run:
    """Choose how a model calls each block: plainly, or with recomputation if a backward pass follows. A `compiler`
    compiles one block for all."""
    recomputes, is_compiling = how != "none" and torch.is_grad_enabled(), torch.compiler.is_compiling()
    if compiler is not None:
        one, whole, selective = map(compiler, (run, run_checkpointed_compiled, run_pointwise_compiled))
    elif is_compiling:
        one, whole, selective = run, run_checkpointed_compiled, run_pointwise_compiled
    else:
        one, whole, selective = run, run_checkpointed, run_pointwise
    if not recomputes or how == "pointwise" and is_compiling:  # a compiled region is pointwise as one
        return one
    return {"pointwise": selective, "blocks": whole}.get(how) or alternate(whole, selective)


def alternate(*runners: Run) -> Run:
    """Return a runner that uses the given runners in turn, one per block."""
    turns = itertools.cycle(runners)
    return lambda block, *inputs: next(turns)(block, *inputs)


def run(block: Run, *inputs: Tensor) -> Tensor:
    return block(*inputs)


def run_checkpointed(block: Run, *inputs: Tensor) -> Tensor:
    return run_recomputed(block, *inputs, context_fn=make_contexts(block, "blocks"), preserve_rng_state=_draws(block))


def run_checkpointed_compiled(block: Run, *inputs: Tensor) -> Tensor:
    """Call the block inside compiled code and keep only its inputs."""
    return run_recomputed(block, *inputs)


def run_pointwise(block: Run, *inputs: Tensor) -> Tensor:
    """Call the block and keep its inputs and expensive results; for a block with dropout, only its inputs."""
    if _draws(block):
        return run_checkpointed(block, *inputs)
    with disable_autocast_cache():
        return run_recomputed(block, *inputs, context_fn=make_contexts(block, "pointwise"))


def run_pointwise_compiled(region: Run, *inputs: Tensor) -> Tensor:
    """Call a whole region inside compiled code and keep its inputs and expensive results."""
    return run_recomputed(region, *inputs, **make_compiled_contexts("pointwise"))


def make_contexts(block: Run, how: Recompute) -> Callable[[], Contexts]:
    """Return a function that makes the contexts of an eager block's two forward passes."""

    def contexts() -> Contexts:
        if how == "blocks":
            return contextlib.nullcontext(), _spare_statistics(block)
        keeping, replaying = create_selective_checkpoint_contexts(_keep_expensive)
        return keeping, _enter_both(_spare_statistics(block), replaying)

    return contexts


def make_compiled_contexts(how: Recompute) -> dict[str, Any]:
    """Return the options of `checkpoint` inside compiled code."""
    if how == "blocks":
        return {}
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_in_partitioner)}


def run_recomputed(function: Run, *inputs: Tensor, **options: Any) -> Tensor:
    """Call a function and keep only its inputs; it must draw nothing, unless `preserve_rng_state` is given."""
    out = checkpoint(function, *inputs, use_reentrant=False, **{"preserve_rng_state": False} | options)
    assert isinstance(out, Tensor)
    return out


def _draws(block: Run) -> bool:
    """True if a block currently applies dropout."""
    assert isinstance(block, nn.Module)
    return any(isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in block.modules())


def _keep_expensive(_context: Any, op: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_expensive(op, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_in_partitioner(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    read = sum(value.numel() for value in tree_leaves(args) if isinstance(value, Tensor))
    if op in WITH_STATISTICS or read < FEW_VALUES:
        # No order: the partitioner then keeps the statistics, which are reductions, and recomputes what uses them.
        return CheckpointPolicy.PREFER_SAVE
    return _keep_expensive(context, op, *args, **kwargs)


def _is_expensive(op: Any, args: tuple[Any, ...]) -> bool:
    """True if recomputing an operation costs more than a pass over memory, or its result is smaller than its inputs."""
    if op in ATTENTION:
        # Kept, one that draws its dropout would leave the generator to the next layer where it has moved on.
        return not any(isinstance(arg, float) and arg > 0 for arg in args)
    if op in MATMULS:
        left, right = args[MATMULS[op]], args[MATMULS[op] + 1]
        return bool(left.shape[-1] >= COMPUTE_BOUND_TERMS or right.shape[-1] < left.shape[-1])
    return bool(op is aten.convolution.default and _is_expensive_convolution(*args))


def _is_expensive_convolution(
    images: Tensor, weight: Tensor, _bias: Any, stride: Any, _p: Any, _d: Any, is_transposed: bool, _o: Any, groups: int
) -> bool:
    channels_in = images.shape[1]
    channels_out = weight.shape[1] * groups if is_transposed else weight.shape[0]
    zoom: float = math.prod(stride) if is_transposed else 1 / math.prod(stride)
    terms: float = channels_in // groups * math.prod(weight.shape[2:]) / max(zoom, 1)
    return terms >= COMPUTE_BOUND_TERMS or channels_out * zoom < channels_in


def is_not_reminder(record: logging.LogRecord) -> bool:
    """Filter torch's reminder to avoid in-place operations in a compiled selective region; ours have none."""
    return "context_fn is passed" not in record.getMessage()


@contextlib.contextmanager
def _enter_both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextlib.contextmanager
def disable_autocast_cache(is_off: bool = True) -> Iterator[None]:
    """Disable autocast's cache of weight copies, which lives for one forward pass. With it, a second forward would cast
    nothing while its recomputation casts again, and a selective region must run the same operations twice."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and not is_off)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _spare_statistics(block: Run) -> Iterator[None]:
    """Let BatchNorm write its running statistics into temporary copies while a block is recomputed."""
    assert isinstance(block, nn.Module)
    kept = [(norm, dict(norm._buffers)) for norm in block.modules() if isinstance(norm, _NormBase)]
    try:
        for norm, buffers in kept:
            norm._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)


Iteration = TypeVar("Iteration", bound=Callable[..., Any])


def make_iteration(function: Iteration, *, is_compiled: bool) -> Iteration:
    """Return one iteration of a loop over chunks, to be called without gradients and with few different shapes."""
    return (_compile if is_compiled else _wrap_plain)(function)


def _wrap_plain(function: Any) -> Any:
    """Wrap the function in a frame that tells the memory prediction what a compiled step would compile."""

    def run_turn(*inputs: Any, **options: Any) -> Any:
        return function(*inputs, **options)

    return run_turn


ITERATION_CODE = _wrap_plain(None).__code__


@functools.cache
def _compile(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
