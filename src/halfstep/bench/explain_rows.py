"""Which rows of a bench are explained, and what is known of each beside its profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from halfstep.bench.apart import apart
from halfstep.bench.bench import STOPPED, Tell
from halfstep.bench.explain import StepFacts, explain
from halfstep.bench.explain_trace import refuse_too_few, wake_profiler
from halfstep.bench.measure_row import why_not
from halfstep.bench.ours import Ours
from halfstep.bench.peers import PeerRunner
from halfstep.bench.problem import Problem, Runner, floor_ms
from halfstep.bench.row import Row
from halfstep.errors import ConfigError, HardwareError
from halfstep.hardware.facts import Hardware
from halfstep.report.explain_view import Explanation
from halfstep.run.assemble import plan_for
from halfstep.tune.fresh_thread import in_fresh_thread
from halfstep.tune.layout import wants_channels_last

MODES = ("eager", "compile", "graph")


@dataclass(frozen=True, kw_only=True, slots=True)
class NotExplained:
    """A row that could not be run, and why."""

    title: str
    reason: str


def refuse_unexplainable(modes: Iterable[str], steps: int) -> None:
    """Raise ConfigError for what no row could be explained with, before anything is measured."""
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(
                f"--modes {mode} cannot be explained", why="it is one of the others", fix=f"--modes {','.join(MODES)}"
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
    """Each runner's explanation, one after the other; a row stands for one who cannot run here.

    Ctrl-C leaves out the runner whose turn it is, and all after it. `tell` hears whose turn comes.
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
            found = _in_turn(runner, problem, hardware, steps=steps, flops=flops)
        except KeyboardInterrupt:  # what was explained before is worth more than none
            is_stopped, found = True, NotExplained(title=title, reason=STOPPED)
        yield found


def _in_turn(
    runner: Runner, problem: Problem, hardware: Hardware, *, steps: int, flops: int
) -> Explanation | NotExplained:
    with apart(problem.device):
        try:
            facts = facts_of(runner, problem, hardware, flops)
            work = partial(explain, runner, steps=steps, facts=facts)
            return in_fresh_thread(work, problem.device)
        # Anything at all, as in the bench itself: one row that cannot run must not cost the others.
        except Exception as error:
            error.__traceback__ = None  # its frames hold the model, and with it the memory of the next row
            return NotExplained(title=f"{runner.name} {runner.variant} {runner.precision}", reason=why_not(error))


def facts_of(runner: Runner, problem: Problem, hardware: Hardware, flops: int) -> StepFacts:
    """How this runner makes its step."""
    return StepFacts(
        channels_last=_keeps_channels_last(runner, hardware),
        device=problem.device,
        device_name=hardware.name,
        floor_ms=floor_ms(flops, hardware, runner.precision),
        bandwidth_gb_s=hardware.bandwidth_gb_s,
    )


def _keeps_channels_last(runner: Runner, hardware: Hardware) -> bool:
    if isinstance(runner, PeerRunner):
        return runner.setup.channels_last
    assert isinstance(runner, Ours), f"no facts are known of {type(runner).__name__}"
    if runner.simulated:
        raise HardwareError(
            f"{runner.precision} is simulated here",
            why="a simulation's time says nothing about it",
            fix="--precisions fp32",
        )
    config, workload = runner.config, runner.workload()
    return wants_channels_last(config, plan_for(config, workload, hardware), workload.model)
