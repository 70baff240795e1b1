"""The changes that would shorten a step, each predicted from what was measured in it.

Every rule turns measured milliseconds into a gain; ratios stand for passes over memory and are derived where they are
written. A rule says nothing where its setting is on already. Gains are those of one change alone: two that shorten
the same kernels do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from halfstep.bench.explain_facts import Breakdown, StepFacts
from halfstep.bench.explain_kernels import ARITHMETIC, CONVOLUTIONS, Kind
from halfstep.bench.explain_words import words_for

MOST_CHANGES = 3
WORTH_SAYING = 0.01
"""Share of the step; less is within the spread of a measurement."""
HOST_BOUND = 0.1
"""Share of launch gaps in a step from which the host sets the pace: shorter kernels then only widen the gaps."""

POINTWISE_SAVED = 3 / 5
"""Convolution, BatchNorm, ReLU: ReLU alone makes 2 passes over the activations forward (read, write) and 3 backward
(read twice, write). Fused into its neighbours it leaves 2, the reads of its output in the two backward kernels of the
norm. Residual additions save 2 passes of 3."""
FUSED_ADAM_SAVED = 1 - 7 / 20
"""AdamW by foreach makes 20 passes: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4. The fused
kernel reads 4 tensors and writes 3."""
FOREACH_LAUNCHES_SAVED = 1 - 1 / 8
"""Those are 8 launches where the fused optimizer makes one."""

LOWER_PRECISIONS = {"fp32": ("bf16", "fp16", "tf32"), "tf32": ("bf16", "fp16")}
"""What can be gone down to; fp8 is left to its own trial, since it slows more than it gains in small layers."""
CLEARLY_FASTER = 1.1
"""A tie under 10 % goes to bf16, which needs no loss scaling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One setting, and what it would gain."""

    title: str
    setting: str
    gain_ms: float
    """Of a step, or of what one sample takes in it."""
    gain_of: Literal["step", "sample"]
    gain_share: float
    """Of the step as it was timed; of a sample's part of it where samples gain."""
    arithmetic: str
    """Where the gain comes from, in measured numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gain:
    title: str
    setting: str
    ms: float
    """Of a step, or of as many samples as one has."""
    arithmetic: str
    of: Literal["step", "sample"] = "step"


Rule = Callable[[Breakdown, StepFacts], _Gain | None]


def advise(step: Breakdown, facts: StepFacts) -> tuple[Change, ...]:
    """At most three changes, the largest gain first."""
    gains = [gain for rule in RULES if (gain := rule(step, facts)) and gain.ms >= WORTH_SAYING * step.step_ms]
    gains.sort(key=lambda gain: gain.ms, reverse=True)
    return tuple(
        Change(
            title=gain.title,
            setting=gain.setting,
            gain_ms=gain.ms / (facts.batch_size if gain.of == "sample" else 1),
            gain_of=gain.of,
            gain_share=gain.ms / step.step_ms,
            arithmetic=gain.arithmetic,
        )
        for gain in gains[:MOST_CHANGES]
    )


def is_host_bound(step: Breakdown, facts: StepFacts) -> bool:
    """On a GPU, launches come too late to keep it busy."""
    return facts.device.type == "cuda" and step.launch_gap_ms > HOST_BOUND * step.step_ms


def step_gain_ms(step: Breakdown, facts: StepFacts, *, saved_ms: float, saved_launches: float = 0.0) -> float:
    """What shorter kernels gain: all of it, or where the host sets the pace, what fewer launches let through."""
    if not is_host_bound(step, facts):
        return saved_ms
    host_ms = step.step_ms * (1 - saved_launches / step.launches)
    return step.step_ms - max(host_ms, step.busy_ms - saved_ms)


def _compile(step: Breakdown, facts: StepFacts) -> _Gain | None:
    if facts.mode != "eager":
        return None
    pointwise_ms, cast_ms = step.ms(Kind.ELEMENTWISE), step.ms(Kind.CAST)
    saved_ms = POINTWISE_SAVED * pointwise_ms + cast_ms
    launches = POINTWISE_SAVED * step.launches_of(Kind.ELEMENTWISE) + step.launches_of(Kind.CAST)
    return _Gain(
        title="fuse elementwise kernels and casts",
        setting=words_for(facts.runner).compile,
        ms=step_gain_ms(step, facts, saved_ms=saved_ms, saved_launches=launches),
        arithmetic=f"{POINTWISE_SAVED:.0%} of {pointwise_ms:.2f} ms elementwise + {cast_ms:.2f} ms casts"
        + _host_remark(step, facts),
    )


def _graph(step: Breakdown, facts: StepFacts) -> _Gain | None:
    if facts.mode == "graph" or facts.device.type != "cuda":
        return None
    return _Gain(
        title="launch the whole step at once",
        setting=words_for(facts.runner).graph,
        ms=step.launch_gap_ms,
        arithmetic=f"{step.launch_gap_ms:.2f} ms of gaps between {step.launches:.0f} launches",
    )


def _channels_last(step: Breakdown, facts: StepFacts) -> _Gain | None:
    convolution_ms, layout_ms = step.ms(*CONVOLUTIONS), step.ms(Kind.LAYOUT)
    if facts.channels_last or not convolution_ms:
        return None
    if facts.channels_last_speedup is None:
        saved_ms, arithmetic = layout_ms, f"{layout_ms:.2f} ms of layout copies"
    else:
        # The rate in NCHW was measured with the turning of tensors in it.
        both_ms, ratio = convolution_ms + layout_ms, facts.channels_last_speedup
        saved_ms = both_ms * (1 - 1 / ratio)
        arithmetic = f"{both_ms:.2f} ms of convolutions and layout copies at the measured {ratio:.2f}x"
    launches = step.launches_of(Kind.LAYOUT)
    return _Gain(
        title="keep images as convolutions read them",
        setting=words_for(facts.runner).channels_last,
        ms=step_gain_ms(step, facts, saved_ms=saved_ms, saved_launches=launches),
        arithmetic=arithmetic + _host_remark(step, facts),
    )


def _precision(step: Breakdown, facts: StepFacts) -> _Gain | None:
    rates = facts.matmul_tflops
    lower = [name for name in LOWER_PRECISIONS.get(facts.precision, ()) if name in rates]
    if not lower or facts.precision not in rates:
        return None
    best = max(lower, key=lambda name: rates[name] * (CLEARLY_FASTER if name == "bf16" else 1.0))
    arithmetic_ms, ratio = step.ms(*ARITHMETIC), rates[best] / rates[facts.precision]
    return _Gain(
        title=f"compute in {best}",
        setting=words_for(facts.runner).precisions[best],
        ms=step_gain_ms(step, facts, saved_ms=arithmetic_ms * (1 - 1 / ratio)),
        arithmetic=f"{arithmetic_ms:.2f} ms of convolutions and matrix products at the measured {ratio:.2f}x"
        + _host_remark(step, facts),
    )


def _fused_optimizer(step: Breakdown, facts: StepFacts) -> _Gain | None:
    # Clipping has foreach kernels too, and they stay.
    update = [k for k in step.kernels if k.kind is Kind.OPTIMIZER and "norm" not in k.name.lower()]
    setting = words_for(facts.runner).fused
    if facts.fused_optimizer or not setting or not update:
        return None
    update_ms, launches = sum(k.ms for k in update), sum(k.launches for k in update)
    saved_launches = FOREACH_LAUNCHES_SAVED * launches
    return _Gain(
        title="update weights in one kernel",
        setting=setting,
        ms=step_gain_ms(step, facts, saved_ms=FUSED_ADAM_SAVED * update_ms, saved_launches=saved_launches),
        arithmetic=f"{FUSED_ADAM_SAVED:.0%} of {update_ms:.2f} ms in {launches:.0f} optimizer kernels"
        + _host_remark(step, facts),
    )


def _larger_batch(step: Breakdown, facts: StepFacts) -> _Gain | None:
    # Where a graph can be had it takes the whole gap, not half of it.
    has_graph_left = facts.mode != "graph" and facts.device.type == "cuda"
    if has_graph_left or step.launch_gap_ms < HOST_BOUND * step.step_ms:
        return None
    return _Gain(
        title="share the gaps among more samples",
        setting=words_for(facts.runner).batch_size.format(2 * facts.batch_size),
        ms=step.launch_gap_ms / 2,
        of="sample",
        arithmetic=f"half of {step.launch_gap_ms:.2f} ms of gaps, which twice the samples would share",
    )


def _data(step: Breakdown, facts: StepFacts) -> _Gain | None:
    if not facts.faster_data or not step.data_wait_ms:
        return None
    waited_ms = step.data_wait_ms
    # A GPU may have work left while the host waits. A CPU waits itself, and what it reads by itself looks like work.
    gained_ms = step.exposed_wait_ms if facts.device.type == "cuda" else waited_ms
    return _Gain(
        title="read data faster",
        setting=facts.faster_data,
        ms=gained_ms,
        arithmetic=f"{waited_ms:.2f} ms a step spent waiting for the loader"
        + (f", {gained_ms:.2f} ms of them with nothing left to run" if gained_ms < waited_ms else ""),
    )


def _prefetch(step: Breakdown, facts: StepFacts) -> _Gain | None:
    if facts.prefetches or not step.exposed_copy_ms:
        return None
    return _Gain(
        title="copy the next batch during the step",
        setting=words_for(facts.runner).prefetch,
        ms=step.exposed_copy_ms,
        arithmetic=f"{step.exposed_copy_ms:.2f} ms of copies from the host while nothing else runs",
    )


def _host_remark(step: Breakdown, facts: StepFacts) -> str:
    return "; the host sets the pace, so fewer launches count first" if is_host_bound(step, facts) else ""


RULES: tuple[Rule, ...] = (
    _compile,
    _graph,
    _channels_last,
    _precision,
    _fused_optimizer,
    _larger_batch,
    _data,
    _prefetch,
)
