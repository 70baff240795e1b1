"""One scaler for the whole run, of the kind that the parallelism needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, is_scaled_backward, is_scaler_step, same_object
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.script import SCALERS
from halfstep_check.lint.syntax import Function, dotted_name, last, parameters_of
from halfstep_check.lint.weights import models_of

SHARDS = re.compile(r"FULL_SHARD|SHARD_GRAD_OP|HYBRID_SHARD")
FSDP = (
    *("torch.distributed.fsdp.FullyShardedDataParallel", "FSDP", "FullyShardedDataParallel"),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch_xla.distributed.fsdp.XlaFullyShardedDataParallel",
)

MAKES_SCALER = re.compile(r"(^|_)(amp|scaler|gradscaler|mixed|precision|fp16)(_|$)", re.IGNORECASE)


def find(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from remade(amp, trace)
        yield from not_sharded(amp, trace)
        yield from clipped_by_shard(amp, trace)


def scalers_made(trace: Trace) -> Iterator[Event]:
    return (event for event in trace.events if event.name in SCALERS)


def remade(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """A scaler made in the loop over epochs: its scale, found by skipping steps, is forgotten each time."""
    for made in (*scalers_made(trace), *scalers_fetched(amp, trace)):
        below = [e for e in trace.events if is_scaled_backward(e) and e.index > made.index and is_own(amp, made, e)]
        scaled = [e for e in below if e.loops[: len(made.loops)] == made.loops]
        if scaled and not made.conditions - scaled[0].conditions and is_repeated(amp, trace, made, scaled[0]):
            name = last(scaled[0].scaled_by)
            message = f"{name} is made again {how_often(made, scaled[0])}: its scale starts at 65536 again"
            fix = "make it once, before the loop over epochs, and pass it on"
            yield amp.script.finding("scaler-remade", made.node, message, fix=fix, related=scaled[0].node)


def scalers_fetched(amp: Amp, trace: Trace) -> Iterator[Event]:
    """`context, scaler = get_amp(config)`: assignments from a helper that makes one, or is named as if it did."""
    for event in trace.events:
        call = event.node.value if isinstance(event.node, ast.Assign) else None
        if not isinstance(call, ast.Call) or not any("scaler" in last(target).lower() for target in event.targets):
            continue
        helper = amp.script.name_of(call.func)
        own = amp.script.functions.get(helper)
        inside = amp.script.calls_below(own) if own is not None else ()
        makes = any(amp.script.name_of(inner.func) in SCALERS for inner in inside)
        if makes or own is None and helper not in SCALERS and MAKES_SCALER.search(last(helper)):
            yield event


def is_own(amp: Amp, made: Event, scaled: Event) -> bool:
    return scaled.scaled_by in made.targets or any(
        same_object(m.key, scaled.scaled_by) and m.call is made.node for m in amp.scalers
    )


def how_often(made: Event, scaled: Event) -> str:
    return "at every step" if made.loops == scaled.loops and made.loops else "every epoch"


def is_repeated(amp: Amp, trace: Trace, made: Event, scaled: Event) -> bool:
    """In the loop over epochs or batches, or in a function that runs one epoch; folds are runs of their own."""
    if made.loops:
        loop = next((node for node in amp.script.nodes if id(node) == made.loops[-1]), None)
        header = (
            (loop.target, loop.iter)
            if isinstance(loop, ast.For)
            else (loop.test,)
            if isinstance(loop, ast.While)
            else ()
        )
        over_epochs = any("epoch" in ast.unparse(part).lower() for part in header) or outlived(amp, trace, made, scaled)
        return made.loops == scaled.loops or over_epochs and len(scaled.loops) == len(made.loops) + 1
    if not isinstance(trace.root, Function):
        return False
    names = {trace.root.name.lower(), *(a.arg.lower() for a in trace.root.args.args)}
    # `train_one_epoch(…)`, or `train(model, loader, epoch)`.
    runs_one = "epoch" in trace.root.name.lower() and "epochs" not in trace.root.name.lower() or "epoch" in names
    return runs_one and made.function == trace.root_name and len(scaled.loops) == 1


def outlived(amp: Amp, trace: Trace, made: Event, scaled: Event) -> bool:
    """Whether the optimizer that the scaler steps was made before the loop, and not again in it: a run goes on."""
    stepped = {e.optimizer for e in trace.calls("step") if is_scaler_step(e, scaled.scaled_by)} - {""}
    born = [e for e in trace.events if stepped.intersection(e.targets) and e.index < made.index]
    around = [e for e in trace.events if e.loops[: len(made.loops)] == made.loops]
    if not born:  # in __init__(), where no object of this file is made in the loop
        new = any(e.name in amp.script.class_by_name for e in around)
        return not new and any("." in name and amp.script.values(name) for name in stepped)
    return all(len(e.loops) < len(made.loops) and e.loops == made.loops[: len(e.loops)] for e in born)


def not_sharded(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """torch's plain scaler judges the shard of its own rank: one rank skips, the others step."""
    wrapped = [event for event in trace.events if event.name in FSDP]
    if not wrapped or "ShardedGradScaler" in amp.script.text:
        return
    for made in scalers_made(trace):
        together = [event for event in wrapped if not event.excludes(made)]
        used = any(is_scaled_backward(e) and is_own(amp, made, e) for t in amp.traces for e in t.events)
        on = not any(m.call is made.node and m.enabled is False for m in amp.scalers)
        if together and used and on and made.conditions <= together[0].conditions:
            message = "a plain GradScaler looks for inf in this rank's shard alone: ranks skip different steps"
            fix = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler()"
            yield amp.script.finding("scaler-not-sharded", made.node, message, fix=fix, related=together[0].node)


def clipped_by_shard(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """torch's clip_grad_norm_ on FSDP's parameters: every rank clips by the norm of its own shard."""
    wrapped = {last(n) for n in amp.script.assigned if any(is_fsdp(amp, v) for v in amp.script.origins(n))}
    # `model = FSDP(model)`, handed back to a caller in another file, who calls the training function, too.
    called = {last(dotted_name(call.func)) for call in amp.script.calls}
    builders = (f for name, f in amp.script.functions.items() if name not in called)
    ends = (n.value for f in builders for n in amp.script.below(f) if isinstance(n, ast.Return))
    built = wrapped & {dotted_name(end) for end in ends}
    # Who takes the sharded scaler trains a sharded model, wherever that was wrapped.
    sharded = any(last(event.name) == "ShardedGradScaler" for event in trace.events)
    whole = "NO_SHARD" in amp.script.code and not SHARDS.search(amp.script.code)
    own = any(last(e.receiver) in wrapped for e in trace.calls("clip_grad_norm_"))
    if whole or own or re.search(r"\bfully_shard\b", amp.script.code):  # FSDP2's gradients know that they are shards
        return
    for clip in trace.events:
        by_torch = clip.name.startswith("torch.nn.utils.") and clip.method.startswith("clip_grad_norm")
        # What a caller hands over, and no caller is here, may be any model.
        models = {last(name) for name in models_of(clip.node)}
        known = (models - (parameters_of(trace.root) - built)) & wrapped or models and sharded
        if by_torch and known and not runs_without_fsdp(clip):
            message = "every rank clips by the norm of its own shard: the ranks scale one gradient differently"
            fix = f"{min(models)}.clip_grad_norm_(max_norm), FSDP's own"
            yield amp.script.finding("clip-not-sharded", clip.node, message, fix=fix)


def is_fsdp(amp: Amp, value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and amp.script.name_of(value.func) in FSDP


def runs_without_fsdp(event: Event) -> bool:
    return any("fsdp" in text.lower() or "shard" in text.lower() for text, holds in event.conditions if not holds)
