"""GradScaler.step() may skip: what follows it, schedule and EMA, should know."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp, is_scaled_backward, is_scaler_step, last
from halfstep.align.lint.flow import Event, Trace

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
    return any(trace.calls("get_scale")) or any("skip" in text or "found_inf" in text for text in texts)


def blind_followers(amp: Amp, trace: Trace, step: Event, scalers: set[str]) -> Iterator[Finding]:
    seen: set[str] = set()
    for event in trace.events:
        if event.loops != step.loops or event.excludes(step) or event.receiver in scalers:
            continue
        if not follows(event, step):
            continue
        rule = "scheduler-ignores-skip" if is_scheduler_step(event) else "ema-ignores-skip" if is_ema(event) else ""
        if rule and rule not in seen:
            seen.add(rule)
            moves = "the schedule advances" if rule.startswith("sched") else "the average moves"
            message = f"{moves} even when {last(step.receiver)}.step() skipped the update"
            fix = "step it only if scaler.get_scale() did not fall in update()"
            yield amp.script.finding(rule, event.node, message, fix=fix, related=step.node)


def follows(event: Event, step: Event) -> bool:
    """Whether it runs whenever the scaler steps; `if scheduler is not None` asks about itself and does not count."""
    others = {(text, holds) for text, holds in event.conditions if text != event.receiver and "%" not in text}
    return others <= step.conditions


def is_scheduler_step(event: Event) -> bool:
    name = last(event.receiver).lower()
    return event.method == "step" and "sched" in name and "noise" not in name


def is_ema(event: Event) -> bool:
    name = last(event.receiver).lower()
    named = name == "ema" or name.startswith("ema_") or name.endswith("_ema") or "model_ema" in name
    return named and event.method in EMA_METHODS or event.method in ("update_ema", "ema_update")
