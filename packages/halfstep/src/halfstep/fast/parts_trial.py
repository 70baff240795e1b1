"""Whether a loss function that is not captured runs compiled, with graph breaks: it must be right, and faster.

This is for code that torch cannot trace whole, and for the shapes that get no graph because there are too many. The
steps of a trial are real steps. In its first ones every part is compared at its first call (compiled_parts.py); then
blocks of compiled and eager steps alternate, and the medians decide. A device is timed by events, without a wait.
"""

from __future__ import annotations

import contextlib
import enum
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.fast.compiled_trial import CompileHistory
from halfstep.fast.windows import list_tensors
from halfstep.step.batches import Batch
from halfstep.step.facts import Facts
from halfstep.step.step import LossFn
from halfstep.step.user_warnings import warn_user

if TYPE_CHECKING:
    from halfstep.fast.compiled_parts import CompiledParts
    from halfstep.fast.fast_path import FastPath


class Stage(enum.Enum):
    """How windows run that are not captured."""

    EAGER = "eagerly, until compiling is likely to pay"
    COMPARED = "compiled, while new parts are compared"
    TIMED = "compiled and eagerly in turn"
    USED = "compiled"
    REFUSED = "eagerly"


LOOK_EVERY = 20  # eager steps between two looks at whether compiling pays
QUIET_STEPS, MOST_STEPS = 2, 40  # compiled steps without new parts before the timing, and how many may take place first
BLOCK, NUM_BLOCKS = 6, 6  # timed steps in a row of one kind, and how many such blocks
NODES_PER_MODULE = 10  # about how many operations a module has, forward and backward
MAX_RENEWALS = 4  # how often everything is compiled again because of backend flags or frozen weights


class Spoiled(Exception):
    """Compiled code has raised after the user's code has run."""


class PartsTrial:
    """Makes the steps that are not captured."""

    def __init__(self, path: FastPath) -> None:
        self.path, self.stage = path, Stage.EAGER if path.asked in ("auto", "compile") else Stage.REFUSED
        self.parts: CompiledParts | None = None
        self.flags: object = None
        """The backend flags for which `parts` were compiled."""
        self.num_eager = self.num_compared = self.num_quiet = self.num_renewals = 0
        self.times: dict[bool, list[tuple[Mark, Mark]]] = {False: [], True: []}
        """Beginning and end of timed steps, by whether they were compiled."""
        self.without_gradient: list[Tensor] = []
        """Trained parameters that got no gradient in the last eager step."""
        self.compiling_s = 0.0  # in steps that compiled or compared something
        self.summary = ""

    @property
    def is_open(self) -> bool:
        """True if steps are, or may become, compiled in parts."""
        modules = self.path.step.model.modules()
        is_compiled = any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules)
        return self.stage is not Stage.REFUSED and not is_compiled

    def check_again(self) -> None:
        """Compare all parts again: a step that compiled code made was bad."""
        if self.parts is not None:
            self.parts.check_again()

    def make_step(self, loss_fn: LossFn, window: list[Batch], eager: Callable[[LossFn], Facts]) -> Facts:
        """Make a step that is not captured, by compiled parts or eagerly."""
        path, is_due = self.path, self.path.step.watch is not None and self.path.step.watch.is_due()
        if self.stage is Stage.EAGER and not is_due and self._is_worth_it(window) and self.is_open:
            path.tell("compiles the parts of loss_fn that torch can trace, which takes a while")
            self.stage = Stage.COMPARED
        # The watch's hooks and global hooks are not compiled.
        if self.stage in (Stage.EAGER, Stage.REFUSED) or is_due or path.has_global_hooks:
            self.num_eager += 1
            return eager(loss_fn)
        number = sum(map(len, self.times.values()))
        is_compiled = self.stage is not Stage.TIMED or number // BLOCK % 2 == 1
        with self._time(is_compiled):
            facts = self._run_compiled(loss_fn, eager) if is_compiled else eager(loss_fn)
        if not is_compiled:
            self.without_gradient = [p for p in path.step.find_trained_parameters() if p.grad is None]
        if self.stage is Stage.TIMED and number + 1 >= BLOCK * NUM_BLOCKS:
            self._decide(window)
        return facts

    def _is_worth_it(self, window: list[Batch]) -> bool:
        """True once the time that compiled code is likely to save exceeds the time that compiling takes."""
        path = self.path
        if path.asked == "compile":
            return True
        if self.num_eager == 0 or self.num_eager % LOOK_EVERY:
            return False
        spent_s = path.measure_step() * self.num_eager
        if path.options.num_steps is not None:
            left = max(0, path.options.num_steps - path.step.attempted)
            spent_s *= left / max(1, path.step.attempted - path.first)
        seconds, saving = self._open_history(window).expect(NODES_PER_MODULE * len(list(path.step.model.modules())))
        return spent_s * saving > seconds

    def _open_history(self, window: list[Batch]) -> CompileHistory:
        # Without lengths, which may be many.
        shapes = [(tensor.dtype, tensor.shape[:1]) for batch in window for tensor in list_tensors(batch)]
        return CompileHistory(self.path.step, ("in parts", shapes))

    @contextlib.contextmanager
    def _time(self, is_compiled: bool) -> Iterator[None]:
        if self.stage is not Stage.TIMED:
            yield
            return
        began = Mark(self.path.step.device)
        yield
        self.times[is_compiled].append((began, Mark(self.path.step.device)))

    def _decide(self, window: list[Batch]) -> None:
        """Use compiled parts if they are faster. The last step was compiled."""
        before_s, after_s = (measure_steps(self.times[is_compiled]) for is_compiled in (False, True))
        times = f"{after_s * 1e3:.3g} ms per step, {before_s * 1e3:.3g} ms without"
        self._open_history(window).write(self.compiling_s, 1 - after_s / before_s)
        zeros = [p for p in self.without_gradient if p.grad is not None and not p.grad.any()]
        if zeros:
            self._refuse("weights that get no gradient would get one of zeros, to which optimizers add weight decay")
        elif after_s >= before_s:
            self._refuse(times)
        else:
            assert self.parts is not None
            self.stage = Stage.USED
            self.summary = (
                f"{len(self.parts.parts)} compiled parts compared with torch's kernels, gradients off from fp32 by at "
                f"most {self.parts.error:.1g} (torch's kernels: {self.parts.error_of_torch:.1g})"
            )
            self.path.note_parts(f"{times}; {self.summary}")

    def _refuse(self, reason: str) -> None:
        self.stage, self.parts = Stage.REFUSED, None
        self.path.refuse_parts(reason)

    # --- one compiled step ---

    def _prepare(self) -> CompiledParts:
        """Return the compiled parts for the backend flags in force, which Dynamo does not guard."""
        from halfstep.fast.compiled_parts import CompiledParts  # imports torch's compiler

        flags = self.path.flags
        if self.parts is None or self.parts.is_outdated or flags != self.flags:
            self.num_renewals += self.parts is not None
            self.parts, self.flags = CompiledParts(self.path.step), flags
        return self.parts

    def _run_compiled(self, loss_fn: LossFn, eager: Callable[[LossFn], Facts]) -> Facts:
        try:
            step, parts = self.path.step, self._prepare()
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}".splitlines()[0])
            return eager(loss_fn)
        number, num_news, began = step.attempted, parts.num_news, time.monotonic()
        is_handed_over = False

        def run(batch: Batch) -> Any:
            nonlocal is_handed_over
            is_handed_over = True
            result = parts(loss_fn, batch)
            is_handed_over = False
            if parts.is_spoiled:
                raise Spoiled
            return result

        run.__wrapped__ = loss_fn  # type: ignore[attr-defined]
        facts: Facts | None = None
        try:
            facts = eager(run)
        except Spoiled:
            pass
        except Exception as error:
            if is_handed_over or step.attempted > number or not is_raised_by_torch(error):
                raise
            parts.fail(f"{type(error).__name__}: {error}".splitlines()[0])  # in backward
        if facts is None:
            warn_user(f"compiled code raised after loss_fn had run: the step is dropped. {parts.failure}")
            facts = self._drop_step(loss_fn, eager)
        elif parts.is_at_fault:
            self.path.pardon(step.attempted)
            warn_user(
                f"{parts.failure}: the steps that were dropped last are its fault, not your model's; it is given up"
            )
        self.path.by_compiler.add(number)
        if not (is_quiet := parts.num_news == num_news):
            self.compiling_s += time.monotonic() - began
            self.path.aside_s += time.monotonic() - began
        self._settle(parts, is_quiet=is_quiet)
        return facts

    def _drop_step(self, loss_fn: LossFn, eager: Callable[[LossFn], Facts]) -> Facts:
        """Make a step that is dropped, and not counted as a fault: the user's code must not run twice."""

        def return_nan(_: Batch) -> Tensor:
            return torch.full((), float("nan"), device=self.path.step.device, requires_grad=True)

        return_nan.__wrapped__ = loss_fn  # type: ignore[attr-defined]
        facts = eager(return_nan)
        self.path.pardon(self.path.step.attempted)
        return facts

    def _settle(self, parts: CompiledParts, *, is_quiet: bool) -> None:
        """Go to the next stage, once a compiled step is made."""
        if not parts.failure and self.num_renewals > MAX_RENEWALS:
            parts.fail("backend flags, or whether weights require a gradient, change again and again")
        if self.stage is Stage.COMPARED:
            self.num_compared += 1
            self.num_quiet = self.num_quiet + 1 if is_quiet else 0
            if self.num_compared >= MOST_STEPS and self.num_quiet < QUIET_STEPS:
                parts.fail(f"something new is compiled at every step, because this changes: {parts.cause}")
            elif self.num_quiet >= QUIET_STEPS:
                self.stage = Stage.TIMED
        if parts.failure:
            self._refuse(parts.failure)


class Mark:
    """A time on the device, taken without a wait."""

    def __init__(self, device: torch.device) -> None:
        self.host_s, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def measure_until(self, other: Mark) -> float:
        """Return the seconds until another mark; waits for it."""
        if self.event is None or other.event is None:
            return other.host_s - self.host_s
        other.event.synchronize()
        return float(self.event.elapsed_time(other.event)) * 1e-3


def measure_steps(times: list[tuple[Mark, Mark]]) -> float:
    """Return the median of the seconds of steps."""
    return statistics.median(began.measure_until(end) for began, end in times)


def is_raised_by_torch(error: Exception) -> bool:
    """True if the innermost Python code is torch's or generated, as in a backward pass without hooks of the user's."""
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    path = traceback.tb_frame.f_code.co_filename
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return path.startswith((str(Path(torch.__file__).parent), cache_dir()))
