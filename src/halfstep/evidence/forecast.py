"""Forecast when a number of a step leaves its format: a robust trend over the last observations, with an interval.

The trend is Theil and Sen's: the median of the slopes between all pairs of the last `K` observations, which one odd
observation in four does not move. Its 90 % interval is the one that Kendall's rank test does not reject. Numbers are
taken as logarithms, so exponential growth is a straight line.

A warning needs all of: a slope whose whole interval points at the limit, the newest observations still moving as fast,
and a crossing at most `horizon` times as far ahead as the observations reach back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from halfstep.formats import find_format

K = 8
HORIZON = 2.0
RANKS = (6, 21)
"""Of the 28 slopes in order, those that bound 90 %: 14 ± 1.645 √(n (n - 1) (2n + 5) / 18) / 2, for n = 8."""
SLOWING = 0.5
"""The newest half of the observations has to move at least this fast, relative to all of them."""
LEAST_MOVE = {"bits": 0.5, "share": 0.5}
"""How far the observations have to move at least, in bits or in the logit of a share: less may be noise."""
MOST_ZERO, MOST_LOST = 0.99, 0.5


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
    """log2 of a magnitude, or the logit of a share."""
    is_upper: bool
    of: str = "high"
    """Which number of a row is compared: `high`, `zeros` or `lost`."""
    fix: str = ""
    horizon: float = HORIZON

    @property
    def unit(self) -> str:
        return "bits" if self.of == "high" else "share"


@dataclass(frozen=True, slots=True)
class Crossing:
    at: float
    low: float
    high: float


def forecast(steps: Sequence[float], values: Sequence[float], limit: Limit) -> Crossing | None:
    """Return when values cross a limit, if their trend shows it; None otherwise."""
    if len(steps) < K or not all(map(math.isfinite, values)):
        return None
    steps, values = steps[-K:], values[-K:]
    sign = 1.0 if limit.is_upper else -1.0
    rising = [sign * value for value in values]
    level = sign * limit.level
    slopes = sorted(_list_slopes(steps, rising))
    slope, slowest, fastest = median(slopes), slopes[RANKS[0]], slopes[RANKS[1]]
    half = K // 2
    recent = median(_list_slopes(steps[half:], rising[half:]))
    if slowest <= 0 or recent < SLOWING * slope or rising[-1] - rising[0] < LEAST_MOVE[limit.unit]:
        return None
    # All three lines pass through the median of the residuals, at the newest observation.
    now, newest = steps[-1], median(y + slope * (steps[-1] - t) for t, y in zip(steps, rising, strict=True))
    left = level - newest
    if left <= 0:
        return None if rising[0] > level else Crossing(now, now, now)
    speed = min(slope, recent) if recent < slope else slope
    at = now + left / speed
    if at - now > limit.horizon * (now - steps[0]):
        return None
    low = now + left / max(fastest, recent)
    high = now + left / min(slowest, recent)
    return Crossing(at, min(low, at), max(high, at))


def _list_slopes(steps: Sequence[float], values: Sequence[float]) -> list[float]:
    return [
        (values[j] - values[i]) / (steps[j] - steps[i]) for i in range(len(steps)) for j in range(i + 1, len(steps))
    ]


def to_logit(share: float) -> float:
    """Return the logit of a share, at most ±20 (log base 2)."""
    bounded = min(max(share, 2.0**-20), 1 - 2.0**-20)
    return math.log2(bounded / (1 - bounded))


def describe_crossing(
    module: str, kind: str, limit: Limit, found: Crossing, step: int, *, num_more: int = 0
) -> WatchWarning:
    """Return the warning of a crossing, which `num_more` other modules follow."""
    name = module or "the model"
    if found.at <= step:
        when = "crossed now"
    else:
        about, low, high = (round_steps(max(at - step, 0)) for at in (found.at, found.low, found.high))
        when = f"in about {about} steps (90 % interval {low} to {high})"
    more = f"; so do {num_more} more modules" if num_more > 1 else "; so does one more module" if num_more else ""
    message = f"{name}, {kind}: {limit.threshold} {when}{more}. {limit.fix}"
    return WatchWarning(module, kind, limit.threshold, step, found.at, found.low, found.high, message)


def round_steps(steps: float) -> str:
    """Return two significant digits: `1,900`."""
    digits = max(len(str(int(steps))) - 2, 0)
    return f"{int(round(steps, -digits)):,}"


# --- what each kind is compared with ---

Fix = Callable[[str, str], str]


def list_limits(kind: str, format: str, module: str, *, scales: bool, eps: float = 0.0) -> list[Limit]:
    """Return the limits of numbers of one kind in their format; `scales`: gradients are scaled by the loss scale."""
    name = module or "(the whole model)"
    if kind == "variance":
        return [Limit(f"variance {eps:g}", math.log2(eps), is_upper=False, fix=FIX_VARIANCE)] if eps > 0 else []
    if kind == "update":
        return [Limit("lost updates 50 %", 0.0, is_upper=True, of="lost", fix=FIX_LOST)] if is_half(format) else []
    fmt = find_format(format)
    bounds = [
        Limit(f"{format} maximum", math.log2(fmt.largest), is_upper=True, fix=FIX_HIGH[kind].format(module=name)),
        Limit(f"{format} subnormal", math.log2(fmt.smallest_normal), is_upper=False, fix=FIX_LOW.format(module=name)),
    ]
    if kind in ("weight", "attention logits"):
        bounds = bounds[:1]  # a weight that decays to zero is pruned, and small logits are harmless
    if kind == "weight":  # what it multiplies leaves the range sooner, and is to be reported first
        bounds = [replace(bounds[0], horizon=HORIZON / 2)]
    if scales and "gradient" in kind:
        bounds = bounds[1:]  # an overflow lowers the loss scale, which has its own forecast
    if kind == "activation":
        bounds.append(Limit(f"zeros {MOST_ZERO:.0%}".replace("%", " %"), to_logit(MOST_ZERO), True, "zeros", FIX_ZERO))
    return bounds


def is_half(format: str) -> bool:
    return find_format(format).storage_bits < 32


FIX_HIGH = {
    "activation": 'Run it in a wider range, modules={{"{module}": "bf16"}} (or "fp32"), or lower the learning rate',
    "attention logits": 'Normalise queries and keys, lower the learning rate, or modules={{"{module}": "fp32"}}',
    "weight": "Lower the learning rate, or raise the weight decay",
    "activation gradient": "Clip gradients (clip_norm=1.0), or lower the learning rate",
    "weight gradient": "Clip gradients (clip_norm=1.0), or lower the learning rate",
}
FIX_LOW = 'Its values vanish: check its initialisation and normalisation, or modules={{"{module}": "bf16"}}'
FIX_ZERO = "Its units die: lower the learning rate, or use an activation with a negative side, such as GELU"
FIX_VARIANCE = "Its inputs become constant: check what feeds it, or raise its eps"
FIX_LOST = (
    "Keep the weights in fp32, round stochastically or keep the lost bits (precision.rounding), or raise the rate"
)
FIX_SCALE = "Gradients outgrow fp16: use bf16, clip gradients (clip_norm=1.0), or lower the learning rate"
