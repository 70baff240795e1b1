"""What a script has for mixed precision: its scalers, its traces, and which objects leave the module."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

from halfstep.align.lint.flow import Event, Trace, traces_of
from halfstep.align.lint.regions import Region
from halfstep.align.lint.script import SCALERS, Script, dotted_name, keyword

FRAMEWORKS = (
    "accelerator",
    "fabric",
    "engine",
    "model_engine",
    "trainer",
    "self.accelerator",
    "self.fabric",
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
        return traces_of(self.script)

    @cached_property
    def scalers(self) -> list[ScalerMade]:
        found = []
        for name, values in self.script.assigned.items():
            for value in values:
                if isinstance(value, ast.Call) and self.script.name_of(value.func) in SCALERS:
                    found.append(ScalerMade(key=name, call=value, enabled=enabled_of(value)))
        return found

    @cached_property
    def may_scale(self) -> bool:
        """Whether anything could scale a loss: a scaler that is used or comes from elsewhere, or a scale by hand."""
        if self.scalers and not any(getattr(call.func, "attr", "") == "scale" for call in self.script.calls):
            # Made here, and never asked to scale: it scales only if somebody else gets hold of it.
            return any(same_object(made.key, name) for made in self.scalers for name in self.escaped)
        names = {
            getattr(n, "id", "") or getattr(n, "attr", "") or getattr(n, "arg", "") or "" for n in self.script.nodes
        }
        words = ("scaler", "accelerat", "loss_scale", "grad_scale")
        return any(word in name.lower() for name in {*names, *self.script.imports} for word in words)

    @cached_property
    def regions(self) -> list[Region]:
        """Regions that may be on, in all traces."""
        seen = {region for trace in self.traces for event in trace.events for region in event.regions}
        return [region for region in seen if region.may_be_on]

    @cached_property
    def uses_autocast(self) -> bool:
        return bool(self.regions)

    @cached_property
    def goes_backward(self) -> bool:
        return any(getattr(call.func, "attr", "") == "backward" for call in self.script.calls)

    @cached_property
    def called_under_no_grad(self) -> set[str]:
        """Names of functions that somebody in this module calls inside no_grad."""
        return {event.method for trace in self.traces for event in trace.events if event.grad_off}

    @cached_property
    def divisors(self) -> set[str]:
        """Last names of what anything here is divided by; counting steps, `len(loader) / n`, is no case."""
        divisions = (n for n in self.script.nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div))
        return {last(ast.unparse(n.right)) for n in divisions if "len(" not in ast.unparse(n.left)}

    @cached_property
    def steps(self) -> bool:
        """Whether anything is stepped here: a lone backward() only looks at gradients."""
        return any(getattr(call.func, "attr", "") == "step" for call in self.script.calls)

    @cached_property
    def escaped(self) -> set[str]:
        """Names handed to calls that are not followed; what happens there is not known."""
        followed = {event for trace in self.traces for event in trace.events}
        return {argument for event in followed for argument in passed(event) if argument}

    def is_disabled(self, key: str) -> bool:
        return any(made.enabled is False for made in self.scalers if same_object(made.key, key))


def passed(event: Event) -> set[str]:
    """What a call hands over, by position or by name; `scaler.step(opt)` and the like do not count."""
    if not isinstance(event.node, ast.Call):
        return set()
    named = {dotted_name(item.value) for item in event.node.keywords}
    return {*event.arguments, *named}


def enabled_of(call: ast.Call) -> bool | None:
    value = keyword(call, "enabled")
    if value is None:
        return None if any(item.arg is None for item in call.keywords) else True
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, bool) else None


def same_object(one: str, other: str) -> bool:
    """`self.scaler` and `scaler`, caller's and callee's: compared by their last name."""
    return bool(one) and last(one) == last(other)


def last(key: str) -> str:
    return key.rsplit(".", 1)[-1].rsplit(":", 1)[-1]


def is_optimizer_name(key: str) -> bool:
    """`optimizer`, `optim_g`, `self.opt`, `opt_d`."""
    name = last(key).lower()
    return "optim" in name or name == "opt" or name.startswith("opt_") or name.endswith("_opt")


def runs_without_amp(event: Event) -> bool:
    """Whether the event stands in a branch for runs without mixed precision: `if not scaler.is_enabled():`."""
    words = ("amp", "fp16", "half", "mixed", "scaler", "precision")
    return any(not holds and any(word in text.lower() for word in words) for text, holds in event.conditions)


def is_plain_backward(event: Event) -> bool:
    """`loss.backward()` without a scaler and without a framework that would scale it."""
    is_method = isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute)
    by_framework = last(event.receiver) in map(last, FRAMEWORKS)
    return event.method == "backward" and is_method and not event.scaled_by and not by_framework


def is_scaled_backward(event: Event) -> bool:
    return event.method == "backward" and bool(event.scaled_by)


def is_clip(event: Event) -> bool:
    """torch.nn.utils' clipping functions; a framework's own clipping unscales first."""
    path, _, name = event.name.rpartition(".")
    return name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm") and (not path or "utils" in path)


def is_scaler_step(event: Event, scaler: str) -> bool:
    return event.method == "step" and len(event.arguments) >= 1 and bool(scaler) and event.receiver == scaler
