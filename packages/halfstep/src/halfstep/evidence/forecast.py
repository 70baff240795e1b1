"""Forecast when a number of a step leaves its format: a robust trend over the last observations, with an interval.

The trend is Theil and Sen's: the median of the slopes between pairs of the last `K` observations, which one odd
observation hardly moves. Its 90 % interval is the one that Kendall's rank test does not reject. Numbers are taken as
logarithms, so exponential growth is a straight line, and the share of zeros as a logit. The share of lost updates is
taken as it is: it is about linear in the logarithm of a decaying rate. How the slope has changed between the two halves
of the observations bends the line, up or down.

A warning needs all of: a slope whose whole interval points at the limit, observations that have moved by a third of
what is left to it, and a crossing at most `horizon` times as far ahead as the observations reach back. A weaker trend
counts only for the name: of the modules that move together the one that crosses first is reported. The constants were
chosen with the ramps `tuning` and `unseen` of benchmarks/results/watch_ramps.json.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from halfstep.formats import FP8_E4M3, FP16, find_format

K = 8
HORIZON = 2.0
RANKS = (6, 21)
"""Of the 28 slopes in order, those that bound 90 %: 14 ± 1.645 √(n (n - 1) (2n + 5) / 18) / 2, for n = 8."""
LEAST_DONE = 1 / 3
"""How far the observations have to move at least, relative to what is left to the limit."""
LEAST_SHARE = 0.01
MOST_BEND = 2.0
UNSURE = 1.25
"""The factor by which the bend of a trend may change after the forecast, up or down."""
MOST_WIDE = 4.0
"""The end of an interval is at most this many times as far ahead as the forecast."""
LEAST_MOVE = {"high": 0.5, "need": 0.5, "spread": 0.5, "top": 0.5, "zeros": 0.3, "lost": 0.05}
"""How far the observations have to move at least, by what is compared (`Limit.of`): less may be noise."""


@dataclass(frozen=True, slots=True)
class WatchWarning:
    """A number of a module that will leave its range."""

    module: str
    """As in model.named_modules(); empty for the whole model."""
    kind: str
    threshold: str
    """What it will cross, such as "fp16 maximum"."""
    step: int
    """When the warning was issued."""
    at: float | None
    """The forecast step of the crossing."""
    low: float | None
    high: float | None
    """The 90 % interval of `at`."""
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Limit:
    """A level that numbers of one kind must not cross."""

    threshold: str
    level: float
    """log2 of a magnitude, the logit of a share of zeros, or a share of lost updates."""
    is_upper: bool
    of: str = "high"
    """Which number of a row is compared: `high`, log2 of the largest magnitude; `top`, that of the 90 % quantile;
    `spread`, the bits from the median to the largest; `need`, for the loss scale; or a share, `zeros` or `lost`."""
    fix: str = ""
    horizon: float = HORIZON
    reported_as: str = ""
    """The kind that is reported, if it is not that of the row: what comes of a number that was cast."""


@dataclass(frozen=True, slots=True)
class Crossing:
    at: float
    low: float
    high: float
    left: float
    """The distance to the limit now."""
    slope: float
    """The speed towards it, per step."""
    is_sure: bool
    """False if the trend is too weak for a warning of its own."""


def forecast(
    steps: Sequence[float], values: Sequence[float], limit: Limit, *, only_sure: bool = False
) -> Crossing | None:
    """Return when values cross a limit; None if they do not move towards it. Only sure crossings merit a warning;
    with `only_sure`, None for most others, which is faster."""
    if len(steps) < K or not all(map(math.isfinite, values)):
        return None
    steps, values = steps[-K:], values[-K:]
    sign = 1.0 if limit.is_upper else -1.0
    rising, level, half = [sign * value for value in values], sign * limit.level, K // 2
    recent = median(_list_slopes(steps[half:], rising[half:]))
    if recent <= 0:
        return None
    now = steps[-1]
    newest = median(y + recent * (now - t) for t, y in zip(steps[half:], rising[half:], strict=True))
    left, span, moved = level - newest, now - steps[half - 1], rising[-1] - rising[0]
    has_moved = moved >= max(LEAST_MOVE[limit.of], LEAST_DONE * left)
    if only_sure and left > 0 and not has_moved:
        return None
    slopes = sorted(_list_slopes(steps, rising))
    slowest, slope, fastest = slopes[RANKS[0]], median(slopes), slopes[RANKS[1]]
    if slope <= 0:
        return None
    if left <= 0:
        return None if rising[0] > level else Crossing(now, now, now, 0.0, slope, is_sure=True)
    is_sure = slowest > 0 and has_moved
    early = median(_list_slopes(steps[:half], rising[:half]))
    # The trend bends: its speed changes by this factor from one half of the observations to the next. Half of that is
    # believed for the forecast, since four observations tell it poorly; the interval allows for more.
    bend = min(max(recent / early, 1 / MOST_BEND), MOST_BEND) if early > 0 else MOST_BEND
    ahead = _cross(left, recent, math.sqrt(bend), span)
    if ahead == math.inf:
        return None
    is_sure = is_sure and max(ahead, left / recent) <= limit.horizon * (now - steps[0])
    bends = [min(bend, 1.0) / UNSURE, max(bend, 1.0) * UNSURE]
    latest = left / slowest if slowest > 0 else math.inf
    ways = [left / fastest, latest, ahead, *(_cross(left, recent, one, span) for one in bends)]
    if limit.is_upper and limit.of == "high":  # growth may be linear, which is slower than exponential
        numbers = [2.0 ** (value - limit.level) for value in values]  # relative to the level
        speed = median(_list_slopes(steps, numbers))
        ways.append((1 - numbers[-1]) / speed if speed > 0 else 0.0)
    return Crossing(now + ahead, now + min(ways), now + min(max(ways), MOST_WIDE * ahead), left, slope, is_sure)


def _cross(left: float, speed: float, bend: float, span: float) -> float:
    """Return the steps to go `left` further, at a speed that changes by `bend` in each `span` of steps; `speed` is that
    of the last half of the observations, whose middle is about half a span ago."""
    rate, speed = math.log(bend), speed * math.sqrt(bend)
    if abs(rate) < 1e-6:
        return left / speed
    covered = 1 + left * rate / (speed * span)
    return span * math.log(covered) / rate if covered > 0 else math.inf


def _list_slopes(steps: Sequence[float], values: Sequence[float]) -> list[float]:
    return [
        (values[j] - values[i]) / (steps[j] - steps[i]) for i in range(len(steps)) for j in range(i + 1, len(steps))
    ]


def to_logit(share: float) -> float:
    """Return the logit of a share (log base 2); below LEAST_SHARE a few elements would look like a trend."""
    bounded = min(max(share, LEAST_SHARE), 1 - 2.0**-14)
    return math.log2(bounded / (1 - bounded))


def rank_limit(kind: str, limit: Limit) -> int:
    """Return how serious a limit is: 0 if numbers beyond it are lost, 1 if gradients overflow, so that steps are
    dropped, 2 if forward does, so that no step is left."""
    if kind == "loss scale":
        return 1
    is_overflow = limit.is_upper and limit.of == "high"
    return 0 if not is_overflow else 1 if "gradient" in kind else 2


def describe_crossing(
    module: str, kind: str, limit: Limit, found: Crossing, step: int, *, num_more: int = 0
) -> WatchWarning:
    """Return the warning of a crossing, which `num_more` other modules follow."""
    name = module or "the model"
    if found.at <= step:
        when = "crossed now"
    else:
        left = [max(round(at - step), 0) for at in (found.at, found.low, found.high)]
        about, low, high = (f"{round(steps, min(2 - len(str(steps)), 0)):,}" for steps in left)  # two digits: `1,900`
        when = f"in about {about} steps (90 % interval {low} to {high})"
    more = f"; {num_more} more modules follow" if num_more > 1 else "; one more module follows" if num_more else ""
    message = f"{name}, {kind}: {limit.threshold} {when}{more}. {limit.fix}"
    return WatchWarning(module, kind, limit.threshold, step, found.at, found.low, found.high, message)


# --- what each kind is compared with ---


@functools.cache
def list_limits(
    kind: str, format: str, module: str, *, scales: bool, eps: float = 0.0, is_fp8: bool = False
) -> list[Limit]:
    """Return the limits of numbers of one kind in their format; `scales`: gradients are scaled by the loss scale."""
    name = module or "(the whole model)"
    if kind == "variance":
        return [Limit(f"variance {eps:g}", math.log2(eps), is_upper=False, fix=FIX_VARIANCE)] if eps > 0 else []
    if kind == "update":
        is_narrow = find_format(format).storage_bits < 32
        return [Limit("lost updates 50 %", 0.5, is_upper=True, of="lost", fix=FIX_LOST)] if is_narrow else []
    if kind == "input":  # in fp32, and about to be cast to fp16
        fix = FIX_HIGH["activation"].format(module=name)
        return [
            Limit("fp16 maximum", math.log2(FP16.largest), True, fix=fix, reported_as="activation"),
            Limit("90 % zeros in fp16", VANISHED, False, fix=FIX_INPUT, reported_as="weight gradient"),
        ]
    # Logits that large are as good as infinite in any format: their softmax picks one key.
    fmt = FP16 if kind == "attention logits" else find_format(format)
    # What a weight multiplies usually leaves the range sooner, and is to be reported first.
    horizon = HORIZON / 2 if kind == "weight" else HORIZON
    fix = FIX_HIGH[kind].format(module=name)
    bounds = [Limit(f"{fmt.name} maximum", math.log2(fmt.largest), is_upper=True, fix=fix, horizon=horizon)]
    if scales and "gradient" in kind:
        bounds = []  # an overflow lowers the loss scale, which has its own forecast
    if kind == "activation":
        bounds.append(Limit("99 % zeros", to_logit(0.99), True, "zeros", FIX_ZERO))
        if is_fp8:
            bounds.append(Limit("50 % below fp8_e4m3's range", FP8_RANGE, True, "spread", FIX_FP8))
    elif "gradient" in kind and format == "fp16":
        bounds.append(Limit("90 % zeros in fp16", VANISHED, False, "top", FIX_LOW.format(module=name)))
    return bounds


VANISHED = math.log2(FP16.smallest_subnormal) - 0.5
"""Half of fp16's smallest number rounds to zero."""
FP8_RANGE = math.log2(FP8_E4M3.largest / FP8_E4M3.smallest_normal)
"""Bits between the largest and the smallest normal number: fp8 scales a tensor's largest magnitude to the former."""


FIX_HIGH = {
    "activation": 'Use a wider format, modules={{"{module}": "bf16"}} (or "fp32"), or lower the learning rate',
    "attention logits": 'Normalise queries and keys, lower the learning rate, or use modules={{"{module}": "fp32"}}',
    "weight": "Lower the learning rate, or raise the weight decay",
    "activation gradient": "Clip gradients (clip_norm=1.0), or lower the learning rate",
    "weight gradient": "Clip gradients (clip_norm=1.0), or lower the learning rate",
}
FIX_LOW = 'Its values vanish: check its initialisation and normalisation, or use modules={{"{module}": "bf16"}}'
FIX_INPUT = "Its inputs vanish when they are cast to fp16: scale or normalise them, or use bf16"
FIX_ZERO = "Its units die: lower the learning rate, or use an activation with a negative side, such as GELU"
FIX_FP8 = "An outlier uses up fp8's range: normalise it, or run the layers that read it in bf16 (modules=)"
FIX_VARIANCE = "Its inputs become constant: check the layers before it, or raise its eps"
FIX_LOST = (
    "Keep the weights in fp32, round stochastically or keep the lost bits (precision.rounding), or raise the rate"
)
FIX_SCALE = "Gradients outgrow fp16: use bf16, clip gradients (clip_norm=1.0), or lower the learning rate"
