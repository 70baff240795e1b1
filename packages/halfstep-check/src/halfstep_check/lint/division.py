"""The loss is divided by the window's length once, and only where a window is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.accumulation import ACCUMULATION_WORDS, loss_chain
from halfstep_check.lint.amp import Amp, is_plain_backward, is_scaled_backward
from halfstep_check.lint.clearing import is_torch_optimizer
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.syntax import dotted_name, last, names_in


def find(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        for backward in (e for e in trace.events if e.loops and (is_plain_backward(e) or is_scaled_backward(e))):
            divisions = list(divided(amp, trace, backward))
            yield from twice(amp, divisions)
            yield from without_window(amp, trace, backward, divisions)


def divided(amp: Amp, trace: Trace, backward: Event) -> Iterator[tuple[Event, set[str], str]]:
    """Divisions by a number of micro-batches on the way to backward, first to last: where, of what, by what."""
    chain = [e for e in loss_chain(trace, backward) if not e.excludes(backward)]
    for event in (*reversed(chain), backward):
        for of, by in (*divisions_in(event.node), *divisions_of_callee(amp, event.node)):
            if any(word in last(by).lower() for word in ACCUMULATION_WORDS):
                yield event, of, last(by)


def divisions_in(node: ast.AST) -> Iterator[tuple[set[str], str]]:
    """Names that are divided, and the divisor, of `loss / n` and `loss /= n`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div):
            yield names_in(inner.left), dotted_name(inner.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        yield names_in(node.target), dotted_name(node.value)


def divisions_of_callee(amp: Amp, node: ast.AST) -> Iterator[tuple[set[str], str]]:
    """What a function of this file divides in its `return`: what it hands over is divided already."""
    call = node.value if isinstance(node, ast.Assign) else None
    own = amp.script.function_named(last(dotted_name(call.func))) if isinstance(call, ast.Call) else None
    for end in (n for n in amp.script.below(own) if isinstance(n, ast.Return)) if own is not None else ():
        yield from ((set(), by) for _, by in divisions_in(end))


def twice(amp: Amp, divisions: list[tuple[Event, set[str], str]]) -> Iterator[Finding]:
    for number, (first, _, by) in enumerate(divisions):
        made = {last(target) for target in first.targets}
        for second, of, other in divisions[number + 1 :]:
            certain = first.conditions <= second.conditions and first.node is not second.node
            if other == by and made & of and certain:
                message = f"the loss is divided by {by} a second time: the gradient is {by} times too small"
                fix = "divide it once"
                yield amp.script.finding(
                    "accumulation-divided-twice", second.node, message, fix=fix, related=first.node
                )
                return


def without_window(
    amp: Amp, trace: Trace, backward: Event, divisions: list[tuple[Event, set[str], str]]
) -> Iterator[Finding]:
    """The loss is divided by a number of micro-batches, and the optimizer steps and clears after each of them."""
    event, _, by = divisions[0] if divisions else (None, None, "")
    later = [e for e in trace.events if e.loops == backward.loops and not e.excludes(backward)]
    steps = [e for e in later if e.optimizer and e.index > backward.index and e.conditions <= backward.conditions]
    cleared = any(e.method == "zero_grad" and e.conditions <= backward.conditions for e in later)
    counted = any("%" in text for e in trace.calls("step") for text, _ in e.conditions)
    if event is not None and steps and cleared and not counted and steps_itself(amp, steps[0]):
        message = f"the loss is divided by {by}, and the optimizer steps after every batch: nothing is accumulated"
        fix = f"step, and clear, every {by} batches, or do not divide"
        yield amp.script.finding("stepped-within-window", event.node, message, fix=fix, related=steps[0].node)


def steps_itself(amp: Amp, step: Event) -> bool:
    """Whether nothing shows that the optimizer is a wrapper, which may count the window in its step()."""
    return all(is_torch_optimizer(amp, value) for value in amp.script.values(step.optimizer))
