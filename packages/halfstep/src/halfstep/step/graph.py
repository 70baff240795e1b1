"""A whole step as one CUDA graph: forward, backward, verdict, clipping, optimizer, average and counters in one launch.

A graph replays the same kernels on the same memory. So it is valid for windows of one shape, inputs are copied into
static tensors, and the step writes everything in place. The verdict, the loss scale and the schedule are device tensors
(see step.py), so a bad step is dropped inside the graph as outside of it.

Capturing runs nothing: weights, counters and generators are the same before and after, whether it works or not.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep.step.batches import Weight, read_sample_ids
from halfstep.step.facts import Facts, read_rng_state, restore_rng
from halfstep.step.flat import are_same_objects
from halfstep.step.optim.single_pass import SinglePass
from halfstep.step.step import GuardedStep, LossFn

Batch: TypeAlias = dict[str, Tensor]
Shape: TypeAlias = tuple[object, ...]
Pool: TypeAlias = Any  # what `torch.cuda.graph_pool_handle()` gives: memory that several graphs share


class CaptureFailed(Exception):
    """Raised if a step cannot be captured; the message gives the reason in one line."""


def describe_shape(window: list[Batch]) -> Shape:
    return tuple(
        (name, tuple(value.shape), value.stride(), value.dtype)
        for batch in window
        for name, value in sorted(batch.items())
    )


def explain_not_copied(window: list[Batch], device: torch.device) -> str:
    """Name inputs that a replay would not read again: kernels keep the host values they were captured with."""
    elsewhere = sorted({name for batch in window for name, value in batch.items() if value.device != device})
    return f"{', '.join(map(repr, elsewhere))} in the batch not on {device}" if elsewhere else ""


class GraphedStep:
    commits = True  # whether the graph holds the optimizers

    def __init__(self, step: GuardedStep, loss_fn: LossFn, window: list[Batch], pool: Pool) -> None:
        if reason := self._find_obstacle(step) or explain_not_copied(window, step.device):
            raise CaptureFailed(reason)
        self.step, self.generation = step, step.generation
        self.tables = list_tables(step)
        self.inputs = [
            {name: torch.empty_like(value).copy_(value) for name, value in batch.items()} for batch in window
        ]
        self.graph = torch.cuda.CUDAGraph()
        self.gradients: list[tuple[Tensor, Tensor]] = []  # of each parameter, if the step is watched
        self.passes: list[SinglePass] = []  # kernels read these tables at every replay: keep them alive
        self.facts: Any = self._capture(loss_fn, pool)
        for single_pass in self.passes:
            single_pass.fill()

    def __del__(self) -> None:
        """Wait for running replays before their memory is freed.

        The allocator waits only for the capture's stream, and replays run on another."""
        try:
            # A capture in progress began with a synchronisation, and another one would break it.
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self.step.device)
        except Exception:  # at interpreter exit CUDA may be gone, and so may the modules of this file
            return

    @property
    def is_valid(self) -> bool:
        return self.generation == self.step.generation and are_same_objects(self.tables, list_tables(self.step))

    def __call__(
        self, window: list[Batch], ids: tuple[Tensor, ...] | None = None, fill: Callable[[], None] = lambda: None
    ) -> Facts:
        """Make one step by a replay, without a wait. Sample ids are those of the window, unless given. `fill` is called
        when forward and backward have run, before hooks that read what they computed."""
        step = self.step
        rng = read_rng_state(step.device) if step.keeps_rng else {}
        if step.watch is not None:
            step.watch.begin()
        self._replay(window)
        fill()
        facts = self.facts.copy_for_replay(step.attempted)
        facts.ids, facts.rng = read_sample_ids(window) if ids is None else ids, rng
        step.attempted += 1
        step.outbox.send(facts)
        if step.watch is not None:
            step.watch.end(facts, self.gradients)
        return facts

    def _replay(self, window: list[Batch]) -> None:
        static: list[Tensor] = []
        given: list[Tensor] = []
        for own, batch in zip(self.inputs, window, strict=True):
            for name, value in batch.items():
                if value.ndim == 0 and value.is_cpu:  # a Python number: an argument of a kernel, not a copy
                    own[name].fill_(value)
                else:
                    static.append(own[name])
                    given.append(value)
        if given:
            torch._foreach_copy_(static, given, non_blocking=True)
        self.graph.replay()

    def replay_gradients(self, window: list[Batch]) -> tuple[Tensor, Weight]:
        raise AssertionError("this graph commits what it computes")

    def _find_obstacle(self, step: GuardedStep) -> str:
        return step.why_not_captured()

    def _capture(self, loss_fn: LossFn, pool: Pool) -> Any:
        stream = torch.cuda.current_stream(self.step.device)
        reason = ""
        # A reference cycle that holds an earlier step's autograd graph keeps AccumulateGrad nodes of the old stream
        # alive, and gradients accumulated on another stream than the capture's break it.
        gc.collect()
        with open_for_capture(self.step, self.commits) as self.passes:
            try:
                # thread_local: other threads (loader, logger) may use the device during the capture.
                capture = torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local")
                with use_growing_segments(), use_own_workspace(), capture:
                    try:
                        return self._record(loss_fn)
                    except Exception as error:
                        # Ending the capture may fail as well, with a less useful message.
                        reason = _read_first_line(error)
                        raise
            except CaptureFailed:
                raise
            except Exception as error:
                reason = reason or _read_first_line(error)
            # Outside of the except block, whose error holds frames and so the activations.
            _end_broken_capture(stream, pool)
            raise CaptureFailed(reason)

    def _record(self, loss_fn: LossFn) -> Any:
        facts = self.step.forward_backward(loss_fn, self.inputs)
        if reason := self._find_obstacle(self.step):
            raise CaptureFailed(reason)
        self.step.commit_on_device(facts)
        if self.step.watch is not None:
            # Kept, their memory is not used for anything else, and holds the gradients of the last replay.
            self.gradients = [(p, p.grad) for p in self.step.find_trained_parameters() if p.grad is not None]
        return facts


class GraphedBackward(GraphedStep):
    """Forward and backward as one CUDA graph. Verdict and commit follow its replay, for optimizers and hooks that run
    Python code."""

    commits = False

    def __call__(
        self, window: list[Batch], ids: tuple[Tensor, ...] | None = None, fill: Callable[[], None] = lambda: None
    ) -> Facts:
        def replay(*_: Any) -> tuple[Tensor, Weight]:
            found = self.replay_gradients(window)
            fill()
            return found

        facts = self.step.compute(run_nothing, window, replay)
        facts.ids = read_sample_ids(window) if ids is None else ids
        self.step.commit(facts)
        return facts

    def replay_gradients(self, window: list[Batch]) -> tuple[Tensor, Weight]:
        """Do by a replay what `GuardedStep.accumulate_gradients` does."""
        self._replay(window)
        loss, weight, gradients = self.facts
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return loss.clone(), weight

    def _find_obstacle(self, step: GuardedStep) -> str:
        return step.writes.why_not_captured

    def _record(self, loss_fn: LossFn) -> Any:
        parameters = self.step.find_trained_parameters()
        loss, weight = self.step.accumulate_gradients(loss_fn, self.inputs, parameters)
        return loss, weight, [(p, p.grad) for p in parameters if p.grad is not None]


def run_nothing(batch: Any) -> Tensor:
    """Take the place of a loss function whose code a graph holds."""
    raise AssertionError("a replay runs no loss function")


def list_tables(step: GuardedStep) -> list[Tensor]:
    """Return what a graph reads or writes and is replaced when it grows: schedule tables, and averages."""
    tables = [tabulated.table for tabulated in (step.rates, step.values) if tabulated is not None]
    return tables if step.ema is None else [*tables, *step.ema.shadows]


@contextlib.contextmanager
def open_for_capture(step: GuardedStep, commits: bool = True) -> Iterator[list[SinglePass]]:
    """Prepare all optimizers for a capture inside, and undo that afterwards, whether it succeeded or not."""
    rng = read_rng_state(step.device)
    _make_fused_capturable(step)
    step.forget_capture()  # copies in memory that is not the graph's might be freed before it
    try:
        yield _make_passes(step) if commits else []
    finally:
        step.forget_capture()
        restore_rng(rng, step.device)


def _make_passes(step: GuardedStep) -> list[SinglePass]:
    try:
        return [made for c in step.committers if (made := c.open_capture(step.device)) is not None]
    except Exception as error:  # out of memory, or Triton's
        raise CaptureFailed(_read_first_line(error)) from error


def _read_first_line(error: Exception) -> str:
    """Return an error's first line, and the second if the first only announces it: `backend='inductor' raised:`."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "legacy stream" in lines[0]:
        return f"{lines[0]} (a tensor of an earlier step still holds its autograd graph: keep it detached)"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _end_broken_capture(stream: torch.cuda.Stream, pool: Pool) -> None:
    """Clean up what torch leaves behind when a capture cannot be ended.

    The capture's stream stays current, so that memory cached for the old one would be unused. Up to torch 2.11 the
    allocator still believes a capture is running and never frees memory, and so does the generator: dropout fails."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize(stream.device)
    with contextlib.suppress(RuntimeError):  # the first call raises where torch has already done it
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        torch._C._cuda_releasePool(stream.device.index, pool)
    # An empty capture that succeeds takes the generator out of the capturing state.
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros((), device=stream.device)


def _make_fused_capturable(step: GuardedStep) -> None:
    """Set `capturable`: fused optimizers keep their counters on the device anyway, but refuse a capture without it."""
    for optimizer in step.optimizers:
        for group in optimizer.param_groups:
            if group.get("fused") and "capturable" in group:
                group["capturable"] = True


# --- the memory a graph keeps for its replays ---
# torch's allocator takes memory from the driver in segments of fixed size. Outside of a graph a gap in one is reused by
# the next step or freed; a graph's segments stay reserved while it lives. In an expandable segment, one range of
# addresses that grows at its end, freed neighbours are joined and hardly a gap remains.

SETTING = "expandable_segments"
CONFIG_KEY = "PYTORCH_CUDA_ALLOC_CONF"
"""The key of the allocator snapshot that holds the settings last given, by whichever variable or call."""

_users_settings: dict[str, str] = {}
"""The user's settings, by the text we restored them with: the allocator cannot unset a setting."""


@contextlib.contextmanager
def use_growing_segments() -> Iterator[None]:
    """Allocate in expandable segments inside, and restore the allocator's settings afterwards.

    A setting by the user, in PYTORCH_ALLOC_CONF or in the program, takes precedence.
    """
    settings = _read_settings()
    if settings is None or settings.get(SETTING):
        yield
        return
    found = str(settings.get(CONFIG_KEY, ""))
    said = _users_settings.get(found, found)
    if SETTING in said:
        yield
        return
    _write_settings(said, is_on=True)
    try:
        yield
    finally:
        _users_settings[_write_settings(said, is_on=False)] = said


def _read_settings() -> dict[str, object] | None:
    if not sys.platform.startswith("linux") or torch.cuda.get_allocator_backend() != "native":
        return None
    found: dict[str, object] | None = torch.cuda.memory._snapshot().get("allocator_settings")
    return found


def _write_settings(said: str, *, is_on: bool) -> str:
    """Write all earlier settings as well: one that is not mentioned may fall back to its default."""
    words = ",".join(filter(None, [said, f"{SETTING}:{is_on}"]))
    torch._C._accelerator_setAllocatorSettings(words)
    return words


@contextlib.contextmanager
def use_own_workspace() -> Iterator[None]:
    """Let cuBLAS allocate a new workspace inside. It keeps one for each stream, in the memory of the first graph that
    was captured there, and later graphs would still write to it when that graph is gone."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
