"""Autocast regions: device, dtype and whether they are on, as far as the script says so for certain."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep.align.lint.script import AUTOCASTS, Script, argument, is_constant
from halfstep.align.spellings import dtype_of

DEFAULT_DTYPE = {"cuda": "fp16", "cpu": "bf16"}
"""What autocast computes in without a dtype (aten/src/ATen/autocast_mode.cpp)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One autocast context; an empty device or dtype is one the script does not fix."""

    device: str = ""
    dtype: str = ""
    enabled: bool | None = True
    """None: decided at run time."""
    explicit_dtype: bool = False

    @property
    def may_be_on(self) -> bool:
        return self.enabled is not False


def region_of(node: ast.expr, script: Script) -> Region | None:
    """The region a `with` item or decorator opens, or None when it is no autocast."""
    if isinstance(node, ast.Name | ast.Attribute):
        values = script.assigned.get(dotted(node), [])
        regions = [region for value in values if (region := region_of_value(value, script)) is not None]
        # A name that may also be a null context is autocast only sometimes.
        return regions[0] if len(regions) == len(values) == 1 else (uncertain(regions) if regions else None)
    return region_of_value(node, script)


def dotted(node: ast.expr) -> str:
    return ast.unparse(node)


def uncertain(regions: list[Region]) -> Region:
    return Region(device=regions[0].device, enabled=None)


def region_of_value(node: ast.expr, script: Script) -> Region | None:
    if isinstance(node, ast.IfExp):
        inner = [region for value in (node.body, node.orelse) if (region := region_of_value(value, script)) is not None]
        return uncertain(inner) if inner else None
    if not isinstance(node, ast.Call):
        return None
    name = script.name_of(node.func)
    if name in AUTOCASTS:
        return read_call(node, name, script)
    if name in ("functools.partial", "partial") and node.args and script.name_of(node.args[0]) in AUTOCASTS:
        bound = ast.Call(func=node.args[0], args=node.args[1:], keywords=node.keywords)
        return read_call(bound, script.name_of(node.args[0]), script)
    if isinstance(node.func, ast.Name) and script.assigned.get(node.func.id):
        return region_of(node.func, script)
    return None


def read_call(call: ast.Call, name: str, script: Script) -> Region:
    legacy = name.startswith(("torch.cuda.amp", "torch.cpu.amp"))
    if legacy:
        device = name.split(".")[1]
        enabled, dtype = argument(call, 0, "enabled"), argument(call, 1, "dtype")
    else:
        first = argument(call, 0, "device_type")
        # A bare `autocast()` without any import is the old torch.cuda.amp one.
        device = device_of(first, script) if first is not None else ("cuda" if name == "autocast" else "")
        dtype, enabled = argument(call, 1, "dtype"), argument(call, 2, "enabled")
    if any(item.arg is None for item in call.keywords):
        return Region(device=device, enabled=None)
    explicit = dtype is not None and not is_constant(dtype, None)
    known = format_of(dtype, script) if explicit else DEFAULT_DTYPE.get(device, "")
    return Region(device=device, dtype=known, enabled=switch(enabled), explicit_dtype=explicit)


def switch(node: ast.expr | None) -> bool | None:
    if node is None:
        return True
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, bool) else None


def device_of(node: ast.expr | None, script: Script) -> str:
    """`cuda` or `cpu` when the script fixes it; a choice by is_available() means the GPU when there is one."""
    node = script.constant(node)
    if isinstance(node, ast.Attribute) and node.attr == "type":
        node = script.constant(node.value)
    if isinstance(node, ast.Call) and script.name_of(node.func) == "torch.device" and node.args:
        node = script.constant(node.args[0])
    if isinstance(node, ast.IfExp) and "is_available" in ast.unparse(node.test):
        node = node.body
        if isinstance(node, ast.Call) and node.args:
            node = node.args[0]
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return text.split(":")[0] if text.split(":")[0] in DEFAULT_DTYPE else ""


def format_of(node: ast.expr | None, script: Script) -> str:
    """fp16, bf16, … for `torch.bfloat16` or a name that is that and nothing else."""
    node = script.constant(node)
    if isinstance(node, ast.Attribute) and script.name_of(node).startswith("torch."):
        return dtype_of(node.attr) or ""
    return ""


def is_no_grad(node: ast.expr, script: Script) -> bool:
    """`torch.no_grad()`, `inference_mode()` or `set_grad_enabled(False)`, as a context or a decorator."""
    target = node.func if isinstance(node, ast.Call) else node
    name = script.name_of(target)
    if name.endswith("set_grad_enabled"):
        return isinstance(node, ast.Call) and bool(node.args) and is_constant(node.args[0], False)
    return name.endswith(("no_grad", "inference_mode"))
