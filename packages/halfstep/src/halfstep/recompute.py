"""Activation checkpointing of our models: what they keep for backward, and what they recompute. Can be changed later.

    none        keep everything that kernels save for backward: fastest
    pointwise   keep outputs that are expensive to compute (attention, matmuls, most convolutions), and recompute those
                that are limited by memory bandwidth (norms, activations, concatenation, pooling, convolutions of RGB).
                Takes less than half the memory in a convolutional model, at the cost of a few passes over kept tensors
    alternate   recompute every other block completely, the rest pointwise: half the cost of `blocks`
    blocks      keep only the inputs of blocks, and run their forward twice: least memory

Blocks with dropout draw the same numbers again: eager mode restores the generator's state, compiled code the seeds.

Eager and compiled code differ in two ways. A compiled model is one region, in which the partitioner interleaves
recomputation with backward; in eager mode a region is recomputed at once, so it must not be larger than a block, or
everything it recomputes would be alive at the same time. And a compiled region recomputes only pure values, while in
eager mode BatchNorm runs a second time, so its running statistics need protection.

Loops over chunks save memory in a similar way and must not be compiled as a whole: the compiler would unroll the loop,
which takes minutes, and fuse iterations, so that the activations of all chunks are alive at the same time.
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
"""Matrix products, with the index of their left factor among the arguments."""

COMPUTE_BOUND_TERMS = 200
"""Number of products per output value above which arithmetic takes longer than memory traffic. In bf16 a value has 2
bytes and a product is 2 operations, so this is operations per byte: an H200 has 790 TFLOP/s and 4 TB/s, an A100 250 and
1.5."""

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
"""Normalisations and sums: recomputing a mean or variance is a pass over the input, keeping it takes a few
kilobytes."""

FEW_VALUES = 2**16
"""Results of operations that read fewer values may be kept or recomputed: statistics, scales, small weights."""


class Recomputing(nn.Module):
    """A module whose recomputation can be chosen."""

    recompute: Recompute = "none"


def set_recompute(model: nn.Module, how: Recompute) -> bool:
    """Set how a model recomputes; return False if it has no `Recomputing` modules. Compiled models must be
    recompiled."""
    found = [module for module in model.modules() if isinstance(module, Recomputing)]
    for module in found:
        module.recompute = how
        for relu in (part for part in module.modules() if isinstance(part, nn.ReLU)):
            relu.inplace = not is_selective(how)  # selective checkpointing allows no in-place operations when compiled
    if is_selective(how):
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_not_reminder)
    return bool(found)


def is_selective(how: Recompute) -> bool:
    """True if some blocks keep their expensive intermediate results."""
    return how in ("pointwise", "alternate")


def keeps_every_product(how: Recompute) -> bool:
    """True if no block is recomputed completely, so that blocks may run as a chain of kernels."""
    return how in ("none", "pointwise")


def get_recompute(model: nn.Module) -> Recompute:
    """Return how a model recomputes."""
    return next((module.recompute for module in model.modules() if isinstance(module, Recomputing)), "none")


class Blocks(Recomputing, nn.Sequential):
    """A sequence of blocks, each of which may be recomputed."""

    def __init__(self, blocks: Mapping[str, nn.Module], *, checkpointing: bool) -> None:
        super().__init__(OrderedDict(blocks))
        self.recompute = "blocks" if checkpointing else "none"

    def forward(self, x: Tensor) -> Tensor:
        return choose_region_runner(self.recompute)(self._run_blocks, x)

    def _run_blocks(self, x: Tensor) -> Tensor:
        run = choose_block_runner(self.recompute, _block_compiler)
        for block in self:
            x = run(block, x)
        return x


_block_compiler: Callable[[Run], Run] | None = None


@contextlib.contextmanager
def compile_each_block(compiler: Callable[[Run], Run]) -> Iterator[None]:
    """Make `Blocks` compile a single block and use it for all, inside this context; not for code that is compiled
    itself."""
    global _block_compiler
    before, _block_compiler = _block_compiler, compiler
    try:
        yield
    finally:
        _block_compiler = before


def choose_region_runner(how: Recompute) -> Run:
    """Return the function with which a model runs all its blocks together."""
    is_one_region = how == "pointwise" and torch.compiler.is_compiling() and torch.is_grad_enabled()
    return run_pointwise_compiled if is_one_region else run


def choose_block_runner(how: Recompute, compiler: Callable[[Run], Run] | None = None) -> Run:
    """Return the function with which a model runs each block: with recomputation if a backward pass follows.

    A `compiler` compiles one block for all.
    """
    recomputes, is_compiling = how != "none" and torch.is_grad_enabled(), torch.compiler.is_compiling()
    if compiler is not None:
        one, whole, selective = map(compiler, (run, run_checkpointed_compiled, run_pointwise_compiled))
    elif is_compiling:
        one, whole, selective = run, run_checkpointed_compiled, run_pointwise_compiled
    else:
        one, whole, selective = run, run_checkpointed, run_pointwise
    if not recomputes or how == "pointwise" and is_compiling:  # choose_region_runner handles the whole region
        return one
    return {"pointwise": selective, "blocks": whole}.get(how) or alternate(whole, selective)


def alternate(*runners: Run) -> Run:
    """Return a runner that uses the given runners in turn, one per block."""
    turns = itertools.cycle(runners)
    return lambda block, *inputs: next(turns)(block, *inputs)


def run(block: Run, *inputs: Tensor) -> Tensor:
    """Call the block without recomputation."""
    return block(*inputs)


def run_checkpointed(block: Run, *inputs: Tensor) -> Tensor:
    """Call the block in eager mode and keep only its inputs."""
    return run_recomputed(
        block, *inputs, context_fn=make_contexts(block, "blocks"), preserve_rng_state=_has_dropout(block)
    )


def run_checkpointed_compiled(block: Run, *inputs: Tensor) -> Tensor:
    """Call the block in compiled code and keep only its inputs."""
    return run_recomputed(block, *inputs)


def run_pointwise(block: Run, *inputs: Tensor) -> Tensor:
    """Call the block in eager mode and keep its inputs and expensive results; with dropout, only its inputs."""
    if _has_dropout(block):
        return run_checkpointed(block, *inputs)
    with disable_autocast_cache():
        return run_recomputed(block, *inputs, context_fn=make_contexts(block, "pointwise"))


def run_pointwise_compiled(region: Run, *inputs: Tensor) -> Tensor:
    """Call a whole region in compiled code and keep its inputs and expensive results."""
    return run_recomputed(region, *inputs, **make_compiled_contexts("pointwise"))


def make_contexts(block: Run, how: Recompute) -> Callable[[], Contexts]:
    """Return a function that makes the contexts of the two forward passes of an eager block."""

    def make_both() -> Contexts:
        if how == "blocks":
            return contextlib.nullcontext(), ProtectedStatistics(block)
        keeping, replaying = create_selective_checkpoint_contexts(_keep_expensive)
        return keeping, _enter_both(ProtectedStatistics(block), replaying)

    return make_both


def make_compiled_contexts(how: Recompute) -> dict[str, Any]:
    """Return the options of `checkpoint` in compiled code."""
    if how == "blocks":
        return {}
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_in_partitioner)}


def run_recomputed(function: Run, *inputs: Tensor, **options: Any) -> Tensor:
    """Call a function and keep only its inputs. It must not draw random numbers, unless `preserve_rng_state` is
    given."""
    out = checkpoint(function, *inputs, use_reentrant=False, **{"preserve_rng_state": False} | options)
    assert isinstance(out, Tensor)
    return out


def _has_dropout(block: Run) -> bool:
    """True if a block applies dropout in its current mode."""
    assert isinstance(block, nn.Module)
    return any(isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in block.modules())


def _keep_expensive(_context: Any, op: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Return the policy for an operation: keep what is expensive to recompute."""
    return CheckpointPolicy.MUST_SAVE if _is_expensive(op, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_in_partitioner(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the policy for an operation in compiled code."""
    read = sum(value.numel() for value in tree_leaves(args) if isinstance(value, Tensor))
    if op in WITH_STATISTICS or read < FEW_VALUES:
        # A preference, not an order: the partitioner keeps the small statistics and recomputes what uses them.
        return CheckpointPolicy.PREFER_SAVE
    return _keep_expensive(context, op, *args, **kwargs)


def _is_expensive(op: Any, args: tuple[Any, ...]) -> bool:
    """True if recomputing an operation costs more than a pass over memory, or if its result is smaller than its
    inputs."""
    if op in ATTENTION:
        # Attention with dropout must be recomputed: if its result were kept, the generator would not advance in the
        # second pass, and later layers would draw other numbers.
        return not any(isinstance(arg, float) and arg > 0 for arg in args)
    if op in MATMULS:
        left, right = args[MATMULS[op]], args[MATMULS[op] + 1]
        return bool(left.shape[-1] >= COMPUTE_BOUND_TERMS or right.shape[-1] < left.shape[-1])
    return bool(op is aten.convolution.default and _is_expensive_convolution(*args))


def _is_expensive_convolution(
    images: Tensor, weight: Tensor, _bias: Any, stride: Any, _p: Any, _d: Any, is_transposed: bool, _o: Any, groups: int
) -> bool:
    """True if a convolution is limited by arithmetic, or if its output is smaller than its input."""
    channels_in = images.shape[1]
    channels_out = weight.shape[1] * groups if is_transposed else weight.shape[0]
    # Output pixels per input pixel, then products per output value.
    zoom: float = math.prod(stride) if is_transposed else 1 / math.prod(stride)
    terms: float = channels_in // groups * math.prod(weight.shape[2:]) / max(zoom, 1)
    return terms >= COMPUTE_BOUND_TERMS or channels_out * zoom < channels_in


def is_not_reminder(record: logging.LogRecord) -> bool:
    """Filter out torch's reminder to avoid in-place operations in selective checkpointing: our regions have none."""
    return "context_fn is passed" not in record.getMessage()


@contextlib.contextmanager
def _enter_both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextlib.contextmanager
def disable_autocast_cache(is_off: bool = True) -> Iterator[None]:
    """Disable autocast's cache of weight copies inside this context.

    With the cache, the first pass of a region might find a weight already cast, while its recomputation casts it again.
    Selective checkpointing requires the same operations in both passes.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and not is_off)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class ProtectedStatistics:
    """Let BatchNorm update temporary copies of its running statistics whenever a block is recomputed: twice for a loss
    that takes a gradient itself."""

    def __init__(self, block: Run) -> None:
        assert isinstance(block, nn.Module)
        self.norms = [module for module in block.modules() if isinstance(module, _NormBase)]
        self.kept: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self.kept = [dict(norm._buffers) for norm in self.norms]
        for norm, buffers in zip(self.norms, self.kept, strict=True):
            norm._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for norm, buffers in zip(self.norms, self.kept, strict=True):
            norm._buffers.update(buffers)


Iteration = TypeVar("Iteration", bound=Callable[..., Any])


def make_iteration(function: Iteration, *, is_compiled: bool) -> Iteration:
    """Return a function for one iteration of a loop over chunks, compiled if requested.

    Call it without gradients and with few different shapes.
    """
    return (_compile if is_compiled else _wrap_plain)(function)


def _wrap_plain(function: Any) -> Any:
    """Wrap a function in a frame by which the memory prediction recognises what a compiled step would compile."""

    def run_iteration(*inputs: Any, **options: Any) -> Any:
        return function(*inputs, **options)

    return run_iteration


ITERATION_CODE = _wrap_plain(None).__code__
"""Code object of that frame."""


@functools.cache
def _compile(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
