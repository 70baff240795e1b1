"""Evaluation as training runs: under autocast, and without recording gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.syntax import Function, last


def find(amp: Amp) -> Iterator[Finding]:
    certain = any(region.enabled for region in amp.regions)
    if not amp.goes_backward:
        return
    for trace in amp.traces:
        yield from without_no_grad(amp, trace)
        if certain:
            yield from outside_autocast(amp, trace)


def evaluation_calls(trace: Trace) -> list[Event]:
    """Model calls after `model.eval()`, before the model trains again, in a function that never goes backward there."""
    found: list[Event] = []
    mode = ""
    for event in trace.events:
        if event.method == "eval" and isinstance(event.node, ast.Call) and not event.node.args and event.receiver:
            mode = event.receiver
        elif event.method == "train" and event.receiver == mode:
            mode = ""
        elif event.method in ("backward", "grad") and mode:
            return []
        elif mode and event.called == mode and event.loops:
            found.append(event)
    return found


def without_no_grad(amp: Amp, trace: Trace) -> Iterator[Finding]:
    whole = trace.root if isinstance(trace.root, Function) else None
    if "set_grad_enabled" in amp.script.text or any(
        "no_grad" in ast.unparse(c.func) for c in amp.script.calls_below(trace.root)
    ):
        return
    if whole is not None and whole.name in amp.called_under_no_grad:
        return
    for event in evaluation_calls(trace)[:1]:
        if not event.grad_off and not is_frozen(amp, trace, event.called):
            message = "evaluation records gradients: model.eval() alone does not stop that"
            yield amp.script.finding("eval-without-no-grad", event.node, message, fix="wrap it in torch.no_grad()")


def is_frozen(amp: Amp, trace: Trace, model: str) -> bool:
    """Whether its weights, or some of them, want no gradient: then little or nothing is recorded."""
    if any(event.receiver == model for event in trace.calls("requires_grad_")):
        return True
    loops = (node for node in amp.script.nodes if isinstance(node, ast.For) and "requires_grad" in ast.unparse(node))
    return any(f"{last(model)}.parameters" in ast.unparse(loop.iter) for loop in loops)


def outside_autocast(amp: Amp, trace: Trace) -> Iterator[Finding]:
    for event in evaluation_calls(trace)[:1]:
        if not event.regions:
            message = "training runs under autocast, evaluation does not: slower, and not the numbers training sees"
            fix = "open the same autocast around evaluation"
            yield amp.script.finding("eval-outside-autocast", event.node, message, fix=fix)
