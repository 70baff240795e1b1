"""Which precision runs, and whether the scaler fits it: fp16 needs one, bf16 does not, backward stays outside."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp, is_plain_backward, is_scaled_backward, last, same_object
from halfstep.align.lint.flow import Event, Trace


def find(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces if amp.steps else ():
        yield from backward_in_autocast(amp, trace)
        if not amp.may_scale:
            yield from fp16_without_scaler(amp, trace)
    yield from scaler_with_bf16(amp)


def backward_in_autocast(amp: Amp, trace: Trace) -> Iterator[Finding]:
    for event in trace.calls("backward"):
        if event.region is not None and event.region.may_be_on and (is_plain_backward(event) or event.scaled_by):
            message = "backward() inside autocast: its ops already run in the dtype of the forward"
            yield amp.script.finding("backward-in-autocast", event.node, message, fix="move it out of the with block")


def fp16_without_scaler(amp: Amp, trace: Trace) -> Iterator[Finding]:
    for backward in filter(is_plain_backward, trace.events):
        forward = origin(trace, backward)
        if forward is None or forward.region is None:
            continue
        region = forward.region
        if region.dtype == "fp16" and region.enabled and region.device != "cpu" and not forward.grad_off:
            how = "" if region.explicit_dtype else " (autocast without a dtype is fp16 on CUDA)"
            message = f"the loss comes from fp16 autocast{how}, and nothing scales it: small gradients become zero"
            fix = "use a GradScaler, or autocast with dtype=torch.bfloat16"
            yield amp.script.finding("fp16-without-scaler", backward.node, message, fix=fix, related=forward.node)


def origin(trace: Trace, backward: Event) -> Event | None:
    """The assignment under autocast that the loss of this backward is made from, however many steps back."""
    wanted = {backward.receiver} if backward.receiver else set()
    for event in reversed(trace.events[: backward.index]):
        if not wanted.intersection(event.targets) or event.excludes(backward):
            continue
        if event.regions:
            return event
        wanted |= {name for name in event.uses if "." not in name}
    return None


def scaler_with_bf16(amp: Amp) -> Iterator[Finding]:
    """A scaler that is certainly on, in a script whose every region is certainly bf16."""
    if not amp.regions or any(region.dtype != "bf16" or region.device == "cpu" for region in amp.regions):
        return
    scaled = [e for t in amp.traces for e in t.events if is_scaled_backward(e)]
    for made in amp.scalers:
        if made.enabled and any(same_object(made.key, e.scaled_by) for e in scaled):
            message = f"{last(made.key)} scales a loss computed in bf16, which has fp32's range and needs no scaling"
            fix = "drop the scaler: loss.backward(), optimizer.step()"
            yield amp.script.finding("scaler-with-bf16", made.call, message, fix=fix)
