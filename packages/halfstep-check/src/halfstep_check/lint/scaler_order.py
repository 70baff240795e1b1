"""The fp16 step in its right order: scale, backward, unscale once, clip, step through the scaler, update."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import (
    CLIPS,
    FRAMEWORKS,
    Amp,
    is_clip,
    is_plain_backward,
    is_same_object,
    is_scaled_backward,
    is_scaler_step,
    rescales_gradients,
    runs_without_amp,
)
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.script import dotted_name, last_name, list_names


def find_wrong_order(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        scaled = [e for e in trace.events if is_scaled_backward(e) and not amp.is_disabled(e.scaled_by)]
        helped = list_helper_backwards(amp, trace)
        yield from find_clip_before_unscale(amp, trace, sorted([*scaled, *helped], key=lambda e: e.index))
        if scaled:
            yield from find_bypassed_scaler(amp, trace, scaled)
            yield from find_updates_between_steps(amp, trace)
    yield from find_steps_without_update(amp)
    yield from find_clip_inside_apex(amp)


def find_clip_inside_apex(amp: Amp) -> Iterator[Finding]:
    """Find a clip inside `with amp.scale_loss(…)`: apex unscales where the block ends."""
    for node in amp.script.nodes:
        calls = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
        if not any(isinstance(c, ast.Call) and amp.script.resolve_name(c.func) == "apex.amp.scale_loss" for c in calls):
            continue
        for call in amp.script.calls_below(node):
            if CLIPS.fullmatch(last_name(dotted_name(call.func))):
                message = "gradients are clipped while still multiplied by apex's loss scale"
                fix = "clip after the with block, which unscales them"
                yield amp.script.report("clip-before-unscale", call, message, fix=fix, related=node)


def find_clip_before_unscale(amp: Amp, trace: Trace, scaled: list[Event]) -> Iterator[Finding]:
    for clip in filter(is_clip, trace.events):
        later = [e for e in trace.events[clip.index :] if not e.excludes(clip)]
        # In between a helper may run a backward of its own, through a scaler that steps nothing.
        stepping = [e for e in scaled if shares_loop(e, clip) and any(steps_through(s, e.scaled_by) for s in later)]
        # The gradients that are clipped come from the latest scaled backward on this path.
        backward = find_latest_before(stepping, clip)
        if backward is None or runs_without_amp(clip):
            continue
        between = trace.events[backward.index + 1 : clip.index]
        unscaled = any(
            (unscales_what_steps(amp, trace, e, clip) or e.method == "get_scale" or rescales_gradients(e))
            and not e.excludes(clip)
            and not is_optional(e, clip, backward)
            for e in between
        )
        # A step in between ends the iteration of that backward.
        stepped = any(e.method == "step" and not e.excludes(clip) for e in between)
        if not unscaled and not stepped:
            message = f"gradients are clipped while still multiplied by {last_name(backward.scaled_by)}'s scale"
            fix = f"call {last_name(backward.scaled_by)}.unscale_(optimizer) before clipping"
            yield amp.script.report("clip-before-unscale", clip.node, message, fix=fix, related=backward.node)


def unscales_what_steps(amp: Amp, trace: Trace, event: Event, clip: Event) -> bool:
    """Match `unscale_(opt_d)` where opt_d steps after the clip; another network's optimizer is no help."""
    if not event.method.startswith("unscale"):
        return False
    later = trace.events[clip.index :]
    # Steps after the next backward belong to other gradients.
    until = next((e.index for e in later if e.method == "backward" and not e.excludes(clip)), len(trace.events))
    steps = [e for e in later if e.index < until and steps_through(e, event.receiver) and not e.excludes(clip)]
    return not steps or any(unscales(amp, event, e.arguments[0]) for e in steps)


def is_optional(unscale: Event, clip: Event, backward: Event) -> bool:
    """Return whether the clip runs on every path, and the unscale only where something else is asked for: `if
    log_norms:`."""
    extra = [text for text, _ in unscale.conditions - clip.conditions - backward.conditions]
    # Conditions that both share say nothing about the one without the other.
    always = clip.conditions <= backward.conditions
    return always and bool(extra) and unscale.method == "unscale_" and not any(map(ABOUT_AMP.search, extra))


ABOUT_AMP = re.compile(r"amp|fp16|half|mixed|scaler|precision|enabled|clip|norm|%|except", re.IGNORECASE)
AMP_HELPER = re.compile(r"(^|_)(amp|mp|mixed|mixed_precision|precision|scaler|fp16)(_|$)", re.IGNORECASE)


def list_helper_backwards(amp: Amp, trace: Trace) -> Iterator[Event]:
    """Return `self.amp.backward(loss)` of a helper from another file; its name, or the object that steps, shows which
    scaler it uses."""
    made = {last_name(made.key) for made in amp.scalers if made.enabled is not False}
    for event in (e for e in trace.events if "backward" in e.method and e.arguments and not e.scaled_by):
        if amp.script.canonicalise(event.receiver) in amp.accelerators or last_name(event.receiver) in map(
            last_name, FRAMEWORKS
        ):
            continue
        steps = [e.receiver for e in trace.calls("step") if e.optimizer and e.arguments and not e.excludes(event)]
        owners = [o for o in (event.receiver, *steps) if AMP_HELPER.search(last_name(o)) or last_name(o) in made]
        if owners:
            yield dataclasses.replace(event, scaled_by=owners[0])


def steps_through(event: Event, scaler: str) -> bool:
    """Match `scaler.step(optimizer)`, and a helper's `step_optimizer(optimizer)`."""
    return "step" in event.method and len(event.arguments) >= 1 and bool(scaler) and event.receiver == scaler


def find_latest_before(events: list[Event], event: Event) -> Event | None:
    before = [e for e in events if e.index < event.index and not e.excludes(event)]
    return before[-1] if before else None


def shares_loop(one: Event, other: Event) -> bool:
    """Return whether two events share a loop, or one is in a loop inside the other's: `for micro in window: backward`
    and then clip."""
    shorter = min(len(one.loops), len(other.loops))
    return one.loops[:shorter] == other.loops[:shorter]


def find_bypassed_scaler(amp: Amp, trace: Trace, scaled: list[Event]) -> Iterator[Finding]:
    through = {argument for e in trace.calls("step") for argument in e.arguments[:1] if argument}
    for step in trace.calls("step"):
        optimizer = last_name(step.receiver)
        if step.arguments or not step.optimizer or is_wrapped_elsewhere(amp, optimizer):
            continue
        backward = find_latest_before(scaled, step)
        if backward is None or not shares_loop(backward, step) or not always_follows(step, backward):
            continue
        between = trace.events[backward.index : step.index]
        if any(is_plain_backward(e) and not e.excludes(backward) for e in list_pending(trace, step)):
            continue  # an optimizer that steps on unscaled gradients, rightly
        if any(is_scaler_step(e, backward.scaled_by) and is_same_object(optimizer, e.arguments[0]) for e in between):
            message = (
                f"{optimizer}.step() right after {last_name(backward.scaled_by)}.step({optimizer}): a second update"
            )
            message += ", even where the scaler skipped the first one because of inf"
            fix = f"delete {optimizer}.step()"
            yield amp.script.report("step-bypasses-scaler", step.node, message, fix=fix, related=backward.node)
            continue
        unscaled = any(unscales(amp, e, optimizer) and e.method == "unscale_" for e in between)
        by_hand = any(unscales(amp, e, optimizer) and e.method != "unscale_" for e in between)
        by_hand = by_hand or any(e.method == "get_scale" or rescales_gradients(e) for e in between)
        if by_hand or unscaled and tests_for_inf(amp, step, between):
            continue
        if not any(is_same_object(optimizer, other) for other in through):
            scale = amp.get_initial_scale(backward.scaled_by)
            message = f"{optimizer}.step() on gradients that are still scaled: steps {scale} times too long at first"
            if unscaled:
                message = (
                    f"{optimizer}.step() also applies inf: after unscale_(), only the scaler's step() skips such a step"
                )
            fix = f"{last_name(backward.scaled_by)}.step({optimizer}), then {last_name(backward.scaled_by)}.update()"
            yield amp.script.report("step-bypasses-scaler", step.node, message, fix=fix, related=backward.node)


LOOKS_FOR_INF = re.compile(r"isfinite|isinf|isnan|finite|found_inf|overflow|nan_to_num|_check_inf|skip", re.IGNORECASE)


def tests_for_inf(amp: Amp, step: Event, between: list[Event]) -> bool:
    """Return whether the script tests for inf by hand between unscale_() and a plain step."""
    texts = [*(text for text, _ in step.conditions), *(ast.unparse(e.node) for e in between)]
    named = [ast.unparse(v) for text, _ in step.conditions for v in amp.script.list_values(text)]
    return any(map(LOOKS_FOR_INF.search, (*texts, *named)))


def always_follows(step: Event, backward: Event) -> bool:
    """Return whether the step runs whenever the backward does; that there is an optimizer at all is no condition."""
    asked = {(text, holds) for text, holds in step.conditions if not (holds and text == step.receiver)}
    return dataclasses.replace(step, conditions=frozenset(asked)).implied_by(backward)


def list_pending(trace: Trace, step: Event) -> list[Event]:
    """Return what happens before a step and is not another optimizer's, which stepped in between."""
    inside = [e for e in trace.events[: step.index] if shares_loop(e, step) and not e.excludes(step)]
    direct = [e.index for e in inside if e.method == "step" and not e.arguments]
    return [e for e in inside if not any(e.index < index for index in direct)]


def unscales(amp: Amp, event: Event, optimizer: str) -> bool:
    """Match `unscale_(optimizer)`; another optimizer's gradients stay as they are."""
    named = event.arguments[0] if event.method == "unscale_" and event.arguments else ""
    return event.method.startswith("unscale") and (
        not amp.script.is_optimizer(named) or is_same_object(named, optimizer)
    )


def find_updates_between_steps(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find step(a), update(), step(b) after one backward: b's gradients carry the old scale, the new one divides
    them."""
    steps = [e for e in trace.calls("step") if e.arguments and e.arguments[0] and e.receiver]
    for step in steps:
        name = last_name(step.optimizer)
        loops = (n for n in amp.script.nodes if isinstance(n, ast.For) and name in list_names(n.target))
        within = next((below for n in loops if step.node in (below := amp.script.walk_below(n))), [])
        inside = [e for e in trace.calls("update", "backward") if e.node in within]
        if within and [e.method for e in inside if e.method == "backward" or e.receiver == step.receiver] == ["update"]:
            message = "update() after the step of each optimizer: the next one's gradients carry the old scale"
            fix = "step all optimizers, then update() once, after the loop"
            yield amp.script.report("update-between-steps", inside[0].node, message, fix=fix, related=step.node)
            return
    for first, second in zip(steps, steps[1:], strict=False):
        same_scaler = first.receiver == second.receiver and first.arguments[0] != second.arguments[0]
        together = (
            first.loops == second.loops and not first.excludes(second) and not is_walked_twice(amp, first, second)
        )
        between = trace.events[first.index + 1 : second.index]
        updates = [e for e in between if e.method == "update" and e.receiver == first.receiver]
        # A backward or unscale_ in between gives the second step gradients with the new scale.
        renewed = any(e.method in ("backward", "unscale_") for e in between)
        if same_scaler and together and updates and (not renewed or accumulates(trace, second)):
            scaler = last_name(first.receiver)
            later = f"{scaler}.step({last_name(second.arguments[0])})"
            message = f"{scaler}.update() before {later}, which then divides by another scale"
            fix = f"call {scaler}.update() once, after all steps"
            yield amp.script.report("update-between-steps", updates[0].node, message, fix=fix, related=second.node)


def is_walked_twice(amp: Amp, first: Event, second: Event) -> bool:
    """Return whether two events are one line in a loop whose function is called twice: two loops, not one iteration."""
    loop = next((node for node in amp.script.nodes if first.loops and id(node) == first.loops[-1]), None)
    return first.node is second.node and loop is not None and first.node in amp.script.walk_below(loop)


def accumulates(trace: Trace, step: Event) -> bool:
    """Return whether a step waits for a window's end, so that it uses gradients of earlier, otherwise scaled
    iterations."""
    gates = {text for text, holds in step.conditions if holds and text in trace.windows}
    inside = [e for e in trace.events if e.loops == step.loops and not e.excludes(step)]
    backward = next((e for e in reversed(inside) if is_scaled_backward(e) and e.index < step.index), None)
    free = backward is not None and not any(text in gates for text, _ in backward.conditions)
    mine = (e for e in inside if e.method == "zero_grad" and (e.receiver == step.optimizer or "opt" not in e.receiver))
    return bool(gates) and free and all(any(text in trace.windows for text, _ in e.conditions) for e in mine)


def is_wrapped_elsewhere(amp: Amp, optimizer: str) -> bool:
    """Match `model, optimizer = msamp.initialize(…)`: a framework's optimizer, whose step() may do anything."""
    makers = [dotted_name(v.func) for v in amp.script.list_values(optimizer) if isinstance(v, ast.Call)]
    return any(last_name(maker) in ("initialize", "prepare", "setup") for maker in makers)


def find_steps_without_update(amp: Amp) -> Iterator[Finding]:
    scalers = {e.scaled_by for t in amp.traces for e in t.events if is_scaled_backward(e)}
    for scaler in sorted(scalers):
        steps = [e for t in amp.traces for e in t.events if is_scaler_step(e, scaler)]
        called = {dotted_name(call.func) for call in amp.script.calls}
        updated = any(name.endswith(f"{last_name(scaler)}.update") for name in called)
        updated = updated or any(is_same_object(e.receiver, scaler) for t in amp.traces for e in t.calls("update"))
        hidden = any(is_same_object(scaler, name) for name in amp.escaped) or inherits(amp, scaler)
        if steps and not updated and not hidden and not amp.is_disabled(scaler):
            name = last_name(scaler)
            message = f"{name}.step() without {name}.update(): the scale never adapts, and overflows never end"
            yield amp.script.report(
                "step-without-update", steps[0].node, message, fix=f"call {last_name(scaler)}.update() after it"
            )


def inherits(amp: Amp, scaler: str) -> bool:
    """Return whether `self.scaler` may be updated in a base class of another file."""
    known = {"object", "ABC", "nn.Module", "Module", "torch.nn.Module", *amp.script.class_by_name}
    bases = {amp.script.resolve_name(base) for node in amp.script.classes for base in node.bases}
    return scaler.startswith("self.") and bool(bases - known)


SKIP_WORDS = re.compile(r"skip|found_inf|is(finite|inf|nan)\W.*(norm|grad)")
"""In a condition around the step: an overflow is seen before the scaler has to skip. A finite loss shows nothing."""
EMA_METHODS = ("update", "step", "update_parameters", "update_ema")


def find_ignored_skips(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        scalers = {e.scaled_by for e in trace.events if is_scaled_backward(e) and not amp.is_disabled(e.scaled_by)}
        if not scalers or handles_skips(trace) or amp.certainly_bf16:
            continue
        steps = [e for e in trace.events for scaler in scalers if is_scaler_step(e, scaler)]
        for step in steps[:1]:
            yield from find_blind_followers(amp, trace, step, scalers)


def handles_skips(trace: Trace) -> bool:
    """Return whether the loop reads the scale, or tests something named after a skip."""
    texts = {text for event in trace.events for text, _ in event.conditions}
    return any(trace.calls("get_scale")) or any(SKIP_WORDS.search(text) for text in texts)


def find_blind_followers(amp: Amp, trace: Trace, step: Event, scalers: set[str]) -> Iterator[Finding]:
    seen: set[str] = set()
    for event in trace.events:
        if event.loops != step.loops or event.excludes(step) or event.receiver in scalers:
            continue
        if not runs_with_step(event, step):
            continue
        rule = (
            "scheduler-ignores-skip" if is_scheduler_step(event, amp) else "ema-ignores-skip" if is_ema(event) else ""
        )
        if rule and rule not in seen:
            seen.add(rule)
            moves = "the schedule advances" if rule.startswith("sched") else "the average moves"
            message = f"{moves} even when {last_name(step.receiver)}.step() skipped the update"
            fix = "step it only if scaler.get_scale() did not decrease in update()"
            yield amp.script.report(rule, event.node, message, fix=fix, related=step.node)


def runs_with_step(event: Event, step: Event) -> bool:
    """Return whether it runs whenever the scaler steps; `if scheduler is not None` asks about itself and does not
    count."""
    own = last_name(event.receiver)
    about_itself = {c for c in event.conditions if own in c[0] or "sched" in c[0].lower() or "%" in c[0]}
    return event.conditions - about_itself <= step.conditions


def is_scheduler_step(event: Event, amp: Amp) -> bool:
    """Match schedulers by their name, or by what made them: `torch.optim.lr_scheduler.…`,
    `get_cosine_schedule_with_warmup(…)`."""
    name = last_name(event.receiver).lower()
    # A schedule that is given its step does its own counting.
    counts = isinstance(event.node, ast.Call) and bool(event.node.args or event.node.keywords)
    if event.method != "step" or counts or "noise" in name or amp.script.is_optimizer(name) or "scaler" in name:
        return False
    made = amp.script.list_values(event.receiver)
    makers = [amp.script.resolve_name(value.func) for value in made if isinstance(value, ast.Call)]
    by_maker = any("lr_scheduler" in maker or "schedule" in last_name(maker).lower() for maker in makers)
    return by_maker or any(word in name for word in ("sched", "schdr", "schd", "lr_sch"))


def is_ema(event: Event) -> bool:
    name = last_name(event.receiver).lower()
    named = name == "ema" or name.startswith("ema_") or name.endswith("_ema") or "model_ema" in name
    return named and event.method in EMA_METHODS or event.method in ("update_ema", "ema_update")
