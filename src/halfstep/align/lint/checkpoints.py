"""Resume is continuation only when the scaler's scale and growth counter are saved and loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp, ScalerMade, is_optimizer_name, is_scaled_backward, last, same_object
from halfstep.align.lint.script import dotted_name


def find(amp: Amp) -> Iterator[Finding]:
    used = [e for t in amp.traces for e in t.events if is_scaled_backward(e)]
    scalers = {last(e.scaled_by) for e in used if any(same_object(m.key, e.scaled_by) for m in amp.scalers)}
    live = {name for name in scalers if not amp.is_disabled(name)}
    if not live or certainly_bf16(amp):
        return
    saved = receivers_of(amp, "state_dict")
    loaded = receivers_of(amp, "load_state_dict")
    if not saved & live:
        made = next(made for made in amp.scalers if last(made.key) in live)
        yield from unsaved(amp, made)
    elif not loaded & live and any(is_optimizer_name(name) for name in loaded):
        first = next(call for call in amp.script.calls if is_optimizer_load(call))
        message = f"{sorted(live)[0]}'s state is saved but never loaded: after resume the scale starts at 65536 again"
        yield amp.script.finding(
            "scaler-not-loaded", first, message, fix=f"{sorted(live)[0]}.load_state_dict(…) beside it"
        )


def certainly_bf16(amp: Amp) -> bool:
    return bool(amp.regions) and all(region.dtype == "bf16" for region in amp.regions)


def receivers_of(amp: Amp, method: str) -> set[str]:
    names = {dotted_name(call.func) for call in amp.script.calls}
    return {last(name.removesuffix(f".{method}")) for name in names if name.endswith(f".{method}")}


def unsaved(amp: Amp, made: ScalerMade) -> Iterator[Finding]:
    """A dict that holds the optimizer's state is a checkpoint to resume from; the scaler belongs into it."""
    for node in amp.script.nodes:
        keys, values = entries(node)
        if any(is_optimizer_state(value) for value in values) and reaches(amp, made, node):
            if None in keys:
                return  # **extra may hold it
            scaler = last(made.key)
            message = f"the checkpoint holds the optimizer but not {scaler}: resume starts at scale 65536 again"
            fix = f'add "scaler": {scaler}.state_dict(), and load it'
            yield amp.script.finding("scaler-not-saved", node, message, fix=fix)
            return


def reaches(amp: Amp, made: ScalerMade, node: ast.AST) -> bool:
    """Whether the scaler belongs to the run this checkpoint is of: same object, same scope, or called from there."""
    if "." in made.key or amp.script.share_scope(made.call, node):
        return True
    writer, trainer = amp.script.owners.get(id(node)), amp.script.owners.get(id(made.call))
    return writer is not None and trainer is not None and writer.name in {called_name(c) for c in amp.script.calls_below(trainer)}


def called_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def entries(node: ast.AST) -> tuple[list[object], list[ast.expr]]:
    """Keys and values of `{…}` or `dict(…)`; a key None is an unpacked mapping."""
    if isinstance(node, ast.Dict):
        return list(node.keys), node.values
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
        return [item.arg for item in node.keywords], [item.value for item in node.keywords]
    return [], []


def is_optimizer_state(value: ast.expr) -> bool:
    name = dotted_name(value.func) if isinstance(value, ast.Call) else ""
    return name.endswith(".state_dict") and is_optimizer_name(name.removesuffix(".state_dict"))


def is_optimizer_load(call: ast.Call) -> bool:
    name = dotted_name(call.func)
    return name.endswith(".load_state_dict") and is_optimizer_name(name.removesuffix(".load_state_dict"))
