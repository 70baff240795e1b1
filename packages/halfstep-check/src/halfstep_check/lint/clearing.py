"""Gradients between steps: when they are cleared, what each backward() adds, and which graph it walks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.accumulation import find_windows, is_cleared_when_due
from halfstep_check.lint.amp import (
    Amp,
    is_plain_backward,
    is_same_object,
    is_scaled_backward,
    list_passed_names,
    strip_function,
)
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.script import dotted_name, is_constant, keyword, last_name, list_names, list_parameters

CLEARS = re.compile(
    r"zero_?_?grad|clear_?grad|reset_grad|grad_?zero|closure|\.grad(\.data)?\s*(-?=[^=]|\.(zero|fill|copy|sub|set|mul)_\()",
    re.IGNORECASE,
)
"""Whatever could clear a gradient, or change it by hand; reading one clears nothing."""
MAY_CLEAR = re.compile(r"zero(?!s)|clear|reset(?!$)|train(?!$|ed|ing)|optim|step_|_step", re.IGNORECASE)
"""In the name of a function of another file that may clear gradients; `meter.reset()` and `model.train()` do not."""
ONLY_READS = re.compile(r"save|checkpoint|(^|_)lr(_|$)|sched|log|print|item", re.IGNORECASE)
"""In the name of a function that is given the optimizer and leaves its gradients alone."""
FIRST = re.compile(r"(\w+) == 0")
"""Holds in a loop's first iteration alone."""
GATHERS = ("gradient_accumulation_steps", "gradient_accumulation_plugin")
WINDOW_WORDS = ("accum", "micro", "virtual", "update_freq", "iter_size", "grad")


def find_uncleared_gradients(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from find_never_cleared(amp, trace)
        yield from find_one_sided_clearing(amp, trace)
        yield from find_clearing_within_window(amp, trace)
    yield from find_clearing_at_head(amp)


def find_never_cleared(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a loop with backward and step in which nothing clears the gradients."""
    backwards = [e for e in trace.events if e.loops and (is_plain_backward(e) or is_scaled_backward(e))]
    for step in trace.calls("step"):
        depth = len(step.loops)  # the micro-batches of a window may have a loop of their own
        inside = [e for e in backwards if depth and e.loops[:depth] == step.loops]
        before = any(e.index < step.index and not e.excludes(step) for e in inside)
        if before and steps_alone(amp, trace, step) and not may_be_cleared(amp, trace, step):
            name = last_name(step.optimizer)
            message = f"nothing in this loop clears the gradients of {name}: they add up from step to step"
            yield amp.script.report(
                "gradients-not-cleared", step.node, message, fix=f"call {name}.zero_grad() after the step"
            )
            return


def may_be_cleared(amp: Amp, trace: Trace, step: Event) -> bool:
    """Return whether anything in the loop could clear what an optimizer steps with, other optimizers' zero_grad()
    aside."""
    around = list_reached_code(amp, step)
    text = "\n".join(ast.unparse(node) for node in around)
    calls = (c for node in around for c in amp.script.calls_below(node))
    written = {id(c) for c in calls if getattr(c.func, "attr", "") == "zero_grad"}
    followed = {id(e.node) for e in trace.calls("zero_grad")}
    effective = {id(e.node) for e in trace.calls("zero_grad") if clears_for(amp, e, step)}
    # Ignore zero_grad() calls that are known to clear other optimizers.
    if written and written <= followed - effective:
        text = re.sub(r"[\w.]+\.zero_grad\(", "", text)
    return CLEARS.search(text) is not None


def clears_for(amp: Amp, event: Event, step: Event) -> bool:
    """Return whether a zero_grad() is this optimizer's, and more than once in a loop: not `if i == 0:` alone."""
    looped = {name for n in amp.script.nodes if isinstance(n, ast.For) for name in list_names(n.target)}
    one = amp.script.is_optimizer(event.receiver) and len(amp.script.list_values(event.receiver)) < 2
    other = one and last_name(event.receiver) != last_name(step.optimizer) and event.receiver not in looped
    asked = (text for text, holds in event.conditions - step.conditions if holds)
    once = any((first := FIRST.fullmatch(text)) is not None and first[1] in looped for text in asked)
    return not other and not once


def list_reached_code(amp: Amp, step: Event) -> list[ast.AST]:
    """Return the loop around a step and all functions of this file that it may call."""
    # By name, so that a helper of any class counts: silence is better than a false finding.
    found: list[ast.AST] = [n for n in amp.script.nodes if id(n) == step.loops[-1]]
    for node in found:  # grows as it goes
        names = {
            last_name(dotted_name(call.func)) or getattr(call.func, "attr", "") for call in amp.script.calls_below(node)
        }
        called = [f for name in names for f in amp.script.named_functions.get(name, [])]
        found += [function for function in called if function not in found]
    return found


def find_one_sided_clearing(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a branch that steps without the zero_grad() that only the other branch has."""
    clears = list(trace.calls("zero_grad"))
    everywhere = {dotted_name(call.func) for call in amp.script.calls}
    for step in trace.calls("step"):
        name = step.optimizer
        computed = any(e.method == "backward" and not e.excludes(step) for e in trace.events[: step.index])
        own = [e for e in clears if e.receiver == name]
        elsewhere = sum(dotted_name(c.func) == f"{name}.zero_grad" for c in amp.script.calls) > len(own)
        by_model = any(
            text.endswith(".zero_grad") and text != f"{name}.zero_grad" for text in everywhere if "optim" not in text
        )
        if name and computed and own and all(e.excludes(step) for e in own) and not elsewhere and not by_model:
            message = f"{last_name(name)}.zero_grad() runs only on the other path: here gradients add up"
            fix = f"call {last_name(name)}.zero_grad() on this path, too"
            yield amp.script.report("gradients-not-cleared", step.node, message, fix=fix, related=own[0].node)
            return


def steps_alone(amp: Amp, trace: Trace, step: Event) -> bool:
    """Return whether torch.optim made the optimizer, or the caller hands it over, and no other call in the loop gets
    it."""
    name = step.optimizer
    own = {"step", "unscale_", "zero_grad", "clip_grad_norm_", "clip_grad_value_"}
    inside = [e for e in trace.events if e.loops[: len(step.loops)] == step.loops and e.method not in own]
    handed = name in list_parameters(trace.root)
    unknown = any(is_unknown_method(amp, e) or MAY_CLEAR.search(e.method) for e in inside)
    alone = not unknown and not any(name in list_passed_names(e) and not ONLY_READS.search(e.method) for e in inside)
    # A scaler steps only torch optimizers, wherever they are made.
    taken = bool(step.arguments) and is_scaler(amp, step.receiver) and bool(amp.script.list_values(name))
    return bool(name) and alone and (handed or taken or is_made_by_torch(amp, name))


def is_scaler(amp: Amp, key: str) -> bool:
    return any(is_same_object(made.key, key) for made in amp.scalers) or "scaler" in last_name(key).lower()


def is_unknown_method(amp: Amp, event: Event) -> bool:
    """Match methods of a base in another file, `self.prepare()`; `self.model(x)` calls an attribute."""
    held = amp.script.list_values(event.called) or event.method in amp.script.model_names
    return event.receiver == "self" and not held and amp.script.find_function(event.method) is None


def is_made_by_torch(amp: Amp, name: str) -> bool:
    """Match optimizers that torch.optim makes, here or in a function of this file, also wrapped:
    `Lookahead(optimizer)`."""
    return bool(amp.script.list_values(name)) and all(
        is_torch_optimizer(amp, value) for value in amp.script.list_values(name)
    )


def is_torch_optimizer(amp: Amp, value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call):
        return False
    called = amp.script.resolve_name(value.func)
    own = amp.script.find_function(called.removeprefix("self."))
    ends = [n.value for n in amp.script.walk_below(own) if isinstance(n, ast.Return)] if own is not None else []
    if ends:
        return all(is_torch_optimizer(amp, amp.script.read_constant(end)) for end in ends)
    wraps = [dotted_name(argument) for argument in value.args[:1]]
    inner = [v for name in wraps if amp.script.is_optimizer(name) for v in amp.script.list_values(name)]
    return called.startswith("torch.optim.") or any(is_torch_optimizer(amp, v) for v in inner if v is not value)


def find_clearing_within_window(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find zero_grad at every micro-batch while the step waits for the window's end: only the last one counts."""
    for window in find_windows(trace):
        optimizer = window.step.optimizer
        around = [e for e in trace.events if e.loops[: len(window.step.loops)] == window.step.loops]
        inside = [e for e in around if e.loops == window.step.loops or drops_gradient(e)]
        stepped = {e.optimizer for e in inside if e.method == "step"} - {""}
        if not any(word in window.length.lower() for word in WINDOW_WORDS) and len(stepped) > 1:
            continue
        for event in inside:
            same = (
                last_name(event.receiver) == last_name(optimizer) or last_name(event.receiver) in amp.script.model_names
            )
            cleared = event.method == "zero_grad" and same or drops_gradient(event)
            due = is_cleared_when_due(trace, window, event)
            if cleared and (due or event.conditions <= window.backward.conditions):
                message = f"gradients are cleared at every micro-batch: only the last one of {window.length} counts"
                fix = "clear them where the optimizer steps"
                yield amp.script.report("cleared-within-window", event.node, message, fix=fix, related=window.step.node)
                break


def find_clearing_at_head(amp: Amp) -> Iterator[Finding]:
    """Find zero_grad() before backward in accumulate(): it acts on the last micro-batch alone, and wipes the others."""
    for node in (n for n in amp.script.nodes if isinstance(n, ast.With)):
        opened = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
        owners = [dotted_name(c.func).removesuffix(".accumulate") for c in opened]
        owner = next((name for name, c in zip(owners, opened, strict=True) if name != dotted_name(c.func)), "")
        made = [v for v in amp.script.list_values(owner) if isinstance(v, ast.Call)]
        lengths = [v for c in made for v in map(amp.script.read_default, (keyword(c, key) for key in GATHERS)) if v]
        alone = made and all(is_constant(length, 1) for length in lengths)
        calls = [c for c in amp.script.calls_below(node) if isinstance(c.func, ast.Attribute)]
        calls = sorted(calls, key=lambda c: (c.lineno, c.col_offset))
        names = [getattr(c.func, "attr", "") for c in calls]
        first = names.index("backward") if "backward" in names else 0
        early = [c for c, name in zip(calls[:first], names, strict=False) if name == "zero_grad"]
        if owner and early and not alone and "step" in names[first:]:
            message = "zero_grad() runs right before the backward() of a window's last micro-batch: the others are lost"
            yield amp.script.report("cleared-within-window", early[0], message, fix="clear them after the step")


def drops_gradient(event: Event) -> bool:
    """Match `p.grad = None`."""
    value = event.node.value if isinstance(event.node, ast.Assign) else None
    return value is not None and is_constant(value, None) and any(target.endswith(".grad") for target in event.targets)


Loop = ast.For | ast.While


def find_repeated_backward(amp: Amp) -> Iterator[Finding]:
    walked = [n.target for n in amp.script.nodes if isinstance(n, ast.For | ast.comprehension)]
    taken = {name for target in walked for name in list_names(target)}  # `for loss in losses:` is a new one each time
    for trace in amp.traces:
        runs = [e for e in trace.events if is_plain_backward(e) or is_scaled_backward(e)]
        kept = any("retain_graph" in ast.unparse(e.node) for e in runs)
        for number, run in enumerate(runs if not kept else ()):
            name = get_loss_name(run)
            made = [e for e in trace.events[: run.index] if name in e.targets and e.function == run.function]
            again = any(is_spent(name, earlier, run, made) for earlier in runs[:number])
            if made and name not in taken and (again or repeats(amp, trace, run, made[-1], name)):
                message = f"second backward() on the same {name}: its graph has been freed, and torch raises"
                fix = "compute the loss again before each backward()"
                yield amp.script.report("backward-again", run.node, message, fix=fix, related=made[-1].node)
                break


def get_loss_name(run: Event) -> str:
    """Return `loss` for `loss.backward()`, `(loss / n).backward()` and `scaler.scale(loss).backward()`, if unique.

    `losses[0]` and `losses[1]` are two, as are two calls of one `loss_fn`."""
    func = run.node.func if isinstance(run.node, ast.Call) else None
    inside = list(ast.walk(func.value)) if isinstance(func, ast.Attribute) else []
    several = {id(n.func) for n in inside if isinstance(n, ast.Call)}
    several |= {id(n.value) for n in inside if isinstance(n, ast.Subscript)}
    names = {n.id for n in inside if isinstance(n, ast.Name) and id(n) not in several}
    found = sorted(name for name in names if "loss" in name.lower() and name != last_name(run.scaled_by))
    return found[0] if len(found) == 1 and "." not in strip_function(run.receiver) else ""


def is_spent(name: str, earlier: Event, run: Event, made: list[Event]) -> bool:
    """Return whether an earlier backward on the same path used this very loss."""
    same = get_loss_name(earlier) == name and earlier.conditions == run.conditions and earlier.loops == run.loops
    return same and earlier.function == run.function and not any(e.index > earlier.index for e in made)


def repeats(amp: Amp, trace: Trace, run: Event, made: Event, name: str) -> bool:
    """Return whether a loop runs backward at every turn on a loss made before it, or in its first turn only."""
    loop = next((n for n in amp.script.nodes if run.loops and id(n) == run.loops[-1]), None)
    if not isinstance(loop, Loop) or any(isinstance(n, ast.Break | ast.Return) for n in amp.script.walk_below(loop)):
        return False
    counters = list_names(loop.target) if isinstance(loop, ast.For) else set()
    first = {(f"{counter} == 0", True) for counter in counters}
    inside = [e for e in trace.events if name in e.targets and e.loops[: len(run.loops)] == run.loops]
    return all(e.conditions & first - run.conditions for e in inside) and run.conditions <= made.conditions
