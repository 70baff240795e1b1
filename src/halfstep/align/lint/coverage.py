"""Does autocast cover the model, and in the model's own dtype?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp, is_scaled_backward, last
from halfstep.align.lint.flow import Event, Trace
from halfstep.align.lint.script import methods_of
from halfstep.align.lint.weights import half_models

LIBRARIES = ("torchvision.", "timm.", "transformers.", "segmentation_models_pytorch.")
OTHER_HALF = re.compile(r"\.half\(|float16|MixedPrecision|accelerat|deepspeed|apex", re.IGNORECASE)
"""Another way to half precision."""


def find(amp: Amp) -> Iterator[Finding]:
    in_bf16 = {last(model.name) for model in half_models(amp) if model.dtype == "bf16"}
    in_bf16 -= {last(model.name) for model in half_models(amp) if model.dtype != "bf16"}
    for trace in amp.traces if amp.goes_backward else ():
        yield from other_dtype(amp, trace, in_bf16)
        yield from uncovered(amp, trace)
        yield from without_autocast(amp, trace)


def other_dtype(amp: Amp, trace: Trace, in_bf16: set[str]) -> Iterator[Finding]:
    """A bf16 model under an autocast that names no dtype: its matmuls run in fp16."""
    for event in trace.events:
        region = event.region
        if region is None or not region.may_be_on or region.explicit_dtype or region.dtype != "fp16":
            continue
        if last(event.called) in in_bf16 and region.device == "cuda":
            message = f"{last(event.called)} is bf16, autocast without a dtype is fp16: values above 65504 become inf"
            fix = "autocast('cuda', dtype=torch.bfloat16)"
            yield amp.script.finding("autocast-dtype-differs", event.node, message, fix=fix)
            return


def uncovered(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """The loss is scaled and computed under autocast, the model that it comes from ran before."""
    layers = [method for node in amp.script.classes if (method := methods_of(node).get("forward")) is not None]
    if any("autocast" in ast.unparse(n) for layer in layers for n in (layer, *layer.decorator_list)):
        return
    for backward in filter(is_scaled_backward, trace.events):
        before = [
            e for e in trace.events[: backward.index] if e.loops == backward.loops != () and not e.excludes(backward)
        ]
        forwards = [e for e in before if is_forward(amp, e)]
        covered = any(e.regions for e in trace.events if is_model(amp, e))
        used = any(e.regions and e.region is not None and e.region.may_be_on for e in before)
        if forwards and not covered and used and not forwards[-1].conditions - backward.conditions:
            message = f"{last(forwards[-1].called)} runs outside autocast, only the loss inside: it computes in fp32"
            fix = "call the model inside the with block"
            yield amp.script.finding(
                "model-outside-autocast", forwards[-1].node, message, fix=fix, related=backward.node
            )
            return


def without_autocast(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """The loss is scaled, and nothing in the file runs in half: not the loop, and not the model, which is known."""
    used = {getattr(n, "attr", "") or getattr(n, "id", "") for n in amp.script.nodes}
    if any("autocast" in name for name in used) or OTHER_HALF.search(amp.script.text):
        return
    for backward in filter(is_scaled_backward, trace.events):
        made = any(last(m.key) == last(backward.scaled_by) and m.enabled is not False for m in amp.scalers)
        inside = [e for e in trace.events[: backward.index] if e.loops == backward.loops and is_forward(amp, e)]
        if made and any(is_known_model(amp, e.called) for e in inside):
            message = f"{last(backward.scaled_by)} scales the loss of a model that no autocast surrounds: all is fp32"
            fix = "call the model and the loss inside torch.autocast('cuda', dtype=torch.float16)"
            yield amp.script.finding("model-outside-autocast", backward.node, message, fix=fix)
            return


def is_known_model(amp: Amp, name: str) -> bool:
    """Made from a class of this file or a library whose models open no autocast; another module's might."""
    own = {node.name for node in amp.script.classes}
    values = [v for key, given in amp.script.assigned.items() if last(key) == last(name) for v in given]
    makers = [amp.script.name_of(v.func) for v in values if isinstance(v, ast.Call)]
    return any(maker in own or maker.startswith(LIBRARIES) for maker in makers)


def is_model(amp: Amp, event: Event) -> bool:
    return isinstance(event.node, ast.Call) and last(event.called) in amp.script.model_names


def is_forward(amp: Amp, event: Event) -> bool:
    return is_model(amp, event) and not event.grad_off and not event.regions
