"""Does autocast cover the model?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, is_scaled_backward, list_passed_names
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.script import (
    AUTOCASTS,
    Function,
    dotted_name,
    is_constant,
    keyword,
    last_name,
    list_methods,
    list_parameters,
)

OWN_METHODS = ("encode", "decode", "compute_loss", "get_loss", "training_loss")
LIBRARIES = ("torchvision.", "timm.", "transformers.", "segmentation_models_pytorch.")
OTHER_HALF = re.compile(r"\.half\(|float16|MixedPrecision|accelerat|deepspeed|apex", re.IGNORECASE)
"""Another way to half precision."""
DATA_PARALLEL = re.compile(r"\bDataParallel\(")
LOST_BLOCK = re.compile(r"^\s*#\s*with [\w.]*autocast", re.MULTILINE)


def find_uncovered_models(amp: Amp) -> Iterator[Finding]:
    yield from find_idle_scaler(amp)
    for trace in amp.traces if amp.goes_backward else ():
        yield from find_uncovered(amp, trace)
        yield from find_missing_autocast(amp, trace)
        yield from find_bypassed_wrapper(amp, trace)


def find_idle_scaler(amp: Amp) -> Iterator[Finding]:
    """Find a GradScaler that never scales in a file without autocast: everything runs in fp32."""
    nodes = amp.script.nodes
    words = {getattr(n, "attr", "") or getattr(n, "id", "") for n in nodes}
    if any("autocast" in word for word in words) or OTHER_HALF.search(amp.script.code):
        return
    kept = {last_name(name) for name in amp.escaped}
    trains = amp.goes_backward and amp.steps
    for made in (m for m in amp.scalers if trains and m.enabled is not False and last_name(m.key) not in kept):
        asked = {
            n.attr
            for n in nodes
            if isinstance(n, ast.Attribute) and last_name(dotted_name(n.value)) == last_name(made.key)
        }
        takers = [n for n in nodes if isinstance(n, Function) and last_name(made.key) in list_parameters(n)]
        inside = [c for f in takers for c in amp.script.calls_below(f)]
        runs = [c for c in inside if getattr(c.func, "attr", "") == "backward"] if not asked else []
        # A scaler without any use is a leftover; one that is saved or passed on was meant to work.
        if (asked or takers) and not asked - {"state_dict", "load_state_dict"}:
            message = f"{last_name(made.key)} scales nothing, and there is no autocast: everything runs in fp32"
            fix = "run the model under autocast, and call scale(), step() and update() of the scaler; or remove it"
            where = runs[0] if runs else made.call
            yield amp.script.report("model-outside-autocast", where, message, fix=fix, related=made.call)
            return


def find_uncovered(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a scaled loss that is computed under autocast from a model that ran outside it."""
    layers = [method for node in amp.script.classes if (method := list_methods(node).get("forward")) is not None]
    if any("autocast" in ast.unparse(n) for layer in layers for n in (layer, *layer.decorator_list)):
        return
    for backward in filter(is_scaled_backward, trace.events):
        before = [
            e for e in trace.events[: backward.index] if e.loops == backward.loops != () and not e.excludes(backward)
        ]
        forwards = [e for e in before if not e.regions and list_models_run(amp, e)]
        # The model must run before the loss, in the same iteration, outside every region.
        depth = len(backward.loops)  # evaluation's own autocast covers nothing here
        inside = [e for e in trace.events if e.regions and not e.grad_off and e.loops[:depth] == backward.loops]
        covered = any(is_model(amp, e) or list_models_run(amp, e) for e in inside)
        covered = covered or any(last_name(e.receiver) in amp.script.model_names for e in inside)
        # `inferer(inputs=images, diffusion_model=model)` runs the model that it is given.
        given = {last_name(name) for e in inside for name in list_passed_names(e)}
        covered = covered or not given.isdisjoint(amp.script.model_names)
        # Without any autocast in the loop another check reports the scaler that scales for nothing.
        used = any(e.regions and e.region is not None and e.region.may_be_on for e in before)
        if forwards and not covered and used and not forwards[-1].conditions - backward.conditions:
            message = f"{last_name(forwards[-1].called)} runs in fp32: only the loss is inside autocast"
            fix = "call the model inside the with block"
            yield amp.script.report(
                "model-outside-autocast", forwards[-1].node, message, fix=fix, related=backward.node
            )
            return


def find_missing_autocast(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a scaled loss where nothing in the file runs in half: not the loop, and not the model, which is known."""
    used = {getattr(n, "attr", "") or getattr(n, "id", "") for n in amp.script.nodes}
    mentioned = any("autocast" in name for name in used) or bool(OTHER_HALF.search(amp.script.text))
    off = find_switched_off_autocast(amp)
    for backward in filter(is_scaled_backward, trace.events):
        made = [m for m in amp.scalers if last_name(m.key) == last_name(backward.scaled_by) and m.enabled is not False]
        before = [e for e in trace.events[: backward.index] if e.loops == backward.loops]
        known = any(is_known_model(amp, name) for e in before for name in list_models_run(amp, e))
        known = known or was_autocast_intended(amp) and any(runs_part_of_model(amp, e) for e in before)
        if made and (off is not None or known and not mentioned):
            message = f"{last_name(backward.scaled_by)} scales the loss of a model that runs in fp32, outside autocast"
            message += ": autocast(enabled=False) switches it off" if off is not None else ""
            fix = "call the model and the loss inside torch.autocast('cuda', dtype=torch.float16)"
            yield amp.script.report("model-outside-autocast", off or backward.node, message, fix=fix)
            return


def was_autocast_intended(amp: Amp) -> bool:
    """Return whether the file imports autocast, which it does not use, or has it in a comment: the with block got
    lost."""
    imported = any(full in AUTOCASTS for full in amp.script.imports.values())
    # Under DataParallel the model's own forward() is where autocast belongs.
    return (imported or bool(LOST_BLOCK.search(amp.script.text))) and not DATA_PARALLEL.search(amp.script.code)


def runs_part_of_model(amp: Amp, event: Event) -> bool:
    """Match `model(x)`, `self.model.encoder(x)`, or a method that does."""
    parts = set(event.called.split(".")) if isinstance(event.node, ast.Call) else set()
    moved = event.method in ("train", "eval", "parameters", "named_parameters", "to", "zero_grad")
    return not event.grad_off and (
        bool(parts & amp.script.model_names) and not moved or bool(list_models_run(amp, event))
    )


def find_switched_off_autocast(amp: Amp) -> ast.Call | None:
    """Return the autocast around a model, if every autocast of the file has enabled=False."""
    calls = [call for call in amp.script.calls if amp.script.resolve_name(call.func) in AUTOCASTS]
    if not calls or not all(is_constant(keyword(call, "enabled"), False) for call in calls):
        return None
    blocks = [
        n for n in amp.script.nodes if isinstance(n, ast.With) and any(c in amp.script.walk_below(n) for c in calls)
    ]
    runs = (
        last_name(dotted_name(c.func)) in amp.script.model_names
        for block in blocks
        for c in amp.script.calls_below(block)
    )
    return calls[0] if any(runs) else None


def list_models_run(amp: Amp, event: Event) -> list[str]:
    """Return the model a call runs, itself or in a method of this file."""
    if is_model(amp, event) and not event.grad_off and not event.regions:
        return [event.called]
    inner = amp.script.find_function(event.method) if isinstance(event.node, ast.Call) else None
    calls = amp.script.calls_below(inner) if inner is not None and not event.grad_off else ()
    return [name for c in calls if last_name(name := dotted_name(c.func)) in amp.script.model_names]


def find_bypassed_wrapper(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find `vae.module.encode(x)` of a prepared model: accelerate's autocast is around forward() alone."""
    halves = {name for name, precision in amp.accelerators.items() if precision in ("fp16", "bf16")}
    if (
        not halves
        or "autocast" in amp.script.code
        or not any(amp.script.canonicalise(e.receiver) in halves for e in trace.calls("backward"))
    ):
        return
    prepared = {n for n, values in amp.script.assigned.items() if any(is_prepare(v, halves) for v in values)}
    for event in trace.events:
        func = event.node.func if isinstance(event.node, ast.Call) else None
        owner = ""
        if isinstance(func, ast.Attribute) and event.method.startswith(OWN_METHODS):
            given = amp.script.list_values(dotted_name(func.value))
            owner = next((name for part in (func.value, *given) if (name := get_unwrapped_name(part)) in prepared), "")
        trained = last_name(owner) in amp.script.model_names and owner in prepared
        if trained and event.loops and not event.grad_off and not any(e.called == owner for e in trace.events):
            message = f"{event.method}() bypasses the forward() that accelerate runs under autocast: it runs in fp32"
            fix = "wrap the call in `with accelerator.autocast():`"
            yield amp.script.report("model-outside-autocast", event.node, message, fix=fix)
            return


def is_prepare(value: ast.expr, accelerators: set[str]) -> bool:
    func = value.func if isinstance(value, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr == "prepare" and dotted_name(func.value) in accelerators


def get_unwrapped_name(node: ast.expr) -> str:
    """Return `vae` for `vae.module` and of `accelerator.unwrap_model(vae)`."""
    if isinstance(node, ast.IfExp):
        node = node.body
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "unwrap_model" and node.args:
        node = node.args[0]
    return dotted_name(node).removesuffix(".module")


def is_known_model(amp: Amp, name: str) -> bool:
    """Match models of this file or of a library whose models open no autocast; another module's might."""
    own = {node.name for node in amp.script.classes}
    values = [v for key, given in amp.script.assigned.items() if last_name(key) == last_name(name) for v in given]
    makers = [amp.script.resolve_name(v.func) for v in values if isinstance(v, ast.Call)]
    return any(maker in own or maker.startswith(LIBRARIES) for maker in makers)


def is_model(amp: Amp, event: Event) -> bool:
    return isinstance(event.node, ast.Call) and last_name(event.called) in amp.script.model_names
