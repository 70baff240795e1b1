"""Resume is continuation only when the scaler's scale and growth counter are saved and loaded."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding, Severity
from halfstep_check.lint.amp import Amp, ScalerMade, is_scaled_backward, passed
from halfstep_check.lint.flow import Event
from halfstep_check.lint.syntax import dotted_name, last

LOADS = re.compile(r"^(?!.*(config|cfg)).*(load|resume|restore)", re.IGNORECASE)
"""In the name of a function that reads a checkpoint; load_from_config() makes something new."""


def find(amp: Amp) -> Iterator[Finding]:
    yield from apex_unloaded(amp)
    live = live_scalers(amp)
    if not live or amp.certainly_bf16:
        return
    saved = receivers_of(amp, "state_dict")
    loaded = receivers_of(amp, "load_state_dict")
    if not saved & live.keys():
        yield from unsaved(amp, live)
    if saved & live.keys() or not any(map(amp.script.is_optimizer, saved)):
        yield from unloaded(amp, live, loaded)


def apex_unloaded(amp: Amp) -> Iterator[Finding]:
    """apex keeps its loss scale in amp.state_dict()."""
    named = [(call, amp.script.name_of(call.func)) for call in amp.script.calls]
    scales = any(name == "apex.amp.initialize" and "'O0'" not in ast.unparse(call) for call, name in named)
    loads = [call for call in amp.script.calls if is_optimizer_load(amp, call)]
    handed = any("amp" in passed(e) for t in amp.traces for e in t.events)
    if scales and loads and not handed and not any(name == "apex.amp.load_state_dict" for _, name in named):
        message = "resume loads the optimizer but not apex's amp: the loss scale starts at 65536 again"
        yield amp.script.finding("scaler-not-loaded", loads[0], message, fix="amp.load_state_dict(…) beside it")


def unloaded(amp: Amp, live: dict[str, ast.AST], loaded: set[str]) -> Iterator[Finding]:
    """Resume loads the optimizer and leaves the scaler; where nothing is saved here, somebody else's file is read."""
    if not loaded & live.keys() and any(amp.script.is_optimizer(name) for name in loaded):
        first = next(call for call in amp.script.calls if is_optimizer_load(amp, call))
        scaler = sorted(live)[0]
        message = f"resume loads the optimizer but not {scaler}: the scale starts at 65536 again"
        yield amp.script.finding("scaler-not-loaded", first, message, fix=f"{scaler}.load_state_dict(…) beside it")


def live_scalers(amp: Amp) -> dict[str, ast.AST]:
    """Scalers that scale here, or are made here and handed to who scales, by last name, with a node of their scope."""
    scaling = {last(e.scaled_by): e.node for t in amp.traces for e in t.events if is_scaled_backward(e)}
    named = {name: node for name, node in scaling.items() if "scaler" in name.lower()}
    made = {last(m.key): m.call for m in amp.scalers if last(m.key) in scaling or handed_over(amp, m)}
    hidden = {last(name) for t in amp.traces for e in t.events if keeps_state(e) for name in passed(e)}
    return {k: v for k, v in {**named, **made}.items() if not amp.is_disabled(k) and k not in hidden}


def handed_over(amp: Amp, made: ScalerMade) -> bool:
    """Whether a call that is not followed gets the scaler together with an optimizer: it trains with them."""
    calls = (passed(e) for t in amp.traces for e in t.events)
    given = ({last(name) for name in names} for names in calls)
    return any(last(made.key) in names and any(map(amp.script.is_optimizer, names)) for names in given)


def keeps_state(event: Event) -> bool:
    """save_checkpoint(…, scaler), Checkpointer(scaler=…), load(…): what happens to the scaler there is not known."""
    return any(word in event.method.lower() for word in ("save", "check", "ckpt", "load", "resume", "state", "prepare"))


def receivers_of(amp: Amp, method: str) -> set[str]:
    names = {dotted_name(call.func) for call in amp.script.calls}
    return {last(name.removesuffix(f".{method}")) for name in names if name.endswith(f".{method}")}


def unsaved(amp: Amp, live: dict[str, ast.AST]) -> Iterator[Finding]:
    """What holds the optimizer's state is a checkpoint to resume from; the scaler belongs into it."""
    for node in amp.script.nodes:
        keys, values = entries(node)
        if not any(is_optimizer_state(amp, value) and scaled(amp, value) for value in values) and not saves_optimizer(
            amp, node
        ):
            continue
        here = [name for name, owner in live.items() if reaches(amp, name, owner, node)]
        if here:
            if None in keys:
                return  # **extra may hold it
            message = f"the checkpoint holds the optimizer but not {here[0]}: resume starts at scale 65536 again"
            fix = f'add "scaler": {here[0]}.state_dict(), and load it'
            found = amp.script.finding("scaler-not-saved", node, message, fix=fix)
            yield found if resumes(amp) else dataclasses.replace(found, severity=Severity.INFO)
            return


def resumes(amp: Amp) -> bool:
    """Whether this file goes on from a checkpoint: it loads an optimizer, or hands one to who loads."""
    given = [[last(dotted_name(v)) for v in (*c.args, *(k.value for k in c.keywords))]
             for c in amp.script.calls if LOADS.search(called_name(c))]  # fmt: skip
    handed = any(amp.script.is_optimizer(name) for names in given for name in names if name)
    return handed or any(is_optimizer_load(amp, call) for call in amp.script.calls)


def reaches(amp: Amp, name: str, owner: ast.AST, node: ast.AST) -> bool:
    """Whether the scaler belongs to the run this checkpoint is of: same object, same scope, or called from there."""
    is_attribute = any("." in made.key for made in amp.scalers if last(made.key) == name)
    if is_attribute or amp.script.share_scope(owner, node):
        return True
    writer, trainer = amp.script.owners.get(id(node)), amp.script.owners.get(id(owner))
    if writer is None or trainer is None:
        return False
    called = {
        function.name: {called_name(c) for c in amp.script.calls_below(function)} for function in (writer, trainer)
    }
    return writer.name in called[trainer.name] or trainer.name in called[writer.name]


def saves_optimizer(amp: Amp, node: ast.AST) -> bool:
    """save_checkpoint(model, optimizer, epoch) of another module: what is not handed over cannot be in the file."""
    if not isinstance(node, ast.Call) or called_name(node) in amp.script.functions:
        return False
    name = called_name(node).lower()
    values = [*node.args, *(item.value for item in node.keywords)]
    given = [dotted_name(value) for value in values]
    whole = "self" not in given and all(item.arg for item in node.keywords)
    # What saves a model may get the optimizer only to gather shards.
    named = "save" in name and "model" not in name and any(word in name for word in ("checkpoint", "ckpt", "state"))
    return named and whole and any(amp.script.is_optimizer(value) for value in given if value)


def called_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def entries(node: ast.AST) -> tuple[list[object], list[ast.expr]]:
    """Keys and values of `{…}`, `d[…] = …`, `dict(…)`, a class or a file; a key None is an unpacked mapping."""
    if isinstance(node, ast.Dict):
        return list(node.keys), node.values
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return [node.targets[0].slice], [node.value]
    if not isinstance(node, ast.Call):
        return [], []
    name = called_name(node)
    if name == "dict" or name[:1].isupper():  # `Snapshot(optimizer_state=optimizer.state_dict(), …)`
        return [item.arg for item in node.keywords], [item.value for item in node.keywords]
    saved = node.args[:1] if name == "save" else []
    listed = saved[0].elts if saved and isinstance(saved[0], ast.List | ast.Tuple) else saved
    return ["state"], listed


def is_optimizer_state(amp: Amp, value: ast.expr) -> bool:
    name = dotted_name(value.func) if isinstance(value, ast.Call) else ""
    return name.endswith(".state_dict") and amp.script.is_optimizer(name.removesuffix(".state_dict"))


def scaled(amp: Amp, state: ast.expr) -> bool:
    """Whether an optimizer whose state is saved may step through the scaler; one that only steps by itself does not."""
    name = dotted_name(state.func).removesuffix(".state_dict") if isinstance(state, ast.Call) else ""
    steps = [e for t in amp.traces for e in t.calls("step")]
    alone = [e for e in steps if not e.arguments and last(e.receiver) == last(name)]
    return not alone or any(last(argument) == last(name) for e in steps for argument in e.arguments[:1])


def is_optimizer_load(amp: Amp, call: ast.Call) -> bool:
    name = dotted_name(call.func)
    return name.endswith(".load_state_dict") and amp.script.is_optimizer(name.removesuffix(".load_state_dict"))
