"""The modes a step can run: eager, compiled, or as one CUDA graph of compiled kernels."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from halfstep.disk import find_cache_directory, read_variable
from halfstep.kernels.fast_forms import force, is_forced_on
from halfstep.models.recompute import Blocks as BlockSequence
from halfstep.models.recompute import compile_each_block
from halfstep.tune.memory_low import activation_budget as budget

Mode: TypeAlias = Literal["eager", "compile", "graph"]
Batch: TypeAlias = dict[str, Tensor]
Region: TypeAlias = Callable[[Batch], tuple[Tensor, Tensor | float, Any]]
"""Forward and loss of one batch: (loss, weight, outputs). This is what gets compiled."""

Level: TypeAlias = Literal["info", "warning"]
Notice: TypeAlias = Callable[[str, Level], None]  # takes one line for the user

UNCAPTURED = 3
"""Windows of one shape in a row before it is captured: they compile, tune and settle what a capture must not."""
COMPILE_S = 45.0  # what a cold start of the compiler takes: 30 to 60 s were seen for U-Net and ResNet-50 beside an H200
WARM_START_S = 15.0  # the same with compiled code found on disk: tracing remains. An allowance, not measured.
KERNEL_TUNING_S = 240.0
"""A cold start in which inductor also searches each kernel's block sizes: over two minutes for U-Net and ResNet-50."""

NEEDS_CUDA = "warning: train.fast=graph needs a CUDA device, this run is on {}: the step is compiled, not captured"


def compiled(
    eager: Region,
    *,
    tunes_kernels: bool = False,
    activation_budget: float = 1.0,
    blocks: Blocks | None = None,
    is_repeated: bool = False,
) -> Region:
    """The region as torch.compile makes it, lazily: the compiler is loaded when the first batch comes.

    Shapes are static: batches of another size run the eager region, so that an epoch's last batch compiles nothing.
    `tunes_kernels` lets inductor search each kernel's block sizes: faster steps (benchmarks/NOTES.md), minutes more to
    start
    with an empty cache. `activation_budget` is the share of activations that backward may keep, which the compiler
    chooses over all of the region. Where `blocks` are named they run, or are compiled, in their own form; of blocks
    that the model repeats (`is_repeated`) one is compiled for all.
    """

    @functools.cache
    def region() -> Region:
        keep_compiled_code()
        logging.getLogger("torch._inductor.scheduler").addFilter(_is_no_echo)
        options: dict[str, Any] = {"coordinate_descent_tuning": True} if tunes_kernels else {}
        compiler = functools.partial(torch.compile, dynamic=False, options=options)
        if blocks:
            return by_blocks(eager, blocks, compiler)
        return one_for_all(eager, compiler) if is_repeated and activation_budget == 1 else compiler(eager)

    def budgeted(batch: Batch) -> tuple[Tensor, Tensor | float, Any]:
        with budget(activation_budget):
            return region()(batch)

    return (lambda batch: region()(batch)) if activation_budget == 1 else budgeted


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Before it raises an error, inductor prints a page of its own code; the engine says the error in one line."""
    return not record.getMessage().startswith("Error in codegen for")


def keep_compiled_code() -> None:
    """Compiled kernels go where they survive a restart; torch's own default is a temporary folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_code()))


def compiled_code() -> Path:
    return Path(read_variable("TORCHINDUCTOR_CACHE_DIR") or find_cache_directory() / "inductor")


# --- cudnn.benchmark ---

CUDNN_TRIALS_S = 20.0
"""What they add to a start: tens of seconds for U-Net (benchmarks/NOTES.md). Nothing of it is kept on disk."""


@contextmanager
def cudnn_trials(wanted: bool) -> Iterator[None]:
    """Algorithms are timed inside, or not; the process's own switch comes back afterwards."""
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
# captured step each runs by the forward that is named beside it, which calls kernels of our own; launches cost nothing
# there. A block without one is compiled alone, once for all of its shape. Steps that are compiled and not captured
# launch one by one: there the region is compiled whole, or, where a block has to be compiled in any case, block by
# block.

MOST_SHAPES = 64  # of one kind of block; torch gives up at 8

Blocks = Mapping[type[nn.Module], Callable[..., Any] | None]
"""Kinds of blocks, each with its forward in captured steps; None: compiled."""


DEEP = 8
"""From so many blocks on one is compiled for all: whole, the 48 of `gpt2_xl` take the compiler a minute and a half."""


def repeats_blocks(model: nn.Module, granted: str) -> bool:
    """Whether it is a deep network of ours (GPT-2, ViT, ResNet-101) whose blocks do not run as a chain, as they do in
    half formats under autocast."""
    is_deep = any(len(part) >= DEEP for part in model.modules() if isinstance(part, BlockSequence))
    return is_deep and granted in ("fp32", "tf32", "bf16-true")


def one_for_all(region: Callable[..., Any], compiler: Callable[..., Any]) -> Callable[..., Any]:
    """The region with one compiled block for all that repeat it; the rest runs as it is."""
    compiled = functools.cache(compiler)

    def run(*arguments: Any) -> Any:
        with compile_each_block(compiled), most_shapes():
            return region(*arguments)

    return run


def by_blocks(region: Callable[..., Any], blocks: Blocks, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """The region in one of these forms; `compiler` is torch.compile as it is to be called."""
    compiled = functools.cache(compiler)
    is_whole = all(forward is not None for forward in blocks.values())

    def run(*arguments: Any) -> Any:
        is_captured = is_forced_on("chain", otherwise=True)
        if is_whole and not is_captured:
            return compiled(region)(*arguments)
        # A forward of its own: a kind that inherits it has it from its parent, which may not be asked for.
        own = {kind: given for kind, given in blocks.items() if "forward" in vars(kind)}
        forwards = {k: given if given and is_captured else compiled(plain(k)) for k, given in own.items()}
        copies = weights_cast_again() if is_captured else contextlib.nullcontext()
        with _swapped(forwards), force(is_captured, "group_norm"), most_shapes(), copies:
            return region(*arguments)

    return run


def plain(kind: type[nn.Module]) -> Callable[..., Any]:
    """The class's forward itself."""
    forward: Callable[..., Any] = kind.forward
    return forward


def most_shapes() -> contextlib.AbstractContextManager[None]:
    found: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=MOST_SHAPES)
    return found


@contextlib.contextmanager
def _swapped(forwards: Mapping[type[nn.Module], Any]) -> Iterator[None]:
    """Classes have these forwards inside. Not the modules: a copied or stored module would take its own along."""
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
def weights_cast_again() -> Iterator[None]:
    """Copies live while their layer runs."""
    was_kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_without_copy, _copied_again):
            yield
    finally:
        torch.set_autocast_cache_enabled(was_kept)


Source = tuple[nn.Parameter, torch.dtype, bool]
"""A parameter, the format of its copy, and whether that is transposed, as linear layers keep it."""


def _without_copy(kept: Tensor) -> Tensor | Source:
    """What autograd keeps of a tensor: of a parameter's copy the parameter; detached, or an output that no backward
    passes would hold its node, which holds it."""
    cast, is_turned = kept.grad_fn, False
    if cast is not None and cast.name() == "TBackward0":
        cast, is_turned = cast.next_functions[0][0], True
    if cast is None or cast.name() != "ToCopyBackward0":
        return kept.detach()
    source = getattr(cast.next_functions[0][0], "variable", None)
    if not isinstance(source, nn.Parameter) or source.numel() != kept.numel() or source.device != kept.device:
        return kept.detach()
    return source, kept.dtype, is_turned


def _copied_again(kept: Tensor | Source) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    source, dtype, is_turned = kept
    copy = source.detach().to(dtype)
    return copy.t() if is_turned else copy
