"""What a script has for mixed precision: its scalers, its traces, and which objects leave the module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from halfstep_check.lint.flow import MAX_INLINED, Event, Trace
from halfstep_check.lint.regions import Region, read_switch
from halfstep_check.lint.script import (
    SCALERS,
    Function,
    Script,
    argument,
    dotted_name,
    is_constant,
    keyword,
    last_name,
    list_methods,
    read_number,
)

FRAMEWORKS = (
    *("accelerator", "fabric", "engine", "model_engine", "trainer", "self.accelerator", "self.fabric"),
    "booster",
)
"""Receivers whose backward, step and clipping unscale by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalerMade:
    """A GradScaler the script constructs."""

    key: str
    call: ast.Call
    enabled: bool | None
    """None: decided at run time."""


class Amp:
    """The facts of one script that the rules share."""

    def __init__(self, script: Script) -> None:
        self.script = script

    @cached_property
    def traces(self) -> list[Trace]:
        return make_traces(self.script)

    @cached_property
    def scalers(self) -> list[ScalerMade]:
        found = []
        for name, values in self.script.assigned.items():
            for value in values:
                found += [ScalerMade(key=name, call=made, enabled=on) for made, on in self.list_made_scalers(value)]
        return found

    def list_made_scalers(self, value: ast.expr) -> Iterator[tuple[ast.Call, bool | None]]:
        """Return GradScalers a value may be: the call itself, or one branch of `GradScaler() if amp else None`."""
        if isinstance(value, ast.IfExp):
            yield from ((call, None) for part in (value.body, value.orelse) for call, _ in self.list_made_scalers(part))
        elif isinstance(value, ast.Call) and self.script.resolve_name(value.func) in SCALERS:
            yield value, read_enabled(value, self.script)

    @cached_property
    def accelerators(self) -> dict[str, str]:
        """Accelerators made here and the precision they are given: fp16 where it may be, empty where none is."""
        made = {name: v for name, values in self.script.assigned.items() for v in values if isinstance(v, ast.Call)}
        calls = {
            n: v
            for n, v in made.items()
            if self.script.resolve_name(v.func) in ("accelerate.Accelerator", "Accelerator")
        }
        return {
            name: read_accelerator_precision(keyword(call, "mixed_precision"), self.script)
            for name, call in calls.items()
        }

    @cached_property
    def plain_accelerators(self) -> set[str]:
        """Accelerators that scale nothing by default: `mixed_precision` is "no" by default."""
        found = set()
        for name, values in self.script.assigned.items():
            for call in (v for v in values if name in self.accelerators and isinstance(v, ast.Call)):
                word = self.script.read_default(keyword(call, "mixed_precision"))
                found |= {name} if isinstance(word, ast.Constant) and word.value == "no" else set()
        return found

    @cached_property
    def may_scale(self) -> bool:
        """Whether anything could scale a loss: a scaler that is used or comes from elsewhere, or a scale by hand."""
        if self.scalers and not any(getattr(call.func, "attr", "") == "scale" for call in self.script.calls):
            # Made here and never asked to scale: it scales only if it is passed on.
            return any(is_same_object(made.key, name) for made in self.scalers for name in self.escaped)
        names = {
            getattr(n, "id", "") or getattr(n, "attr", "") or getattr(n, "arg", "") or "" for n in self.script.nodes
        }
        words = ("scaler", "accelerat", "loss_scale", "grad_scale")
        # An import that is never used scales nothing, and a StandardScaler scales data.
        # Names are all there is for scalers from other files, so any name that suggests one counts.
        imported = {name for name, full in self.script.imports.items() if full not in SCALERS}
        names = {name for name in {*names, *imported} if not self.scales_data(name)}
        # `loss_scaled = loss / n` is a loss, not a scale.
        return any(word in name.lower().replace("loss_scaled", "") for name in names for word in words)

    def scales_data(self, name: str) -> bool:
        """Return whether a name is scikit-learn's, or holds only what that made."""
        if self.script.imports.get(name, "").startswith("sklearn."):
            return True
        values = [v for key, given in self.script.assigned.items() if last_name(key) == name for v in given]
        makers = [self.script.resolve_name(value.func) if isinstance(value, ast.Call) else "" for value in values]
        return bool(makers) and all(maker.startswith("sklearn.") for maker in makers)

    @cached_property
    def regions(self) -> list[Region]:
        """Regions that may be on, in all traces."""
        seen = {region for trace in self.traces for event in trace.events for region in event.regions}
        return [region for region in seen if region.may_be_on]

    @cached_property
    def certainly_bf16(self) -> bool:
        return bool(self.regions) and all(region.dtype == "bf16" for region in self.regions)

    @cached_property
    def uses_autocast(self) -> bool:
        return bool(self.regions)

    @cached_property
    def goes_backward(self) -> bool:
        return any(getattr(call.func, "attr", "") == "backward" for call in self.script.calls)

    @cached_property
    def steps(self) -> bool:
        """Whether anything is stepped here, profilers aside: a lone backward() only looks at gradients."""
        stepped = [call.func.value for call in self.script.calls if getattr(call.func, "attr", "") == "step"]  # type: ignore[attr-defined]
        # torch.profiler has a step() too.
        return any("prof" not in ast.unparse(owner) for owner in stepped)

    @cached_property
    def escaped(self) -> set[str]:
        """Names handed to calls that are not followed; what happens there is not known."""
        # Inlined calls leave no event of their own: what remains are calls into other files.
        followed = {event for trace in self.traces for event in trace.events}
        return {argument for event in followed for argument in list_passed_names(event) if argument}

    def get_initial_scale(self, key: str) -> str:
        """Return the scale a GradScaler starts at, as a number or as the script writes it; 65536 by default."""
        for made in (made for made in self.scalers if is_same_object(made.key, key)):
            # torch.amp's takes the device first, torch.cuda.amp's the scale.
            position = 0 if self.script.resolve_name(made.call.func).startswith(("torch.cuda.", "torch.cpu.")) else 1
            if (given := argument(made.call, position, "init_scale")) is not None:
                value = read_number(self.script.read_constant(given))
                return f"{value:.12g}" if value is not None else ast.unparse(given)
        return "65536"

    def is_disabled(self, key: str) -> bool:
        """Return whether a scaler is off wherever it is made, or None throughout; one that is off on the CPU alone is
        not."""
        made = [made.enabled for made in self.scalers if is_same_object(made.key, key)]
        given = [v for name, values in self.script.assigned.items() if is_same_object(name, key) for v in values]
        is_none = bool(given) and all(is_constant(value, None) for value in given)
        return bool(made) and all(enabled is False for enabled in made) or is_none and not self.is_passed(key)

    def is_passed(self, key: str) -> bool:
        """Return whether a caller may hand over an object of this name."""
        return last_name(key) in self.script.parameters


def read_accelerator_precision(value: ast.expr | None, script: Script) -> str:
    """Return `mixed_precision=` of an Accelerator; what is decided at run time may be fp16."""
    if value is None:
        return ""
    fixed = script.read_constant(value)
    return str(fixed.value) if isinstance(fixed, ast.Constant) else "fp16"


def list_passed_names(event: Event) -> set[str]:
    """Return what a call hands over, by position or by name; `scaler.step(opt)` and the like do not count."""
    if not isinstance(event.node, ast.Call):
        return set()
    named = {dotted_name(item.value) for item in event.node.keywords}
    return {*event.arguments, *named}


def read_enabled(call: ast.Call, script: Script) -> bool | None:
    spread = any(item.arg is None for item in call.keywords)
    return None if spread else read_switch(keyword(call, "enabled"), script)


def is_same_object(one: str, other: str) -> bool:
    """Match `self.scaler` and `scaler`, caller's and callee's: compared by their last name."""
    return bool(one) and last_name(one) == last_name(other)


def strip_function(key: str) -> str:
    """Return a name as its own function writes it."""
    return key.rsplit(":", 1)[-1]


def runs_without_amp(event: Event) -> bool:
    """Return whether the event is in a branch for runs without mixed precision: `if not scaler.is_enabled():`."""
    words = ("amp", "fp16", "half", "mixed", "scaler", "precision")
    return any(not holds and any(word in text.lower() for word in words) for text, holds in event.conditions)


def is_plain_backward(event: Event) -> bool:
    """Match `loss.backward()` without a scaler and without a framework that would scale it."""
    is_method = isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute)
    # `engine.backward(loss)`, `optim.backward(loss)`: a framework's; torch's takes a gradient, or nothing.
    by_framework = last_name(event.receiver) in map(last_name, FRAMEWORKS) or any(
        "loss" in last_name(a) for a in event.arguments
    )
    return event.method == "backward" and is_method and not event.scaled_by and not by_framework


def is_scaled_backward(event: Event) -> bool:
    return event.method == "backward" and bool(event.scaled_by)


CLIPS = re.compile(r"(adaptive_|dispatch_)?clip_(grad|grads|gradient|gradients)(_norm|_value|_by_\w+)?_?")
HAND_CLIP = re.compile(r"clip|norm", re.IGNORECASE)


def is_clip(event: Event) -> bool:
    """Match torch.nn.utils' clipping functions and those named after them; a framework's own clipping unscales
    first."""
    if event.method == "clamp_" and last_name(event.receiver.removesuffix(".data")) == "grad":
        return True  # by hand: p.grad.data.clamp_(-1, 1)
    text = ast.unparse(event.node) if rescales_gradients(event) else ""
    if HAND_CLIP.search(text) and "scale" not in text:
        return True  # by hand: p.grad.mul_(max_norm / total_norm)
    path, _, name = event.name.rpartition(".")
    by_model = "model" in last_name(path).lower() and name == "clip_grad_norm_"  # FSDP's method
    return CLIPS.fullmatch(name) is not None and (not path or "util" in path or by_model)


RESCALING = re.compile(r"(multiply|scale|mul|div|divide|average|normalize)_(\w+_)?grad")


def rescales_gradients(event: Event) -> bool:
    """Match `p.grad.div_(n)`, `p.grad *= f`, `multiply_grads(optimizer, f)`: what the gradients are then, is not
    known."""
    if isinstance(event.node, ast.Call) and RESCALING.search(event.method.lower()):
        return True
    func = event.node.func if isinstance(event.node, ast.Call) and event.method in ("div_", "mul_") else None
    changed = event.node.target if isinstance(event.node, ast.AugAssign) else func
    return changed is not None and re.search(r"\.grad\b", ast.unparse(changed)) is not None


def is_scaler_step(event: Event, scaler: str) -> bool:
    return event.method == "step" and len(event.arguments) >= 1 and bool(scaler) and event.receiver == scaler


STEP_WORDS = {
    *("backward", "unscale_", "scale", "clip_grad_norm_", "clip_grad_value_", "zero_grad", "eval", "get_scale"),
    "autograd",
    *("autocast", "GradScaler", "no_grad", "inference_mode", "binary_cross_entropy", "BCELoss"),
}
STEPPED_WORDS = ("scaler", "optim", "sched", "ema", "opt")


def trains(function: ast.AST, script: Script) -> bool:
    """Return whether a function does any part of a training or evaluation step itself."""
    for node in script.walk_below(function):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in STEP_WORDS or name in script.autocast_names:
            return True
        if name in ("step", "update") and isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).lower()
            if any(word in owner for word in (*STEPPED_WORDS, *script.scaler_names)):
                return True
    return False


def find_training_functions(script: Script) -> frozenset[int]:
    """Return functions that take part in a step, and those that call them, by identity."""
    functions = [node for node in script.nodes if isinstance(node, Function)]
    found = {id(node) for node in functions if trains(node, script)}
    called = {
        id(f): {getattr(c.func, "attr", "") or getattr(c.func, "id", "") for c in script.calls_below(f)}
        for f in functions
    }
    # Propagate from steps to their callers, one call level per round, as deep as calls are followed.
    for _ in range(MAX_INLINED):
        names = {node.name for node in functions if id(node) in found}
        found |= {id(node) for node in functions if called[id(node)] & names}
    return frozenset(found)


def calls_any(script: Script, function: Function, methods: dict[str, Function]) -> bool:
    names = {call.func.attr for call in script.calls_below(function) if isinstance(call.func, ast.Attribute)}
    return not names.isdisjoint(methods)


def make_traces(script: Script) -> list[Trace]:
    """Return one trace for every training function that nothing else runs, and one for the module's own statements."""
    trainers = find_training_functions(script)
    traces = [Trace(script, script.tree, trainers=trainers)]
    owners = {id(method): node for node in script.classes for method in list_methods(node).values()}
    functions = [node for node in script.nodes if isinstance(node, Function) and id(node) in trainers]
    traces += [Trace(script, function, owners.get(id(function)), trainers=trainers) for function in functions]
    # A base's loop that calls steps of its subclass.
    traces += [
        Trace(script, method, node, trainers=trainers)
        for node in script.classes
        for name, method in script.list_methods(node).items()
        if id(method) in trainers and name not in list_methods(node) and calls_any(script, method, list_methods(node))
    ]
    # A function that another trace walked in place of its call is judged there, with the caller's context.
    inlined = {function for trace in traces for function in trace.inlined}
    return [trace for trace in traces if id(trace.root) not in inlined]
