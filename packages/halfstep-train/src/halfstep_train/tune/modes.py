"""The modes a step can run: eager, compiled, or as one CUDA graph of compiled kernels."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from halfstep.disk import find_cache_directory
from halfstep.precision.contexts import BACKWARD_AS_EAGER
from halfstep.recompute import Blocks as BlockSequence
from halfstep.recompute import compile_each_block
from halfstep_train.kernels.fast_forms import force, is_forced_on

Mode: TypeAlias = Literal["eager", "compile", "graph"]
Batch: TypeAlias = dict[str, Tensor]
Region: TypeAlias = Callable[[Batch], tuple[Tensor, Tensor | float, Any]]
"""Forward and loss of one batch: (loss, weight, outputs). This is what gets compiled."""

Level: TypeAlias = Literal["info", "warning"]
Notice: TypeAlias = Callable[[str, Level], None]  # shows one line to the user

UNCAPTURED = 3
"""Consecutive windows of one shape before capture: they compile, choose kernels and allocate optimizer state."""
COMPILE_S = 45.0  # a cold start of the compiler: 30 to 60 s were measured for U-Net and ResNet-50 on an H200 machine
WARM_START_S = 15.0  # the same with compiled code on disk: tracing remains. An estimate, not measured.
KERNEL_TUNING_S = 240.0
"""A cold start in which inductor also searches each kernel's block sizes: over two minutes for U-Net and ResNet-50."""

NEEDS_CUDA = "warning: train.fast=graph needs a CUDA device, but this run is on {}: the step is compiled, not captured"


def compile_region(
    eager: Region,
    *,
    tunes_kernels: bool = False,
    activation_budget: float = 1.0,
    blocks: Blocks | None = None,
    is_repeated: bool = False,
) -> Region:
    """Return the region compiled by torch.compile, lazily: the compiler is loaded with the first batch.

    Shapes are static: batches of another size run the eager region, so that an epoch's last batch compiles nothing.
    `tunes_kernels` lets inductor search each kernel's block sizes: faster steps (benchmarks/NOTES.md), but minutes more
    to start with an empty cache. `activation_budget` is the share of activations that backward may keep; the compiler
    chooses them over the whole region. `blocks` run, or are compiled, in their own form; if the model repeats a block
    (`is_repeated`), one is compiled for all.
    """

    @functools.cache
    def region() -> Region:
        keep_compiled_code()
        logging.getLogger("torch._inductor.scheduler").addFilter(_is_no_echo)
        options: dict[str, Any] = {"coordinate_descent_tuning": True} if tunes_kernels else {}
        compiler = functools.partial(torch.compile, dynamic=False, options=options)
        if blocks:
            return compile_blocks(eager, blocks, compiler)
        return compile_one_for_all(eager, compiler) if is_repeated and activation_budget == 1 else compiler(eager)

    # Made once: to make it takes longer than a small step. The budget is read when the region is compiled, also a later
    # time for another shape, and is part of inductor's cache key.
    settings = BACKWARD_AS_EAGER | {"activation_memory_budget": activation_budget}
    patched = torch._functorch.config.patch(settings)

    def run(batch: Batch) -> tuple[Tensor, Tensor | float, Any]:
        with patched:
            return region()(batch)

    return run


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Filter the page of code that inductor prints before it raises; the engine reports the error in one line."""
    return not record.getMessage().startswith("Error in codegen for")


def keep_compiled_code() -> None:
    """Store compiled kernels where they survive a restart; torch's default is a temporary folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(find_cache_directory() / "inductor"))


# --- cudnn.benchmark ---

CUDNN_TRIALS_S = 20.0
"""Time that cuDNN's trials add to a start: tens of seconds for U-Net (benchmarks/NOTES.md). Not cached on disk."""


@contextmanager
def allow_cudnn_trials(wanted: bool) -> Iterator[None]:
    """Switch cudnn.benchmark on or off inside, and restore it afterwards."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, _ConvNd) for module in model.modules())


# --- deep networks that are not compiled as a whole ---
# The compiler takes minutes for a U-Net of 860M parameters, and leaves channels_last on the way (8 of 44 ms of a VAE's
# compiled step were layout copies; why is not known). So a workload names blocks that its network repeats. In a
# captured step each block runs by the forward given with it, which calls our own kernels; launches cost nothing
# there. A block without one is compiled alone, once per shape. Steps that are compiled and not captured
# pay for launches: there the region is compiled whole, or, if a block has to be compiled in any case, block by
# block.

MOST_SHAPES = 64  # of one kind of block; torch's limit is 8

Blocks = Mapping[type[nn.Module], Callable[..., Any] | None]
"""Block classes, each with its forward in captured steps; None: compiled."""


DEEP = 8
"""With at least this many blocks, one is compiled for all: compiling all 48 of `gpt2_xl` takes 1.5 minutes."""


def repeats_blocks(model: nn.Module, granted: str) -> bool:
    """True for our deep networks (GPT-2, ViT, ResNet-101), unless their blocks run as a chain, as they do in half
    formats under autocast."""
    is_deep = any(len(part) >= DEEP for part in model.modules() if isinstance(part, BlockSequence))
    return is_deep and granted in ("fp32", "tf32", "bf16-true")


def compile_one_for_all(region: Callable[..., Any], compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the region with one compiled block for all repetitions; the rest runs eagerly."""
    compiled = functools.cache(compiler)

    def run(*arguments: Any) -> Any:
        with compile_each_block(compiled), allow_many_shapes():
            return region(*arguments)

    return run


def compile_blocks(region: Callable[..., Any], blocks: Blocks, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the region with its blocks in one of these forms; `compiler` is torch.compile with its arguments."""
    compiled = functools.cache(compiler)
    is_whole = all(forward is not None for forward in blocks.values())

    def run(*arguments: Any) -> Any:
        is_captured = is_forced_on("chain", otherwise=True)
        if is_whole and not is_captured:
            return compiled(region)(*arguments)
        # Only a class's own forward: an inherited one belongs to its parent, which may not be among the blocks.
        own = {kind: given for kind, given in blocks.items() if "forward" in vars(kind)}
        forwards = {k: given if given and is_captured else compiled(k.forward) for k, given in own.items()}
        copies = cast_weights_again() if is_captured else contextlib.nullcontext()
        with _swap_forwards(forwards), force(is_captured, "group_norm"), allow_many_shapes(), copies:
            return region(*arguments)

    return run


def allow_many_shapes() -> contextlib.AbstractContextManager[None]:
    return torch._dynamo.config.patch(recompile_limit=MOST_SHAPES)


@contextlib.contextmanager
def _swap_forwards(forwards: Mapping[type[nn.Module], Any]) -> Iterator[None]:
    """Swap the forward of classes inside. Not of modules: a copied or stored module would keep the swapped one."""
    before = {kind: kind.forward for kind in forwards}
    for kind, forward in forwards.items():
        kind.forward = forward
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward


# --- autocast's half copies of weights: cast again in backward instead of kept since forward ---
#
# Saves 2 bytes per parameter at the peak for one more cast of each weight. Gradients have the same bits.


@contextmanager
def cast_weights_again() -> Iterator[None]:
    """Keep autocast's copies of weights only while their layer runs, and cast again in backward."""
    was_kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack_copy, _unpack_copy):
            yield
    finally:
        torch.set_autocast_cache_enabled(was_kept)


Source = tuple[nn.Parameter, torch.dtype, bool]
"""A parameter, the format of its copy, and whether the copy is transposed, as linear layers keep it."""


def _pack_copy(kept: Tensor) -> Tensor | Source:
    """Return what autograd saves of a tensor: instead of a cast copy of a parameter, the parameter itself.

    Others are detached: an output saved by its own node would otherwise form a reference cycle that no backward breaks.
    """
    cast, is_turned = kept.grad_fn, False
    if cast is not None and cast.name() == "TBackward0":
        cast, is_turned = cast.next_functions[0][0], True
    if cast is None or cast.name() != "ToCopyBackward0":
        return kept.detach()
    source = getattr(cast.next_functions[0][0], "variable", None)
    if not isinstance(source, nn.Parameter) or source.numel() != kept.numel() or source.device != kept.device:
        return kept.detach()
    return source, kept.dtype, is_turned


def _unpack_copy(kept: Tensor | Source) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    source, dtype, is_turned = kept
    copy = source.detach().to(dtype)
    return copy.t() if is_turned else copy
