"""What fits: the largest batch of a memory, with the accumulation that keeps the effective batch, fastest first."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep.config.schema import ADAM_LIKE, RunConfig
from halfstep.errors import ConfigError, MemoryLimitError, format_bytes
from halfstep.hardware.facts import Hardware
from halfstep.models.recompute import Recompute
from halfstep.precision.ladder import lacks
from halfstep.run.memory.plan import Cell, MemoryPlanner, Prediction
from halfstep.tune.memory_low import NORMAL, MemorySetting
from halfstep.tune.modes import Mode

USABLE = 0.92
"""Of a device's memory: torch's allocator leaves gaps between blocks."""
CONTEXT_BYTES = 600_000_000
"""CUDA's own, with its kernels."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-true")
RECOMPUTE_TIME: dict[Recompute, float] = {"none": 1.0, "pointwise": 1.07, "alternate": 1.2, "blocks": 1.33}
"""Of a step's time: a few passes over memory (measured on a U-Net, benchmarks/results/speed.json), and one more forward
pass, which is a third of a step's arithmetic; between them their mean."""
SMALL_OPTIMIZER_TIME = 1.02
LARGEST_GROWTH = 4
"""How far a larger batch is proposed: much larger ones need more epochs (McCandlish et al. 2018)."""
MOST = 1 << 20
"""Samples of a batch that are looked at."""
UNITS = {"": 1} | {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)}
UNITS |= {letter: 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)}
MOST_BYTES = 10**15


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A precision and memory level with the largest batch that fits."""

    prediction: Prediction
    largest_batch: int
    batch_size: int
    """To train with: the configured one, or what fits of it."""
    accumulate: int
    relative_time: float
    """Of a sample, against the fastest row; an order, not a measurement."""

    @property
    def words(self) -> list[str]:
        """Settings to type."""
        cell = self.prediction.cell
        levers = []
        if cell.setting.recompute == "blocks":
            levers.append("train.activation_checkpointing=true")
        elif cell.setting != NORMAL:
            levers.append("train.memory=low")
        if cell.setting.optimizer_bits == 8:
            levers.append("optimizer.moment_bits=8")
        size = [f"train.batch_size={self.batch_size}", f"train.accumulate={self.accumulate}"]
        return ["--precision", cell.precision, *size, *levers]


def read_size(text: str) -> int:
    """`24GB`, `24 GiB` or `24e9` in bytes; a number alone is gigabytes."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*((?:[kmgt]i?)?)(b?)\s*", text.lower())
    try:
        number, unit = float(found[1]) if found else 0.0, found[2] if found else ""
        is_bare = found is not None and not unit and not found[3]
        size = int(number * (UNITS["g"] if is_bare and number < 10**6 else UNITS[unit]))
    except (ValueError, OverflowError):
        size = 0
    if not 0 < size <= MOST_BYTES:
        raise ConfigError(
            f"--fit {text!r} is not a size of memory", fix="a number and its unit: --fit 24GB, or --fit 40GiB"
        )
    return size


def usable_bytes(memory_bytes: int) -> int:
    """What torch's tensors may take of it at their peak."""
    return max(0, int(USABLE * memory_bytes) - CONTEXT_BYTES)


def levels_of(planner: MemoryPlanner, config: RunConfig) -> list[MemorySetting]:
    """Memory levels that this model has, the gentlest first."""
    recomputes: list[Recompute] = ["none"]
    if planner.step.recomputes:
        recomputes += ["pointwise", "alternate", "blocks"]
    small = config.optimizer.name == "adamw" and config.optimizer.moment_bits == 32
    bits: tuple[int, ...] = (32, 8) if small else (32,)
    settings = [MemorySetting(recompute=how, optimizer_bits=b) for how in recomputes for b in bits]  # type: ignore[arg-type]
    return sorted(settings, key=level_time)


def level_time(setting: MemorySetting) -> float:
    """Time of a step against the normal one."""
    return RECOMPUTE_TIME[setting.recompute] * (SMALL_OPTIMIZER_TIME if setting.optimizer_bits == 8 else 1.0)


def precisions_of(hardware: Hardware | None) -> tuple[str, ...]:
    """Those a GPU has."""
    return PRECISIONS if hardware is None else tuple(name for name in PRECISIONS if not lacks(name, hardware))


def largest_batch(planner: MemoryPlanner, cell: Cell, limit_bytes: int) -> int:
    """Samples of a micro-batch that fit; 0 where not even one does. `cell.batch_size` is where it starts to look."""
    base = max(cell.batch_size, 2)

    def fits(batch_size: int) -> bool:
        asked = dataclasses.replace(cell, batch_size=batch_size)
        return planner.predict(asked, base_batch=base).total <= limit_bytes

    if not fits(1):
        return 0
    low = 1
    while low < MOST and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fitting(
    planner: MemoryPlanner,
    config: RunConfig,
    limit_bytes: int,
    mode: Mode,
    precisions: Sequence[str],
    hardware: Hardware | None = None,
    most: int = 12,
) -> list[Fit]:
    """Precisions and levels in which at least one sample fits, in order of predicted speed; the first `most`. A level
    that saves nothing over a faster one of its precision is left out."""
    levels = levels_of(planner, config)
    cells = [Cell.of(config, precision, mode, setting) for precision in precisions for setting in levels]
    times = {cell: level_time(cell.setting) / speed_of(cell.precision, hardware) for cell in cells}
    found: list[Fit] = []
    faster: dict[str, list[tuple[int, int]]] = {precision: [] for precision in precisions}
    for cell in sorted(cells, key=times.__getitem__):
        largest = largest_batch(planner, cell, limit_bytes)
        if largest < config.train.batch_size:
            # Then gradients of several micro-batches add up, and all of them are there.
            largest = largest_batch(planner, dataclasses.replace(cell, accumulate=2), limit_bytes)
        least = planner.predict(cell, base_batch=max(cell.batch_size, 2)).total
        if largest and all(largest > batch or least < peak for batch, peak in faster[cell.precision]):
            faster[cell.precision].append((largest, least))
            found.append(_fit(planner, config, cell, largest, times[cell]))
        if len(found) == most:
            break
    return [dataclasses.replace(fit, relative_time=fit.relative_time / found[0].relative_time) for fit in found]


def _fit(planner: MemoryPlanner, config: RunConfig, cell: Cell, largest: int, relative_time: float) -> Fit:
    wanted = config.train.batch_size * config.train.accumulate
    size = next(n for n in range(min(largest, config.train.batch_size), 0, -1) if wanted % n == 0)
    accumulate = wanted // size
    taken = dataclasses.replace(cell, batch_size=size, accumulate=accumulate)
    return Fit(
        prediction=planner.predict(taken, base_batch=max(config.train.batch_size, 2)),
        largest_batch=largest,
        batch_size=size,
        accumulate=accumulate,
        relative_time=relative_time,
    )


USUAL_SPEED = {"fp32": 1.0, "tf32": 4.0, "bf16": 8.0, "fp16": 8.0, "fp8": 12.0}
"""Of matrix units against fp32, where no GPU is named: an A100's published rates, roughly."""


def speed_of(precision: str, hardware: Hardware | None) -> float:
    """Against strict fp32: measured or published rates of the device."""
    name = precision.removesuffix("-true")
    known = hardware.speedup(name) if hardware is not None else None
    return known or USUAL_SPEED[name]


def refuse_nothing_fits(planner: MemoryPlanner, config: RunConfig, limit_bytes: int, mode: Mode, where: str) -> None:
    """Where not even one sample fits in any way: the least that would be needed, and what it consists of."""
    cells = (
        Cell(precision=precision, mode=mode, setting=setting, batch_size=1)
        for precision in ("bf16-true", "bf16", "fp32")
        for setting in levels_of(planner, config)
    )
    least = min((planner.predict(cell) for cell in cells), key=lambda found: found.total)
    largest = sorted(least.components.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    raise MemoryLimitError(
        f"nothing fits {where}: one sample of {config.workload} needs {format_bytes(least.total)}, and "
        f"{format_bytes(limit_bytes)} of it can be used beside CUDA and the allocator's gaps",
        why=f"the least is {least.cell.precision}, {least.cell.setting}: {parts}",
        fix="a smaller model, smaller samples, or a GPU with more memory (halfstep detect --gpu list)",
    )


def notes_of(planner: MemoryPlanner, config: RunConfig, fits: Sequence[Fit]) -> Iterator[str]:
    """What batch and accumulation do to training."""
    train, wanted = config.train, config.train.batch_size * config.train.accumulate
    best = fits[0]
    yield f"batch x accumulation stays at {wanted} samples per step: the learning rate stays {config.optimizer.lr:g}"
    if best.largest_batch >= 2 * train.batch_size:
        size = min(best.largest_batch, LARGEST_GROWTH * train.batch_size)
        rule = "square root of the batch, for Adam" if config.optimizer.name in ADAM_LIKE else "linear in the batch"
        factor = math.sqrt(size / wanted) if config.optimizer.name in ADAM_LIKE else size / wanted
        yield (
            f"train.batch_size={size} would fit: with it optimizer.lr={config.optimizer.lr * factor:.3g} ({rule}), and "
            "fewer steps per epoch"
        )
    if planner.step.has_batch_norm and any(fit.batch_size < train.batch_size for fit in fits):
        yield "BatchNorm sees micro-batches: its statistics change with a smaller train.batch_size"
