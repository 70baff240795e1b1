"""Autocast regions: device, dtype and whether they are on, as far as the script says so for certain."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep_check.lint.script import AUTOCASTS, Function, Script, argument, dotted_name, is_constant, last_name
from halfstep_check.spellings import parse_dtype

DEFAULT_DTYPE = {"cuda": "fp16", "cpu": "bf16", "mps": "fp16"}
"""What autocast computes in without a dtype (aten/src/ATen/autocast_mode.cpp)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One autocast context; an empty device or dtype is one the script does not fix."""

    device: str = ""
    dtype: str = ""
    enabled: bool | None = True
    """None: decided at run time."""
    explicit_dtype: bool = False
    fp16_on_a_path: bool = False
    """Where the dtype is chosen at run time: whether fp16 is among the choices."""

    @property
    def may_be_fp16(self) -> bool:
        return self.dtype == "fp16" or self.fp16_on_a_path

    @property
    def may_be_on(self) -> bool:
        return self.enabled is not False


PARTIALS = ("functools.partial", "partial")
MAX_ALIASES = 4
"""Names for names: `ctx = make_ctx`, `make_ctx = partial(autocast, …)`."""


def read_region(node: ast.expr, script: Script, depth: int = 0) -> Region | None:
    """Return the region a `with` item or decorator opens, or None when it is not an autocast."""
    if depth > MAX_ALIASES:
        return None
    if isinstance(node, ast.Name | ast.Attribute):
        return merge_choices([read_region(value, script, depth + 1) for value in script.list_values(dotted_name(node))])
    if isinstance(node, ast.IfExp):
        return merge_choices([read_region(value, script, depth + 1) for value in (node.body, node.orelse)])
    if not isinstance(node, ast.Call):
        return None
    name = script.resolve_name(node.func)
    # `autocast = get_autocast(precision)`: a name of this file is not torch's.
    if name in AUTOCASTS and name not in script.assigned:
        return read_autocast_call(node, name, script)
    # A helper of this file, or a name that holds autocast, a partial or a lambda, may make the context.
    own = script.find_function(last_name(name)) if name.startswith("self.") or name in script.local_names else None
    makers = [*script.list_values(dotted_name(node.func)), *list_helper_contexts(own, script)]
    return merge_choices([read_made_region(maker, node, script, depth + 1) for maker in makers])


def list_helper_contexts(function: Function | None, script: Script) -> list[ast.expr]:
    """Return what a helper returns, `return torch.autocast(…)`, or opens around its yield; None for a yield in the
    open."""
    inside = script.walk_below(function) if function is not None else []
    ends = [n.value for n in inside if isinstance(n, ast.Return) and n.value is not None]
    # `@contextmanager`: what is open around the yield is open in the caller's block.
    yields = {n for n in inside if isinstance(n, ast.Yield)}
    opened = [n for n in inside if isinstance(n, ast.With) and yields.intersection(ast.walk(n))]
    bare: list[ast.expr] = [ast.Constant(None)] if yields.difference(*map(ast.walk, opened)) else []
    return [*ends, *(item.context_expr for block in opened for item in block.items), *bare]


def read_made_region(maker: ast.expr, call: ast.Call, script: Script, depth: int) -> Region | None:
    """Return what `call` opens when the thing called is `maker`: autocast itself, a partial, a lambda, or a choice of
    them."""
    if isinstance(maker, ast.IfExp):
        return merge_choices([read_made_region(value, call, script, depth) for value in (maker.body, maker.orelse)])
    if isinstance(maker, ast.Lambda):
        return read_region(maker.body, script, depth)
    if isinstance(maker, ast.Name | ast.Attribute) and script.resolve_name(maker) in AUTOCASTS:
        return read_autocast_call(call, script.resolve_name(maker), script)
    bound = maker.args[0] if isinstance(maker, ast.Call) and maker.args else None
    if isinstance(maker, ast.Call) and script.resolve_name(maker.func) in PARTIALS and bound is not None:
        # partial(autocast, "cuda")(enabled=x) is autocast("cuda", enabled=x).
        whole = ast.Call(func=bound, args=[*maker.args[1:], *call.args], keywords=[*maker.keywords, *call.keywords])
        return read_made_region(bound, whole, script, depth)
    return read_region(maker, script, depth)


def merge_choices(choices: list[Region | None]) -> Region | None:
    """Return the region when all choices are one; a choice that may be a null context is autocast only sometimes."""
    regions = [region for region in choices if region is not None]
    if not regions or len(choices) == 1:
        return regions[0] if regions else None
    # A choice that is switched off computes in no format of its own.
    regions = [region for region in regions if region.may_be_on] or regions
    dtypes = {region.dtype for region in regions}
    explicit = all(region.explicit_dtype for region in regions)
    dtype = dtypes.pop() if len(dtypes) == 1 else ""
    # Different dtypes: the region has none for certain, but fp16 may be one of them.
    on_a_path = not dtype and any(region.may_be_fp16 and region.device != "mps" for region in regions)
    return Region(
        device=regions[0].device, dtype=dtype, enabled=None, explicit_dtype=explicit, fp16_on_a_path=on_a_path
    )


def may_be_fp16(node: ast.expr | None, script: Script, depth: int = 0) -> bool:
    """Match `torch.float16` as one arm of a choice, in a table of dtypes, or one of the values that a name is given."""
    name = dotted_name(node)
    # A parameter's values are what calls in this file pass; without such calls nothing is known.
    handed = script.list_passed_values(name) if script.is_taken(node) else []
    values = [*handed, *(script.list_values(name) if handed or not script.is_taken(node) else [])]
    # Without a known value the expression itself may be the choice.
    choices = [arm for v in values or ([node] if node else []) for arm in list_choices(v, script)]
    # `self.dtype = dtype`, which the caller chose.
    passed_on = [a for a in choices if depth < MAX_ALIASES and isinstance(a, ast.Name) and a is not node]
    return any(read_format(arm, script) == "fp16" for arm in choices) or any(
        may_be_fp16(arm, script, depth + 1) for arm in passed_on
    )


def list_choices(node: ast.expr | None, script: Script, depth: int = 0) -> list[ast.expr]:
    """Return the expressions that a choice chooses from; an expression that is no choice is the only one itself.

    Choices are `a if test else b`, `{"fp16": a, "bf16": b}[name]`, `table.get(name)`, and functions or properties of
    the script that return one: `def pick_dtype(): return torch.bfloat16 if … else torch.float16`.
    """
    match node:
        case None:
            return []
        case ast.IfExp():
            return [*list_choices(node.body, script, depth), *list_choices(node.orelse, script, depth)]
        case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value, attr="get")):
            table = script.read_constant(value)
            if isinstance(table, ast.Dict):
                key = script.read_constant(node.slice) if isinstance(node, ast.Subscript) else None
                entries = [(k, v) for k, v in zip(table.keys, table.values, strict=True) if isinstance(k, ast.Constant)]
                # A key that is written out leaves one entry, any other one all of them.
                return [v for k, v in entries if isinstance(key, ast.Constant) and k.value == key.value] or table.values
    function = script.find_property(node)
    if isinstance(node, ast.Call):
        function = script.functions.get(dotted_name(node.func))
    if function is None or depth == MAX_ALIASES:
        return [node]
    returned = [n.value for n in script.walk_below(function) if isinstance(n, ast.Return)]
    plain = [value for value in returned if not isinstance(value, ast.Call)]
    return [choice for value in plain for choice in list_choices(value, script, depth + 1)]


def read_autocast_call(call: ast.Call, name: str, script: Script) -> Region:
    device_first = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    # torch.cuda.amp.autocast(enabled, dtype) has the device in its name; torch.autocast takes it first.
    legacy = name.startswith(("torch.cuda.amp", "torch.cpu.amp")) and not device_first
    if legacy:
        device = name.split(".")[1]
        enabled, dtype = argument(call, 0, "enabled"), argument(call, 1, "dtype")
    else:
        first = argument(call, 0, "device_type")
        # A bare `autocast()` without any import is the old torch.cuda.amp one.
        device = read_device(first, script) if first is not None else ("cuda" if name == "autocast" else "")
        dtype, enabled = argument(call, 1, "dtype"), argument(call, 2, "enabled")
    if any(item.arg is None for item in call.keywords):
        return Region(device=device, enabled=None)
    explicit = dtype is not None and not is_constant(dtype, None)
    # Of a device that is computed, `device.type`, the GPU is what autocast is there for.
    computed = "" if isinstance(call.args[0] if call.args else None, ast.Constant) else "fp16"
    known = read_format(dtype, script) if explicit else DEFAULT_DTYPE.get(device, computed)
    on_a_path = explicit and not known and may_be_fp16(dtype, script)
    on = read_switch(enabled, script)
    return Region(device=device, dtype=known, enabled=on, explicit_dtype=explicit, fp16_on_a_path=on_a_path)


def read_switch(node: ast.expr | None, script: Script) -> bool | None:
    """Return whether `enabled=` is on; None where that is decided at run time."""
    if node is None:
        return True
    node = script.read_constant(node)
    if node is not None and (compares_dtype_with_text(node, script) or compares_other_texts(node, script)):
        return False
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, bool) else None


def compares_other_texts(test: ast.expr, script: Script) -> bool:
    """Return whether a test is `dtype == "float16"` where dtype is only ever another text."""
    # nanoGPT's configurator replaces constants of the module by exec().
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq) or "exec(" in script.code:
        return False
    sides = [script.read_constant(side) for side in (test.left, *test.comparators)]
    texts = {side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)}
    return len(sides) == 2 and len(texts) == 2


def compares_dtype_with_text(test: ast.expr, script: Script) -> bool:
    """Return whether a test is `dtype == "float16"` where dtype holds a torch.dtype: never true."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    text = test.comparators[0]
    is_text = isinstance(text, ast.Constant) and isinstance(text.value, str)
    values = [arm for value in script.list_values(dotted_name(test.left)) for arm in list_choices(value, script)]
    certain = bool(values) and not script.is_taken(test.left) and all(read_written_format(v, script) for v in values)
    return is_text and certain


def read_device(node: ast.expr | None, script: Script) -> str:
    """Return `cuda` or `cpu` when the script fixes it; a choice by is_available() means the GPU when there is one."""
    node = script.read_constant(node)
    if isinstance(node, ast.Attribute) and node.attr == "type":
        node = script.read_constant(node.value)
    if isinstance(node, ast.Call) and script.resolve_name(node.func) == "torch.device" and node.args:
        node = script.read_constant(node.args[0])
    if isinstance(node, ast.IfExp) and "is_available" in ast.unparse(node.test):
        node = node.body
        if isinstance(node, ast.Call) and node.args:
            node = node.args[0]
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return text.split(":")[0] if text.split(":")[0] in DEFAULT_DTYPE else ""


def read_format(node: ast.expr | None, script: Script) -> str:
    """Return fp16, bf16, … for `torch.bfloat16` or a name that is that and nothing else."""
    node = script.read_constant(node)
    if isinstance(node, ast.IfExp):  # half where AMP is on, fp32 (no cast at all) where it is off
        half = {read_written_format(node.body, script), read_written_format(node.orelse, script)} - {"fp32"}
        return half.pop() if len(half) == 1 else ""
    return read_written_format(node, script)


def read_written_format(node: ast.expr | None, script: Script) -> str:
    """Return fp16, bf16, … where it is written out as `torch.bfloat16`, or `getattr(torch, "bfloat16")`."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
        word = script.read_default(node.args[1]) if script.resolve_name(node.args[0]) == "torch" else None
        return parse_dtype(word.value) or "" if isinstance(word, ast.Constant) and isinstance(word.value, str) else ""
    known = isinstance(node, ast.Attribute) and script.resolve_name(node).startswith("torch.")
    return parse_dtype(node.attr) or "" if known and isinstance(node, ast.Attribute) else ""


def is_no_grad(node: ast.expr, script: Script) -> bool:
    """Match `torch.no_grad()`, `inference_mode()` or `set_grad_enabled(False)`, as a context or a decorator."""
    target = node.func if isinstance(node, ast.Call) else node
    name = script.resolve_name(target)
    if name.endswith("set_grad_enabled"):
        return isinstance(node, ast.Call) and bool(node.args) and is_constant(node.args[0], False)
    return name.endswith(("no_grad", "inference_mode"))
