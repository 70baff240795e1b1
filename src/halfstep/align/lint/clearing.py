"""Gradients are cleared once per step: not never, and not between the micro-batches of a window."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.accumulation import windows
from halfstep.align.lint.amp import Amp, is_optimizer_name, is_plain_backward, is_scaled_backward, last
from halfstep.align.lint.flow import Event, Trace

CLEARS = re.compile(r"zero_?_?grad|clear_?grad|\.grad\b|reset_grad|grad_?zero|closure", re.IGNORECASE)
"""Whatever could clear a gradient, or work on it by hand."""
WINDOW_WORDS = ("accum", "micro", "virtual", "update_freq", "iter_size", "grad")


def find(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from never_cleared(amp, trace)
        yield from cleared_within(amp, trace)


def optimizer_of(step: Event) -> str:
    """`optimizer` of `optimizer.step()` and of `scaler.step(optimizer)`, where its name says so."""
    name = step.arguments[0] if step.arguments else step.receiver
    return name if is_optimizer_name(name) else ""


def never_cleared(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """backward and step in one loop, and nothing in the file clears a gradient."""
    if CLEARS.search(amp.script.text):
        return
    backwards = [e for e in trace.events if e.loops and (is_plain_backward(e) or is_scaled_backward(e))]
    for step in trace.calls("step"):
        made = is_torch_optimizer(amp, optimizer_of(step))
        if made and any(e.loops == step.loops and e.index < step.index for e in backwards):
            message = (
                f"nothing clears the gradients that {last(optimizer_of(step))} steps with: each step adds to the last"
            )
            fix = f"{last(optimizer_of(step))}.zero_grad() after the step"
            yield amp.script.finding("gradients-not-cleared", step.node, message, fix=fix)
            return


def is_torch_optimizer(amp: Amp, name: str) -> bool:
    """Made here by torch.optim: another one may clear gradients by itself."""
    values = amp.script.assigned.get(name, []) if name else []
    makers = [amp.script.name_of(value.func) if isinstance(value, ast.Call) else "" for value in values]
    return bool(makers) and all(maker.startswith("torch.optim.") for maker in makers)


def cleared_within(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """zero_grad at every micro-batch while the step waits for the window's end: only the last one counts."""
    for window in windows(trace):
        optimizer = optimizer_of(window.step)
        inside = [e for e in trace.events if e.loops == window.step.loops]
        stepped = {optimizer_of(e) for e in inside if e.method == "step"} - {""}
        if not any(word in window.length.lower() for word in WINDOW_WORDS) and len(stepped) > 1:
            continue
        for event in inside:
            same = last(event.receiver) == last(optimizer) or last(event.receiver) in amp.script.model_names
            if event.method == "zero_grad" and same and event.conditions <= window.backward.conditions:
                message = f"gradients are cleared at every micro-batch: of {window.length} only the last one counts"
                fix = "clear them where the optimizer steps"
                yield amp.script.finding(
                    "cleared-within-window", event.node, message, fix=fix, related=window.step.node
                )
                break
