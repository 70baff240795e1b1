"""Watch the numbers of a training: every N steps measure each module, and warn before something leaves its range.

    watch.begin()            before the step: keep a sample of the weights
    watch.observe_modules()  around forward and backward of an eager step: activations, their gradients, attention
    watch.end(facts)         after the commit: weights, gradients, updates
    watch.look_aside(...)    instead of observe_modules, where steps are captured or compiled: an eager side step
    watch.finish(facts)      send it; read what was sent two steps ago, forecast, and warn

The guarded step calls `begin` and `end`; its owner, hs.Step or a run, calls the others. Nothing is written and nothing
waits, so training is bit-identical with and without a watch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from halfstep.errors import summarise_error
from halfstep.evidence.forecast import (
    FIX_SCALE,
    HORIZON,
    LEAST_DONE,
    Crossing,
    K,
    Limit,
    WatchWarning,
    describe_crossing,
    forecast,
    list_limits,
    rank_limit,
    to_logit,
)
from halfstep.evidence.module_hooks import ACTIVATION, GRADIENT, INPUT, LOGITS, ModuleHooks, list_batch_norms
from halfstep.evidence.observer import FORMATS
from halfstep.evidence.precision_ledger import undo_after, watch_step
from halfstep.formats import FP8_E4M3, FP16, Format, find_format
from halfstep.precision.plan import ROOT, align_columns
from halfstep.step.clip import compute_total_norm
from halfstep.step.facts import Facts, start_copy_to_host
from halfstep.step.flat import get_dtype, is_dense, view_flat
from halfstep.step.guard import LAG
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16
from halfstep.step.ranks import Ranks
from halfstep.step.step import GuardedStep, LossFn

SAMPLE = 8192
BINS = 256
BIAS = 127
"""Bin b holds the magnitudes from 2^(b - 127) to twice that."""
CHUNK = 256  # samples that are counted at once: their int64 indices take 16 MiB
KEPT = 64
"""Observations that are kept, and stored in a capsule."""
FEWEST_ROWS, MOST_ROWS = 4, 16
"""Samples of a micro-batch in a side step: a quarter of them, within these bounds."""
NEARLY = 1.05
"""Crossings whose times differ by less than this factor may come at the same step."""
MOST_SHOWN = 40  # rows of the table
WEIGHT, WEIGHT_GRADIENT, UPDATE = "weight", "weight gradient", "update"
VARIANCE, SCALE = "variance", "loss scale"
Key = tuple[str, str]
"""Module and kind."""
Series = tuple[list[float], list[float]]
"""Steps, and a number of a row at each."""


@dataclass(frozen=True, slots=True)
class WatchRow:
    """One kind of numbers of one module in one observation."""

    module: str
    kind: str
    format: str
    """The format in which the step holds these numbers."""
    numbers: Mapping[str, float]
    """`high`: log2 of the largest magnitude; `zeros`: share of zeros; `lost`: share of updates that change nothing."""
    counts: Any = None
    """Number of sampled magnitudes by exponent: entry k counts those from 2^(k - 127) to twice that."""

    @property
    def high(self) -> float:
        return self.numbers.get("high", math.nan)

    def find_headroom(self, fmt: Format) -> float:
        """Return the bits between the largest magnitude and the format's largest number."""
        return math.log2(fmt.largest) - self.high

    def find_share_below(self, fmt: Format) -> float:
        """Return the share of nonzero magnitudes below the format's smallest normal number."""
        total = 0 if self.counts is None else int(self.counts[1 : BINS - 1].sum())
        first = int(math.log2(fmt.smallest_normal)) + BIAS
        return float(self.counts[1 : max(first, 1)].sum()) / total if total else math.nan


@dataclass(slots=True)
class Observation:
    step: int
    rows: dict[Key, WatchRow]


@dataclass(slots=True)
class OpenObservation:
    """An observation of the step in flight."""

    attempted: int
    measures: RowMeasures
    before: list[Tensor]
    """Samples of the weights before the commit; empty if updates are not measured."""
    formats: dict[int, str] = field(default_factory=dict)
    """By row."""
    scalars: list[Tensor | float] = field(default_factory=list)
    """Gradient norm, the same of the gradients as measured, loss scale, verdict; empty until the step has committed."""
    factor: float = 1.0
    """What activation gradients of a side step are multiplied by: its mean is over fewer samples."""
    has_activations: bool = False


class Watch:
    """Observe one guarded step every `every` steps. Print it for a table; `warnings` lists what will go wrong."""

    def __init__(
        self, step: GuardedStep, every: int, *, notice: Callable[[str], None], warn: Callable[[str], None] | None = None
    ) -> None:
        self.step, self.every, self.notice, self.warn = step, every, notice, warn or notice
        self.history: deque[Observation] = deque(maxlen=KEPT)
        self.warnings: list[WatchWarning] = []
        self.why_no_activations = ""
        self.has_updates = True
        self.on_observation: Callable[[Observation, list[WatchWarning]], None] = lambda seen, new: None
        self._open: OpenObservation | None = None
        self._sent: deque[tuple[OpenObservation, SentMeasures]] = deque()
        self._is_aside = False
        self._warned: dict[Key, int] = {}
        """How serious the limit was (`rank_limit`) with which a row was reported, or followed from one that was."""
        model = step.model
        self._owners = {id(p): name for name, m in model.named_modules() for p in m.parameters(recurse=False)}
        self._modules = dict(model.named_modules())
        self._computes = {row.module.replace(ROOT, ""): row.compute for row in step.plan.rows}
        self._rows: list[Key] = []
        for name, module in self._modules.items():
            kinds = [ACTIVATION, GRADIENT, LOGITS]
            kinds += [VARIANCE] if isinstance(module, _NormBase) else []
            kinds += [INPUT] if self._computes.get(name) == "fp16" else []
            self._rows += [(name, kind) for kind in kinds]
        owners = dict.fromkeys(self._owners.get(id(p), "") for p in step.find_trained_parameters())
        self._rows += [(name, kind) for name in owners for kind in (WEIGHT, WEIGHT_GRADIENT, UPDATE)]
        self._index = {key: row for row, key in enumerate(self._rows)}
        self._hooks = ModuleHooks(model, self._note)
        step.watch = self

    # --- one step ---

    def is_due(self, attempted: int | None = None) -> bool:
        """True if the step with this number is observed."""
        attempted = self.step.attempted if attempted is None else attempted
        return attempted > 0 and attempted % self.every == 0 and not self._is_aside

    @torch.no_grad()
    def begin(self) -> None:
        """Keep what the commit of the next step overwrites, if that step is observed."""
        if not self.is_due():
            return
        with self._survive_lack_of_memory():
            measures = RowMeasures(len(self._rows), self.step.device)
            trained = self.step.find_trained_parameters() if self.has_updates else []
            before = [take_sample(make_plain(parameter)).clone() for parameter in trained]
            self._open = OpenObservation(self.step.attempted, measures, before)

    @contextmanager
    def observe_modules(self) -> Iterator[None]:
        """Observe what modules compute inside, if this step is observed."""
        if self._open is None or self.why_no_activations:
            yield
            return
        self._open.has_activations = True
        with self._hooks.observe():
            yield

    @contextmanager
    def enter_real_step(self) -> Iterator[None]:
        """Observe the modules of the step that runs inside, unless its code is compiled: hooks would change it."""
        if not self.is_due():
            yield
            return
        compiled = [name for name, module in self._modules.items() if is_compiled(module)]
        if compiled:
            self.stop_activations(f"{compiled[0] or 'the model'} is compiled")
        with watch_step(self.step, self.observe_modules):
            yield

    @torch.no_grad()
    def end(self, facts: Facts, gradients: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Measure weights, gradients and updates of a committed step; `gradients` are those of a captured one."""
        opened = self._open
        if opened is None or opened.attempted != facts.attempted or self._is_aside:
            return
        with self._survive_lack_of_memory():
            trained = self.step.find_trained_parameters()
            given = {id(parameter): gradient for parameter, gradient in gradients}
            owned = [(p, given.get(id(p), p.grad)) for p in trained]
            befores = dict(zip(map(id, trained), opened.before, strict=False))
            plain = [(p, make_plain(p), make_plain(g)) for p, g in owned if g is not None]
            plain = [(p, weight, gradient) for p, weight, gradient in plain if weight.numel() and gradient.numel()]
            self._measure_weights(opened, plain, befores)
            # The optimizers' kernels may have unscaled and clipped these gradients. The ratio to the norm of the step
            # tells by how much.
            ranks, kind = self.step.ranks, self.step.clip.norm_kind
            is_sharded = ranks is not None and ranks.sharding is not None
            compute = ranks.compute_norm if ranks is not None and is_sharded else compute_total_norm
            measured = compute([g for *_, g in plain], kind) if plain or is_sharded else 1.0
            opened.scalars = [facts.grad_norm, measured, facts.scale, facts.bad.float()]
            for name, norm in list_batch_norms(self.step.model):
                # The smallest of channels that vary at all: one that is always zero hides none of the others.
                variance = norm.running_var
                assert variance is not None
                smallest = torch.where(variance > 0, variance, math.inf).amin()
                opened.measures.add_value(self._index[name, VARIANCE], smallest)

    def _measure_weights(
        self,
        opened: OpenObservation,
        owned: list[tuple[Tensor, Tensor, Tensor]],
        befores: Mapping[int, Tensor],
    ) -> None:
        """Measure parameters; each comes with its numbers and those of its gradient."""
        if not owned:
            return
        index, measures = self._index, opened.measures
        names = [self._owners.get(id(p), "") for p, *_ in owned]
        weights = [weight for _, weight, _ in owned]
        gradients = [_align(gradient, weight) for _, weight, gradient in owned]
        for kind, tensors in ((WEIGHT, weights), (WEIGHT_GRADIENT, gradients)):
            for name, tensor, largest in zip(names, tensors, measure_largest(tensors), strict=True):
                measures.add_value(index[name, kind], largest)
                measures.add_sample(index[name, kind], take_sample(tensor))
        for name, (parameter, *_), weight, gradient in zip(names, owned, weights, gradients, strict=True):
            opened.formats[index[name, WEIGHT]] = opened.formats[index[name, WEIGHT_GRADIENT]] = self._find_compute(
                name, parameter
            )
            before = befores.get(id(parameter))
            if before is None:
                continue
            opened.formats[index[name, UPDATE]] = self._find_storage(parameter)
            after, slope = take_sample(weight), take_sample(gradient)
            if len(slope) == len(after) == len(before):
                # Where the gradient is zero no update was due: in the bin of infinities, which is not counted.
                change = torch.where(slope == 0, math.inf, after.float() - before.float())
                measures.add_sample(index[name, UPDATE], change)

    @property
    def lacks_activations(self) -> bool:
        """True if this step is observed, and its modules were not."""
        return self._open is not None and not self._open.has_activations and not self.why_no_activations

    def look_aside(self, loss_fn: LossFn, batch: Any, *, num_rows: int) -> None:
        """Observe modules in an eager side step on a few samples of one micro-batch; all effects are undone."""
        opened = self._open
        if opened is None or not self.lacks_activations:
            return
        num_kept = count_side_rows(num_rows)
        cut, opened.factor = cut_rows(batch, num_rows, num_kept), num_kept / num_rows
        self._is_aside = True
        on_gradients, self.step.on_gradients = self.step.on_gradients, None  # it has seen this step's already
        try:
            # Hooks do not see compiled code, and would make torch compile it again.
            with (
                torch.compiler.set_stance("force_eager"),
                undo_after(self.step),
                watch_step(self.step, self.observe_modules),
            ):
                self.step.compute(loss_fn, [cut])
        except torch.OutOfMemoryError:
            self._drop_activations("a side step does not fit into memory")
        except Exception as error:  # all effects are undone, so training goes on
            self._drop_activations(f"a side step failed: {summarise_error(error)}")
        finally:
            self._is_aside = False
            self.step.on_gradients = on_gradients

    def finish(self, facts: Facts) -> None:
        """Send the observation of this step; read those of two steps ago and more."""
        opened, self._open = self._open, None
        if opened is not None and opened.attempted == facts.attempted and opened.scalars:
            with self._survive_lack_of_memory():
                packed = opened.measures.pack(opened.scalars)
                self._sent.append((opened, SentMeasures(packed, len(self._rows), self.step.ranks)))
        while self._sent and facts.attempted - self._sent[0][0].attempted >= LAG:
            self._read(facts.attempted)

    def drain(self) -> None:
        """Read everything that was sent; waits for the device."""
        while self._sent:
            self._read(self.step.attempted)

    def _note(self, name: str, kind: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if self._open is None or (row := self._index.get((name, kind))) is None:
            return
        # Hooks run inside autocast, which would copy each half tensor to fp32 before it is measured.
        with self._survive_lack_of_memory(), torch.autocast(tensor.device.type, enabled=False):
            self._open.formats[row] = FORMATS.get(dtype, "fp32")
            if kind == LOGITS:
                self._open.measures.add_value(row, tensor)
            else:
                self._open.measures.add(row, tensor)

    # --- what is not watched ---

    @contextmanager
    def _survive_lack_of_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            self._open, self.has_updates = None, False
            self._drop_activations("memory is short")

    def _drop_activations(self, reason: str) -> None:
        self.stop_activations(reason)
        if self._open is not None:
            self._open.has_activations = False

    def stop_activations(self, reason: str) -> None:
        """Watch weights and gradients only from here on."""
        if not self.why_no_activations:
            self.why_no_activations = reason
            self.notice(f"watch: weights and gradients only, activations are not watched: {reason}")

    def _find_compute(self, name: str, parameter: Tensor) -> str:
        """Return the narrower of the formats in which a module keeps and multiplies its weights."""
        stored, computed = FORMATS.get(parameter.dtype, "fp32"), self._computes.get(name, "fp32")
        # fp8 scales each operand to its range, so that only bf16, in which it sums, can overflow.
        computed = {"fp8": "bf16", "tf32": "fp32"}.get(computed, computed)
        return min(stored, computed, key=lambda own: find_format(own).largest)

    def _find_storage(self, parameter: Tensor) -> str:
        """Return the format that an update has to survive: fp32 where the optimizer keeps the bits that bf16 lacks."""
        for optimizer in self.step.optimizers:
            if isinstance(optimizer, AdamWBf16 | AdamW8bit) and getattr(optimizer, "rounding", "") != "nearest":
                return "fp32"
        return FORMATS.get(parameter.dtype, "fp32")

    # --- on the host ---

    def _read(self, now: int) -> None:
        opened, sent = self._sent.popleft()
        counts, largest, (norm, measured, scale, is_bad) = sent.read()
        shift = math.log2(norm / measured) if 0 < norm < math.inf and 0 < measured < math.inf else 0.0
        in_format = {WEIGHT_GRADIENT: shift + math.log2(scale), GRADIENT: math.log2(opened.factor)}
        rows: dict[Key, WatchRow] = {}
        in_order = dict.fromkeys((*opened.formats, *range(len(self._rows))))  # activations as they were computed
        for row in in_order:
            module, kind = self._rows[row]
            own = counts[row]
            is_seen = bool(own.any()) or largest[row] > 0 or row in opened.formats
            if not is_seen or kind == UPDATE and is_bad:
                continue
            by = in_format.get(kind, 0.0)
            numbers = {"high": log2(float(largest[row])) + by} if kind != UPDATE else {}
            total = int(own[: BINS - 1].sum())
            if kind == UPDATE:
                numbers["lost"] = float(own[0]) / total if total else math.nan
            elif total:
                numbers["zeros"] = float(own[0]) / total
                numbers["spread"] = numbers["high"] - find_quantile(own, 0.5, counts_zeros=False) - by
                numbers["top"] = find_quantile(own, 0.9, counts_zeros=True) + by
            shown = np.roll(own, round(by)) if round(by) else own.copy()
            rows[module, kind] = WatchRow(module, kind, opened.formats.get(row, "fp32"), numbers, shown)
        scaler = self.step.scaler
        if scaler.enabled:
            # What the scale would have to be for the largest gradient to fit: that moves before the scale does.
            raw = [r.high - math.log2(scale) for r in rows.values() if "gradient" in r.kind and r.format == "fp16"]
            need = max(filter(math.isfinite, raw), default=math.nan)
            rows["", SCALE] = WatchRow("", SCALE, "fp32", {"high": math.log2(scale), "need": need})
        seen = Observation(opened.attempted, rows)
        if self.history:
            self.history[-1].rows = {key: replace(row, counts=None) for key, row in self.history[-1].rows.items()}
        self.history.append(seen)
        new = self._find_warnings(now)
        self.warnings += new
        self.on_observation(seen, new)
        for warning in new:
            self.warn(f"watch: {warning.message}")

    def _find_warnings(self, now: int) -> list[WatchWarning]:
        """Return the warnings of the newest observation: for each kind and limit the module that crosses it first.

        What grows in a module grows in all that follow, so there is one warning for all that move together, and of
        modules that cross at nearly the same time the one that was computed first is reported. A module is reported
        again only for a more serious limit."""
        alike: dict[Key, list[tuple[str, Limit, Series]]] = {}
        for (module, kind), row in self.history[-1].rows.items():
            for limit in self._list_limits(row):
                series = self._collect((module, kind), limit.of)
                alike.setdefault((limit.reported_as or kind, limit.threshold), []).append((module, limit, series))
        found: dict[Key, list[tuple[str, Limit, Crossing]]] = {}
        for key, group in alike.items():
            sure = (forecast(*series, limit, only_sure=True) for _, limit, series in group)
            if any(crossing is not None and crossing.is_sure for crossing in sure):
                all_of_them = ((module, limit, forecast(*series, limit)) for module, limit, series in group)
                found[key] = [(module, limit, crossing) for module, limit, crossing in all_of_them if crossing]
        new: list[WatchWarning] = []
        for (kind, _), crossings in sorted(found.items(), key=lambda own: min(one[2].at for one in own[1])):
            keys = {(module, kind) for module, _, crossing in crossings if crossing.is_sure}
            # Modules that move together often have one cause. The speed of a single module is noisy, so half of it is
            # taken from all of them.
            common = median(crossing.slope for *_, crossing in crossings)
            times = [crossing.left / (crossing.slope + common) for *_, crossing in crossings]
            first = next(k for k, time in enumerate(times) if time <= NEARLY * min(times))
            module, limit, crossing = crossings[first]
            keys.add((module, kind))
            rank = rank_limit(kind, limit)
            # Reported before: one of those that move together, or this module for another kind.
            before = [own for key, own in self._warned.items() if key in keys or key[0] == module]
            if rank > max(before, default=-1):
                new.append(describe_crossing(module, kind, limit, crossing, now, num_more=len(keys) - 1))
            self._warned |= {key: max(rank, self._warned.get(key, 0)) for key in keys}
        return new

    def _list_limits(self, row: WatchRow) -> list[Limit]:
        scaler = self.step.scaler
        if row.kind == SCALE:
            floor = math.log2(scaler.options.min_scale)
            limits = [
                # The scale reaches its floor when a gradient overflows at twice the floor.
                Limit("loss scale floor", math.log2(FP16.largest) - floor - 1, True, "need", FIX_SCALE, HORIZON / 2),
                Limit("loss scale floor", floor, False, "high", FIX_SCALE),
            ]
            return limits if self._gradients_outgrow_scale() else []
        eps = getattr(self._modules.get(row.module), "eps", None) or 0.0
        is_fp8 = self.step.plan.compute == "fp8"
        return list_limits(row.kind, row.format, row.module, scales=scaler.enabled, eps=eps, is_fp8=is_fp8)

    def _gradients_outgrow_scale(self) -> bool:
        """True if even the smallest gradients grow: single batches with large ones lower the scale too, but only to
        what they need."""
        (_, needs), (_, scales) = (self._collect(("", SCALE), of) for of in ("need", "high"))
        half = K // 2
        if len(needs) < K:
            return False
        fallen, moved = median(scales[:half]) - median(scales[half:]), needs[-1] - needs[0]
        return min(needs[half:]) - min(needs[:half]) >= LEAST_DONE * max(fallen, moved)

    def _collect(self, key: Key, of: str) -> Series:
        """Return the last steps and numbers of a row; shares of zeros as logits, infinities left out."""
        steps: list[float] = []
        values: list[float] = []
        for seen in reversed(self.history):
            row = seen.rows.get(key)
            if row is not None and math.isfinite(value := row.numbers.get(of, math.nan)):
                steps.append(float(seen.step))
                values.append(to_logit(value) if of == "zeros" else value)
                if len(steps) == K:
                    break
        return steps[::-1], values[::-1]

    # --- what it shows ---

    @property
    def rows(self) -> list[WatchRow]:
        """Return the newest observation, rows with the least headroom in fp16 first."""
        rows = self.history[-1].rows.values() if self.history else ()
        return sorted(rows, key=lambda row: row.find_headroom(FP16) if math.isfinite(row.high) else math.inf)

    def __str__(self) -> str:
        if not self.history:
            return f"watch: nothing observed yet (every {self.every} steps)"
        rows = self.rows
        table = [("module", "kind", "format", "largest", "to its max", "to fp16", "to fp8", "< fp16 normal", "zeros",
                  "lost"), *map(_format_row, rows[:MOST_SHOWN])]  # fmt: skip
        lines = [f"step {self.history[-1].step}; bits of headroom", *align_columns(table)]
        lines += [f"… and {len(rows) - MOST_SHOWN} more rows (`step.watched.rows`)"] if len(rows) > MOST_SHOWN else []
        lines += [f"activations are not watched: {self.why_no_activations}"] if self.why_no_activations else []
        return "\n".join([*lines, *(f"warning (step {w.step}): {w.message}" for w in self.warnings)])

    def state_dict(self) -> dict[str, Any]:
        """Return what forecasts need after a resume: the last observations, and what was reported."""
        seen = [
            [s.step, [[r.module, r.kind, r.format, dict(r.numbers)] for r in s.rows.values()]] for s in self.history
        ]
        return {
            "seen": seen[-K:],
            "warnings": [asdict(warning) for warning in self.warnings],
            "warned": [[*key, rank] for key, rank in sorted(self._warned.items())],
            "why_no_activations": self.why_no_activations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.clear()
        for step, rows in state["seen"]:
            self.history.append(Observation(step, {(m, kind): WatchRow(m, kind, *more) for m, kind, *more in rows}))
        self.warnings = [WatchWarning(**stored) for stored in state["warnings"]]
        self._warned = {(module, kind): rank for module, kind, rank in state["warned"]}
        self.why_no_activations = state["why_no_activations"]

    def to_json(self) -> dict[str, Any]:
        """Return the observations for a capsule: steps, and the numbers of each row at them."""
        rows: list[dict[str, Any]] = []
        for module, kind in dict.fromkeys(key for seen in self.history for key in seen.rows):
            of = "lost" if kind == UPDATE else "high"
            own = [seen.rows[module, kind].numbers.get(of) if (module, kind) in seen.rows else None
                   for seen in self.history]  # fmt: skip
            shown = [round(value, 2) if value is not None and math.isfinite(value) else None for value in own]
            rows.append({"module": module, "kind": kind, "high": shown})
        return {"steps": [seen.step for seen in self.history], "rows": rows,
                "warnings": [warning.message for warning in self.warnings]}  # fmt: skip


def count_side_rows(num_rows: int) -> int:
    """Return how many samples of a micro-batch a side step uses."""
    return min(num_rows, MOST_ROWS, max(FEWEST_ROWS, num_rows // 4))


def cut_rows(batch: Any, num_rows: int, num_kept: int) -> Any:
    """Return the first rows of a micro-batch, cut in all its tensors of `num_rows` rows."""

    def cut(value: Any) -> Any:
        is_long = isinstance(value, Tensor) and value.ndim > 0 and len(value) == num_rows
        return value[:num_kept] if is_long else value

    return tree_map(cut, batch)


def estimate_bytes(model: nn.Module) -> int:
    """Return the device memory of an observation: samples of weights before and after, of gradients, updates and
    activations with their gradients, in fp32, the indices of one chunk, and the counts."""
    num_weights = sum(min(p.numel(), SAMPLE) for p in model.parameters() if p.requires_grad)
    num_modules = len(list(model.modules()))
    return 4 * (4 * num_weights + 2 * num_modules * SAMPLE) + (24 << 20) + 6 * num_modules * BINS * 4


def is_compiled(module: nn.Module) -> bool:
    """True for a module that torch.compile has wrapped, or compiled in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def find_quantile(counts: Any, share: float, *, counts_zeros: bool) -> float:
    """Return log2 of a quantile of magnitudes, interpolated within its bin; NaN if it is zero."""
    sums = np.cumsum(counts[: BINS - 1]) - (0 if counts_zeros else counts[0])
    wanted = share * sums[-1]
    place = int(np.searchsorted(sums, wanted))
    if not place or not sums[-1]:
        return math.nan
    return float(place - BIAS + (wanted - sums[place - 1]) / counts[place])


def log2(value: float) -> float:
    return math.log2(value) if 0 < value < math.inf else -math.inf if value == 0 else math.nan


def _align(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient with the memory order of its weight, so that samples of both are of the same elements."""
    if gradient.stride() == weight.stride() or gradient.shape != weight.shape:
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _format_row(row: WatchRow) -> tuple[str, ...]:
    own = row.numbers

    def show(value: float, form: str) -> str:
        return format(value, form) if math.isfinite(value) else ""

    bits = [row.find_headroom(fmt) for fmt in (find_format(row.format), FP16, FP8_E4M3)]
    if row.kind in (VARIANCE, SCALE, UPDATE):
        bits = [math.nan] * 3
    below = row.find_share_below(FP16) if row.kind not in (VARIANCE, SCALE, UPDATE) else math.nan
    return (
        row.module or "(model)", row.kind, row.format, show(2.0**row.high if row.high < 1023 else math.nan, ".3g"),
        *(show(b, ".1f") for b in bits), show(below, ".1%"), show(own.get("zeros", math.nan), ".1%"),
        show(own.get("lost", math.nan), ".1%"),
    )  # fmt: skip


# --- magnitudes on the device: the largest value and a histogram of exponents for each row, sent without a wait ---
# A row is one kind of numbers of one module. The largest value is that of all elements. The histogram is that of at
# most `SAMPLE` evenly spaced elements of each tensor: one scatter counts those of many tensors, and one copy sends
# everything. The exponent field of fp32 is the bin, so zeros and magnitudes below 2^-126 are in bin 0, and inf and NaN
# in bin 255.


class RowMeasures:
    """The measurements of one observation, as tensors on the device."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows, self.device = num_rows, device
        self._samples: list[tuple[int, Tensor]] = []
        self._values: list[tuple[int, Tensor]] = []
        self._num_calls: dict[int, int] = {}

    @torch.no_grad()
    def add(self, row: int, tensor: Tensor) -> None:
        """Measure one tensor; a row that gets several holds their largest value, and all samples of the first few."""
        if not tensor.numel():
            return
        tensor = make_plain(tensor)
        # The maximum norm is one kernel and takes no memory, unlike abs().
        self.add_value(row, torch.linalg.vector_norm(tensor, float("inf")))
        self._num_calls[row] = self._num_calls.get(row, 0) + 1
        if self._num_calls[row] <= 8:  # a cell of a recurrent network runs hundreds of times
            self.add_sample(row, take_sample(tensor))

    def add_sample(self, row: int, sample: Tensor) -> None:
        self._samples.append((row, sample.float()))

    def add_value(self, row: int, value: Tensor) -> None:
        """Add a number that is largest for the row, or its only one."""
        self._values.append((row, value))

    @torch.no_grad()
    def pack(self, scalars: Sequence[Tensor | float]) -> Tensor:
        """Return counts, largest values and `scalars` as one int32 tensor, for `unpack`."""
        with _allow_atomics():
            counts = torch.zeros(self.num_rows * BINS, dtype=torch.int32, device=self.device)
            for first in range(0, len(self._samples), CHUNK):
                self._count(counts, self._samples[first : first + CHUNK])
            largest = torch.zeros(self.num_rows, device=self.device)
            for dtype in {value.dtype for _, value in self._values}:
                own = [(row, value) for row, value in self._values if value.dtype == dtype]
                rows = upload([row for row, _ in own], self.device)
                values = torch.stack([value for _, value in own]).float()
                largest.scatter_reduce_(0, rows, values, "amax")
        known = [s.detach().float().reshape(()) if isinstance(s, Tensor) else None for s in scalars]
        given = upload([0.0 if isinstance(s, Tensor) else float(s) for s in scalars], self.device, torch.float32)
        numbers = torch.stack([own if own is not None else given[k] for k, own in enumerate(known)])
        return torch.cat([counts, largest.view(torch.int32), numbers.view(torch.int32)])

    def _count(self, counts: Tensor, samples: Sequence[tuple[int, Tensor]]) -> None:
        flat = torch.cat([sample for _, sample in samples])
        rows = upload([row * BINS for row, _ in samples], self.device)
        lengths = upload([sample.numel() for _, sample in samples], self.device)
        index = torch.repeat_interleave(rows, lengths, output_size=flat.numel())  # the size given: no wait
        index += (flat.view(torch.int32) >> 23).bitwise_and_(BINS - 1)
        if flat.is_cuda:  # where bincount waits for the largest index
            counts.scatter_add_(0, index, torch.ones((), dtype=torch.int32, device=flat.device).expand(len(index)))
        else:
            counts += torch.bincount(index, minlength=len(counts)).int()


class SentMeasures:
    """Measurements on their way to the host; with several ranks those of all, combined."""

    @torch.no_grad()
    def __init__(self, packed: Tensor, num_rows: int, ranks: Ranks | None) -> None:
        self.num_rows = num_rows
        if ranks is not None and ranks.size > 1:  # sum the counts, and take the largest values
            gathered = [torch.empty_like(packed) for _ in range(ranks.size)]
            torch.distributed.all_gather(gathered, packed)
            together, cut = torch.stack(gathered), num_rows * BINS
            numbers = together[:, cut:].view(torch.float32).amax(0)
            packed = torch.cat([together[:, :cut].sum(0, dtype=torch.int32), numbers.view(torch.int32)])
        self._host = start_copy_to_host(packed)
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[Any, Any, list[float]]:
        """Return counts by row, largest values by row, and the scalars; waits only for the copy."""
        if self._event is not None:
            self._event.synchronize()
        cut = self.num_rows * BINS
        counts = self._host[:cut].view(self.num_rows, BINS).numpy()
        numbers = self._host[cut:].view(torch.float32)
        return counts, numbers[: self.num_rows].numpy(), numbers[self.num_rows :].tolist()


def make_plain(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as real ones that torch has arithmetic for; of a shard those of this rank."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor  # fp8


def take_sample(tensor: Tensor) -> Tensor:
    """Return at most about SAMPLE elements at equal distances. An odd distance meets all columns of a matrix."""
    flat = view_flat(tensor) if is_dense(tensor) else tensor.reshape(-1)
    return flat[:: flat.numel() // SAMPLE | 1]


def measure_largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each tensor, in few kernels."""
    found: list[Tensor] = [tensors[0]] * len(tensors)
    for dtype in set(map(get_dtype, tensors)):
        places = [k for k, tensor in enumerate(tensors) if tensor.dtype == dtype]
        norms = torch._foreach_norm([tensors[k] for k in places], float("inf"))
        for k, norm in zip(places, norms, strict=True):
            found[k] = norm
    return found


def upload(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers to the device without a wait: from pageable memory the host would wait for all queued work."""
    host = torch.tensor(numbers, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@contextmanager
def _allow_atomics() -> Iterator[None]:
    """Allow atomic additions under `train.deterministic`: sums of integers and maxima do not depend on the order."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warned)
