"""Which rows of a bench are explained, and what is known of each beside its profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from halfstep.bench.apart import apart
from halfstep.bench.bench import STOPPED, Tell
from halfstep.bench.explain import Explanation, explain
from halfstep.bench.explain_facts import StepFacts
from halfstep.bench.explain_trace import FeedOf, refuse_too_few, wake_profiler
from halfstep.bench.floor import MATMUL_FORMAT
from halfstep.bench.measure_row import why_not
from halfstep.bench.ours import Ours
from halfstep.bench.peers import PeerRunner
from halfstep.bench.row import Row
from halfstep.bench.runner import Problem, Runner
from halfstep.errors import ConfigError, HardwareError
from halfstep.hardware.facts import Hardware
from halfstep.run.assemble import plan_for
from halfstep.run.waiting import num_cores, way_out
from halfstep.step.optimizers import FUSED, FUSED_DEVICES
from halfstep.tune.fresh_thread import in_fresh_thread
from halfstep.tune.layout import wants_channels_last

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")

Mode = Literal["eager", "compile", "graph"]
OUR_MODES: dict[str, Mode] = {"eager": "eager", "compile": "compile", "graph": "graph"}
PEER_MODES: dict[str, Mode] = {"documented": "compile", "tuned": "compile", "graphs": "graph"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NotExplained:
    """A row that could not be run, and why."""

    title: str
    reason: str


def refuse_unexplainable(modes: Iterable[str], steps: int) -> None:
    """Raise ConfigError for what no row could be explained with, before anything is measured."""
    for mode in modes:
        if mode not in OUR_MODES:
            raise ConfigError(
                f"--modes {mode} cannot be explained",
                why="it is one of the others",
                fix=f"--modes {','.join(OUR_MODES)}",
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
            work = partial(explain, runner, steps=steps, facts=facts, feed=_feed_of(runner))
            return in_fresh_thread(work, problem.device)
        # Anything at all, as in the bench itself: one row that cannot run must not cost the others.
        except Exception as error:
            error.__traceback__ = None  # its frames hold the model, and with it the memory of the next row
            return NotExplained(title=f"{runner.name} {runner.variant} {runner.precision}", reason=why_not(error))


def facts_of(runner: Runner, problem: Problem, hardware: Hardware, flops: int) -> StepFacts:
    """How this runner makes its step."""
    mode, channels_last, is_fused, prefetches = _habits(runner, problem, hardware)
    return StepFacts(
        precision=runner.precision,
        mode=mode,
        channels_last=channels_last,
        fused_optimizer=is_fused,
        prefetches=prefetches,
        batch_size=problem.samples,
        device=problem.device,
        device_name=hardware.name,
        runner=runner.name,
        num_workers=problem.config.data.num_workers,
        faster_data=_faster_data(runner),
        flops=flops,
        matmul_tflops=_matmul_rates(hardware),
        channels_last_speedup=hardware.layout_gain(runner.precision),
        bandwidth_gb_s=hardware.bandwidth_gb_s,
    )


def _habits(runner: Runner, problem: Problem, hardware: Hardware) -> tuple[Mode, bool, bool, bool]:
    """Mode, channels_last, fused optimizer, prefetch."""
    if isinstance(runner, PeerRunner):
        return PEER_MODES[runner.variant], runner.setup.channels_last, runner.setup.by_hand, False
    assert isinstance(runner, Ours), f"no facts are known of {type(runner).__name__}"
    if runner.simulated:
        raise HardwareError(
            f"{runner.precision} is simulated here",
            why="a simulation's time says nothing about it",
            fix="--precisions fp32",
        )
    config, kind, workload = runner.config, problem.device.type, runner.workload()
    optimizer = config.optimizer.name
    return (
        OUR_MODES[runner.variant],
        wants_channels_last(config, plan_for(config, workload, hardware), workload.model),
        optimizer in FUSED and kind in FUSED_DEVICES.get(optimizer, (kind,)),
        True,
    )


def _feed_of(runner: Runner) -> FeedOf | None:
    if not isinstance(runner, Ours) or runner.problem.own_data is None:
        return None
    return runner.reading


def _faster_data(runner: Runner) -> str:
    if not isinstance(runner, Ours) or runner.problem.own_data is None:
        return ""
    return way_out(runner.config, runner.problem.own_data.train_samples, num_cores())


def _matmul_rates(hardware: Hardware) -> dict[str, float]:
    measured = ((name, hardware.measured("matmul", MATMUL_FORMAT.get(name, name))) for name in PRECISIONS)
    return {name: found.tflops for name, found in measured if found is not None}
