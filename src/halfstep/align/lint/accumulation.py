"""Gradient accumulation: divide the loss, keep the last window, and do not average averages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp, is_optimizer_name, last
from halfstep.align.lint.flow import Event, Trace
from halfstep.align.lint.script import calls_in, dotted_name, names_in

MASK_WORDS = ("mask", "valid", "num_tokens", "n_tokens", "ntokens", "token_count")
ACCUMULATION_WORDS = ("accum", "micro")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A loop that runs backward at every micro-batch and steps at every N-th."""

    backward: Event
    step: Event
    test: str
    """The condition of the step; empty where an inner loop counts the micro-batches."""
    length: str
    """N, as the script writes it."""


def find(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        for window in (*windows(trace), *inner_windows(amp, trace)):
            chain = loss_chain(trace, window.backward)
            divided = any(divides(event.node) for event in chain) or divides(window.backward.node) or rescales(trace)
            if chain and not divided and not uses_length(trace, window) and last(window.length) not in amp.divisors:
                message = f"the loss is not divided by {window.length}: the gradient is that many times too large"
                fix = f"loss = loss / {window.length} before backward"
                yield amp.script.finding("accumulation-not-divided", window.backward.node, message, fix=fix)
            yield from masked_means(amp, chain, divided)
            if window.test:
                yield from dropped_tail(amp, trace, window)


def windows(trace: Trace) -> Iterator[Window]:
    seen: set[tuple[int, ...]] = set()
    for step in trace.calls("step"):
        tests = [text for text, holds in step.conditions if holds and text in trace.windows]
        optimizer = step.arguments[0] if step.arguments else step.receiver
        if not tests or not step.loops or not is_optimizer_name(optimizer):
            continue
        backwards = [e for e in trace.calls("backward") if e.loops == step.loops and e.index < step.index]
        free = [e for e in backwards if not any(text == tests[0] for text, _ in e.conditions) and not e.excludes(step)]
        length = modulus(tests[0])
        if free and length and length != "1" and step.loops not in seen:
            seen.add(step.loops)
            yield Window(backward=free[-1], step=step, test=tests[0], length=length)


def inner_windows(amp: Amp, trace: Trace) -> Iterator[Window]:
    """`for _ in range(accumulation_steps):` around backward, and the step after that loop."""
    loops = {id(node): node for node in amp.script.nodes if isinstance(node, ast.For)}
    seen: set[int] = set()
    for backward in trace.calls("backward"):
        loop = loops.get(backward.loops[-1]) if backward.loops else None
        length = counted(loop)
        if not length or not any(word in length.lower() for word in ACCUMULATION_WORDS) or id(loop) in seen:
            continue
        inside = [e for e in trace.events if e.loops[: len(backward.loops)] == backward.loops]
        after = [e for e in trace.calls("step") if e.loops == backward.loops[:-1] and e.index > inside[-1].index]
        steps = [e for e in after if is_optimizer_name(e.arguments[0] if e.arguments else e.receiver)]
        if steps and not any(e.method in ("step", "zero_grad") for e in inside):
            seen.add(id(loop))
            yield Window(backward=backward, step=steps[0], test="", length=length)


def counted(loop: ast.For | None) -> str:
    """N of `for … in range(N)`."""
    over = loop.iter if loop is not None else None
    if isinstance(over, ast.Call) and getattr(over.func, "id", "") == "range" and len(over.args) == 1:
        return ast.unparse(over.args[0])
    return ""


def rescales(trace: Trace) -> bool:
    """Whether gradients themselves are divided or multiplied, `p.grad.div_(n)`: nothing is certain then."""
    changes = (e for e in trace.events if e.method in ("div_", "mul_") or isinstance(e.node, ast.AugAssign))
    return any(".grad" in ast.unparse(event.node) for event in changes)


def modulus(test: str) -> str:
    """N of `(i + 1) % N == 0`, empty when there is not exactly one."""
    tree = ast.parse(test, mode="eval")
    found = [n.right for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
    return ast.unparse(found[0]) if len(found) == 1 else ""


def loss_chain(trace: Trace, backward: Event) -> list[Event]:
    """Assignments in the loop that the loss of this backward is made from."""
    func = backward.node.func if isinstance(backward.node, ast.Call) else None
    inner = names_in(func.value) if isinstance(func, ast.Attribute) and not backward.receiver else set()
    # In a function walked in place of its call, local names carry the function's name.
    inner |= {f"{backward.function}:{name}" for name in inner}
    wanted, chain = ({backward.receiver} | inner) - {"", backward.scaled_by}, []
    for event in reversed(trace.events[: backward.index]):
        if event.targets and wanted.intersection(event.targets) and event.loops == backward.loops:
            chain.append(event)
            wanted |= {name for name in event.uses if "loss" in name}
    return chain


def divides(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
        return True
    scaled = (ast.Div, ast.Mult)
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, scaled) for n in ast.walk(node)) or any(
        isinstance(n, ast.Call) and getattr(n.func, "attr", "") in ("div", "div_", "mul", "mul_")
        for n in ast.walk(node)
    )


def uses_length(trace: Trace, window: Window) -> bool:
    """Whether N is used for anything else in the loop, say handed to the function that computes the loss."""
    name = last(window.length)
    if name.isdigit():
        return False
    loops = window.backward.loops
    inside = [e for e in trace.events if e.loops[: len(loops)] == loops]
    return any(name in ast.unparse(event.node) for event in inside)


def masked_means(amp: Amp, chain: list[Event], divided: bool) -> Iterator[Finding]:
    for event in chain:
        value = event.node.value if isinstance(event.node, ast.Assign) else None
        helpers = [h for c in calls_in(event.node) if (h := amp.script.functions.get(dotted_name(c.func))) is not None]
        returns = [n.value for h in helpers for n in ast.walk(h) if isinstance(n, ast.Return) and n.value is not None]
        if value is not None and divided and any(map(is_masked_mean, (value, *returns))):
            message = "each micro-batch is averaged over its own unmasked elements, then the averages are averaged"
            fix = "sum the losses, and divide by the count of the whole window"
            yield amp.script.finding("mean-of-means", event.node, message, fix=fix)
            return


def is_masked_mean(value: ast.expr) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            divisor = ast.unparse(node.right)
            if any(word in divisor for word in MASK_WORDS) and (
                "sum(" in divisor or "count" in divisor or "tokens" in divisor
            ):
                return True
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("cross_entropy", "nll_loss"):
            names = {item.arg: ast.unparse(item.value) for item in node.keywords}
            if "ignore_index" in names and names.get("reduction", "'mean'") == "'mean'":
                return True
    return False


def dropped_tail(amp: Amp, trace: Trace, window: Window) -> Iterator[Finding]:
    """Gradients of a last, partial window are thrown away by a zero_grad before the next epoch's first batch."""
    tree = ast.parse(window.test, mode="eval").body
    plain = isinstance(tree, ast.Compare) and "len(" not in window.test
    loop = next((n for n in amp.script.nodes if id(n) == window.step.loops[-1]), None)
    if not plain or not isinstance(loop, ast.For) or not over_batches(loop.iter):
        return
    outer = window.step.loops[:-1]
    inside = [e.index for e in trace.events if e.loops[: len(window.step.loops)] == window.step.loops]
    cleared = any(e.loops == outer and e.index < inside[0] and not e.conditions for e in trace.calls("zero_grad"))
    stepped = any(e.index > inside[-1] for e in trace.calls("step") if e.loops[: len(outer)] == outer)
    if cleared and not stepped:
        message = "batches after the last full window are computed and then dropped"
        fix = "also step when the batch is the last one, or after the loop"
        yield amp.script.finding("accumulation-drops-tail", window.step.node, message, fix=fix)


def over_batches(iterated: ast.expr) -> bool:
    """enumerate(loader), tqdm(enumerate(loader)) and the like; not a range, which is a count of windows or steps."""
    text = ast.unparse(iterated)
    return "range(" not in text and "islice" not in text and ("enumerate(" in text or "load" in text)
