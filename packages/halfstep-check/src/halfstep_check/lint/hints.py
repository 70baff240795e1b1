"""Worth knowing, and breaks nothing: a host wait in every step."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.flow import Trace
from halfstep_check.lint.syntax import last


def find(amp: Amp) -> Iterator[Finding]:
    if amp.uses_autocast:
        for trace in amp.traces:
            yield from waits_every_step(amp, trace)


def waits_every_step(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """`.item()` on a loss in the loop that trains, at every step."""
    trained = {event.loops for event in trace.calls("backward") if event.loops}
    for event in trace.calls("item"):
        if event.loops in trained and not event.conditions and "loss" in last(event.receiver).lower():
            message = "loss.item() makes the CPU wait for the GPU at every step"
            yield amp.script.finding(
                "item-every-step", event.node, message, fix="keep the tensor, read it every N steps"
            )
            return
