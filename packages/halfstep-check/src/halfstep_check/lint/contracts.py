"""What torch.amp's calls take: the kind of each argument, as far as the script shows it, against the signature."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.api import serves_two_versions
from halfstep_check.lint.regions import format_of
from halfstep_check.lint.scaler_use import is_scaler
from halfstep_check.lint.script import AUTOCASTS, Script
from halfstep_check.lint.syntax import Function, argument, dotted_name, keyword, last

FLAG = re.compile(
    r"^(use_?|enable_?|no_?|with_?|is_?)*(amp|fp16|bf16|mixed|mixed_precision|half|autocast|enabled?)$", re.I
)
NEW_AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
OLD_SCALERS = ("torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler")
NEW_SCALERS = ("torch.amp.GradScaler", "torch.GradScaler", "torch.amp.grad_scaler.GradScaler")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """One argument of one call: the kinds that torch refuses there, and what it wants."""

    names: tuple[str, ...]
    position: int
    argument: str
    refused: tuple[str, ...]
    wants: str
    fix: str


CONTRACTS = (
    Contract(names=NEW_AUTOCASTS, position=0, argument="device_type", refused=("device", "bool", "dtype"),
             wants="the device's type, a string", fix='autocast("cuda", …), or device.type'),
    Contract(names=NEW_AUTOCASTS, position=1, argument="dtype", refused=("bool", "str"),
             wants="a torch.dtype as its second argument", fix="dtype=torch.float16, enabled=…"),
    Contract(names=("torch.cuda.amp.autocast",), position=0, argument="enabled", refused=("str", "device", "dtype"),
             wants="true or false first: the device is in its name", fix='torch.amp.autocast("cuda", …)'),
    Contract(names=OLD_SCALERS, position=0, argument="init_scale", refused=("str", "device", "bool"),
             wants="the first scale, a number", fix='torch.amp.GradScaler("cuda", enabled=…)'),
    Contract(names=NEW_SCALERS, position=0, argument="device", refused=("bool",),
             wants="the device first", fix='GradScaler("cuda", enabled=…)'),
)  # fmt: skip


def find(amp: Amp) -> Iterator[Finding]:
    script = amp.script
    if not serves_two_versions(script):
        for call in script.calls:
            yield from broken_contracts(script, call)
            yield from missing_device(script, call)
    for call in script.calls:
        yield from scaler_arguments(amp, call)
    yield from never_entered(script)


def broken_contracts(script: Script, call: ast.Call) -> Iterator[Finding]:
    name = script.name_of(call.func)
    for contract in CONTRACTS:
        value = argument(call, contract.position, contract.argument) if name in contract.names else None
        by_position = len(call.args) > contract.position
        if value is not None and kind_of(script, value, by_name=by_position) in contract.refused:
            message = f"{last(name)}() gets `{ast.unparse(value)}` where it wants {contract.wants}"
            yield script.finding("launch-refused", call, message, fix=contract.fix)


def missing_device(script: Script, call: ast.Call) -> Iterator[Finding]:
    """`from torch.amp import autocast` and `autocast()`: there the device comes first, and has no default."""
    given = call.args or any(item.arg in (None, "device_type") for item in call.keywords)
    if script.name_of(call.func) in NEW_AUTOCASTS and not given:
        message = "torch.amp.autocast() without a device_type is a TypeError; only torch.cuda.amp's has a default"
        yield script.finding("launch-refused", call, message, fix='autocast("cuda")')
    elif script.name_of(call.func) == "torch.cuda.amp.autocast" and keyword(call, "device_type") is not None:
        message = "torch.cuda.amp.autocast() takes no device_type: a TypeError"
        yield script.finding("launch-refused", call, message, fix="torch.amp.autocast(…)")
    elif script.name_of(call.func) in (*OLD_SCALERS, *NEW_SCALERS) and keyword(call, "device_type") is not None:
        yield script.finding("launch-refused", call, "GradScaler() takes device, not device_type", fix='device="cuda"')


def kind_of(script: Script, node: ast.expr, *, by_name: bool = False) -> str:
    """bool, str, device or dtype, where the script leaves no doubt; `by_name`, a flag's name counts as bool."""
    asked, node = node, script.constant(node) or node
    if isinstance(node, ast.Constant):
        return {bool: "bool", str: "str"}.get(type(node.value), "")
    if isinstance(node, ast.Compare) or isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "bool"
    if isinstance(node, ast.Call):
        name = script.name_of(node.func)
        return {"torch.device": "device", "torch.cuda.is_available": "bool"}.get(name, "")
    if format_of(node, script):
        return "dtype"
    values = script.values(dotted_name(asked))
    made = {kind_of(script, value) for value in values if isinstance(value, ast.Call | ast.Constant | ast.Compare)}
    if len(made) == 1 and len(values) == len(
        [v for v in values if isinstance(v, ast.Call | ast.Constant | ast.Compare)]
    ):
        return made.pop()
    return "bool" if by_name and not values and FLAG.search(last(dotted_name(asked))) else ""


def scaler_arguments(amp: Amp, call: ast.Call) -> Iterator[Finding]:
    """unscale_() and step() take the optimizer, no less and nothing else; scale() takes a loss that is not scaled."""
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr not in ("unscale_", "step", "scale"):
        return
    if not is_scaler(amp, func.value):
        return
    first = argument(call, 0, "optimizer")
    fix = f"{ast.unparse(func.value)}.{func.attr}(optimizer)"
    if func.attr != "scale" and first is None and not call.keywords:
        message = f"{func.attr}() needs the optimizer: a TypeError when this line runs"
        yield amp.script.finding("scaler-misused", call, message, fix=fix)
    elif func.attr != "scale" and first is not None and is_no_optimizer(amp.script, first):
        message = (
            f"{func.attr}() takes the optimizer, not {ast.unparse(first)}: it asks for its param_groups and raises"
        )
        yield amp.script.finding("scaler-misused", call, message, fix=fix)
    elif func.attr == "scale" and isinstance(first := argument(call, 0, "outputs"), ast.Call):
        inner = first.func
        if isinstance(inner, ast.Attribute) and inner.attr == "scale" and is_scaler(amp, inner.value):
            yield amp.script.finding(
                "scaler-misused", call, "the loss is scaled twice, and unscaled once", fix="scale once"
            )


def is_no_optimizer(script: Script, node: ast.expr) -> bool:
    """A model, its parameters, or a loss."""
    name = last(dotted_name(node))
    by_call = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("parameters", "step")
    return by_call or name == "loss" or name in script.model_names - script.optimizer_names


def never_entered(script: Script) -> Iterator[Finding]:
    """`autocast("cuda")` as a statement, or `with autocast:`: nothing is switched on."""
    for node in script.nodes:
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if called is not None and script.name_of(called) in AUTOCASTS:
            message = "autocast() alone switches nothing on: it is a context"
            yield script.finding("model-outside-autocast", node, message, fix="with autocast(…): around the model")
        bare = [script.name_of(d) for d in node.decorator_list] if isinstance(node, Function) else []
        if AUTOCASTS.intersection(bare) - {"autocast"}:
            message = "`@autocast` without a call makes the function an autocast object: it can no longer be called"
            yield script.finding("launch-refused", node, message, fix="@autocast(…)")
        for item in node.items if isinstance(node, ast.With) else ():
            context = item.context_expr
            if isinstance(context, ast.Name | ast.Attribute) and script.name_of(context) in AUTOCASTS - {"autocast"}:
                message = "`with autocast:` enters the class, not a context: a TypeError"
                yield script.finding("launch-refused", node, message, fix="with autocast(…):")
