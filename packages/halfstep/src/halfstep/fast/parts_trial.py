"""Whether a loss function that is not captured runs compiled, with graph breaks: it must be right, and faster.

This is for code that torch cannot trace as one graph, and for the shapes that get no graph because there are too many.
The steps of a trial are real steps, made by torch's kernels. At its first call every part is compared, and timed on the
side (compiled_parts.py). Once nothing new is compiled, the sums over the parts of a step decide, so that a refusal
leaves training as it would be without the trial. The first compiled steps are timed as a whole, and refused if they
are slower than eager ones.
"""

from __future__ import annotations

import enum
import statistics
import time
import traceback
from collections.abc import Callable
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
    COMPARED = "by torch's kernels, while new parts are compared and timed"
    TIMED = "eagerly, to compare their time with that of compiled steps"
    USED = "compiled"
    REFUSED = "eagerly"


LOOK_EVERY = 20  # eager steps between two looks at whether compiling pays
QUIET_STEPS, MOST_STEPS = 2, 40  # steps without new parts before a decision, and how many may take place first
NUM_TIMED = 6  # eager steps, and compiled ones
MOST_SHARE = 0.9  # of the time of torch's kernels that compiled parts may take
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
        """The backend flags and frozen weights for which `parts` were compiled."""
        self.num_eager = self.num_compared = self.num_quiet = self.num_renewals = 0
        self.eager_s: list[float] = []
        self.compiled_s: list[float] = []  # of steps
        self.compiling_s = 0.0  # in steps that compiled or compared something
        self.summary = ""

    @property
    def is_open(self) -> bool:
        """True if steps are, or may become, compiled in parts."""
        modules = self.path.step.model.modules()
        is_compiled = any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules)
        return self.stage is not Stage.REFUSED and not is_compiled and not self.path.find_recurrent()

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
        if self.stage is not Stage.TIMED:
            return self._run_compiled(loss_fn, window, eager)
        began = self._read_clock()
        facts = eager(loss_fn)
        self.eager_s.append(self._read_clock() - began)
        if len(self.eager_s) >= NUM_TIMED:
            self.stage = Stage.USED
        return facts

    def _read_clock(self) -> float:
        """Return the time; while steps are compared, what the device has to do is done."""
        if self.path.step.device.type == "cuda" and len(self.compiled_s) < NUM_TIMED:
            torch.cuda.synchronize(self.path.step.device)
        return time.perf_counter()

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

    def _decide(self, window: list[Batch], parts: CompiledParts) -> None:
        """Use compiled parts if those of the last step are faster than torch's kernels."""
        after_s, before_s = parts.compiled_s, parts.plain_s
        if not before_s:
            self._refuse("torch can compile no part of it")
            return
        times = f"its parts take {after_s * 1e3:.3g} ms per step, {before_s * 1e3:.3g} ms without"
        self._open_history(window).write(self.compiling_s, max(0.0, 1 - after_s / before_s))
        if after_s >= MOST_SHARE * before_s:
            self._refuse(times)
            return
        self.stage = Stage.TIMED
        self.summary = (
            f"{len(parts.parts)} compiled parts compared with torch's kernels, gradients off from fp32 by at most "
            f"{parts.error:.1g} (torch's kernels: {parts.error_of_torch:.1g})"
        )
        self.path.note_parts(f"{times}; {self.summary}")

    def _look_back(self, window: list[Batch]) -> None:
        """Refuse compiled parts after all if steps are not faster with them."""
        after_s, before_s = map(statistics.median, (self.compiled_s, self.eager_s))
        self._open_history(window).write(self.compiling_s, 1 - after_s / before_s)
        if after_s >= before_s:
            times = f"{after_s * 1e3:.3g} ms per step, {before_s * 1e3:.3g} ms without"
            self._refuse(f"{times}, as {NUM_TIMED} compiled steps have shown, which were rounded differently")

    def _refuse(self, reason: str) -> None:
        self.stage, self.parts = Stage.REFUSED, None
        self.path.refuse_parts(reason)

    # --- one compiled step ---

    def _prepare(self) -> CompiledParts:
        """Return the compiled parts for what Dynamo does not guard: backend flags, and which weights are frozen."""
        from halfstep.fast.compiled_parts import CompiledParts  # imports torch's compiler

        groups = [group for optimizer in self.path.step.optimizers for group in optimizer.param_groups]
        flags = (self.path.flags, [p.requires_grad for group in groups for p in group["params"]])
        if self.parts is None or flags != self.flags:
            self.num_renewals += self.parts is not None
            self.parts, self.flags = CompiledParts(self.path.step), flags
        self.parts.start_step(is_used=self.stage is Stage.USED)
        return self.parts

    def _run_compiled(self, loss_fn: LossFn, window: list[Batch], eager: Callable[[LossFn], Facts]) -> Facts:
        try:
            step, parts = self.path.step, self._prepare()
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}".splitlines()[0])
            return eager(loss_fn)
        number, num_news, began = step.attempted, parts.num_news, self._read_clock()

        def run(batch: Batch) -> Any:
            result = parts(loss_fn, batch)
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
            if not parts.is_used or step.attempted > number or not is_raised_in_backward(error):
                raise
            parts.fail(f"{type(error).__name__}: {error}".splitlines()[0])
        if facts is None:
            warn_user(f"compiled code raised after loss_fn had run: the step is dropped. {parts.failure}")
            facts = self._drop_step(loss_fn, eager)
        elif parts.is_at_fault:
            self.path.pardon(step.attempted)
            warn_user(f"{parts.failure}: it, not your model, caused the last dropped steps, and is no longer used")
        seconds = self._read_clock() - began
        if self.stage is Stage.USED:
            self.path.by_compiler.add(number)
        if not (is_quiet := parts.num_news == num_news):
            self.compiling_s += seconds
            self.path.aside_s += seconds
        self._settle(window, parts, seconds, is_quiet=is_quiet)
        return facts

    def _drop_step(self, loss_fn: LossFn, eager: Callable[[LossFn], Facts]) -> Facts:
        """Make a step that is dropped, and not counted as a fault: the user's code must not run twice."""

        def return_nan(_: Batch) -> Tensor:
            return torch.full((), float("nan"), device=self.path.step.device, requires_grad=True)

        return_nan.__wrapped__ = loss_fn  # type: ignore[attr-defined]
        facts = eager(return_nan)
        self.path.pardon(self.path.step.attempted)
        return facts

    def _settle(self, window: list[Batch], parts: CompiledParts, seconds: float, *, is_quiet: bool) -> None:
        """Go to the next stage, once a step is made."""
        if self.num_renewals > MAX_RENEWALS:
            parts.fail("backend flags, or whether weights require a gradient, change again and again")
        if self.stage is Stage.COMPARED:
            self.num_compared += 1
            self.num_quiet = self.num_quiet + 1 if is_quiet else 0
            if self.num_compared >= MOST_STEPS and self.num_quiet < QUIET_STEPS:
                changing = f"something new is compiled at every step, because this changes: {parts.cause}"
                are_compared = all(part.is_compared for part in parts.parts)
                parts.fail(changing if are_compared else "torch's kernels give no finite gradients to compare with")
        if parts.failure:
            self._refuse(parts.failure)
        elif self.stage is Stage.COMPARED and self.num_quiet >= QUIET_STEPS:
            self._decide(window, parts)
        elif self.stage is Stage.USED and is_quiet and len(self.compiled_s) < NUM_TIMED:
            self.compiled_s.append(seconds)
            if len(self.compiled_s) == NUM_TIMED:
                self._look_back(window)


def is_raised_in_backward(error: Exception) -> bool:
    """True if a backward pass has raised an error, in code that is torch's or generated, and not in a hook of the
    user's. The loss function may have started that pass."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_torchs = codes[-1].co_filename.startswith((str(Path(torch.__file__).parent), cache_dir()))
    return is_torchs and torch.autograd.graph._engine_run_backward.__code__ in codes
