"""Losses that autocast refuses, inputs cast by hand under it, and losses read by the host at every step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.hiding import is_model_call
from halfstep_check.lint.script import Script, last_name, list_parameters
from halfstep_check.lint.weights import get_cast_dtype


def find_refused_bce(amp: Amp) -> Iterator[Finding]:
    kinds: dict[str, list[bool]] = {}
    for name in amp.script.assigned:
        kinds.setdefault(last_name(name), []).extend(is_bce_loss(v, amp.script) for v in amp.script.trace_origins(name))
    # A name that is also given another loss may be that one here.
    made = {name for name, found in kinds.items() if found and all(found)}
    for trace in amp.traces:
        for event in trace.events:
            region = event.region
            if region is None or not region.may_be_on or region.device == "cpu" or not isinstance(event.node, ast.Call):
                continue
            by_function = event.name.endswith("functional.binary_cross_entropy")
            by_loss = last_name(event.called) in made and event.called not in list_parameters(trace.root)
            if by_function or by_loss or is_in_loss_module(amp, event):
                message = "binary_cross_entropy raises under CUDA autocast: its gradient can leave fp16's range"
                fix = "use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the logits"
                yield amp.script.report("bce-under-autocast", event.node, message, fix=fix)


def is_in_loss_module(amp: Amp, event: Event) -> bool:
    """Return whether the loss that is called is a class of this file whose forward() runs binary_cross_entropy."""
    owner = amp.script.find_class(event.called) if event.called else None
    forward = amp.script.list_methods(owner).get("forward") if owner is not None else None
    if forward is None or "autocast" in ast.unparse(forward) or "cuda.amp" in ast.unparse(forward):
        return False
    names = [amp.script.resolve_name(call.func) for call in amp.script.calls_below(forward)]
    held = {name: amp.script.trace_origins(name) for name in amp.script.assigned if name.startswith("self.")}
    own = {name for name, made in held.items() if made and all(is_bce_loss(v, amp.script) for v in made)}
    return any(name.endswith("functional.binary_cross_entropy") or name in own for name in names)


def is_bce_loss(value: ast.expr, script: Script) -> bool:
    return isinstance(value, ast.Call) and script.resolve_name(value.func).endswith("nn.BCELoss")


def find_manual_casts(amp: Amp) -> Iterator[Finding]:
    """Find model(x.half()) under autocast: autocast casts what should be cast, and keeps fp32 what should stay."""
    for trace in amp.traces:
        casts: dict[str, ast.Call] = {}
        for event in trace.events:
            is_on = event.region is not None and event.region.may_be_on and event.region.device != "cpu"
            value = event.node.value if not isinstance(event.node, ast.Call) else None
            # A name stays cast until it is given another value; a cast before the block is the author's choice.
            for target in event.targets:
                casts.pop(target, None)
                if is_on and isinstance(value, ast.Call) and get_cast_dtype(value, amp.script) in ("fp16", "bf16"):
                    casts[target] = value
            if not is_on or not isinstance(event.node, ast.Call) or not is_model_call(event.node, amp.script):
                continue
            for key, given in zip(event.arguments, event.node.args, strict=True):
                cast = casts.get(key, given)
                if isinstance(cast, ast.Call) and get_cast_dtype(cast, amp.script) in ("fp16", "bf16"):
                    message = "an input is cast to half by hand under autocast: ops that autocast keeps in fp32 get a "
                    fix = "remove the cast: autocast casts where it helps"
                    yield amp.script.report("manual-cast", cast, message + "rounded input", fix=fix)


def find_host_waits(amp: Amp) -> Iterator[Finding]:
    if amp.uses_autocast:
        for trace in amp.traces:
            yield from find_waits_every_step(amp, trace)


def find_waits_every_step(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find `.item()` on a loss in the loop that trains, at every step."""
    trained = {event.loops for event in trace.calls("backward") if event.loops}
    for event in trace.calls("item"):
        if event.loops in trained and not event.conditions and "loss" in last_name(event.receiver).lower():
            message = "loss.item() makes the CPU wait for the GPU at every step"
            yield amp.script.report(
                "item-every-step", event.node, message, fix="keep the tensor, read it every N steps"
            )
            return
