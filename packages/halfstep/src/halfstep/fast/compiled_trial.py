"""Inductor's code in place of torch's kernels: whether to try it, whether to use it, and whether it is still right."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import get_total_norm

from halfstep.disk import find_cache_directory
from halfstep.fast.certificate import subtract
from halfstep.fast.windows import (
    Compiler,
    Graph,
    NotTraced,
    Replay,
    are_finite,
    describe_window,
    run_calls,
    run_reference,
)
from halfstep.hardware.cache import read_json, write_json
from halfstep.step.batches import Batch
from halfstep.step.step import GuardedStep, LossFn
from halfstep.step.user_warnings import warn_user

if TYPE_CHECKING:
    from halfstep.fast.fast_path import Attempt, FastPath, Level

COMPILED: Compiler = "inductor"
COMPILE_S, COMPILE_S_PER_NODE = 5.0, 0.02
"""About what Inductor takes for a step: seconds, and seconds per operation of its graphs (forward and backward)."""
LIKELY_SAVING = 0.25
"""Share of the time of captured torch kernels that compiled ones save: 12 to 56 % for six models on an H200."""
TIMED = 20  # replays
ERROR = 2.0  # how much further from fp32 compiled gradients may be than those of torch's kernels
ROUNDING = 1e-5  # relative, of sums in another order in fp32
MOST_APART = 0.1  # relative, of compiled and uncompiled gradients, where the code does not run in fp32


def is_worth_it(path: FastPath, attempt: Attempt) -> bool:
    """True once the time that compiled code is likely to save exceeds the time that compiling takes."""
    shape = attempt.shape
    if shape.expected is None:
        num_nodes = sum(entry.num_nodes for tracer in path.tracers.values() for entry in tracer.entries)
        shape.expected = CompileHistory(path.step, describe_window(attempt.batches)).expect(num_nodes)
    seconds, saving = shape.expected
    return measure_rest(path, path.level) * saving > seconds


def measure_rest(path: FastPath, level: Level) -> float:
    """Return how many seconds of steps are left for a level; if the number of steps is not known, as many as there
    were since its first graph."""
    spent = path.in_steps_s - level.began_s
    if path.options.num_steps is not None:
        spent *= max(0, path.options.num_steps - path.step.attempted) / max(1, level.num_replays)
    return spent


def try_compiled(path: FastPath, graph: Graph, attempt: Attempt) -> None:
    """Compile and capture the window, compare, and keep the faster of the two graphs. Nothing is trained by it: the
    step is made by a graph that has been accepted."""
    began = time.monotonic()
    attempt.level = level = path.compiled = path.make_level(COMPILED)
    compiled = path.capture(level, attempt)
    attempt.level = path.level
    if compiled is None:  # the step would be dropped, which shows nothing: try the next one
        return
    with path.aside(attempt):
        path.step.committed.zero_()  # the replays would run past the end of a table of learning rates
        before_s, after_s = (time_replays(one.replay, path.step.device) for one in (graph, compiled))
    history = CompileHistory(path.step, describe_window(attempt.batches))
    history.write(time.monotonic() - began, 1 - after_s / before_s)
    times = f"{after_s * 1e3:.3g} ms per step, {before_s * 1e3:.3g} ms without"
    if after_s > before_s:
        path.move("refused", times)
        return
    level.graphs[attempt.key], level.began_s = compiled, path.in_steps_s
    del path.level.graphs[attempt.key]
    attempt.shape.is_compiled = True
    path.move("accepted", f"{times}; {level.certificate}")


def compare_gradients(path: FastPath, level: Level, attempt: Attempt) -> bool:
    """Raise NotTraced if the compiled code's gradients are further from fp32 than ERROR times those of torch's kernels,
    or not finite where theirs are. Return False if neither are finite, which shows nothing."""
    step = path.step
    window: Sequence[Any] = attempt.calls
    gradients = []
    uncompiled: Compiler = "aten fp8" if level.compiler.endswith("fp8") else "aten"
    for call in attempt.calls:
        if uncompiled not in call.entry.codes:
            with path.timed():
                call.entry.compile(uncompiled)
    plain, compiled = (run_calls(attempt, compiler, step, []) for compiler in (uncompiled, level.compiler))
    exact = turn_off_autocast(run_reference(attempt, has_exchanges=False))
    is_random = any(call.entry.is_random for call in attempt.calls)
    with path.aside(attempt) as (state, before):
        for code in (plain, compiled) if is_random else (plain, compiled, exact):
            state.restore(before)
            try:
                step.forward_backward(code, window)
            except RuntimeError:  # code that says .to(torch.bfloat16) does not run in fp32
                if code is not exact:
                    raise
            step.writes.put_back()
            gradients.append([p.grad.float() for p in step.find_trained_parameters() if p.grad is not None])
    if not are_finite(gradients[0]):
        return False
    if not are_finite(gradients[1]):
        raise NotTraced("the compiled code's gradients are not finite, but those of torch's kernels are")
    if is_random:
        level.certificate.gradients = "not compared, because Inductor and torch draw different random numbers"
        return True
    size = float(get_total_norm(gradients[0]))
    has_exact = [g.shape for g in gradients[2]] == [g.shape for g in gradients[0]] and are_finite(gradients[2])
    if not has_exact:
        gradients[2] = gradients[0]
    of_plain, of_compiled = (float(get_total_norm(subtract(own, gradients[2]))) for own in gradients[:2])
    allowed = ERROR * of_plain + ROUNDING * size if has_exact else MOST_APART * size
    if not of_compiled <= allowed:
        raise NotTraced(
            f"the compiled code's gradients are off by {of_compiled / size:.2g}, those of torch's kernels by "
            f"{of_plain / size:.2g}"
        )
    if size:
        other = f"fp32 (torch's kernels: {of_plain / size:.1g})" if has_exact else "those of torch's kernels"
        level.certificate.gradients = f"within {of_compiled / size:.1g} of {other}"
    return True


def check_again(path: FastPath, graph: Graph, attempt: Attempt) -> None:
    """After a bad step of compiled code: compute this window with it and with torch's kernels, from one state. If only
    compiled code fails, give it up: the dropped steps are its fault."""
    with path.aside(attempt) as (state, before):
        state.has_gradients = bool(path.find_eager_commit())
        plain = state.run_from(before, lambda: path.try_calls("aten", attempt))
        compiled = state.run_from(before, lambda: path.replay_only(graph, attempt))
    if path.is_dropped(state, plain, before):
        return  # shows nothing: look at the next window
    if not path.is_dropped(state, compiled, before):
        path.move("cleared")
        return
    path.pardon(path.step.attempted)
    reason = "compiled code gives values that are not finite where torch's kernels do not"
    warn_user(f"{reason}: it, not your model, caused the last dropped steps, and is no longer used")
    raise NotTraced(reason)


def time_replays(replay: Replay, device: torch.device) -> float:
    """Return the seconds of one replay. It trains: restore the state afterwards."""
    for num in (2, TIMED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(num):
            replay(replay.inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / TIMED


def turn_off_autocast(loss_fn: LossFn) -> LossFn:
    def run(batch: Batch) -> Any:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return loss_fn(batch)

    return run


class CompileHistory:
    """What compiling a step took and saved for windows of one shape, kept on disk for later runs of the same model,
    device and versions: seconds, and the share of a step's time."""

    def __init__(self, step: GuardedStep, shapes: object) -> None:
        identity = (
            str(step.model), str(shapes), [type(optimizer).__name__ for optimizer in step.optimizers],
            step.plan.granted, step.plan.device_name, torch.__version__,
        )  # fmt: skip
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.path = find_cache_directory() / f"step-{name}.json"

    def expect(self, num_nodes: int, likely_saving: float = LIKELY_SAVING) -> tuple[float, float]:
        """Return what was measured before, or an estimate by the number of operations."""
        try:
            stored = read_json(self.path)
            return float(stored["seconds"]), float(stored["saving"])
        except (OSError, ValueError, LookupError, TypeError):  # no usable file: measure
            return COMPILE_S + COMPILE_S_PER_NODE * num_nodes, likely_saving

    def write(self, seconds: float, saving: float) -> None:
        # If it cannot be written, the next run measures again.
        write_json(self.path, {"seconds": seconds, "saving": saving})
