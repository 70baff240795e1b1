"""Dry run: predict what a format would do to a model from a step in fp32, before a GPU is rented.

Magnitudes come from fp32 steps on real batches, as histograms of exponents. One simulated step in the format shows
which tensors it would hold: dtypes do not depend on values. fp8 scales each operand of a linear layer to its own
largest value, so nothing overflows there and only small values are lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.evidence.attempts import Subject, attempt
from halfstep.evidence.ranges import ROOT, Operation, RangeTrace
from halfstep.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, DryRunTarget, Format
from halfstep.precision.simulate import round_to

DTYPES = {"fp16": "float16", "bf16-true": "bfloat16", "fp8": "bfloat16"}
MUCH = 0.1
"""A module loses much where a tenth of its numbers that are not zero become zero, or a tenth of its updates vanish."""
PRODUCTS = ("mm", "addmm", "bmm")


@dataclass(slots=True)
class Magnitudes:
    """The largest magnitude in many tensors, and a histogram of exponents."""

    high: float = 0.0
    exponents: Counter[int] = field(default_factory=Counter)

    def add(self, tensor: Tensor) -> None:
        """Add the magnitudes of a tensor, without zeros and non-finite values."""
        size = tensor.detach().float().abs().flatten()
        size = size[size.isfinite() & (size > 0)]
        if not len(size):
            return
        self.high = max(self.high, float(size.max()))
        found, counts = torch.frexp(size)[1].unique(return_counts=True)
        self.exponents.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def join(self, other: Magnitudes) -> None:
        self.high = max(self.high, other.high)
        self.exponents.update(other.exponents)

    def compute_flushed_share(self, fmt: Format, scale: float = 1.0) -> float:
        """Return the share that rounds to zero when multiplied by `scale`: below half the smallest number."""
        total = sum(self.exponents.values())
        # frexp's mantissa is below 1, so an exponent e holds numbers below 2^e.
        limit = math.log2(fmt.smallest_subnormal / 2 / scale)
        return sum(n for e, n in self.exponents.items() if e <= limit) / total if total else 0.0

    def compute_headroom_bits(self, fmt: Format) -> float:
        """Return the powers of two between the largest value and the format's largest number."""
        return math.log2(fmt.largest / self.high) if self.high else math.inf


LOST = "optimizer.name=adamw with precision.rounding=split would help"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the format would do to one kind of numbers of one module."""

    module: str
    kind: str
    verdict: str
    """"fits", "overflows", "flushes to zero", "loses updates" or "refuses the format"."""
    headroom_bits: float
    lost: float
    """The share that becomes zero, or of updates that change nothing."""
    remedy: str = ""
    """What would avoid the loss, or that loss scaling does not."""
    is_saved: bool = False
    """Whether a run in this format avoids it anyway: by loss scaling, or by weights that keep the bits of updates."""

    @property
    def is_bad(self) -> bool:
        return self.verdict != "fits"


class Histograms(RangeTrace):
    """A trace that records the magnitudes of each operation's outputs and operands."""

    def __init__(self, *traced: Any) -> None:
        super().__init__(*traced)
        self.outputs: dict[int, Magnitudes] = {}
        self.operands: dict[tuple[str, bool], Magnitudes] = {}

    def _record(self, func: Any, name: str, given: list[Tensor], before: Any, found: list[Tensor]) -> None:
        first = len(self.operations)
        super()._record(func, name, given, before, found)
        for seen, tensor in zip(self.operations[first:], found, strict=False):
            self.outputs.setdefault(seen.index, Magnitudes()).add(tensor)
        if name in PRODUCTS and self.operations[first:]:
            seen = self.operations[first]
            for tensor in given:
                if tensor.ndim >= 2:
                    self.operands.setdefault((seen.module, seen.is_backward), Magnitudes()).add(tensor)


def judge_modules(subject: Subject, target: DryRunTarget, windows: Iterable[list[Any]]) -> list[Judgement]:
    """Judge weights, activations and gradients of each module."""
    in_fp32 = subject.plan_for("fp32", {})
    # fp8 applies to operands of linear layers only, which the fp32 trace records; it needs no simulated step.
    in_target = None
    if target != "fp8":
        in_target = attempt(subject, target, subject.plan_for(target.removesuffix("-true"), {}), traced=True)
    # Whether each operation gives numbers in the format, by module, name, direction and occurrence.
    held = {}
    if in_target is not None and in_target.trace is not None:
        held = {key: op.output.dtype == DTYPES[target] for key, op in _enumerate_operations(in_target.trace)}
    cast = {module for (module, name, *_), is_held in held.items() if is_held and name in (*PRODUCTS, "convolution")}
    """Modules whose weights autocast casts to the format, which an fp32 step does not show."""
    found: dict[tuple[str, str], Magnitudes] = {}
    for window in windows:
        run = attempt(subject, "fp32", in_fp32, window=window, traced=Histograms)
        trace = run.trace
        assert isinstance(trace, Histograms)
        if not run.is_good:
            raise PrecisionError(
                f"a step fails even without {target}: {run}",
                why="a step that fails in fp32 shows nothing about another format",
                fix="train it with --precision fp32: the run saves the step, and `halfstep replay` finds the cause",
            )
        for (module, is_backward), magnitudes in _select_magnitudes(trace, target, held, subject.model):
            kind = "gradients" if is_backward else "activations"
            found.setdefault((module, kind), Magnitudes()).join(magnitudes)
    for name, parameter in subject.model.named_parameters():
        module = name.rpartition(".")[0] or "(root)"
        if target == "bf16-true" or module in cast and parameter.ndim > 1:
            found.setdefault((module, "weights"), Magnitudes()).add(parameter)
    scale = 1.0
    high = max((m.high for (_, kind), m in found.items() if kind == "gradients"), default=0.0)
    if target == "fp16" and high:
        # The largest power of two at which no gradient overflows: the result of the scaler's search.
        scale = 2.0 ** min(math.floor(math.log2(FP16.largest / high)), 24)
    rows = [_judge(module, kind, magnitudes, target, scale) for (module, kind), magnitudes in found.items()]
    if in_target is not None and in_target.error:  # the step ends there, and nothing after it was judged
        where = in_target.origin.module if in_target.origin is not None else ROOT
        remedy = f"{in_target.error}; put hs.fp32_island() around it; later operations are not checked"
        kind, verdict = "operations", "refuses the format"
        refused = Judgement(module=where, kind=kind, verdict=verdict, headroom_bits=math.inf, lost=0.0, remedy=remedy)
        rows.append(refused)
    return rows


def judge_updates(before: Mapping[str, Tensor], after: Mapping[str, Tensor], saved_by: str = "") -> list[Judgement]:
    """Judge the updates of a step that bf16 weights would lose: w + Δ == w. `saved_by` names what a run does about
    it."""
    found: dict[str, list[int]] = {}
    for name, old in before.items():
        weight = round_to(old.detach().float(), BF16)
        change = after[name].detach().float() - old.detach().float()
        is_made = change != 0
        # Lost: the weight is the same after the update is rounded to bf16.
        is_lost = (round_to(weight + change, BF16) == weight) & is_made
        counts = found.setdefault(name.rpartition(".")[0] or "(root)", [0, 0])
        counts[0] += int(is_lost.sum())
        counts[1] += int(is_made.sum())
    return [
        Judgement(
            module=module, kind="updates", verdict="loses updates" if lost > MUCH * made else "fits",
            headroom_bits=math.inf, lost=lost / made if made else 0.0,
            remedy=(f"{saved_by} helps" if saved_by else LOST) if lost > MUCH * made else "",
            is_saved=bool(saved_by),
        )
        for module, (lost, made) in found.items()
    ]  # fmt: skip


def _enumerate_operations(trace: RangeTrace) -> Iterable[tuple[tuple[Any, ...], Operation]]:
    seen: Counter[tuple[str, str, bool]] = Counter()
    for op in trace.operations:
        kind = (op.module, op.name, op.is_backward)
        yield (*kind, seen[kind]), op
        seen[kind] += 1


def _select_magnitudes(
    trace: Histograms, target: DryRunTarget, held: Mapping[tuple[Any, ...], bool], model: nn.Module
) -> Iterable[tuple[tuple[str, bool], Magnitudes]]:
    if target == "fp8":
        linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        yield from ((key, m) for key, m in trace.operands.items() if key[0] in linear)
        return
    for key, op in _enumerate_operations(trace):
        if held.get(key) and op.index in trace.outputs:
            yield (op.module, op.is_backward), trace.outputs[op.index]


def _judge(module: str, kind: str, found: Magnitudes, target: DryRunTarget, scale: float) -> Judgement:
    if target == "fp8":
        fmt = FP8_E5M2 if kind == "gradients" else FP8_E4M3
        # Scaled so that the largest value becomes the largest of the format.
        lost = found.compute_flushed_share(fmt, fmt.largest / found.high if found.high else 1.0)
        verdict = "flushes to zero" if lost > MUCH else "fits"
        return Judgement(module=module, kind=kind, verdict=verdict, headroom_bits=0.0, lost=lost)
    fmt = FP16 if target == "fp16" else BF16
    lost, headroom, remedy, is_saved = found.compute_flushed_share(fmt), found.compute_headroom_bits(fmt), "", False
    verdict = "overflows" if headroom < 0 else "flushes to zero" if lost > MUCH else "fits"
    if verdict != "fits" and target == "fp16":
        is_saved = kind == "gradients" and verdict != "overflows" and found.compute_flushed_share(fmt, scale) <= MUCH
        remedy = f"loss scaling helps (2^{math.log2(scale):.0f})" if is_saved else "loss scaling does not help"
    return Judgement(
        module=module, kind=kind, verdict=verdict, headroom_bits=headroom, lost=lost, remedy=remedy, is_saved=is_saved
    )  # fmt: skip
