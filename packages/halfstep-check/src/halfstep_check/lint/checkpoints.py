"""State that outlives a step: what checkpoints save and load, and where a scaler is created."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding, Severity
from halfstep_check.lint.amp import (
    Amp,
    ScalerMade,
    is_same_object,
    is_scaled_backward,
    is_scaler_step,
    list_passed_names,
)
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.script import SCALERS, Function, dotted_name, last_name, list_parameters
from halfstep_check.lint.weights import list_models

LOADS = re.compile(r"^(?!.*(config|cfg)).*(load|resume|restore)", re.IGNORECASE)
"""In the name of a function that reads a checkpoint; load_from_config() makes something new."""


def find_unsaved_scalers(amp: Amp) -> Iterator[Finding]:
    yield from find_unloaded_apex(amp)
    live = list_live_scalers(amp)
    if not live or amp.certainly_bf16:
        return
    saved = list_receivers(amp, "state_dict")
    loaded = list_receivers(amp, "load_state_dict")
    if not saved & live.keys():
        yield from find_unsaved(amp, live)
    # A scaler that is not saved either is one finding, not two.
    if saved & live.keys() or not any(map(amp.script.is_optimizer, saved)):
        yield from find_unloaded(amp, live, loaded)


def find_unloaded_apex(amp: Amp) -> Iterator[Finding]:
    """Find resumes that load the optimizer but not apex's loss scale, which is in amp.state_dict()."""
    named = [(call, amp.script.resolve_name(call.func)) for call in amp.script.calls]
    scales = any(name == "apex.amp.initialize" and "'O0'" not in ast.unparse(call) for call, name in named)
    loads = [call for call in amp.script.calls if is_optimizer_load(amp, call)]
    handed = any("amp" in list_passed_names(e) for t in amp.traces for e in t.events)
    if scales and loads and not handed and not any(name == "apex.amp.load_state_dict" for _, name in named):
        message = "resume loads the optimizer but not apex's amp: the loss scale restarts at 65536"
        yield amp.script.report("scaler-not-loaded", loads[0], message, fix="also call amp.load_state_dict(…)")


def find_unloaded(amp: Amp, live: dict[str, ast.AST], loaded: set[str]) -> Iterator[Finding]:
    """Find a resume that loads the optimizer but not the scaler; where nothing is saved here, another script wrote the
    file."""
    if not loaded & live.keys() and any(amp.script.is_optimizer(name) for name in loaded):
        first = next(call for call in amp.script.calls if is_optimizer_load(amp, call))
        scaler = sorted(live)[0]
        message = f"resume loads the optimizer but not {scaler}: the scale restarts at {amp.get_initial_scale(scaler)}"
        yield amp.script.report("scaler-not-loaded", first, message, fix=f"also call {scaler}.load_state_dict(…)")


def list_live_scalers(amp: Amp) -> dict[str, ast.AST]:
    """Return scalers that scale here, or are made here and passed to code that scales, by last name, with a node of
    their scope."""
    scaling = {last_name(e.scaled_by): e.node for t in amp.traces for e in t.events if is_scaled_backward(e)}
    named = {name: node for name, node in scaling.items() if "scaler" in name.lower()}
    made = {last_name(m.key): m.call for m in amp.scalers if last_name(m.key) in scaling or is_handed_over(amp, m)}
    # A scaler that is passed to code that saves or loads may be in the checkpoint.
    hidden = {last_name(name) for t in amp.traces for e in t.events if keeps_state(e) for name in list_passed_names(e)}
    return {k: v for k, v in {**named, **made}.items() if not amp.is_disabled(k) and k not in hidden}


def is_handed_over(amp: Amp, made: ScalerMade) -> bool:
    """Return whether a call that is not followed gets the scaler together with an optimizer: it trains with them."""
    calls = (list_passed_names(e) for t in amp.traces for e in t.events)
    given = ({last_name(name) for name in names} for names in calls)
    return any(last_name(made.key) in names and any(map(amp.script.is_optimizer, names)) for names in given)


def keeps_state(event: Event) -> bool:
    """Match save_checkpoint(…, scaler), Checkpointer(scaler=…), load(…): what happens to the scaler there is not
    known."""
    return any(word in event.method.lower() for word in ("save", "check", "ckpt", "load", "resume", "state", "prepare"))


def list_receivers(amp: Amp, method: str) -> set[str]:
    names = {dotted_name(call.func) for call in amp.script.calls}
    return {last_name(name.removesuffix(f".{method}")) for name in names if name.endswith(f".{method}")}


def find_unsaved(amp: Amp, live: dict[str, ast.AST]) -> Iterator[Finding]:
    """Find checkpoints with the optimizer's state but without the scaler's."""
    for node in amp.script.nodes:
        keys, values = list_entries(node)
        if not any(
            is_optimizer_state(amp, value) and may_be_scaled(amp, value) for value in values
        ) and not saves_optimizer(amp, node):
            continue
        mentioned = {last_name(dotted_name(n)) for n in amp.script.walk_below(node)}  # `scaler if use_amp else None`
        here = [name for name, owner in live.items() if reaches(amp, name, owner, node) and name not in mentioned]
        if here and not (isinstance(node, ast.Assign) and loads_nearby(amp, node)):
            if None in keys:
                return  # **extra may hold it
            scale = amp.get_initial_scale(here[0])
            message = (
                f"the checkpoint has the optimizer but not {here[0]}: the scale restarts at {scale} after a resume"
            )
            fix = f'add "scaler": {here[0]}.state_dict(), and load it'
            found = amp.script.report("scaler-not-saved", node, message, fix=fix)
            # Without a resume in this file, the optimizer may be stored for inspection only.
            yield found if resumes(amp) else dataclasses.replace(found, severity=Severity.INFO)
            return


def loads_nearby(amp: Amp, node: ast.AST) -> bool:
    """Return whether the function around a node loads an optimizer: it converts a checkpoint, and does not write
    one."""
    function = amp.script.owners.get(id(node))
    return function is not None and any(is_optimizer_load(amp, call) for call in amp.script.calls_below(function))


def resumes(amp: Amp) -> bool:
    """Return whether this file goes on from a checkpoint: it loads an optimizer, or passes one to a function that
    loads."""
    given = [[last_name(dotted_name(v)) for v in (*c.args, *(k.value for k in c.keywords))]
             for c in amp.script.calls if LOADS.search(get_called_name(c))]  # fmt: skip
    handed = any(amp.script.is_optimizer(name) for names in given for name in names if name)
    return handed or any(is_optimizer_load(amp, call) for call in amp.script.calls)


def reaches(amp: Amp, name: str, owner: ast.AST, node: ast.AST) -> bool:
    """Return whether the scaler belongs to the run this checkpoint is of: same object, same scope, or called from
    there."""
    is_attribute = any("." in made.key for made in amp.scalers if last_name(made.key) == name)
    if is_attribute or amp.script.share_scope(owner, node):
        return True
    # Functions that call each other belong to one run.
    writer, trainer = amp.script.owners.get(id(node)), amp.script.owners.get(id(owner))
    if writer is None or trainer is None:
        return False
    called = {
        function.name: {get_called_name(c) for c in amp.script.calls_below(function)} for function in (writer, trainer)
    }
    return writer.name in called[trainer.name] or trainer.name in called[writer.name]


def saves_optimizer(amp: Amp, node: ast.AST) -> bool:
    """Match save_checkpoint(model, optimizer, epoch) of another module: what is not handed over cannot be in the
    file."""
    if not isinstance(node, ast.Call) or get_called_name(node) in amp.script.functions:
        return False
    name = get_called_name(node).lower()
    values = [*node.args, *(item.value for item in node.keywords)]
    given = [dotted_name(value) for value in values]
    whole = "self" not in given and all(item.arg for item in node.keywords)
    # What saves a model may get the optimizer only to gather shards.
    named = "save" in name and "model" not in name and any(word in name for word in ("checkpoint", "ckpt", "state"))
    return named and whole and any(amp.script.is_optimizer(value) for value in given if value)


def get_called_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def list_entries(node: ast.AST) -> tuple[list[object], list[ast.expr]]:
    """Return keys and values of `{…}`, `d[…] = …`, `dict(…)`, a class or a file; a key None is an unpacked mapping."""
    if isinstance(node, ast.Dict):
        return list(node.keys), node.values
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return [node.targets[0].slice], [node.value]
    if not isinstance(node, ast.Call):
        return [], []
    name = get_called_name(node)
    if name == "dict" or name[:1].isupper():  # `Snapshot(optimizer_state=optimizer.state_dict(), …)`
        return [item.arg for item in node.keywords], [item.value for item in node.keywords]
    saved = node.args[:1] if name == "save" else []
    listed = saved[0].elts if saved and isinstance(saved[0], ast.List | ast.Tuple) else saved
    return ["state"], listed


def is_optimizer_state(amp: Amp, value: ast.expr) -> bool:
    name = dotted_name(value.func) if isinstance(value, ast.Call) else ""
    return name.endswith(".state_dict") and amp.script.is_optimizer(name.removesuffix(".state_dict"))


def may_be_scaled(amp: Amp, state: ast.expr) -> bool:
    """Return whether an optimizer whose state is saved may step through the scaler; one that only steps by itself does
    not."""
    name = dotted_name(state.func).removesuffix(".state_dict") if isinstance(state, ast.Call) else ""
    steps = [e for t in amp.traces for e in t.calls("step")]
    alone = [e for e in steps if not e.arguments and last_name(e.receiver) == last_name(name)]
    return not alone or any(last_name(argument) == last_name(name) for e in steps for argument in e.arguments[:1])


def is_optimizer_load(amp: Amp, call: ast.Call) -> bool:
    name = dotted_name(call.func)
    return name.endswith(".load_state_dict") and amp.script.is_optimizer(name.removesuffix(".load_state_dict"))


SHARDS = re.compile(r"FULL_SHARD|SHARD_GRAD_OP|HYBRID_SHARD")
FSDP = (
    *("torch.distributed.fsdp.FullyShardedDataParallel", "FSDP", "FullyShardedDataParallel"),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch_xla.distributed.fsdp.XlaFullyShardedDataParallel",
)

MAKES_SCALER = re.compile(r"(^|_)(amp|scaler|gradscaler|mixed|precision|fp16)(_|$)", re.IGNORECASE)


def find_remade_scalers(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from find_remade(amp, trace)
        yield from find_unsharded_scalers(amp, trace)
        yield from find_clips_by_shard(amp, trace)


def list_made_scalers(trace: Trace) -> Iterator[Event]:
    return (event for event in trace.events if event.name in SCALERS)


def find_remade(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a scaler made in the loop over epochs: its scale, found by skipping steps, is forgotten each time."""
    for made in (*list_made_scalers(trace), *list_fetched_scalers(amp, trace)):
        below = [e for e in trace.events if is_scaled_backward(e) and e.index > made.index and is_own(amp, made, e)]
        scaled = [e for e in below if e.loops[: len(made.loops)] == made.loops]
        scaled = [e for e in scaled if any(is_scaler_step(step, e.scaled_by) for step in trace.calls("step"))]
        if scaled and not made.conditions - scaled[0].conditions and is_repeated(amp, trace, made, scaled[0]):
            name = last_name(scaled[0].scaled_by)
            scale = amp.get_initial_scale(name)
            message = f"{name} is created again {describe_repeat(made, scaled[0])}: its scale restarts at {scale}"
            fix = "create it once, before the loop over epochs, and pass it on"
            yield amp.script.report("scaler-remade", made.node, message, fix=fix, related=scaled[0].node)


def list_fetched_scalers(amp: Amp, trace: Trace) -> Iterator[Event]:
    """Return `context, scaler = get_amp(config)`: assignments from a helper that makes one, or is named as if it
    did."""
    for event in trace.events:
        call = event.node.value if isinstance(event.node, ast.Assign) else None
        if not isinstance(call, ast.Call) or not any("scaler" in last_name(target).lower() for target in event.targets):
            continue
        helper = amp.script.resolve_name(call.func)
        own = amp.script.functions.get(helper)
        inside = amp.script.calls_below(own) if own is not None else ()
        makes = any(amp.script.resolve_name(inner.func) in SCALERS for inner in inside)
        if makes or own is None and helper not in SCALERS and MAKES_SCALER.search(last_name(helper)):
            yield event


def is_own(amp: Amp, made: Event, scaled: Event) -> bool:
    return scaled.scaled_by in made.targets or any(
        is_same_object(m.key, scaled.scaled_by) and m.call is made.node for m in amp.scalers
    )


def describe_repeat(made: Event, scaled: Event) -> str:
    return "at every step" if made.loops == scaled.loops and made.loops else "every epoch"


def is_repeated(amp: Amp, trace: Trace, made: Event, scaled: Event) -> bool:
    """Match scalers made in the loop over epochs or batches, or in a function for one epoch; folds are separate
    runs."""
    if made.loops:
        loop = next((node for node in amp.script.nodes if id(node) == made.loops[-1]), None)
        header = (
            (loop.target, loop.iter)
            if isinstance(loop, ast.For)
            else (loop.test,)
            if isinstance(loop, ast.While)
            else ()
        )
        over_epochs = any("epoch" in ast.unparse(part).lower() for part in header) or is_outlived_by_optimizer(
            amp, trace, made, scaled
        )
        return made.loops == scaled.loops or over_epochs and len(scaled.loops) == len(made.loops) + 1
    if not isinstance(trace.root, Function):
        return False
    names = {trace.root.name.lower(), *(a.arg.lower() for a in trace.root.args.args)}
    # `train_one_epoch(…)`, or `train(model, loader, epoch)`.
    runs_one = "epoch" in trace.root.name.lower() and "epochs" not in trace.root.name.lower() or "epoch" in names
    return runs_one and made.function == trace.root_name and len(scaled.loops) == 1


def is_outlived_by_optimizer(amp: Amp, trace: Trace, made: Event, scaled: Event) -> bool:
    """Return whether the optimizer that the scaler steps was made before the loop, and not again in it: a run goes
    on."""
    stepped = {e.optimizer for e in trace.calls("step") if is_scaler_step(e, scaled.scaled_by)} - {""}
    # A loop over folds or configurations makes a new optimizer each time: separate runs.
    born = [e for e in trace.events if stepped.intersection(e.targets) and e.index < made.index]
    around = [e for e in trace.events if e.loops[: len(made.loops)] == made.loops]
    if not born:  # in __init__(), where no object of this file is made in the loop
        new = any(e.name in amp.script.class_by_name for e in around)
        return not new and any("." in name and amp.script.list_values(name) for name in stepped)
    return all(len(e.loops) < len(made.loops) and e.loops == made.loops[: len(e.loops)] for e in born)


def find_unsharded_scalers(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a plain scaler with FSDP: it checks only its rank's shard, so one rank skips and the others step."""
    wrapped = [event for event in trace.events if event.name in FSDP]
    if not wrapped or "ShardedGradScaler" in amp.script.text:
        return
    for made in list_made_scalers(trace):
        together = [event for event in wrapped if not event.excludes(made)]
        used = any(is_scaled_backward(e) and is_own(amp, made, e) for t in amp.traces for e in t.events)
        on = not any(m.call is made.node and m.enabled is False for m in amp.scalers)
        if together and used and on and made.conditions <= together[0].conditions:
            message = "a plain GradScaler checks only this rank's shard for inf: ranks skip different steps"
            fix = "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler()"
            yield amp.script.report("scaler-not-sharded", made.node, message, fix=fix, related=together[0].node)


def find_clips_by_shard(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find torch's clip_grad_norm_ on FSDP's parameters: every rank clips by the norm of its own shard."""
    wrapped = {last_name(n) for n in amp.script.assigned if any(is_fsdp(amp, v) for v in amp.script.trace_origins(n))}
    # `model = FSDP(model)`, returned to a caller in another file that also calls the training function.
    called = {last_name(dotted_name(call.func)) for call in amp.script.calls}
    builders = (f for name, f in amp.script.functions.items() if name not in called)
    ends = (n.value for f in builders for n in amp.script.walk_below(f) if isinstance(n, ast.Return))
    built = wrapped & {dotted_name(end) for end in ends}
    # Who takes the sharded scaler trains a sharded model, wherever that was wrapped.
    sharded = any(last_name(event.name) == "ShardedGradScaler" for event in trace.events)
    whole = "NO_SHARD" in amp.script.code and not SHARDS.search(amp.script.code)
    own = any(last_name(e.receiver) in wrapped for e in trace.calls("clip_grad_norm_"))
    if whole or own or re.search(r"\bfully_shard\b", amp.script.code):  # FSDP2's gradients know that they are shards
        return
    for clip in trace.events:
        by_torch = clip.name.startswith("torch.nn.utils.") and clip.method.startswith("clip_grad_norm")
        # What a caller hands over, and no caller is here, may be any model.
        models = {last_name(name) for name in list_models(clip.node)}
        known = (models - (list_parameters(trace.root) - built)) & wrapped or models and sharded
        if by_torch and known and not runs_without_fsdp(clip):
            message = "each rank clips by the norm of its own shard: ranks scale the same gradient differently"
            fix = f"use FSDP's own {min(models)}.clip_grad_norm_(max_norm)"
            yield amp.script.report("clip-not-sharded", clip.node, message, fix=fix)


def is_fsdp(amp: Amp, value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and amp.script.resolve_name(value.func) in FSDP


def runs_without_fsdp(event: Event) -> bool:
    return any("fsdp" in text.lower() or "shard" in text.lower() for text, holds in event.conditions if not holds)
