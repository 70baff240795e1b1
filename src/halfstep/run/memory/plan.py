"""The memory plan: peak memory of a run's step before anything runs, by component, for any precision, mode, level and
batch.

Peak is the same everywhere in this project: the larger of torch's max_memory_allocated before a step is captured and
what is reserved once it is (hardware/memory.py). What is traced, by mode:

    eager     forward and backward, operation by operation
    compile   the same trace; what the compiler keeps, computes again and fuses away is worked out from it
    graph     the step as it is captured: our chains of kernels where the model has one, else as compiled; and the gaps
              of the graph's memory pool
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from halfstep.config.schema import RunConfig
from halfstep.hardware.facts import Hardware
from halfstep.kernels.fast_forms import has_triton
from halfstep.models.recompute import Recompute
from halfstep.precision.plan import Plan
from halfstep.run.memory.compiled import PRODUCTS, compiled_timeline
from halfstep.run.memory.planned_step import Fixed, PlannedStep
from halfstep.run.memory.timeline import Timeline, at_batch, eager_timeline
from halfstep.run.memory.trace import Trace
from halfstep.tune.memory_low import NORMAL, MemorySetting
from halfstep.tune.modes import Mode, has_convolutions

COMPONENTS = (
    "weights", "gradients", "optimizer", "average", "frozen parts", "half copies", "activations", "inputs",
    "workspaces", "graph pool",
)  # fmt: skip
"""In the order of tables and pictures."""

MODES: tuple[Mode, ...] = ("eager", "compile", "graph")
HALF = ("bf16", "fp16", "fp8")
CUBLAS_BYTES = 33_562_624
"""cuBLAS' workspace on Hopper; the forward and the backward thread have one each."""
SMALL_CUBLAS_BYTES = 8_519_680
"""The same on other GPUs."""
COMPILED_BLOCKS = 1.1
"""What a compiled step that recomputes blocks takes against an eager one (a U-Net's: benchmarks/results/speed.json)."""
POOL_GAPS = 0.04
"""Of a graph's pool: what lies idle between its blocks. A guess; rows of benchmarks/memory_plan.py agree with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One step to be predicted."""

    precision: str
    mode: Mode
    setting: MemorySetting = NORMAL
    batch_size: int
    accumulate: int = 1

    @classmethod
    def of(cls, config: RunConfig, precision: str, mode: Mode, setting: MemorySetting | None = None) -> Cell:
        """A step of this config, whose own memory level is taken where none is named."""
        if setting is None:
            setting = MemorySetting(recompute="blocks") if config.train.activation_checkpointing else NORMAL
        size, accumulate = config.train.batch_size, config.train.accumulate
        return cls(precision=precision, mode=mode, setting=setting, batch_size=size, accumulate=accumulate)

    @classmethod
    def of_plan(cls, config: RunConfig, plan: Plan) -> Cell:
        """The step that a run of this plan makes, each batch as it is loaded."""
        setting = MemorySetting(**plan.memory) if plan.memory else None
        return cls.of(config, plan.granted, plan.mode or "eager", setting)


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
    """Predicts cells of one step; what two cells share is traced once."""

    step: PlannedStep
    hardware: Hardware | None = None
    _timelines: dict[tuple[object, ...], list[Timeline]] = field(default_factory=dict)
    _traces: dict[tuple[object, ...], list[Trace]] = field(default_factory=dict)
    _fixed: dict[tuple[str, int], Fixed] = field(default_factory=dict)
    _inputs: dict[int, tuple[int, int]] = field(default_factory=dict)

    def recomputing(self, step: PlannedStep) -> MemoryPlanner:
        """Of the same step with other blocks recomputed: weights, optimizer and inputs are known already."""
        return replace(self, step=step, _timelines={}, _traces={})

    def predict(self, cell: Cell, *, base_batch: int = 0) -> Prediction:
        """Traced at its own batch, or from those of `base_batch` and its double: for looking at many batches."""
        fixed = self._fixed_of(cell)
        raw, prepared = self._input_bytes(cell.batch_size)
        moving = self._dynamic(cell, base_batch)
        found = Counter(
            {
                "weights": fixed.weights,
                "optimizer": fixed.optimizer,
                "average": fixed.average,
                "frozen parts": fixed.frozen,
                "inputs": raw + prepared,
                "workspaces": self._library_bytes(),
                "graph pool": int(POOL_GAPS * moving.total()) + prepared if cell.mode == "graph" else 0,
            }
        )
        found.update(moving)
        return Prediction(cell=cell, components={name: found[name] for name in COMPONENTS})

    def _dynamic(self, cell: Cell, base_batch: int) -> Counter[str]:
        """What comes and goes, at its highest: in forward and backward, or while the optimizer updates."""
        if cell.setting.recompute == "alternate" and cell.mode != "eager":
            return self._between(cell, base_batch)
        accumulates = cell.accumulate > 1
        if not base_batch or base_batch == cell.batch_size:
            peaks = [line.peak(accumulates=accumulates) for line in self._lines(cell, cell.batch_size)]
        else:
            near, far = self._lines(cell, base_batch), self._lines(cell, 2 * base_batch)
            peaks = [
                at_batch(cell.batch_size, (base_batch, one), (2 * base_batch, two), accumulates=accumulates)
                for one, two in zip(near, far, strict=True)
            ]
        gradients = max(line.gradient_bytes for line in self._lines(cell, base_batch or cell.batch_size))
        update = 0 if cell.mode == "graph" else self._fixed_of(cell).update
        peaks.append(Counter({"gradients": gradients, "workspaces": update}))
        return max(peaks, key=lambda peak: peak.total())

    def _between(self, cell: Cell, base_batch: int) -> Counter[str]:
        """Half the blocks compiled in the one way and half in the other."""
        ways = (replace(cell.setting, recompute=how) for how in ("pointwise", "blocks"))
        one, other = (self._dynamic(replace(cell, setting=setting), base_batch) for setting in ways)
        return Counter({name: (one[name] + other[name]) // 2 for name in one | other})

    def _lines(self, cell: Cell, batch_size: int) -> list[Timeline]:
        how, recompute = self._family(cell.precision), cell.setting.recompute
        key = (how, cell.mode, recompute, batch_size)
        if key not in self._timelines:
            self._timelines[key] = self._worked_out(how, cell.mode, recompute, batch_size)
        return self._timelines[key]

    def _worked_out(self, how: str, mode: Mode, recompute: Recompute, batch_size: int) -> list[Timeline]:
        if mode == "eager":
            return [eager_timeline(trace) for trace in self._traced(how, recompute, batch_size, chains=False)]
        if mode == "graph" and how in HALF and has_triton():
            chained = self._traced(how, recompute, batch_size, chains=True)
            if not any(trace.is_chain for trace in chained):
                self._traces[how, recompute, batch_size, False] = chained
            else:
                return [_as_compiled(trace) for trace in chained]
        if recompute == "blocks":
            # What a compiled block computes again lies apart from where it is used: nothing is gained by fusing.
            traces = self._traced(how, recompute, batch_size, chains=False)
            return [eager_timeline(trace).scaled(COMPILED_BLOCKS) for trace in traces]
        # A compiled model recomputes what is cheap between its kernels, not a whole block at once.
        keeps_cheap = recompute != "pointwise"
        traces = self._traced(how, recompute if keeps_cheap else "none", batch_size, chains=False)
        return [_as_compiled(trace, keeps_cheap=keeps_cheap) for trace in traces]

    def _family(self, precision: str) -> str:
        """Precisions of one family take the same memory; TF32 and fp32 differ where something convolves."""
        if precision == "tf32":
            return "tf32" if has_convolutions(self.step.workload.model) else "fp32"
        return {"fp16": "bf16", "fp8": "bf16"}.get(precision, precision)

    def _traced(self, precision: str, recompute: Recompute, batch_size: int, *, chains: bool) -> list[Trace]:
        key = (precision, recompute, batch_size, chains)
        if key not in self._traces:
            self._traces[key] = self.step.traces(precision, recompute, batch_size, chains=chains)
        return self._traces[key]

    def _fixed_of(self, cell: Cell) -> Fixed:
        key = (self._family(cell.precision), cell.setting.optimizer_bits)
        if key not in self._fixed:
            self._fixed[key] = self.step.fixed(key[0], cell.setting)
        return self._fixed[key]

    def _input_bytes(self, batch_size: int) -> tuple[int, int]:
        """As loaded, and ready for the model: so much for each sample."""
        if not self._inputs:
            self._inputs = self.step.input_bytes(2, 4)
        (raw, prepared), (more_raw, more_prepared) = self._inputs[2], self._inputs[4]
        steps = (batch_size - 2) / 2
        return int(raw + (more_raw - raw) * steps), int(prepared + (more_prepared - prepared) * steps)

    def _library_bytes(self) -> int:
        """Of cuBLAS, where anything is multiplied; a GPU is meant where none is named."""
        if self.hardware is not None and self.hardware.kind == "cpu":
            return 0
        traces = next(iter(self._traces.values()))
        multiplies = any(op.name in PRODUCTS and "conv" not in op.name for trace in traces for op in trace.ops)
        capability = self.hardware.capability if self.hardware is not None else (9, 0)
        each = CUBLAS_BYTES if capability is not None and capability >= (9, 0) else SMALL_CUBLAS_BYTES
        return 2 * each * multiplies


def _as_compiled(trace: Trace, *, keeps_cheap: bool = True) -> Timeline:
    leaves_it = trace.is_chain or not trace.compiles
    return eager_timeline(trace) if leaves_it else compiled_timeline(trace, keeps_cheap=keeps_cheap)
