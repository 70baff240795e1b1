"""Every backward() walks a graph of its own: the first one frees it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, is_plain_backward, is_scaled_backward, plain
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.syntax import last, names_in

Loop = ast.For | ast.While


def find(amp: Amp) -> Iterator[Finding]:
    walked = [n.target for n in amp.script.nodes if isinstance(n, ast.For | ast.comprehension)]
    taken = {name for target in walked for name in names_in(target)}  # `for loss in losses:` is a new one each time
    for trace in amp.traces:
        runs = [e for e in trace.events if is_plain_backward(e) or is_scaled_backward(e)]
        kept = any("retain_graph" in ast.unparse(e.node) for e in runs)
        for number, run in enumerate(runs if not kept else ()):
            name = loss_name(run)
            made = [e for e in trace.events[: run.index] if name in e.targets and e.function == run.function]
            again = any(is_spent(name, earlier, run, made) for earlier in runs[:number])
            if made and name not in taken and (again or repeats(amp, trace, run, made[-1], name)):
                message = f"backward() a second time on one {name}: its graph is gone, and torch raises"
                fix = "compute the loss anew before each backward()"
                yield amp.script.finding("backward-again", run.node, message, fix=fix, related=made[-1].node)
                break


def loss_name(run: Event) -> str:
    """`loss` of `loss.backward()`, `(loss / n).backward()` and `scaler.scale(loss).backward()`, where it is one.

    `losses[0]` and `losses[1]` are two, as are two calls of one `loss_fn`."""
    func = run.node.func if isinstance(run.node, ast.Call) else None
    inside = list(ast.walk(func.value)) if isinstance(func, ast.Attribute) else []
    several = {id(n.func) for n in inside if isinstance(n, ast.Call)}
    several |= {id(n.value) for n in inside if isinstance(n, ast.Subscript)}
    names = {n.id for n in inside if isinstance(n, ast.Name) and id(n) not in several}
    found = sorted(name for name in names if "loss" in name.lower() and name != last(run.scaled_by))
    return found[0] if len(found) == 1 and "." not in plain(run.receiver) else ""


def is_spent(name: str, earlier: Event, run: Event, made: list[Event]) -> bool:
    """Whether an earlier backward on the same path used this very loss."""
    same = loss_name(earlier) == name and earlier.conditions == run.conditions and earlier.loops == run.loops
    return same and earlier.function == run.function and not any(e.index > earlier.index for e in made)


def repeats(amp: Amp, trace: Trace, run: Event, made: Event, name: str) -> bool:
    """Whether a loop runs backward at every turn on a loss made before it, or in its first turn only."""
    loop = next((n for n in amp.script.nodes if run.loops and id(n) == run.loops[-1]), None)
    if not isinstance(loop, Loop) or any(isinstance(n, ast.Break | ast.Return) for n in amp.script.below(loop)):
        return False
    counters = names_in(loop.target) if isinstance(loop, ast.For) else set()
    first = {(f"{counter} == 0", True) for counter in counters}
    inside = [e for e in trace.events if name in e.targets and e.loops[: len(run.loops)] == run.loops]
    return all(e.conditions & first - run.conditions for e in inside) and run.conditions <= made.conditions
