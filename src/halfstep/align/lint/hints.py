"""Things worth knowing that break nothing: a host wait in every step, TF32 never set."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp, last
from halfstep.align.lint.flow import Trace

TF32_WORDS = ("allow_tf32", "set_float32_matmul_precision", "fp32_precision")
OTHER_PRECISION = (
    *("autocast", "scaler", "Scaler", "accelerate", "lightning", "deepspeed", "apex", "halfstep", "transformers"),
    *(".half()", "float16"),
)
"""Whoever names one of these has chosen a precision already."""


def find(amp: Amp) -> Iterator[Finding]:
    if amp.uses_autocast:
        for trace in amp.traces:
            yield from waits_every_step(amp, trace)
    yield from tf32_never_set(amp)


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


def tf32_never_set(amp: Amp) -> Iterator[Finding]:
    text = amp.script.text
    on_gpu = '"cuda' in text or "'cuda" in text or ".cuda(" in text
    if not on_gpu or any(word in text for word in (*TF32_WORDS, *OTHER_PRECISION)):
        return
    for trace in amp.traces:
        for event in trace.calls("backward"):
            steps = any(e.method == "step" for e in trace.events)
            if event.loops and steps and isinstance(event.node, ast.Call) and not event.node.args:
                message = "trains in fp32 on a GPU and never allows TF32: matmuls run without tensor cores"
                fix = 'torch.set_float32_matmul_precision("high")'
                yield amp.script.finding("tf32-never-set", event.node, message, fix=fix)
                return
