"""`halfstep bench --explain`: profile a step and show where its time goes, by kind of operation and by kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from halfstep.errors import ConfigError, HardwareError
from halfstep.hardware.device_facts import Hardware
from halfstep_train.bench.bench import STOPPED, HalfstepRunner, Tell
from halfstep_train.bench.isolate import isolate_row
from halfstep_train.bench.measure_row import Row, describe_failure
from halfstep_train.bench.peers import PeerRunner
from halfstep_train.bench.problem import Problem, Runner, compute_floor_ms
from halfstep_train.bench.step_profile import (
    MEMORY_BOUND,
    OpKind,
    StepProfile,
    classify_kernel,
    classify_operator,
    profile_steps,
    refuse_too_few,
    wake_profiler,
)
from halfstep_train.report.console import make_columns_table, make_pairs_table
from halfstep_train.run.assemble import decide_plan
from halfstep_train.tune.channels_last import wants_channels_last
from halfstep_train.tune.fresh_thread import run_in_fresh_thread


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """How the step runs, and the measured rates of its device."""

    channels_last: bool
    device: torch.device
    device_name: str
    floor_ms: float | None = None
    """The time of the step's matrix products alone, at the measured rate."""
    bandwidth_gb_s: float | None = None


TOP_KERNELS = 10
WORTH_SAYING = 0.01
"""Share of the step from which a note is printed."""
HOST_BOUND = 0.1
"""Share of launch gaps above which the step is limited by the host."""


def explain(runner: Runner, *, steps: int, facts: StepFacts) -> Explanation:
    """Time and profile `steps` steps of a runner."""
    seen = profile_steps(runner, steps=steps, device=facts.device)
    return explain_profile(seen, facts, title=f"{runner.name} {runner.variant} {runner.precision}")


def explain_profile(step: StepProfile, facts: StepFacts, *, title: str) -> Explanation:
    """Build the explanation from a profile."""
    kernels = group_kernels(step, classify_kernel if facts.device.type == "cuda" else classify_operator)
    kinds = {row.kind: row for row in _group_kinds(kernels)}
    memory_ms = sum(row.ms for kind, row in kinds.items() if kind in MEMORY_BOUND)
    kernel_ms = sum(kernel.ms for kernel in kernels)
    return Explanation(
        title=title,
        device_name=facts.device_name,
        num_steps=step.num_steps,
        step_ms=step.step_ms,
        kernel_ms=kernel_ms,  # more than `busy_ms` where streams overlap
        busy_ms=step.busy_ms,
        launch_gap_ms=step.launch_gap_ms,
        floor_ms=facts.floor_ms,
        launches=sum(kernel.launches for kernel in kernels),
        memory_bound_share=memory_ms / kernel_ms if kernel_ms else 0.0,
        memory_gb=memory_ms * facts.bandwidth_gb_s / 1e3 if facts.bandwidth_gb_s else None,
        cast_share=kinds[OpKind.CAST].share if OpKind.CAST in kinds else 0.0,
        optimizer_share=kinds[OpKind.OPTIMIZER].share if OpKind.OPTIMIZER in kinds else 0.0,
        kinds=tuple(kinds.values()),
        top_kernels=kernels[:TOP_KERNELS],
        notes=tuple(_list_notes(step, kernels, facts)),
    )


def group_kernels(step: StepProfile, kind_of: Callable[[str], OpKind]) -> tuple[KernelTime, ...]:
    """Return a step's kernels, the longest first."""
    times_us: defaultdict[str, list[float]] = defaultdict(list)
    for event in step.events:
        times_us[event.name].append(event.self_us)
    kernels = [
        KernelTime(
            name=name, kind=kind_of(name), ms=step.convert_to_step_ms(sum(us)), launches=len(us) / step.num_steps
        )
        for name, us in times_us.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: kernel.ms, reverse=True))


def _group_kinds(kernels: Sequence[KernelTime]) -> list[KindTime]:
    """Sum kernels by kind, the longest first."""
    ms, launches = defaultdict[str, float](float), defaultdict[str, float](float)
    for kernel in kernels:
        ms[kernel.kind] += kernel.ms
        launches[kernel.kind] += kernel.launches
    total = sum(ms.values()) or 1.0
    rows = [KindTime(kind=str(kind), ms=ms[kind], share=ms[kind] / total, launches=launches[kind]) for kind in ms]
    return sorted(rows, key=lambda row: (-row.ms, row.kind))


def _list_notes(step: StepProfile, kernels: Sequence[KernelTime], facts: StepFacts) -> Iterator[str]:
    """Yield notes on what limits the step."""
    if facts.device.type == "cuda" and step.launch_gap_ms > HOST_BOUND * step.step_ms:
        yield "the step is limited by the host: faster kernels alone change little"
    turned = [kernel for kernel in kernels if kernel.kind is OpKind.LAYOUT]
    turned_ms = sum(kernel.ms for kernel in turned)
    if facts.channels_last and turned and turned_ms >= WORTH_SAYING * step.step_ms:
        yield f"{turned_ms:.2f} ms of layout copies although channels_last is on: {turned[0].name}"
    if facts.device.type == "cpu":
        yield (
            "profiling slows CPU operators, small ones most: times are scaled to the unprofiled step, so shares are "
            "approximate; launch gaps are Python code between operators"
        )


# --- the rows of a benchmark, one after the other ---

MODES = ("eager", "compile", "graph")


@dataclass(frozen=True, kw_only=True, slots=True)
class NotExplained:
    """A row that could not run, with the reason."""

    title: str
    reason: str


def refuse_unexplainable(modes: Iterable[str], steps: int) -> None:
    """Raise ConfigError for modes or steps that cannot be profiled, before anything is measured."""
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(
                f"--modes {mode} cannot be explained",
                why="it resolves to one of the other modes",
                fix=f"--modes {','.join(MODES)}",
            )
    refuse_too_few(steps)


def explain_rows(
    runners: Iterable[Runner | Row],
    problem: Problem,
    hardware: Hardware,
    *,
    steps: int,
    flops: int,
    tell: Tell = lambda title: None,
) -> Iterator[Explanation | NotExplained]:
    """Yield the explanation of each runner; a `Row` among them is one that cannot run.

    Ctrl-C skips the current runner and all after it. `tell` is called with the title before each.
    """
    wake_profiler(problem.device)
    is_stopped = False
    for runner in runners:
        title = f"{runner.name} {runner.variant} {runner.precision}"
        if isinstance(runner, Row) or is_stopped:
            yield NotExplained(title=title, reason=runner.reason if isinstance(runner, Row) else STOPPED)
            continue
        tell(title)
        try:
            found = _explain_in_turn(runner, problem, hardware, steps=steps, flops=flops)
        except KeyboardInterrupt:  # keep the explanations made so far
            is_stopped, found = True, NotExplained(title=title, reason=STOPPED)
        yield found


def _explain_in_turn(
    runner: Runner, problem: Problem, hardware: Hardware, *, steps: int, flops: int
) -> Explanation | NotExplained:
    """Explain one row; an error becomes its reason."""
    with isolate_row(problem.device):
        try:
            facts = collect_step_facts(runner, problem, hardware, flops)
            work = partial(explain, runner, steps=steps, facts=facts)
            return run_in_fresh_thread(work, problem.device)
        # Any error, as in measure_row: one row that fails must not end the others.
        except Exception as error:
            error.__traceback__ = None  # its frames would keep the model, and thereby memory, alive for the next row
            return NotExplained(
                title=f"{runner.name} {runner.variant} {runner.precision}", reason=describe_failure(error)
            )


def collect_step_facts(runner: Runner, problem: Problem, hardware: Hardware, flops: int) -> StepFacts:
    """Collect layout, floor and bandwidth for this runner."""
    return StepFacts(
        channels_last=_keeps_channels_last(runner, hardware),
        device=problem.device,
        device_name=hardware.name,
        floor_ms=compute_floor_ms(flops, hardware, runner.precision),
        bandwidth_gb_s=hardware.bandwidth_gb_s,
    )


def _keeps_channels_last(runner: Runner, hardware: Hardware) -> bool:
    """True if the runner's model is in channels_last layout."""
    if isinstance(runner, PeerRunner):
        return runner.setup.channels_last
    assert isinstance(runner, HalfstepRunner), f"no facts are known about {type(runner).__name__}"
    if runner.simulated:
        raise HardwareError(
            f"{runner.precision} is simulated here",
            why="the time of a simulation does not show the speed of the format",
            fix="--precisions fp32",
        )
    config, workload = runner.config, runner.build_workload()
    return wants_channels_last(
        config.train.channels_last, config.workload, decide_plan(config, workload, hardware), workload.model
    )


# --- the result, and how it is printed ---

NAME_LENGTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTime:
    """Time of one kind of operation per step."""

    kind: str
    ms: float
    share: float
    """Share of the time of all kernels."""
    launches: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """Time of one kernel per step, over all launches."""

    name: str
    kind: str
    ms: float
    launches: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Where the time of one runner's step goes."""

    title: str
    device_name: str
    num_steps: int
    """Steps timed without the profiler."""
    step_ms: float
    """Time per step without the profiler."""
    kernel_ms: float
    busy_ms: float
    launch_gap_ms: float
    floor_ms: float | None
    launches: float
    memory_bound_share: float
    memory_gb: float | None
    """Upper bound of the traffic of memory-bound kernels: their time at the measured bandwidth."""
    cast_share: float
    optimizer_share: float
    kinds: tuple[KindTime, ...]
    """The longest first; they add up to `kernel_ms`."""
    top_kernels: tuple[KernelTime, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def render_explanation(explanation: Explanation) -> RenderableType:
    """Render the kinds, the main findings and the longest kernels."""
    return Group(*_render_parts(explanation))


def _render_parts(explanation: Explanation) -> Iterator[RenderableType]:
    head = f"{explanation.title} on {explanation.device_name}: {explanation.step_ms:.2f} ms per step"
    yield Text(f"{head} (mean of {explanation.num_steps})", style="bold")
    yield ""
    yield _build_kinds_table(explanation)
    yield ""
    yield make_pairs_table(_list_findings(explanation))
    yield ""
    yield Text(f"the {len(explanation.top_kernels)} longest", style="bold")
    yield _build_kernels_table(explanation)
    yield from (Text(f"note: {note}", style="dim") for note in explanation.notes)


def _build_kinds_table(explanation: Explanation) -> RenderableType:
    rows = explanation.kinds
    columns = {
        "kind": [*(row.kind for row in rows), "all"],
        "ms per step": [*(f"{row.ms:.3f}" for row in rows), f"{explanation.kernel_ms:.3f}"],
        "share": [*(f"{row.share:.1%}" for row in rows), "100.0%"],
        "launches": [*(f"{row.launches:.0f}" for row in rows), f"{explanation.launches:.0f}"],
    }
    return make_columns_table(columns, left=("kind",))


def _list_findings(explanation: Explanation) -> Iterator[tuple[str, str]]:
    moved = f", at most {explanation.memory_gb:.3g} GB per step" if explanation.memory_gb is not None else ""
    yield "memory-bound", f"{explanation.memory_bound_share:.1%}{moved}"
    yield "casts", f"{explanation.cast_share:.1%}"
    yield "optimizer", f"{explanation.optimizer_share:.1%}"
    yield "launch gaps", f"{explanation.launch_gap_ms:.2f} ms"
    if explanation.floor_ms is not None:
        share = explanation.floor_ms / explanation.step_ms
        yield "floor", f"{explanation.floor_ms:.2f} ms of matrix products at the measured rate: {share:.0%} of the step"


def _build_kernels_table(explanation: Explanation) -> RenderableType:
    rows = explanation.top_kernels
    columns = {
        "ms per step": [f"{row.ms:.3f}" for row in rows],
        "launches": [f"{row.launches:.0f}" for row in rows],
        "kind": [row.kind for row in rows],
        "kernel": [_shorten_kernel(row.name) for row in rows],
    }
    table = make_columns_table(columns, left=("kind", "kernel"))
    table.columns[3].no_wrap, table.columns[3].overflow = False, "fold"
    return table


def _shorten_kernel(name: str) -> str:
    """Remove the prefixes that all torch kernels share."""
    text = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return text if len(text) <= NAME_LENGTH else f"{text[: NAME_LENGTH - 1]}…"
