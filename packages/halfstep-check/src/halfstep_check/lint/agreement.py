"""autocast and the scaler follow one switch: where AMP is off, both are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, is_plain_backward, is_scaled_backward
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.regimes import origin, scaler_condition
from halfstep_check.lint.regions import region_of
from halfstep_check.lint.script import AUTOCASTS
from halfstep_check.lint.syntax import dotted_name, is_constant, keyword, last

SWITCH = re.compile(r"amp|fp16|half|mixed|autocast", re.IGNORECASE)
NO_SWITCH = re.compile(r"bf16|bfloat16|float16|dtype|is_available|device|cuda", re.IGNORECASE)
"""What chooses a dtype, or only asks for a GPU, without which autocast("cuda") is off anyway."""

ASKS_FOR_AMP = re.compile(r"(^|_)(amp|fp16|half|mixed(_precision)?|autocast|scaler|scaling)(_|$)", re.IGNORECASE)
NEGATIVE = re.compile(
    r"(^|_)(no|not|disable\w*|without|off|skip|bf16|fp32|full|has|pure|native|apex)(_|$)", re.IGNORECASE
)
"""In the name of a switch that is on where mixed precision is off, or another kind of it is on."""


def find(amp: Amp) -> Iterator[Finding]:
    scalers = switches(amp)
    yield from asked_for_scaler(amp, scalers)
    yield from opposite(amp)
    yield from never_there(amp)
    for trace in amp.traces if amp.scalers else ():
        yield from always_on(amp, trace, scalers)


def switches(amp: Amp) -> dict[str, ast.expr]:
    """Scalers that are always there and only sometimes on, `GradScaler(enabled=args.amp)`, with what switches them."""
    found: dict[str, ast.expr] = {}
    for made in amp.scalers:
        values = [v for key, given in amp.script.assigned.items() if last(key) == last(made.key) for v in given]
        condition = keyword(made.call, "enabled")
        always_there = all(any(v is other.call for other in amp.scalers) for v in values)
        if condition is not None and made.enabled is None and always_there and is_switch(amp, condition):
            found[last(made.key)] = condition
    return found


def is_switch(amp: Amp, condition: ast.expr) -> bool:
    """Whether somebody turns AMP off with it, on a machine that has a GPU."""
    asked = amp.script.constant(condition) or condition
    parts = asked.values if isinstance(asked, ast.BoolOp) and isinstance(asked.op, ast.And) else [asked]
    texts = [ast.unparse(part) for part in (condition, *parts)]
    named = [text for text in texts if SWITCH.search(text) and not NO_SWITCH.search(text)]
    return bool(named) and not all(NO_SWITCH.search(ast.unparse(part)) for part in parts)


def asked_for_scaler(amp: Amp, scalers: dict[str, ast.expr]) -> Iterator[Finding]:
    """autocast on where `scaler is not None`, and the scaler is an object with or without AMP."""
    for test, call in autocast_tests(amp) if scalers else ():
        name = asked_object(amp, test)
        region = region_of(call, amp.script)
        fp16 = region is not None and region.dtype == "fp16" and region.device != "cpu"
        if name in scalers and fp16:
            flag = ast.unparse(scalers[name])
            message = f"`{ast.unparse(test)}` holds without {flag} too: autocast stays fp16, the scaler scales nothing"
            yield amp.script.finding("amp-switch-stuck", call, message, fix=f"enabled={name}.is_enabled()")


def never_there(amp: Amp) -> Iterator[Finding]:
    """autocast on where `scaler is not None`, and nothing ever makes one."""
    for test, call in autocast_tests(amp):
        name = asked_object(amp, test)
        values = [v for key, given in amp.script.assigned.items() if last(key) == name for v in given]
        asked = isinstance(amp.script.constant(test) or test, ast.Compare)
        if asked and values and all(is_constant(v, None) for v in values) and name not in amp.script.parameters:
            message = f"`{ast.unparse(test)}` never holds, {name} is None throughout: autocast is off for good"
            yield amp.script.finding("amp-switch-stuck", call, message, fix="enabled by the flag that asks for AMP")


def opposite(amp: Amp) -> Iterator[Finding]:
    """`enabled=not use_amp`, of autocast or of the scaler: on where mixed precision is not asked for."""
    scalers = [(flag, made.call) for made in amp.scalers if (flag := keyword(made.call, "enabled")) is not None]
    for test, call in (*autocast_tests(amp), *scalers):
        flag = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
        name = last(dotted_name(flag))
        if flag is not None and ASKS_FOR_AMP.search(name) and not NEGATIVE.search(name):
            message = f"{last(dotted_name(call.func))} is on where `{ast.unparse(test)}`: where AMP is not asked for"
            yield amp.script.finding("amp-switch-stuck", call, message, fix=f"enabled={ast.unparse(flag)}")


def autocast_tests(amp: Amp) -> Iterator[tuple[ast.expr, ast.Call]]:
    """What decides on an autocast: `enabled=`, and the test of an `if` around one without it."""
    for call in (c for c in amp.script.calls if amp.script.name_of(c.func) in AUTOCASTS):
        if (enabled := keyword(call, "enabled")) is not None:
            yield enabled, call
    for node in (n for n in amp.script.nodes if isinstance(n, ast.If | ast.IfExp)):
        for part in node.body if isinstance(node, ast.If) else [node.body]:
            for call in amp.script.calls_below(part):
                if amp.script.name_of(call.func) in AUTOCASTS and keyword(call, "enabled") is None:
                    yield node.test, call


def asked_object(amp: Amp, test: ast.expr) -> str:
    """`scaler` of `scaler`, `bool(scaler)` and `scaler is not None`, also by a name given that value."""
    test = amp.script.constant(test) or test
    if isinstance(test, ast.Call) and dotted_name(test.func) == "bool" and test.args:
        test = test.args[0]
    compared = test if isinstance(test, ast.Compare) and is_constant(test.comparators[0], None) else None
    if compared is not None and isinstance(compared.ops[0], ast.IsNot | ast.NotEq):
        test = compared.left
    return last(dotted_name(test))


def always_on(amp: Amp, trace: Trace, scalers: dict[str, ast.expr]) -> Iterator[Finding]:
    """autocast without a condition, and a loss that is scaled only where AMP is asked for."""
    for backward in (
        trace.calls("backward") if any(trace.calls("step")) else ()
    ):  # a loop that only times steps no weight
        flag = scalers.get(last(backward.scaled_by)) if is_scaled_backward(backward) else None
        if is_plain_backward(backward):
            flag = unscaled_where(amp, trace, backward)
        forward = origin(trace, backward) if flag is not None else None
        region = forward.region if forward is not None else None
        if flag is None or forward is None or region is None or forward.grad_off:
            continue
        asked = any(SWITCH.search(text) or "scaler" in text for text, _ in forward.conditions)
        if region.enabled is True and not asked and region.dtype == "fp16" and region.device != "cpu":
            message = f"autocast is fp16 without {ast.unparse(flag)} too, and then nothing scales the loss"
            fix = f"autocast(…, enabled={ast.unparse(flag)})"
            yield amp.script.finding("fp16-without-scaler", forward.node, message, fix=fix, related=backward.node)
            return


def unscaled_where(amp: Amp, trace: Trace, backward: Event) -> ast.expr | None:
    """The switch of `if use_amp: scaler.scale(loss).backward() else: loss.backward()`, for the second branch."""
    scaled = [e for e in trace.events if is_scaled_backward(e) and e.excludes(backward)]
    for guard in backward.guards if scaled else ():
        test = guard.test
        held = [made for made in amp.scalers if last(made.key) == asked_object(amp, test)]
        asked = scaler_condition(amp, held[0]) if held else test
        if asked is not None and guard in scaled[0].guards and is_switch(amp, asked):
            return asked
    return None
