"""Predict the peak memory of a step by component, for any precision, mode, memory level and batch; find what fits.

Peak means the same everywhere in this project: the larger of torch's max_memory_allocated before a step is captured and
the memory reserved once it is (hardware/memory.py). The prediction comes from a trace, by mode:

    eager     forward and backward, operation by operation
    compile   the same trace, from which compiled.py derives what the compiler keeps, recomputes and fuses away
    graph     the captured step: our chains of kernels where the model has one, else as compiled, plus the gaps in the
              graph's memory pool
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from halfstep.errors import MemoryLimitError, format_bytes
from halfstep.evidence.watch import count_side_rows, estimate_bytes
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.ladder import explain_lack
from halfstep.precision.plan import Plan
from halfstep.recompute import Recompute
from halfstep_train.config.schema import RunConfig, TrainConfig
from halfstep_train.kernels.fast_forms import has_triton
from halfstep_train.run.memory.compiled import PRODUCTS, derive_compiled_timeline
from halfstep_train.run.memory.sharded import ShardUnit, replicate_timeline, shard_timeline
from halfstep_train.run.memory.step_trace import StepTrace, Timeline, derive_eager_timeline, interpolate_peak
from halfstep_train.run.memory.traceable_step import Fixed, TraceableStep
from halfstep_train.tune.modes import Mode, has_convolutions
from halfstep_train.tune.trials import NORMAL, MemorySetting

COMPONENTS = (
    *("weights", "gathered", "gradients", "reductions", "optimizer", "average", "frozen parts", "half copies"),
    *("activations", "inputs", "workspaces", "graph pool"),
)
"""The parts of a peak. docs/memory.md says what each of them holds."""

MODES: tuple[Mode, ...] = ("eager", "compile", "graph")
Layout = Literal["alone", "ddp", "shard"]
"""One rank without the others; a whole copy of the model on each; or its parameters divided by FSDP2."""
HALF = ("bf16", "fp16", "fp8")
CUBLAS_BYTES = 33_562_624
"""cuBLAS' workspace on Hopper; the forward and the backward thread have one each."""
SMALL_CUBLAS_BYTES = 8_519_680
"""The same on other GPUs."""
COMPILED_BLOCKS = 1.1
"""Memory of a compiled step that recomputes blocks, over the eager one's (U-Net, benchmarks/results/speed.json)."""
POOL_GAPS = 0.04
"""Share of a graph's pool that is idle between its blocks. A guess; rows of benchmarks/memory_plan.py agree with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One step to predict: a cell of the table that `halfstep plan --memory` prints."""

    precision: str
    mode: Mode
    setting: MemorySetting = NORMAL
    batch_size: int
    """Samples of a micro-batch on one rank."""
    accumulate: int = 1
    ranks: int = 1
    layout: Layout = "alone"
    gathers_half: bool = False
    """Whether sharded blocks are gathered in bf16."""
    reduces_last: bool = False
    """Whether sharded gradients are reduced once per step: until then they are whole."""

    @classmethod
    def of(cls, train: TrainConfig, precision: str, mode: Mode, setting: MemorySetting | None = None) -> Cell:
        """Return the cell of a step with these settings; without `setting` at their own memory level."""
        if setting is None:
            setting = MemorySetting(recompute="blocks") if train.activation_checkpointing else NORMAL
        return cls(precision=precision, mode=mode, setting=setting, batch_size=train.batch_size,
                   accumulate=train.accumulate, gathers_half=train.shard_gather == "bf16")  # fmt: skip

    def spread(self, ranks: int, layout: Layout) -> Cell:
        """Return the cell of the rank with most samples if several ranks train this batch."""
        size = -(-self.batch_size // ranks)
        return replace(self, batch_size=size, ranks=ranks, layout=layout).run_in(self.mode)

    def run_in(self, mode: Mode) -> Cell:
        """Return the cell of this step in another mode; sharded steps are compiled, not captured."""
        return replace(self, mode="compile" if self.layout == "shard" and mode == "graph" else mode)

    @classmethod
    def of_plan(cls, train: TrainConfig, plan: Plan) -> Cell:
        """Return the cell of a run with this plan, before batches are cut into micro-batches."""
        setting = MemorySetting(**plan.memory) if plan.memory else None
        return cls.of(train, plan.granted, plan.mode or "eager", setting)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A cell and its peak, in bytes by component."""

    cell: Cell
    components: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.components.values())


@dataclass(slots=True)
class MemoryPlanner:
    """Predict cells of one step; what two cells share is traced once."""

    step: TraceableStep
    hardware: Hardware | None = None
    _timelines: dict[tuple[object, ...], list[tuple[StepTrace, Timeline]]] = field(default_factory=dict)
    _traces: dict[tuple[object, ...], list[StepTrace]] = field(default_factory=dict)
    _fixed: dict[tuple[str, int], Fixed] = field(default_factory=dict)

    def predict(self, cell: Cell, *, base_batch: int = 0) -> Prediction:
        """Predict a cell from a trace at its batch size.

        With `base_batch`, interpolate between traces at that batch size and its double: cheaper for many batch sizes.
        """
        fixed = self._divide_fixed(cell)
        raw, prepared = self._count_inputs(cell.batch_size)
        moving = self._predict_temporary(cell, base_batch)
        found = Counter(
            {
                "weights": fixed.weights,
                "optimizer": fixed.optimizer,
                "average": fixed.average,
                "frozen parts": fixed.frozen,
                "inputs": raw + prepared,
                "workspaces": self._count_library() + self._count_watch(cell, fixed, moving),
                "graph pool": int(POOL_GAPS * moving.total()) + prepared if cell.mode == "graph" else 0,
            }
        )
        found.update(moving)
        return Prediction(cell=cell, components={name: found[name] for name in COMPONENTS})

    def _count_watch(self, cell: Cell, fixed: Fixed, moving: Counter[str]) -> int:
        """Return what an observation of `log.watch` takes. Next to a captured step, whose memory stays reserved, its
        side step takes gradients, half copies and the activations of a few samples; otherwise it runs while a step's
        memory is free."""
        if not self.step.config.log.watch:
            return 0
        found = estimate_bytes(self.step.workload.model)
        if cell.mode != "graph":
            return found
        by_batch = moving.total() - moving["gradients"] - moving["half copies"]
        found += fixed.weights + moving["half copies"]
        return found + by_batch * count_side_rows(cell.batch_size) // cell.batch_size

    def _predict_temporary(self, cell: Cell, base_batch: int) -> Counter[str]:
        """Return temporary memory at its peak: in forward and backward, or while the optimizer updates."""
        if cell.setting.recompute == "alternate" and cell.mode != "eager":
            return self._average_ways(cell, base_batch)
        # DDP's buckets hold all gradients during every step; the shards of FSDP2 are part of its timeline.
        accumulates = cell.layout == "ddp" or cell.layout == "alone" and cell.accumulate > 1
        if not base_batch or base_batch == cell.batch_size:
            peaks = [line.find_peak(accumulates=accumulates) for line in self._get_timelines(cell, cell.batch_size)]
        else:
            # Allocations are linear in the batch size, so two traces give all of them.
            near, far = self._get_timelines(cell, base_batch), self._get_timelines(cell, 2 * base_batch)
            peaks = [
                interpolate_peak(cell.batch_size, (base_batch, one), (2 * base_batch, two), accumulates=accumulates)
                for one, two in zip(near, far, strict=True)
            ]
        gradients = max(line.gradient_bytes for line in self._get_timelines(cell, base_batch or cell.batch_size))
        if cell.layout == "shard":
            gradients = sum(unit.count_shard_bytes(cell.ranks, trained=True) for unit in self.step.units)
        update = 0 if cell.mode == "graph" else self._divide_fixed(cell).update
        peaks.append(Counter({"gradients": gradients, "workspaces": update}))
        return max(peaks, key=lambda peak: peak.total())

    def _average_ways(self, cell: Cell, base_batch: int) -> Counter[str]:
        """Average two kinds of recomputation: `alternate` compiles every other block in each way."""
        ways = (replace(cell.setting, recompute=how) for how in ("pointwise", "blocks"))
        one, other = (self._predict_temporary(replace(cell, setting=setting), base_batch) for setting in ways)
        return Counter({name: (one[name] + other[name]) // 2 for name in one | other})

    def _get_timelines(self, cell: Cell, batch_size: int) -> list[Timeline]:
        how, recompute = self._find_family(cell.precision), cell.setting.recompute
        key = (how, cell.mode, recompute, batch_size)
        if key not in self._timelines:
            self._timelines[key] = self._derive_timelines(how, cell.mode, recompute, batch_size)
        if cell.layout == "alone":
            return [timeline for _, timeline in self._timelines[key]]
        if cell.layout == "ddp":
            return [replicate_timeline(timeline) for _, timeline in self._timelines[key]]
        return [shard_timeline(timeline, trace, self.step.units, cell) for trace, timeline in self._timelines[key]]

    def _derive_timelines(
        self, how: str, mode: Mode, recompute: Recompute, batch_size: int
    ) -> list[tuple[StepTrace, Timeline]]:
        """Derive the allocations of a mode from the traces that it needs, one timeline per phase."""
        if mode == "eager":
            traces = self._get_traces(how, recompute, batch_size, chains=False)
            return [(trace, derive_eager_timeline(trace)) for trace in traces]
        if mode == "graph" and how in HALF and has_triton():
            # A model without chains gives the same trace as without them, so keep it for both.
            chained = self._get_traces(how, recompute, batch_size, chains=True)
            if not any(trace.is_chain for trace in chained):
                self._traces[how, recompute, batch_size, False] = chained
            else:
                return [(trace, _derive_compiled(trace)) for trace in chained]
        if recompute == "blocks":
            # A compiled block is recomputed as a whole, not fused with the code that uses its results.
            traces = self._get_traces(how, recompute, batch_size, chains=False)
            return [(trace, derive_eager_timeline(trace).scale(COMPILED_BLOCKS)) for trace in traces]
        # A compiled model recomputes what is cheap between its kernels, not a whole block at once.
        keeps_cheap = recompute != "pointwise"
        traces = self._get_traces(how, recompute if keeps_cheap else "none", batch_size, chains=False)
        return [(trace, _derive_compiled(trace, keeps_cheap=keeps_cheap)) for trace in traces]

    def _find_family(self, precision: str) -> str:
        """Map precisions that take the same memory to one name; TF32 and fp32 differ only if the model convolves."""
        if precision == "tf32":
            return "tf32" if has_convolutions(self.step.workload.model) else "fp32"
        return {"fp16": "bf16", "fp8": "bf16"}.get(precision, precision)

    def _get_traces(self, precision: str, recompute: Recompute, batch_size: int, *, chains: bool) -> list[StepTrace]:
        key = (precision, recompute, batch_size, chains)
        if key not in self._traces:
            self._traces[key] = self.step.trace_phases(precision, recompute, batch_size, chains=chains)
        return self._traces[key]

    def _divide_fixed(self, cell: Cell) -> Fixed:
        """Return the fixed bytes of one rank: FSDP2 divides everything that belongs to a parameter."""
        key = (self._find_family(cell.precision), cell.setting.optimizer_bits)
        if key not in self._fixed:
            self._fixed[key] = self.step.measure_fixed(key[0], cell.setting)
        fixed = self._fixed[key]
        if cell.layout != "shard":
            return fixed
        trained = _compute_share(self.step.units, cell.ranks, trained=True)
        # Buffers, and modules of frozen networks outside of blocks, are whole on every rank.
        own = sum(unit.count_shard_bytes(1) for unit in self.step.units if not unit.is_frozen)
        kept = sum(unit.count_shard_bytes(1) for unit in self.step.units if unit.is_frozen)
        return Fixed(
            weights=fixed.weights - int(own * (1 - _compute_share(self.step.units, cell.ranks))),
            frozen=fixed.frozen - int(kept * (1 - _compute_share(self.step.units, cell.ranks, frozen=True))),
            optimizer=int(fixed.optimizer * trained),
            average=int(fixed.average * trained),
            update=int(fixed.update * trained),
        )

    def _count_inputs(self, batch_size: int) -> tuple[int, int]:
        """Return the bytes of batches as loaded and of one prepared batch; both are linear in the batch size."""
        (raw, prepared), (more_raw, more_prepared) = self.step.input_bytes
        # Line through the two measured batch sizes, 2 and 4.
        steps = (batch_size - 2) / 2
        return int(raw + (more_raw - raw) * steps), int(prepared + (more_prepared - prepared) * steps)

    def _count_library(self) -> int:
        """Return cuBLAS' workspaces if the step has matrix products; without hardware a Hopper GPU is assumed."""
        if self.hardware is not None and self.hardware.kind == "cpu":
            return 0
        traces = next(iter(self._traces.values()))
        multiplies = any(op.name in PRODUCTS and "conv" not in op.name for trace in traces for op in trace.ops)
        capability = self.hardware.capability if self.hardware is not None else (9, 0)
        each = CUBLAS_BYTES if capability is not None and capability >= (9, 0) else SMALL_CUBLAS_BYTES
        return 2 * each * multiplies


def _compute_share(units: Sequence[ShardUnit], num_ranks: int, *, trained: bool = False, frozen: bool = False) -> float:
    """Return the largest rank's share of these parameters; more than 1 / num_ranks where rows divide unevenly."""
    some = [unit for unit in units if unit.is_frozen == frozen]
    whole = sum(unit.count_shard_bytes(1, trained=trained) for unit in some)
    return sum(unit.count_shard_bytes(num_ranks, trained=trained) for unit in some) / max(whole, 1)


def _derive_compiled(trace: StepTrace, *, keeps_cheap: bool = True) -> Timeline:
    leaves_it = trace.is_chain or not trace.compiles
    return derive_eager_timeline(trace) if leaves_it else derive_compiled_timeline(trace, keeps_cheap=keeps_cheap)


# --- what fits: the largest batch for a device, with the accumulation that keeps the effective batch ---


USABLE = 0.92
"""Share of a device's memory that tensors may take: torch's allocator leaves gaps between blocks."""
CONTEXT_BYTES = 600_000_000
"""The CUDA context with its kernels."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-true")
RECOMPUTE_TIME: dict[Recompute, float] = {"none": 1.0, "pointwise": 1.07, "alternate": 1.2, "blocks": 1.33}
"""Relative time of a step. Pointwise: a few passes over memory (measured on a U-Net, benchmarks/results/speed.json).
Blocks: one more forward pass, a third of a step's arithmetic. Alternate: their mean."""
SMALL_OPTIMIZER_TIME = 1.02
SHARD_TIME = 1.05
"""A sharded step over the same step of DDP: GPT-2 XL in a world of one (benchmarks/results/sharded_gpt2_xl.json)."""
MOST = 1 << 20
"""Upper limit of the search for a batch size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A precision and memory level with the largest batch that fits."""

    prediction: Prediction
    largest_batch: int
    batch_size: int
    """The configured batch, or the part of it that fits."""
    relative_time: float
    """Time per sample relative to the fastest row; an order, not a measurement."""

    @property
    def accumulate(self) -> int:
        return self.prediction.cell.accumulate

    @property
    def arguments(self) -> list[str]:
        """Return the arguments for `halfstep train`."""
        cell = self.prediction.cell
        levers = [] if cell.layout == "alone" else [f"train.shard={str(cell.layout == 'shard').lower()}"]
        if cell.setting.recompute == "blocks":
            levers.append("train.activation_checkpointing=true")
        elif cell.setting != NORMAL:
            levers.append("train.memory=low")
        if cell.setting.optimizer_bits == 8:
            levers.append("optimizer.moment_bits=8")
        size = [f"train.batch_size={self.batch_size}", f"train.accumulate={self.accumulate}"]
        ranks = [] if cell.layout == "alone" else ["--gpus", str(cell.ranks)]
        return ["--precision", cell.precision, *ranks, *size, *levers]


def compute_usable_bytes(memory_bytes: int) -> int:
    """Return how much of a device's memory torch's tensors may take at their peak."""
    return max(0, int(USABLE * memory_bytes) - CONTEXT_BYTES)


def list_levels(planner: MemoryPlanner, config: RunConfig) -> list[MemorySetting]:
    """Return the memory levels of this model, the fastest first."""
    recomputes: list[Recompute] = ["none"]
    if planner.step.recomputes:
        recomputes += ["pointwise", "alternate", "blocks"]
    small = config.optimizer.name == "adamw" and config.optimizer.moment_bits == 32
    bits: tuple[int, ...] = (32, 8) if small else (32,)
    settings = [MemorySetting(recompute=how, optimizer_bits=b) for how in recomputes for b in bits]  # type: ignore[arg-type]
    return sorted(settings, key=estimate_level_time)


def list_cells(
    planner: MemoryPlanner, config: RunConfig, mode: Mode, precisions: Sequence[str], ranks: int | None
) -> list[Cell]:
    """Return the cells of all precisions and memory levels; of several ranks those of both layouts.

    Sharded runs have levels that need no trial on a copy of the model: those that a model or optimizer has itself.
    """
    cells = [
        Cell.of(config.train, name, mode, setting) for name in precisions for setting in list_levels(planner, config)
    ]
    if ranks is None:
        return cells
    recomputes = ("none",) if planner.step.blocks else ("none", "blocks")
    both = ((cell.spread(ranks, "ddp"), cell.spread(ranks, "shard")) for cell in cells)
    return [cell for pair in both for cell in pair if cell.layout == "ddp" or cell.setting.recompute in recomputes]


def estimate_level_time(setting: MemorySetting) -> float:
    """Return the time of a step relative to the normal one."""
    return RECOMPUTE_TIME[setting.recompute] * (SMALL_OPTIMIZER_TIME if setting.optimizer_bits == 8 else 1.0)


def list_precisions(hardware: Hardware | None) -> tuple[str, ...]:
    """Return the precisions that a GPU supports; all of them if no GPU is named."""
    return PRECISIONS if hardware is None else tuple(name for name in PRECISIONS if not explain_lack(name, hardware))


def find_largest_batch(planner: MemoryPlanner, cell: Cell, limit_bytes: int) -> int:
    """Return the largest micro-batch that fits, within 1 in 64; 0 if not even one sample fits.

    The step is traced at `cell.batch_size` and its double.
    """
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


def find_fits(
    planner: MemoryPlanner,
    config: RunConfig,
    limit_bytes: int,
    mode: Mode,
    precisions: Sequence[str],
    hardware: Hardware | None = None,
    most: int = 12,
    ranks: int | None = None,
    tell: Callable[[str], None] = lambda progress: None,
) -> list[Fit]:
    """Return the first `most` precisions and levels in which at least one sample fits each rank, in order of predicted
    speed.

    A level that saves nothing over a faster one of the same precision is left out. `tell` is given the progress.
    """
    cells = list_cells(planner, config, mode, precisions, ranks)
    times = {cell: estimate_time(cell, hardware) for cell in cells}
    found: list[Fit] = []
    faster: dict[str, list[tuple[int, int]]] = {precision: [] for precision in precisions}
    for number, cell in enumerate(sorted(cells, key=times.__getitem__), 1):
        tell(f"finding the largest batch: {cell.precision}, {cell.setting} ({number} of {len(cells)})")
        largest = find_largest_batch(planner, cell, limit_bytes)
        if largest < cell.batch_size:
            # Then gradients accumulate over several micro-batches, so all of them exist during forward.
            largest = find_largest_batch(planner, dataclasses.replace(cell, accumulate=2), limit_bytes)
        least = planner.predict(cell, base_batch=max(cell.batch_size, 2)).total
        # Keep a slower level only if it allows a larger batch or needs less memory.
        if largest and all(largest > batch or least < peak for batch, peak in faster[cell.precision]):
            faster[cell.precision].append((largest, least))
            if fit := _make_fit(planner, config, cell, largest, times[cell]):
                found.append(fit)
        if len(found) == most:
            break
    return [dataclasses.replace(fit, relative_time=fit.relative_time / found[0].relative_time) for fit in found]


def _make_fit(planner: MemoryPlanner, config: RunConfig, cell: Cell, largest: int, relative_time: float) -> Fit | None:
    """Return the row for a cell: the largest divisor of the effective batch that fits, and its accumulation.

    `largest` counts the samples of one rank. There is no row if no divisor has a sample for each rank.
    """
    wanted, largest = config.train.batch_size * config.train.accumulate, largest * cell.ranks
    # A divisor, so that batch x accumulate stays exactly the same.
    sizes = range(min(largest, config.train.batch_size), cell.ranks - 1, -1)
    size = next((size for size in sizes if wanted % size == 0), None)
    if size is None:
        return None
    taken = dataclasses.replace(cell, batch_size=-(-size // cell.ranks), accumulate=wanted // size)
    prediction = planner.predict(taken, base_batch=max(cell.batch_size, 2))
    return Fit(prediction=prediction, largest_batch=largest, batch_size=size, relative_time=relative_time)


USUAL_SPEED = {"fp32": 1.0, "tf32": 4.0, "bf16": 8.0, "fp16": 8.0, "fp8": 12.0}
"""Speed of matrix units relative to fp32 if no GPU is named: roughly an A100's published rates."""


def estimate_time(cell: Cell, hardware: Hardware | None) -> float:
    """Return the time per sample in arbitrary units, for an order."""
    name = cell.precision.removesuffix("-true")
    # Measured or published, relative to strict fp32.
    speed = (hardware.find_speedup(name) if hardware is not None else None) or USUAL_SPEED[name]
    return (SHARD_TIME if cell.layout == "shard" else 1.0) * estimate_level_time(cell.setting) / speed


def refuse_nothing_fits(
    planner: MemoryPlanner, config: RunConfig, limit_bytes: int, mode: Mode, where: str, ranks: int | None = None
) -> None:
    """Raise with the least memory that one sample would need, and its largest components."""
    cells = list_cells(planner, config, mode, ("bf16-true", "bf16", "fp32"), ranks)
    ones = (planner.predict(dataclasses.replace(cell, batch_size=1, accumulate=1)) for cell in cells)
    least = min(ones, key=lambda found: found.total)
    largest = sorted(least.components.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    layout = {"alone": "", "ddp": ", not sharded", "shard": ", sharded"}[least.cell.layout]
    raise MemoryLimitError(
        f"nothing fits {where}: one sample of {config.workload} needs {format_bytes(least.total)}, and only "
        f"{format_bytes(limit_bytes)} can be used, because CUDA and the allocator's gaps take the rest",
        why=f"the smallest setting is {least.cell.precision}, {least.cell.setting}{layout}: {parts}",
        fix="use a smaller model, smaller samples, a GPU with more memory (halfstep detect list), or "
        f"{'several' if ranks is None else 'more'} ranks that share the model (--ranks N)",
    )


def describe_effects(planner: MemoryPlanner, config: RunConfig, fits: Sequence[Fit]) -> Iterator[str]:
    """Yield notes on what the proposed batch and accumulation change in training."""
    train, wanted = config.train, config.train.batch_size * config.train.accumulate
    yield f"batch x accumulate stays {wanted} samples per step, so the learning rate stays {config.optimizer.lr:g}"
    if planner.step.has_batch_norm and any(fit.batch_size < train.batch_size for fit in fits):
        yield "BatchNorm sees micro-batches: its statistics change with a smaller train.batch_size"
