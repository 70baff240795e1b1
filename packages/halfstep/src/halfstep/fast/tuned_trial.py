"""Code that Inductor tunes for the device, in place of the code that it compiles in less time.

In a run that is long enough, a compiled step is compiled once more between two steps. Some of its calls are computed in
another way if that is measured to be faster (kernel_choice.py), and Inductor tunes each of its own kernels by
coordinate descent when it first launches it. The graph is compared like that of any compiled code, both are timed, and
the faster one stays.

What tuning found is kept in halfstep's cache directory: later runs of the same model, device and versions read it, also
on another machine of the same kind to which the directory was copied.

GEMMs stay cuBLAS's: on an H200 with torch 2.11 Triton's templates would save 2.5 % of GPT-2's step and less of ViT-B's
and ConvNeXt-T's, and trying them takes 7 s and more per shape.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.disk import open_atomic_file
from halfstep.fast import compiled_trial
from halfstep.fast.compiled_trial import CompileHistory
from halfstep.fast.windows import Compiler, Graph, describe_window

if TYPE_CHECKING:
    from halfstep.fast.fast_path import Attempt, FastPath

TUNED: dict[Compiler, Compiler] = {
    "aten": "aten tuned",
    "inductor": "inductor tuned",
    "inductor fp8": "inductor tuned fp8",
}
"""The compiler that makes the same code, tuned."""
LIKELY_SAVING = 0.05
"""Share of the time of compiled steps that tuning saves, before it was measured for a model: 6.5 % for GPT-2 and 7.5 %
for ViT-B on an H200."""
SPENT = 0.2
"""Share of that saving which is spent on it at most, so that a run gains even if the saving is overestimated."""
MOST_S = 600.0
"""The most that a run spends on it."""
MOST_COMPILING = 0.5
"""Share of that which compiling alone may take, by how long it took before."""


def find_budget(path: FastPath, attempt: Attempt) -> float:
    """Return how many seconds tuning may take. 0 if compiling alone would take too much of them."""
    shape = attempt.shape
    if shape.tuning is None:
        window = describe_window(attempt.batches)
        compile_s, _ = CompileHistory(path.step, window).expect(0)
        _, saving = CompileHistory(path.step, ("tuned", window)).expect(0, LIKELY_SAVING)
        shape.tuning = compile_s, saving
    compile_s, saving = shape.tuning
    budget_s = min(MOST_S, SPENT * saving * compiled_trial.measure_rest(path, path.compiled))
    return budget_s if compile_s <= MOST_COMPILING * budget_s else 0.0


def try_tuned(path: FastPath, graph: Graph, attempt: Attempt, budget_s: float) -> str:
    """Tune and capture the window, and keep the faster of the two graphs. Return the line for the user, or nothing if
    this window shows nothing. Nothing is trained by it."""
    began, level = time.monotonic(), path.make_level(TUNED[path.compiled.compiler])
    history = CompileHistory(path.step, ("tuned", describe_window(attempt.batches)))
    kept = history.path.with_suffix(".bin")
    load_cache(kept)
    problem, captured, attempt.shape.tuning = "", None, (0.0, 0.0)  # it is tried once
    try:
        with limit_tuning(began + budget_s):
            captured = path.capture(level, attempt)
        if captured is not None:
            with path.aside(attempt):
                path.step.committed.zero_()  # the replays would run past the end of a table of learning rates
                before_s, after_s = (
                    compiled_trial.time_replays(one.replay, path.step.device) for one in (graph, captured)
                )
    except Exception as error:
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    # Outside of the except block, whose error holds frames and so activations.
    path.has_lost_graphs = path.step.device.type == "cuda"
    if captured is None and not problem:
        attempt.shape.tuning = None
        return ""
    history.write(time.monotonic() - began, 0.0 if problem else 1 - after_s / before_s)
    times = "" if problem else f"{1e3 * after_s:.3g} ms per step, {1e3 * before_s:.3g} ms without"
    if problem or after_s >= before_s:
        for call in attempt.calls:
            call.entry.codes.pop(level.compiler, None)
        return f"not tuned: {problem or times}"
    assert captured is not None
    path.tuned = level
    level.graphs[attempt.key], level.began_s = captured, path.in_steps_s
    del path.compiled.graphs[attempt.key]
    return f"tuned: {times}; {level.certificate}{save_cache(kept)}"


@contextlib.contextmanager
def limit_tuning(deadline: float) -> Iterator[None]:
    """Let Inductor tune no further kernel after the deadline. It tunes each one when it first launches it."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tune: Any = CachingAutotuner.coordinate_descent_tuning

    def tune_in_time(self: Any, launcher: Any, *arguments: Any, **options: Any) -> Any:
        if time.monotonic() < deadline:
            return tune(self, launcher, *arguments, **options)
        launcher.config.found_by_coordesc = True  # or the next launch would ask again
        return launcher

    CachingAutotuner.coordinate_descent_tuning = tune_in_time  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachingAutotuner.coordinate_descent_tuning = tune  # type: ignore[method-assign]


def load_cache(path: Path) -> None:
    """Give Inductor what an earlier run found. A file that cannot be read counts as none."""
    from halfstep.fast.dynamo_gaps import keep_quiet  # imports torch's compiler

    with keep_quiet(), contextlib.suppress(Exception):
        torch.compiler.load_cache_artifacts(path.read_bytes())


def save_cache(path: Path) -> str:
    """Keep what Inductor has found. Return what the line adds if it cannot be written."""
    if (found := torch.compiler.save_cache_artifacts()) is None:
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic_file(path) as hidden:
            hidden.write_bytes(found[0])
    except OSError as error:
        return f" (not kept for later runs: {error.strerror})"
    return ""
