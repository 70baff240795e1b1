"""The ledger: the formats that a step really computed in, one row per module, compared with the plan.

`observe` runs one step under an `Observer` and undoes it; `make_ledger` compares what was seen with the plan.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from halfstep.errors import format_count
from halfstep.evidence.observer import HALF, OUTSIDE, Observer, Product, Seen, name_format
from halfstep.precision.apply import STORAGE_DTYPES
from halfstep.precision.plan import ROOT, WHOLE_MODEL, Plan, align_columns
from halfstep.step.batches import Window
from halfstep.step.randomness import read_generators, restore_generators
from halfstep.step.step import GuardedStep, LossFn

WORTH_NAMING = 0.005
"""Share of the FLOPs from which a module is named in the summary."""
MOST_ROWS = 24
"""Rows that fit on a screen; --json has all."""
MOST_KERNELS = 12
MOST_ALIKE = 6
"""Findings of one reason that are named one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow:
    """One module, with its formats by their share of its own FLOPs."""

    module: str
    planned: str
    forward: str = "-"
    backward: str = "-"
    flops_share: float = 0.0
    casts: int = 0
    cast_bytes: int = 0
    kept: str = "-"
    """What it keeps for backward, formats by bytes."""
    kept_bytes: int = 0
    weights: str = "-"
    gradients: str = "-"
    optimizer_state: str = "-"
    verdict: str = "as planned"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """One kernel of a captured step."""

    name: str
    calls: int
    time_share: float
    """Share of the step's device time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What a step really ran in one mode: formats by module, differences from the plan, kernels."""

    mode: str
    rows: tuple[LedgerRow, ...]
    findings: tuple[Finding, ...]
    summary: str
    notes: tuple[str, ...] = ()
    step: int | None = None
    kernels: tuple[KernelRow, ...] = ()
    """Kernels of a captured step, the longest first."""

    def to_json(self) -> dict[str, Any]:
        document = dataclasses.asdict(self)
        return {**document, "rows": [{"mode": self.mode, **row} for row in document["rows"]]}

    def __str__(self) -> str:
        return render_ledger(self)


@dataclass(slots=True)
class Weights:
    """Formats of a step's weights, gradients and optimizer state, by module."""

    weights: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    @classmethod
    def collect(cls, model: nn.Module, optimizers: Iterable[Optimizer]) -> Weights:
        """Return the current formats: call it after backward for gradients, after a commit for optimizer state."""
        states = {id(p): state for optimizer in optimizers for p, state in optimizer.state.items()}
        found = cls()
        for name, module in model.named_modules():
            own = list(nn.Module.parameters(module, recurse=False))
            found.weights[name or ROOT] = _join_formats(own)
            found.gradients[name or ROOT] = _join_formats(p.grad for p in own if p.grad is not None)
            moments = (v for p in own for key, v in states.get(id(p), {}).items() if key != "step")
            found.states[name or ROOT] = _join_formats(v for v in moments if isinstance(v, Tensor) and v.numel() > 0)
        return found


def _join_formats(tensors: Iterable[Tensor]) -> str:
    return ", ".join(sorted({name_format(tensor.dtype) for tensor in tensors})) or "-"


def make_ledger(
    plan: Plan,
    seen: Seen,
    model: nn.Module,
    weights: Weights,
    frozen: Mapping[str, nn.Module] | None = None,
    mode: str = "eager",
    notes: Sequence[str] = (),
    step: int | None = None,
) -> Ledger:
    """Compare what was observed with what the plan declares."""
    expected = Expected(plan)
    modules = {name or ROOT: module for name, module in model.named_modules()}
    for part, module in (frozen or {}).items():
        modules |= {f"{part}.{name}".rstrip("."): inner for name, inner in module.named_modules()}
    # The worst first: compute formats, then weights and statistics.
    found = [*_check_products(expected, seen), *_check_weights(expected, modules), *_check_statistics(modules)]
    rows, summary = tuple(_make_rows(expected, seen, weights, found)), summarise(expected, seen, found)
    return Ledger(mode=mode, rows=rows, findings=tuple(found), summary=summary, notes=tuple(notes), step=step)


def _make_rows(expected: Expected, seen: Seen, weights: Weights, found: Sequence[Finding]) -> list[LedgerRow]:
    all_flops = max(sum(seen.flops.values()), 1)
    named = [product.module for product in seen.calls] + [cast.module for cast in seen.casts]
    named += [module for module, _ in seen.kept] + [name for name, own in weights.weights.items() if own != "-"]
    # Reversed, so that the first finding of a module, the worst, wins.
    first_findings = {finding.module: finding for finding in reversed(found)}
    rows = []
    wanted = set(named)
    for module in dict.fromkeys([*(name for name in weights.weights if name in wanted), *named]):
        kept = Counter({name: size for (own, name), size in seen.kept.items() if own == module})
        casts = [cast for cast in seen.casts if cast.module == module]
        rows.append(
            LedgerRow(
                module=module,
                planned="-" if module == OUTSIDE else expected.find_compute(module),
                forward=_describe_formats(seen, module, "forward"),
                backward=_describe_formats(seen, module, "backward"),
                flops_share=sum(n for p, n in seen.flops.items() if p.module == module) / all_flops,
                casts=sum(seen.casts[cast] for cast in casts),
                cast_bytes=sum(seen.cast_bytes[cast] for cast in casts),
                kept=_format_shares(kept),
                kept_bytes=sum(kept.values()),
                weights=weights.weights.get(module, "-"),
                gradients=weights.gradients.get(module, "-"),
                optimizer_state=weights.states.get(module, "-"),
                verdict=_judge_module(module, expected, seen, first_findings.get(module)),
            )
        )
    return rows


def _judge_module(module: str, expected: Expected, seen: Seen, finding: Finding | None) -> str:
    if finding is not None:
        return f"differs: {finding.what}"
    if module == OUTSIDE:
        return "not in the plan"
    kinds = {_classify_product(expected, product) for product in seen.calls if product.module == module}
    return ", ".join(sorted(kinds)) or "as planned"


def _describe_formats(seen: Seen, module: str, direction: str) -> str:
    flops: Counter[str] = Counter()
    for product in (p for p in seen.calls if p.module == module and p.direction == direction):
        # Products of unknown cost count as 1, so that their format is listed.
        flops[product.format] += max(seen.flops[product], 1)
    return _format_shares(flops)


def _format_shares(counts: Counter[str]) -> str:
    total = sum(counts.values())
    if len(counts) < 2:
        return next(iter(counts), "-")
    return ", ".join(f"{name} {count / total:.0%}" for name, count in counts.most_common())


def summarise(expected: Expected, seen: Seen, found: Sequence[Finding]) -> str:
    """Summarise in one sentence: shares by format, and the modules behind those that differ from the plan."""
    total = sum(seen.flops.values())
    if not total:
        return "no matmul, convolution or attention was seen"
    formats: Counter[str] = Counter()
    for product, flops in seen.flops.items():
        formats[product.format] += flops
    parts: list[str] = []
    for name, flops in formats.most_common():
        apart = _describe_exceptions(expected, seen, name, total) if name != formats.most_common(1)[0][0] else ""
        of = "of FLOPs in " if not parts else ""
        parts.append(f"{format_percent(flops / total)} {of}{name}{apart}")
    unknown = sorted({p.operation for p in seen.calls if not seen.flops[p]})
    parts += [f"of unknown cost: {', '.join(unknown)}"] if unknown else []
    num = len(found)
    verdict = f"{num} differ{'s' if num == 1 else ''} from the plan" if num else "all as planned"
    return f"{'; '.join(parts)}; {verdict}"


def _describe_exceptions(expected: Expected, seen: Seen, name: str, total: int) -> str:
    """Describe exceptions, as in `: 3 % decoder.head (island), 1 % encoder.fft (custom op)`."""
    by_module: Counter[tuple[str, str]] = Counter()
    for product, flops in seen.flops.items():
        if product.format == name:
            by_module[product.module, _classify_product(expected, product)] += flops
    named = [(key, flops / total) for key, flops in by_module.most_common() if flops / total >= WORTH_NAMING]
    shown = ", ".join(f"{format_percent(share)} {module} ({kind})" for (module, kind), share in named[:4])
    return f": {shown}" if shown else ""


def _classify_product(expected: Expected, product: Product) -> str:
    if product.module == OUTSIDE:
        return "loss and code around the model"
    if product.format == expected.find_compute(product.module):
        return "as planned"
    if product.is_island:
        return "island"
    if is_as_planned(expected, product):
        return "simulated"
    if product.is_custom:
        return "custom op without autocast"
    return f"{product.function} unaware of autocast" if product.function else "differs"


def format_percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


# --- the kernels of a replayed CUDA graph ---
# They come from the events of torch's profiler, in the form of a chrome trace, which all supported torch versions
# write: `cat`, `name`, `args`, and `ts` and `dur` in microseconds. Nothing here needs a GPU. A replay shows only a
# sequence of kernels: their formats by module are those of the code that was captured.

Event = Mapping[str, Any]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
GRAPH_LAUNCH = "cudaGraphLaunch"


def split_replays(events: Sequence[Event]) -> list[list[Event]]:
    """Return what each launched graph ran on the device, in launch order."""
    launches = [e for e in events if e.get("cat") in LAUNCHES and str(e["name"]).startswith(GRAPH_LAUNCH)]
    by_launch: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE:
            by_launch[int(event.get("args", {}).get("correlation", -1))].append(event)
    numbers = [int(e["args"]["correlation"]) for e in sorted(launches, key=lambda e: float(e["ts"]))]
    return [by_launch[number] for number in numbers if by_launch[number]]


def make_captured_ledger(code: Ledger, replay: Sequence[Event], mode: str) -> Ledger:
    """Return the ledger of a captured step: that of the captured code, with the kernels of a replay."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in replay:
        times[str(event["name"])].append(float(event.get("dur", 0.0)))
    total = max(sum(map(sum, times.values())), 1e-9)
    rows = [KernelRow(name=name, calls=len(own), time_share=sum(own) / total) for name, own in times.items()]
    kernels = tuple(sorted(rows, key=lambda row: -row.time_share))
    summary = f"{len(replay)} kernels; as {code.mode}: {code.summary}"
    return dataclasses.replace(code, mode=mode, findings=(), kernels=kernels, summary=summary)


# --- as text ---


def render_ledger(ledger: Ledger) -> str:
    """Render the summary, the rows with most FLOPs and those that differ, then what differs and how to fix it."""
    # Rows with a finding first, then by share of FLOPs.
    by_weight = sorted(ledger.rows, key=lambda row: (not row.verdict.startswith("differs"), -row.flops_share))
    is_busy = {row.module for row in ledger.rows if row.flops_share or row.verdict != "as planned"}
    chosen = {row.module for row in by_weight[:MOST_ROWS]} & is_busy
    rows = [row for row in ledger.rows if row.module in chosen]
    titles = ("module", "planned", "forward", "backward", "FLOPs", "casts", "kept", "weights", "grads", "state")
    body = [
        (r.module, r.planned, r.forward, r.backward, format_percent(r.flops_share), str(r.casts or "-"), r.kept,
         r.weights, r.gradients, r.optimizer_state)
        for r in rows
    ]  # fmt: skip
    lines = [f"{ledger.mode}: {ledger.summary}", *ledger.notes, "", *align_columns([titles, *body])]
    if hidden := len(ledger.rows) - len(rows):
        lines.append(f"and {format_count(hidden, 'more module')} as planned or without matmuls (--json has all)")
    if ledger.kernels:
        longest = [(k.name[:60], str(k.calls), format_percent(k.time_share)) for k in ledger.kernels[:MOST_KERNELS]]
        lines += ["", *align_columns([("kernel", "calls", "time"), *longest])]
    return "\n".join([*lines, *_render_findings(ledger.findings)])


def _render_findings(found: Sequence[Finding]) -> list[str]:
    """Render findings with the same reason together, such as those of forty norms."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.why, finding.fix), []).append(finding)
    lines = []
    for (why, fix), group in groups.items():
        lines += ["", *(f"differs {finding.module}: {finding.what}" for finding in group[:MOST_ALIKE])]
        lines += [f"    and {len(group) - MOST_ALIKE} more modules likewise"] if len(group) > MOST_ALIKE else []
        lines += [f"    why: {why}", f"    fix: {fix}"]
    return lines


# --- findings: where the step differs from the plan ---


class Expected:
    """The plan's rows by module, and the format of modules without a row."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        rows = (*plan.rows, *plan.frozen)
        self.rows = {row.module: row for row in rows if row.kind != "island" and row.module != WHOLE_MODEL}

    def find_compute(self, module: str) -> str:
        """Return the format of a module's matmuls and convolutions: by its own row, by its enclosing module's, or by
        the plan."""
        row = self.rows.get(module)
        # Only rows of whole parts apply to the modules inside them.
        while row is None and module not in ("", ROOT):
            module = module.rpartition(".")[0]
            enclosing = self.rows.get(module)
            row = enclosing if enclosing is not None and enclosing.is_part else None
        return row.compute if row is not None else self.plan.compute


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One difference from the plan."""

    module: str
    what: str
    why: str
    fix: str


def _check_products(expected: Expected, seen: Seen) -> Iterable[Finding]:
    """Return one finding per module, reason and format."""
    shown = set()
    # Forward first: its finding is shown, and that of backward for the same reason is dropped.
    for product in sorted(seen.calls, key=lambda p: p.direction == "backward"):
        planned = expected.find_compute(product.module)
        if product.module == OUTSIDE or is_as_planned(expected, product):
            continue
        why, fix = _explain_product(product, planned, expected.plan)
        if (product.module, why) not in shown:
            shown.add((product.module, why))
            operation = f"{product.operation} ({product.direction})"
            what = f"{operation} computed in {product.format}, but the plan requires {planned}"
            yield Finding(module=product.module, what=what, why=why, fix=fix)


def is_as_planned(expected: Expected, product: Product) -> bool:
    """True if the product ran in the planned format, on an island in fp32, or as a simulation of the format."""
    planned, plan = expected.find_compute(product.module), expected.plan
    if product.module == OUTSIDE or product.format == planned or product.is_island and product.format == "fp32":
        return True
    # Simulation multiplies the rounded operands in fp32.
    return plan.simulated and planned in ("fp8", "tf32") and product.format in ("fp32", "bf16")


def _explain_product(product: Product, planned: str, plan: Plan) -> tuple[str, str]:
    module, device = product.module, plan.device.partition(":")[0] or "cuda"
    dtype = "torch.float16" if planned == "fp16" else "torch.bfloat16"
    if product.format == "tf32":
        return (
            "a TF32 switch was set inside the model",
            "remove allow_tf32 = True or set_float32_matmul_precision('high') there, or request precision tf32",
        )
    if product.is_custom:
        return (
            f"custom op {product.operation} without autocast: it uses its inputs' format",
            f'torch.library.register_autocast("{product.operation}", "{device}", {dtype})',
        )
    if product.function:
        return (
            f"{product.function} is an autograd Function unaware of autocast: its backward runs outside of it",
            f'@torch.amp.custom_fwd(device_type="{device}") on its forward, and custom_bwd on its backward',
        )
    if planned in (*HALF, "fp8"):
        return (
            "autocast is off there",
            f"remove autocast(enabled=False), or use hs.fp32_island() or modules: {{{module}: {product.format}}}",
        )
    return (
        f"its operands are {product.format}: half weights, a cast, or autocast switched on inside",
        f"remove .half(), .bfloat16() or autocast there, or precision.modules: {{{module}: {product.format}}}",
    )


def _check_weights(expected: Expected, modules: Mapping[str, nn.Module]) -> Iterable[Finding]:
    for name, module in modules.items():
        planned = expected.rows[name].storage if name in expected.rows else ""
        for own, weight in module.named_parameters(recurse=False):
            stored = name_format(weight.dtype)
            if planned and weight.is_floating_point() and stored != planned:
                yield Finding(
                    module=name,
                    what=f"{own} is stored in {stored}, but the plan requires {planned}",
                    why="it was cast, before or after the plan was made: small updates are rounded away in half",
                    fix=f"model.get_submodule({name.replace(ROOT, '')!r}).to({STORAGE_DTYPES[planned]}) "
                    "before the optimizer is created",
                )


def _check_statistics(modules: Mapping[str, nn.Module]) -> Iterable[Finding]:
    for name, module in modules.items():
        if not isinstance(module, _NormBase):
            continue
        half = [own for own, buffer in module.named_buffers(recurse=False) if name_format(buffer.dtype) in HALF]
        if half:
            yield Finding(
                module=name,
                what=f"{' and '.join(half)} in {name_format(module.get_buffer(half[0]).dtype)}",
                why="a running statistic in half stops moving: its updates are below half a unit in the last place",
                fix=f"model.get_submodule({name!r}).float()",
            )


# --- a step on the side: computed, observed and undone ---


@contextmanager
def undo_after(step: GuardedStep) -> Iterator[None]:
    """Undo what a compute() inside changed."""
    # compute() draws random numbers, such as dropout masks: restored, so that training draws the same again.
    generators = read_generators()
    try:
        yield
    finally:
        step.abandon()
        restore_generators(generators)


@contextmanager
def watch_step(step: GuardedStep, watching: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run forward and backward of this step inside `watching()`."""
    before, step.observed = step.observed, watching
    try:
        yield
    finally:
        step.observed = before


def observe(
    step: GuardedStep, loss_fn: LossFn, window: Window, frozen: Mapping[str, nn.Module] | None = None
) -> tuple[Observer, Weights]:
    """Return what one eager step of this window does, and the formats of the tensors it leaves."""
    observer = Observer(step.model, frozen)
    with undo_after(step), watch_step(step, observer.watch):
        step.compute(loss_fn, window)
        return observer, Weights.collect(step.model, step.optimizers)
