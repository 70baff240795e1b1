"""Gradient accumulation: windows, the division of the loss, the last window, and no_sync()."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, list_passed_names, rescales_gradients
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.script import Function, Script, dotted_name, is_constant, keyword, last_name, list_names

ACCUMULATION_WORDS = ("accum", "micro")
MICRO_WORDS = ("micro_batch", "microbatch", "micro_batches", "chunks", "minibatches", "mini_batches")
WEIGHT = re.compile(
    r"weight|lambda|alpha|beta|gamma|coef|(^|_)w(_|$)|temp|(^|_)t$|mask|token|outputs|eps", re.IGNORECASE
)
"""In the name of what weighs a term of the loss, or counts its elements."""
RATE = re.compile(r"(^|_|\.)(lr|rate|grad)", re.IGNORECASE)
KEPT_FEATURES = re.compile(r"accum\w*_(features|embed|logits)", re.IGNORECASE)
WRAPPERS = ("enumerate", "tqdm", "trange", "zip", "list")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A loop that runs backward at every micro-batch and steps at every N-th."""

    backward: Event
    step: Event
    test: str
    """The condition of the step; empty where an inner loop counts the micro-batches."""
    length: str
    """N, as the script writes it."""


def find_undivided_windows(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from find_gated_engine(amp, trace)
        yield from find_double_division(amp, trace)
        yield from find_missing_accumulate(amp, trace)
        for window in (*find_windows(trace), *find_inner_windows(amp, trace)):
            chain = trace_loss(trace, window.backward)
            # Each line below is one of the ways in which scripts divide; any of them silences the rule.
            steps = [*(event.node for event in chain), window.backward.node]
            divided = any(divides(amp, node, window) for node in steps) or any(map(rescales_gradients, trace.events))
            divided = divided or divides_itself(amp, window.backward)
            # `loss.mul_(size / batch_size)` changes the loss in place.
            divided = divided or any(e.receiver == window.backward.receiver for e in trace.calls("mul_", "div_"))
            divided = divided or any(is_cleared_when_due(trace, window, e) for e in trace.calls("zero_grad"))
            divided = divided or hands_over_length(trace, window) or is_divided_elsewhere(amp, window)
            if chain and not divided and not adds_over_batch(amp, window):
                message = f"the loss is not divided by {window.length}: gradients are that many times too large"
                fix = f"loss = loss / {window.length} before backward"
                yield amp.script.report("accumulation-not-divided", window.backward.node, message, fix=fix)
            if window.test:
                yield from find_dropped_tail(amp, trace, window)


def is_cleared_when_due(trace: Trace, window: Window, clear: Event) -> bool:
    """Return whether zero_grad() runs under the step's own condition and before backward: the window's sum is lost.

    A function that is called twice is walked twice: a zero_grad() after a step belongs to the earlier call.
    """
    due = (window.test, True) in clear.conditions and clear.index < window.backward.index
    due = due and not clear.excludes(window.backward) and clear.function == window.backward.function
    same = [e for e in trace.calls("step") if last_name(e.optimizer) == last_name(window.step.optimizer)]
    return due and not any(e.index < clear.index for e in same)


SUMS = re.compile(r"reduction\s*={1,2}\s*[\"']?sum\b")
"""A loss that adds over the batch, also where only a comment says so (icefall's trainers)."""


def adds_over_batch(amp: Amp, window: Window) -> bool:
    """Return whether the loss is a sum over the batch, not a mean; N is `64 / batch_size` in YOLO's trainers."""
    return SUMS.search(amp.script.text) is not None or any(
        "batch" in ast.unparse(by) for v in amp.script.list_values(window.length) for by in list_divisors(v)
    )


def divides_itself(amp: Amp, backward: Event) -> bool:
    """Return whether `engine.backward(loss)` may divide by the window: Fabric does not, nor an Accelerator that has
    none."""
    if not isinstance(backward.node, ast.Call) or not backward.node.args:
        return False
    made = [v for v in amp.script.list_values(backward.receiver) if isinstance(v, ast.Call)]
    plain = [
        last_name(dotted_name(v.func)) in ("Accelerator", "Fabric") and "accumulation" not in ast.unparse(v)
        for v in made
    ]
    return not plain or not all(plain)


def find_gated_engine(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find `engine.step()` at the window's end: DeepSpeed counts micro-batches in step() itself."""
    engines = {e.receiver for e in trace.calls("backward")}  # not its optimizer or scheduler, which step too
    for step in (e for e in trace.calls("step") if e.receiver in engines):
        makers = [
            amp.script.resolve_name(v.func) for v in amp.script.list_values(step.receiver) if isinstance(v, ast.Call)
        ]
        gates = [text for text, holds in step.conditions if holds and text in trace.windows]
        if (
            "deepspeed.initialize" in makers
            and not amp.script.is_optimizer(step.receiver)
            and any("accum" in get_modulus(gate).lower() for gate in gates)
        ):
            name = last_name(step.receiver)
            message = f"{name}.step() runs only where `{gates[0]}`, but it counts micro-batches itself"
            fix = "call it after every backward(); gradient_accumulation_steps in the config sets the window"
            yield amp.script.report("engine-step-gated", step.node, message, fix=fix)
            return


def find_double_division(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find `accelerator.backward(loss / n)` of an Accelerator(gradient_accumulation_steps=n), which divides by n
    itself."""
    made = {name: v for name, values in amp.script.assigned.items() for v in values if isinstance(v, ast.Call)}
    given = {n: keyword(v, "gradient_accumulation_steps") for n, v in made.items() if n in amp.accelerators}
    for backward in trace.calls("backward"):
        length = given.get(amp.script.canonicalise(backward.receiver))
        if length is None or is_constant(length, 1) or not isinstance(backward.node, ast.Call):
            continue
        name = backward.arguments[0] if backward.arguments else ""
        chain = [
            e.node for e in trace.events[: backward.index] if name and name in e.targets and not e.excludes(backward)
        ]
        for node in (*chain, *backward.node.args):
            if any(last_name(ast.unparse(by)) == last_name(ast.unparse(length)) for by in list_divisors(node)):
                owner, number = last_name(backward.receiver), last_name(ast.unparse(length))
                message = f"{owner}.backward() divides by {number} itself: the loss is divided twice"
                yield amp.script.report("accumulation-divided-twice", node, message, fix="pass the undivided loss")
                return


def find_missing_accumulate(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find an Accelerator(gradient_accumulation_steps=n) without accumulate(): it divides by n, and steps every
    time."""
    if re.search(r"\.accumulate\(|\.no_sync\(|sync_gradients|gradient_state", amp.script.code):
        return
    for name, call in ((n, v) for n in amp.accelerators for v in amp.script.list_values(n) if isinstance(v, ast.Call)):
        length = keyword(call, "gradient_accumulation_steps")
        if length is None or is_constant(length, 1):
            continue
        for backward in (e for e in trace.calls("backward") if amp.script.canonicalise(e.receiver) == name and e.loops):
            steps = [e for e in trace.calls("step") if e.optimizer and e.loops == backward.loops]
            if any(e.conditions <= backward.conditions for e in steps):
                number = last_name(ast.unparse(length))
                message = f"the loss is divided by {number}, but nothing accumulates: each batch steps"
                fix = f"wrap the batch in `with {last_name(name)}.accumulate(model):`"
                yield amp.script.report("stepped-within-window", backward.node, message, fix=fix, related=call)
                return


def list_divisors(node: ast.AST) -> list[ast.expr]:
    """Return what an expression, or `loss /= n`, divides by."""
    by = [n.right for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    return [*by, *([node.value] if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) else [])]


def find_windows(trace: Trace) -> Iterator[Window]:
    seen: set[tuple[tuple[int, ...], str]] = set()
    for step in trace.calls("step"):
        # Sorted: a set has another order in every run. `i % 1 == 0` is no window, `n % 4 != 0` asks for its rest.
        tests = sorted(text for text, holds in step.conditions if holds and text in trace.windows)
        tests = [text for text in tests if get_modulus(text) not in ("", "1") and "!= 0" not in text]
        if not tests or not step.loops or not step.optimizer:
            continue
        backwards = [
            e for e in trace.calls("backward") if e.loops[: len(step.loops)] == step.loops and e.index < step.index
        ]
        # The backward of the same path whose gradients the step uses.
        latest = next((e for e in reversed(backwards) if not e.excludes(step)), None)
        length = get_modulus(tests[0])
        # `with model.no_sync(): …backward()` of the micro-batches before the last one, which has a branch of its own.
        waiting = [e for e in backwards if (tests[0], False) in e.conditions and e.loops == step.loops]
        latest = waiting[-1] if waiting else latest
        free = latest is not None and (waiting or not any(text == tests[0] for text, _ in latest.conditions))
        # A function that is walked twice gives its window once.
        own = step.loops, step.optimizer
        if latest is not None and free and own not in seen:
            seen.add(own)
            yield Window(backward=latest, step=step, test=tests[0], length=length)


def find_inner_windows(amp: Amp, trace: Trace) -> Iterator[Window]:
    """Find windows that an inner loop counts, `for _ in range(accumulation_steps):` or `for micro in batch.chunk(n):`
    around backward, and a step after it."""
    loops = {id(node): node for node in amp.script.nodes if isinstance(node, ast.For | ast.While)}
    seen: set[int] = set()
    for backward in trace.calls("backward"):
        loop = loops.get(backward.loops[-1]) if backward.loops else None
        length = get_loop_length(loop, amp.script)
        if loop is None or not length or id(loop) in seen or recomputes(amp, loop):
            continue
        # A window needs a step after the inner loop, and none inside it.
        inside = [e for e in trace.events if e.loops[: len(backward.loops)] == backward.loops]
        after = [e for e in trace.calls("step") if e.loops == backward.loops[:-1] and e.index > inside[-1].index]
        steps = [e for e in after if e.optimizer]
        if steps and not any(e.method == "zero_grad" or e.optimizer for e in inside):
            seen.add(id(loop))
            yield Window(backward=backward, step=steps[0], test="", length=length)


def counts_micro_batches(length: ast.expr, script: Script) -> bool:
    """Match counts of micro-batches by name, `accum_steps`, or by value: `n_inner = batch_size // microbatch`."""
    texts = [ast.unparse(length), *map(ast.unparse, script.list_values(dotted_name(length)))]
    return any(word in text.lower() for text in texts for word in ACCUMULATION_WORDS)


def get_loop_length(loop: ast.For | ast.While | None, script: Script) -> str:
    """Return N of `for … in range(N)` or `while i < N` that counts micro-batches, or what is cut into them; wrapped or
    not."""
    if isinstance(loop, ast.While):
        below = isinstance(loop.test, ast.Compare) and len(loop.test.ops) == 1 and isinstance(loop.test.ops[0], ast.Lt)
        limit = loop.test.comparators[0] if below and isinstance(loop.test, ast.Compare) else None
        return ast.unparse(limit) if limit is not None and counts_micro_batches(limit, script) else ""
    over = loop.iter if loop is not None else None
    while isinstance(over, ast.Call) and dotted_name(over.func).rsplit(".", 1)[-1] in WRAPPERS and over.args:
        over = over.args[0]
    if over is None or loop is None:
        return ""
    if isinstance(over, ast.Call) and getattr(over.func, "id", "") == "range":
        fits = len(over.args) == 1 and counts_micro_batches(over.args[0], script)
        return ast.unparse(over.args[0]) if fits else ""
    cut = isinstance(over, ast.Call) and getattr(over.func, "attr", "") in ("chunk", "split")
    text = ast.unparse(over)
    return f"len({text})" if cut or any(word in text.lower() for word in MICRO_WORDS) else ""


def recomputes(amp: Amp, loop: ast.For | ast.While) -> bool:
    """Return whether a pass sees the whole window, `torch.cat` of features kept before (contrastive losses): no mean of
    N."""
    if any(KEPT_FEATURES.search(dotted_name(a)) for c in amp.script.calls_below(loop) for a in c.args):
        return True  # joined in the function that they are given to
    joins = [
        c for c in amp.script.calls_below(loop) if last_name(dotted_name(c.func)) in ("cat", "concat", "concatenate")
    ]
    listed = (c.args[0].elts if c.args and isinstance(c.args[0], ast.List) else [ast.Constant(None)] for c in joins)
    return any(not all(isinstance(part, ast.Name) for part in parts) for parts in listed)


def get_modulus(test: str) -> str:
    """Return N of `(i + 1) % N == 0`, empty when there is not exactly one."""
    tree = ast.parse(test, mode="eval")
    found = [n.right for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
    return ast.unparse(found[0]) if len(found) == 1 else ""


def trace_loss(trace: Trace, backward: Event) -> list[Event]:
    """Return assignments in the loop that the loss of this backward is made from."""
    func = backward.node.func if isinstance(backward.node, ast.Call) else None
    inner = list_names(func.value) if isinstance(func, ast.Attribute) and not backward.receiver else set()
    given = backward.node.args[:1] if isinstance(backward.node, ast.Call) else []
    inner |= {name for value in given for name in list_names(value)}  # `fabric.backward(loss)`
    # In a function walked in place of its call, local names carry the function's name.
    inner |= {f"{backward.function}:{name}" for name in inner}
    # Walk back through assignments, adding the losses that each is made from.
    wanted, chain = ({backward.receiver} | inner) - {"", backward.scaled_by}, []
    for event in reversed(trace.events[: backward.index]):
        if event.targets and wanted.intersection(event.targets) and event.loops == backward.loops:
            chain.append(event)
            wanted |= {name for name in event.uses if "loss" in name}
    return chain


def divides(amp: Amp, node: ast.AST, window: Window) -> bool:
    """Return whether the loss may be divided by the window's length here; a term's weight and a mean over tokens are
    not."""
    parts = list(ast.walk(node))
    methods = {getattr(n.func, "attr", "") for n in parts if isinstance(n, ast.Call)}
    factors = [n for n in parts if isinstance(n, ast.BinOp | ast.AugAssign) and isinstance(n.op, ast.Mult)]
    by = [side for n in factors for side in ([n.value] if isinstance(n, ast.AugAssign) else [n.left, n.right])]
    return (
        bool(methods & {"div", "div_", "mul", "mul_"})
        or any(may_be_length(amp, divisor, window) for divisor in list_divisors(node))
        or any(may_be_length(amp, side, window) for side in by if "loss" not in ast.unparse(side).lower())
    )


def may_be_length(amp: Amp, node: ast.expr, window: Window) -> bool:
    """Return whether a divisor, or a factor, may be the number of micro-batches: by its name, its value, or not
    known."""
    text = ast.unparse(node)
    if last_name(window.length) in text or any(word in text.lower() for word in ACCUMULATION_WORDS):
        return True
    if isinstance(node, ast.Constant) or not isinstance(node, ast.Name | ast.Attribute):
        counts = "len(" in text and not window.test  # the micro-batches of an inner loop
        return counts or isinstance(node, ast.Constant) and str(node.value) in re.findall(r"\w+", window.length)
    values = [v for v in amp.script.list_values(dotted_name(node)) if v is not node]
    if window.test and WEIGHT.search(last_name(text)):
        return False
    return not values or any(
        name in ast.unparse(v) for v in values for name in (last_name(window.length), "accum", "micro")
    )


def hands_over_length(trace: Trace, window: Window) -> bool:
    """Return whether N is given to a call before backward, say to the function that computes the loss."""
    name, loops = last_name(window.length), window.backward.loops
    before = [e for e in trace.events[: window.backward.index] if e.loops[: len(loops)] == loops]
    return not name.isdigit() and any(last_name(given) == name for e in before for given in list_passed_names(e))


def is_divided_elsewhere(amp: Amp, window: Window) -> bool:
    """Return whether N divides something in a function that runs no backward itself, or a rate or gradient anywhere."""
    for node in (n for n in amp.script.nodes if isinstance(n, ast.BinOp | ast.AugAssign) and isinstance(n.op, ast.Div)):
        by = node.value if isinstance(node, ast.AugAssign) else node.right
        of = ast.unparse(node.target if isinstance(node, ast.AugAssign) else node.left)
        if last_name(ast.unparse(by)) != last_name(window.length) or "len(" in of:
            continue
        home = amp.script.owners.get(id(node), amp.script.tree)
        trains = any(getattr(call.func, "attr", "") == "backward" for call in amp.script.calls_below(home))
        if not trains or RATE.search(of):
            return True
    return False


def find_dropped_tail(amp: Amp, trace: Trace, window: Window) -> Iterator[Finding]:
    """Find a last, partial window whose gradients are cleared, or leak into the next epoch."""
    tree = ast.parse(window.test, mode="eval").body
    plain = isinstance(tree, ast.Compare) and "len(" not in window.test
    if any(
        isinstance(node, ast.Continue) for loop in get_step_loop(amp, window) for node in amp.script.walk_below(loop)
    ):
        return  # it may leave the partial window out before anything is computed
    if not plain or not any(
        isinstance(loop, ast.For) and iterates_batches(loop.iter) for loop in get_step_loop(amp, window)
    ):
        return
    # What runs once per epoch has the loops around the loop over batches.
    outer = window.step.loops[:-1]
    inside = [e.index for e in trace.events if e.loops[: len(window.step.loops)] == window.step.loops]
    before = [e for e in trace.calls("zero_grad") if e.loops == outer and e.index < inside[0]]
    cleared = any(not e.conditions for e in before)
    restarts = counts_from_zero(amp, window) and any(e.loops == window.step.loops for e in trace.calls("zero_grad"))
    stepped = any(e.index > inside[-1] for e in trace.calls("step") if e.loops[: len(outer)] == outer)
    if (cleared or restarts) and not stepped:
        message = "batches after the last full window are computed and then dropped"
        if not any(e.conditions <= window.step.conditions for e in before):
            message = (
                "the epoch ends within a window: its gradients leak into the next epoch's first step, "
                "and the last ones are lost"
            )
        fix = "also step when the batch is the last one, or after the loop"
        yield amp.script.report("accumulation-drops-tail", window.step.node, message, fix=fix)


def counts_from_zero(amp: Amp, window: Window) -> bool:
    """Return whether the window counts by the loop's own index, `for i, batch in enumerate(loader)`, in a run of
    epochs."""
    loop = next((node for node in get_step_loop(amp, window) if isinstance(node, ast.For)), None)
    if loop is None or not isinstance(loop.target, ast.Tuple) or "enumerate(" not in ast.unparse(loop.iter):
        return False
    index, tree = dotted_name(loop.target.elts[0]), ast.parse(window.test, mode="eval")
    named = any(word in window.length.lower() for word in (*ACCUMULATION_WORDS, "grad"))
    function = amp.script.owners.get(id(loop))
    epochs = len(window.step.loops) > 1 or function is not None and "epoch" in function.name.lower()
    # `step += epoch * len(loader)`: the count, and so the window, goes on in the next epoch.
    moved = any(isinstance(n, ast.AugAssign) and dotted_name(n.target) == index for n in amp.script.walk_below(loop))
    return (
        named
        and epochs
        and not moved
        and list_names(tree) & {index} != set()
        and "start=" not in ast.unparse(loop.iter)
    )


def get_step_loop(amp: Amp, window: Window) -> list[ast.AST]:
    """Return the loop whose body holds the step."""
    return [node for node in amp.script.nodes if id(node) == window.step.loops[-1]]


def iterates_batches(iterated: ast.expr) -> bool:
    """Match enumerate(loader), tqdm(enumerate(loader)) and the like; not a range, which is a count of windows or
    steps."""
    text = ast.unparse(iterated)
    return "range(" not in text and "islice" not in text and ("enumerate(" in text or "load" in text)


RULE = "gradients-not-reduced"
FIX = "run the backward of a window's last micro-batch outside no_sync()"
REDUCES = re.compile(r"all_?reduce|reduce_scatter|sync_grad|average_grad", re.IGNORECASE)
"""Whoever reduces by hand."""


def find_unreduced_gradients(amp: Amp) -> Iterator[Finding]:
    if "no_sync" in amp.script.code and not REDUCES.search(amp.script.code):
        yield from find_never_reduced(amp.script)
        yield from find_wrong_micro_batch(amp.script)


def find_unsynced(script: Script, node: ast.AST) -> list[ast.With]:
    """Match `with model.no_sync():`; a choice between that and nullcontext() is decided at run time."""
    blocks = [n for n in script.walk_below(node) if isinstance(n, ast.With)]
    return [
        n
        for n in blocks
        if any(getattr(getattr(item.context_expr, "func", None), "attr", "") == "no_sync" for item in n.items)
    ]


def list_named_calls(script: Script, node: ast.AST, method: str) -> list[ast.Call]:
    return [c for c in script.calls_below(node) if getattr(c.func, "attr", "") == method]


def find_never_reduced(script: Script) -> Iterator[Finding]:
    """Find a function that steps with every backward() in no_sync()."""
    for function in (n for n in script.nodes if isinstance(n, Function)):
        chosen = {id(n) for i in script.walk_below(function) if isinstance(i, ast.If) for n in script.walk_below(i)}
        blocks = [b for b in find_unsynced(script, function) if id(b) not in chosen]
        inside = {id(c) for block in blocks for c in list_named_calls(script, block, "backward")}
        steps = [
            c
            for c in list_named_calls(script, function, "step")
            if script.is_optimizer(dotted_name(c.func)[: -len(".step")])
        ]
        if inside and steps and all(id(c) in inside for c in list_named_calls(script, function, "backward")):
            message = "every backward() before the step is in no_sync(): each rank steps on its own gradients"
            yield script.report(RULE, blocks[0], message, fix=FIX, related=steps[0])


def find_wrong_micro_batch(script: Script) -> Iterator[Finding]:
    """Find no_sync() at the micro-batch whose backward the step waits for, judging by its test and the position of the
    counter."""
    for loop in (n for n in script.nodes if isinstance(n, ast.For | ast.While)):
        choices = [(i, n) for i, n in enumerate(loop.body) if isinstance(n, ast.If)]
        for place, choice in choices:
            test, block = ast.unparse(choice.test), find_unsynced(script, choice)
            holds = any(b in script.walk_below(s) for b in block for s in choice.body)
            due = [(i, n) for i, n in choices if i >= place and ast.unparse(n.test) == test]
            due = [(i, n) for i, n in due if any(list_named_calls(script, s, "step") for s in n.body)]
            moved = due and counts(loop.body[place + 1 : due[0][0]], choice.test)
            if "%" in test and block and due and holds != bool(moved):
                message = f"where `{test}`, no_sync() also covers the last micro-batch before the step"
                yield script.report(RULE, block[0], message, fix=FIX, related=due[0][1])
                break


def counts(between: list[ast.stmt], test: ast.expr) -> bool:
    """Return whether the counter that a test looks at goes on between it and the same test."""
    targets = {dotted_name(n.target) for n in between if isinstance(n, ast.AugAssign)}
    return bool(targets & (list_names(test) | {dotted_name(n) for n in ast.walk(test)}))
