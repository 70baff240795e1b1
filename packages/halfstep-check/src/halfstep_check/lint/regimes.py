"""Which precision runs, and whether the scaler fits it: fp16 needs one, bf16 does not, backward stays outside."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding, Severity
from halfstep_check.lint.amp import (
    Amp,
    ScalerMade,
    is_plain_backward,
    is_same_object,
    is_scaled_backward,
    runs_without_amp,
)
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.regions import read_region
from halfstep_check.lint.script import AUTOCASTS, argument, dotted_name, is_constant, keyword, last_name, list_names

ABOUT_PRECISION = re.compile(
    r"amp|16|32|half|mixed|scale|precision|dtype|cuda|cpu|device|gpu|autocast|apex|deepspeed|enable", re.IGNORECASE
)


def find_unscaled_fp16(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces if amp.steps else ():
        yield from find_backward_in_autocast(amp, trace)
        yield from find_fp16_without_scaler(amp, trace)
    yield from find_scaler_with_bf16(amp)
    yield from find_scaler_of_other_device(amp)
    yield from find_tests_for_none(amp)


def find_backward_in_autocast(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find backward() inside autocast, once per function, with the other lines as related ones."""
    seen: dict[str, list[Event]] = {}
    for event in trace.calls("backward"):
        if event.region is not None and event.region.may_be_on and (is_plain_backward(event) or event.scaled_by):
            seen.setdefault(event.function, []).append(event)
    for first, *others in seen.values():
        message = "backward() inside autocast: its ops already run in the dtype of the forward"
        found = amp.script.report("backward-in-autocast", first.node, message, fix="move it out of the with block")
        yield dataclasses.replace(found, related=tuple(amp.script.get_place(event.node) for event in others))


def find_fp16_without_scaler(amp: Amp, trace: Trace) -> Iterator[Finding]:
    for backward in trace.calls("backward"):
        # Accelerate scales only with mixed_precision="fp16", so one with "no" is like a plain backward().
        framework = amp.script.canonicalise(backward.receiver) in amp.plain_accelerators
        if not framework and not is_plain_backward(backward):
            continue
        forward = find_origin(trace, backward) or find_model_with_own_autocast(amp, trace, backward)
        region = forward.region if forward is not None else None
        # `else:` branches without scaler are right for runs without AMP, unless they open fp16 themselves.
        chosen = forward is not None and opens_fp16_itself(forward, backward)
        if forward is None or region is None or forward.grad_off or runs_without_amp(backward) and not chosen:
            continue
        if (
            not region.may_be_fp16
            or not region.may_be_on
            or region.device == "cpu"
            or not framework
            and not chosen
            and may_be_scaled(amp, trace, backward)
        ):
            continue
        how = "" if region.explicit_dtype else " (autocast without a dtype is fp16 on CUDA)"
        how = how if region.dtype == "fp16" else " on one of its paths"
        message = f"the loss comes from fp16 autocast{how}, and nothing scales it: small gradients become zero"
        fix = "use a GradScaler, or autocast with dtype=torch.bfloat16"
        found = amp.script.report("fp16-without-scaler", backward.node, message, fix=fix, related=forward.node)
        yield found if region.dtype == "fp16" else dataclasses.replace(found, severity=Severity.WARNING)


def opens_fp16_itself(forward: Event, backward: Event) -> bool:
    """Match `else:` of a branch with a scaler that still opens autocast(dtype=torch.float16), on the same device."""
    region, off = forward.region, {text for text, holds in backward.conditions if not holds and "scaler" in text}
    fixed = region is not None and region.enabled is True and region.explicit_dtype and region.dtype == "fp16"
    same = bool(off) and off <= {text for text, holds in forward.conditions if not holds}
    return fixed and same and not any(re.search(r"cuda|cpu|device|gpu", text) for text in off)


def find_model_with_own_autocast(amp: Amp, trace: Trace, backward: Event) -> Event | None:
    """Return the model's call before a backward, as one under the autocast that the model's own forward() opens."""
    for event in reversed(trace.events[: backward.index]):
        owner = amp.script.find_class(event.called) if event.called and event.loops == backward.loops else None
        forward = amp.script.list_methods(owner).get("forward") if owner is not None else None
        if forward is not None and not event.regions and not event.grad_off:
            items = [i.context_expr for n in forward.body if isinstance(n, ast.With) for i in n.items]
            opened = [read_region(node, amp.script) for node in (*forward.decorator_list, *items)]
            regions = tuple(region for region in opened if region is not None and region.may_be_on)
            return dataclasses.replace(event, regions=regions) if regions else None
    return None


def may_be_scaled(amp: Amp, trace: Trace, backward: Event) -> bool:
    """Return whether a scaler could be at work: nothing certain, unless this loop scales another loss and forgets this
    one."""
    scaled = [e for e in trace.events if is_scaled_backward(e) and not amp.is_disabled(e.scaled_by)]
    # Two losses in one iteration, one scaled and one not, under the same tests: the second was forgotten.
    together = [e for e in scaled if e.loops == backward.loops and not e.excludes(backward)]
    forgotten = bool(together) and backward.conditions == together[0].conditions
    # `if meta: … backward(), step()` and `else: scaler.scale(…)`: what is asked has nothing to do with AMP.
    branches = [e for e in scaled if e.loops == backward.loops and e.excludes(backward)]
    asked = {text for e in branches for text, holds in e.conditions if (text, not holds) in backward.conditions}
    forgotten = forgotten or bool(asked) and not any(map(ABOUT_PRECISION.search, asked))
    return amp.may_scale and not forgotten


def find_origin(trace: Trace, backward: Event) -> Event | None:
    """Return the assignment under autocast that the loss of this backward is made from, however many steps back."""
    given = {backward.receiver} if is_plain_backward(backward) else set(backward.arguments)
    wanted = given if backward.receiver else list_loss_names(backward)
    for event in reversed(trace.events[: backward.index]):
        if not wanted.intersection(event.targets) or event.excludes(backward):
            continue
        event = add_helper_region(trace, event)
        if event.regions:
            # An inner `autocast(enabled=False)` switches the outer one off again.
            return event if event.region is not None and event.region.may_be_on else None
        # Follow the loss back through its inputs until an assignment under autocast is met.
        wanted |= {name for name in event.uses if "." not in name}
    return None


def add_helper_region(trace: Trace, event: Event) -> Event:
    """Return an assignment of what a function of this file returns from inside its `with autocast(…):`, as one under
    it."""
    call = event.node.value if isinstance(event.node, ast.Assign) else None
    name = last_name(dotted_name(call.func)) if isinstance(call, ast.Call) else ""
    own = trace.script.find_function(name) if name and not event.regions else None
    blocks = [n for n in trace.script.walk_below(own) if isinstance(n, ast.With)] if own is not None else []
    ends = [n for n in blocks if any(isinstance(i, ast.Return) for i in trace.script.walk_below(n))]
    opened = [read_region(item.context_expr, trace.script) for block in ends for item in block.items]
    opened += [read_region(node, trace.script) for node in own.decorator_list] if own is not None else []
    regions = tuple(region for region in opened if region is not None)
    return dataclasses.replace(event, regions=regions) if regions else event


def list_loss_names(backward: Event) -> set[str]:
    """Return `loss` for `(loss / n).backward()`, as the walk names it."""
    func = backward.node.func if isinstance(backward.node, ast.Call) else None
    names = list_names(func.value) if isinstance(func, ast.Attribute) else set()
    return names | {f"{backward.function}:{name}" for name in names}


def find_scaler_of_other_device(amp: Amp) -> Iterator[Finding]:
    """Find a CUDA GradScaler() next to autocast on mps, where it finds no GPU and disables itself."""
    if not amp.regions or not all(region.device == "mps" and region.may_be_fp16 for region in amp.regions):
        return
    for made in amp.scalers:
        device = argument(made.call, 0, "device")
        if made.enabled is not False and (device is None or getattr(device, "value", "") == "cuda"):
            message = f"{last_name(made.key)} is for CUDA and disables itself on mps: fp16 gradients are not scaled"
            yield amp.script.report("fp16-without-scaler", made.call, message, fix='torch.amp.GradScaler("mps")')


def list_autocast_switches(amp: Amp) -> set[str]:
    """Return what decides whether autocast is on, as the script writes it: `self.use_amp`."""
    calls = [call for call in amp.script.calls if amp.script.resolve_name(call.func) in AUTOCASTS]
    values = [value for call in calls if (value := keyword(call, "enabled")) is not None]
    return {ast.unparse(value) for value in values if isinstance(value, ast.Name | ast.Attribute)}


def find_scaler_with_bf16(amp: Amp) -> Iterator[Finding]:
    """Find an enabled scaler in a loop whose regions are all certainly bf16."""
    if not amp.regions or any(region.dtype != "bf16" or region.device == "cpu" for region in amp.regions):
        return
    scaled = [e for t in amp.traces if any(e.regions for e in t.events) for e in t.events if is_scaled_backward(e)]
    for made in amp.scalers:
        condition = keyword(made.call, "enabled")
        # On wherever autocast is, by the same switch.
        shared = condition is not None and ast.unparse(condition) in list_autocast_switches(amp)
        on = made.enabled or made.enabled is None and (shared or not made.call.keywords)
        if on and any(is_same_object(made.key, e.scaled_by) and reaches(amp, made, e) for e in scaled):
            message = (
                f"{last_name(made.key)} scales a loss computed in bf16, which has fp32's range and needs no scaling"
            )
            fix = "remove the scaler: loss.backward(), optimizer.step()"
            yield amp.script.report("scaler-with-bf16", made.call, message, fix=fix)


def reaches(amp: Amp, made: ScalerMade, event: Event) -> bool:
    """Return whether the scaler of an event can be the one made here: an attribute, the same scope, or a parameter."""
    owner = amp.script.owners.get(id(event.node))
    given = owner is not None and any(
        last_name(event.scaled_by) == a.arg for a in ast.walk(owner.args) if isinstance(a, ast.arg)
    )
    return "." in made.key or given or amp.script.share_scope(made.call, event.node)


def find_tests_for_none(amp: Amp) -> Iterator[Finding]:
    """Find autocast that is on where `scaler is not None`, although nothing ever makes one."""
    for test, call in list_autocast_tests(amp):
        name = get_tested_name(amp, test)
        values = [v for key, given in amp.script.assigned.items() if last_name(key) == name for v in given]
        asked = isinstance(amp.script.read_constant(test) or test, ast.Compare)
        if asked and values and all(is_constant(v, None) for v in values) and name not in amp.script.parameters:
            message = f"`{ast.unparse(test)}` is never true, since {name} is always None: autocast is always off"
            yield amp.script.report("amp-switch-stuck", call, message, fix="pass the flag that requests AMP")


def list_autocast_tests(amp: Amp) -> Iterator[tuple[ast.expr, ast.Call]]:
    """Return what decides on an autocast: `enabled=`, and the test of an `if` around one without it."""
    for call in (c for c in amp.script.calls if amp.script.resolve_name(c.func) in AUTOCASTS):
        if (enabled := keyword(call, "enabled")) is not None:
            yield enabled, call
    for node in (n for n in amp.script.nodes if isinstance(n, ast.If | ast.IfExp)):
        for part in node.body if isinstance(node, ast.If) else [node.body]:
            for call in amp.script.calls_below(part):
                if amp.script.resolve_name(call.func) in AUTOCASTS and keyword(call, "enabled") is None:
                    yield node.test, call


def get_tested_name(amp: Amp, test: ast.expr) -> str:
    """Return `scaler` for `scaler`, `bool(scaler)` and `scaler is not None`, also by a name given that value."""
    test = amp.script.read_constant(test) or test
    if isinstance(test, ast.Call) and dotted_name(test.func) == "bool" and test.args:
        test = test.args[0]
    compared = test if isinstance(test, ast.Compare) and is_constant(test.comparators[0], None) else None
    if compared is not None and isinstance(compared.ops[0], ast.IsNot | ast.NotEq):
        test = compared.left
    return last_name(dotted_name(test))
