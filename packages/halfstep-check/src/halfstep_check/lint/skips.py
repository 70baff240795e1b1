"""GradScaler.step() may skip: what follows it, schedule and EMA, should know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, is_scaled_backward, is_scaler_step
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.syntax import last

SKIP_WORDS = re.compile(r"skip|found_inf|is(finite|inf|nan)\W.*(norm|grad)")
"""In a condition around the step: an overflow is seen before the scaler has to skip. A finite loss shows nothing."""
EMA_METHODS = ("update", "step", "update_parameters", "update_ema")


def find(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        scalers = {e.scaled_by for e in trace.events if is_scaled_backward(e) and not amp.is_disabled(e.scaled_by)}
        if not scalers or knows_of_skips(trace) or only_bf16(amp):
            continue
        steps = [e for e in trace.events for scaler in scalers if is_scaler_step(e, scaler)]
        for step in steps[:1]:
            yield from blind_followers(amp, trace, step, scalers)


def only_bf16(amp: Amp) -> bool:
    """Another rule speaks of a scaler with bf16; nothing is skipped there."""
    return bool(amp.regions) and all(region.dtype == "bf16" for region in amp.regions)


def knows_of_skips(trace: Trace) -> bool:
    """The scale is looked at, or something named after a skip decides."""
    texts = {text for event in trace.events for text, _ in event.conditions}
    return any(trace.calls("get_scale")) or any(SKIP_WORDS.search(text) for text in texts)


def blind_followers(amp: Amp, trace: Trace, step: Event, scalers: set[str]) -> Iterator[Finding]:
    seen: set[str] = set()
    for event in trace.events:
        if event.loops != step.loops or event.excludes(step) or event.receiver in scalers:
            continue
        if not follows(event, step):
            continue
        rule = (
            "scheduler-ignores-skip" if is_scheduler_step(event, amp) else "ema-ignores-skip" if is_ema(event) else ""
        )
        if rule and rule not in seen:
            seen.add(rule)
            moves = "the schedule advances" if rule.startswith("sched") else "the average moves"
            message = f"{moves} even when {last(step.receiver)}.step() skipped the update"
            fix = "step it only if scaler.get_scale() did not fall in update()"
            yield amp.script.finding(rule, event.node, message, fix=fix, related=step.node)


def follows(event: Event, step: Event) -> bool:
    """Whether it runs whenever the scaler steps; `if scheduler is not None` asks about itself and does not count."""
    own = last(event.receiver)
    about_itself = {c for c in event.conditions if own in c[0] or "sched" in c[0].lower() or "%" in c[0]}
    return event.conditions - about_itself <= step.conditions


def is_scheduler_step(event: Event, amp: Amp) -> bool:
    """By its name, or by what made it: `torch.optim.lr_scheduler.…`, `get_cosine_schedule_with_warmup(…)`."""
    name = last(event.receiver).lower()
    # A schedule that is told its step counts by itself.
    counts = isinstance(event.node, ast.Call) and bool(event.node.args or event.node.keywords)
    if event.method != "step" or counts or "noise" in name or amp.script.is_optimizer(name) or "scaler" in name:
        return False
    made = amp.script.values(event.receiver)
    makers = [amp.script.name_of(value.func) for value in made if isinstance(value, ast.Call)]
    by_maker = any("lr_scheduler" in maker or "schedule" in last(maker).lower() for maker in makers)
    return by_maker or any(word in name for word in ("sched", "schdr", "schd", "lr_sch"))


def is_ema(event: Event) -> bool:
    name = last(event.receiver).lower()
    named = name == "ema" or name.startswith("ema_") or name.endswith("_ema") or "model_ema" in name
    return named and event.method in EMA_METHODS or event.method in ("update_ema", "ema_update")
