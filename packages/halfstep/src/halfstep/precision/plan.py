"""The Plan: the precision decision as data, printable before any work and stored with the run. No torch at import."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from halfstep.disk import parse_json
from halfstep.errors import PrecisionError
from halfstep.precision.ladder import ROOT, WHOLE_MODEL, PlanRow, RowKind

if TYPE_CHECKING:
    import torch

__all__ = ["ROOT", "WHOLE_MODEL", "Gain", "Plan", "PlanRow", "RowKind", "fold_rows", "format_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The step time without and with one lever of the mode, everything else equal."""

    part: str  # channels_last, compile, graph, cudnn.benchmark or kernel tuning
    before_ms: float
    after_ms: float
    is_taken: bool

    @property
    def factor(self) -> float:
        return self.before_ms / self.after_ms

    def __str__(self) -> str:
        left_out = "" if self.is_taken else " (not taken)"
        return f"{self.part} {self.factor:.2f}x, {self.before_ms:.1f} -> {self.after_ms:.1f} ms{left_out}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What was asked for, what was granted, why they differ, and one row per module."""

    asked: str
    granted: str  # one of fp32, tf32, bf16, fp16, fp8, bf16-true
    reason: str
    device: str  # how torch names it; empty for hardware that is not here: such a plan prints but does not run
    device_name: str
    simulated: bool = False  # numerics of `granted` on hardware that lacks it: never a statement about speed
    fp8_recipe: str = "tensorwise"  # how torchao scales the operands of fp8 products
    rows: tuple[PlanRow, ...] = ()
    frozen: tuple[PlanRow, ...] = ()  # rows of modules that the model uses but does not own
    warnings: tuple[str, ...] = ()  # shown to the user once: a fallback, a request that was ignored
    mode: Literal["", "eager", "compile", "graph"] = ""  # how steps run, once that is chosen; empty before
    mode_reason: str = ""  # what was measured for it
    channels_last: bool | None = None
    """Whether channels_last was measured to be faster; None if nothing was measured."""
    tunes_kernels: bool = False  # whether the compiler searches each kernel's block sizes: faster steps, a longer start
    cudnn_benchmark: bool = False
    """Whether cuDNN times its algorithms at each start, for full batches, instead of using its heuristic."""
    gains: tuple[Gain, ...] = ()
    """What each lever of the mode gained; empty if nothing was measured."""
    memory: dict[str, Any] = field(default_factory=dict)
    """The setting of `train.memory: low`; empty for the normal step."""
    memory_reason: str = ""
    memory_trials: tuple[str, ...] = ()  # one line per lever: what it saved and cost
    blocks: tuple[str, ...] = ()
    """Modules that may be recomputed, in a model without its own activation checkpointing; checked before the run."""

    pieces: int = 1
    """Micro-batches that each batch is split into from the first step on, as the ranks agreed before it."""
    shards: bool = False
    """Whether the ranks divide the model among them."""
    shard_reason: str = ""
    shard_blocks: tuple[str, ...] = ()
    """Modules that are gathered one at a time; those of frozen networks as NETWORK:MODULE."""
    reduces_last: bool = False
    """Whether sharded gradients are reduced in a step's last micro-batch only: whole ones stay in memory until then."""
    reduce_reason: str = ""

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def compute(self) -> str:
        """Format of matmuls and convolutions: `granted` without its storage suffix."""
        return self.granted.removesuffix("-true")

    @property
    def needs_loss_scaling(self) -> bool:
        """True if anything computes in fp16, even a single module: its gradients would underflow unscaled."""
        rows = (*self.rows, *self.frozen)  # frozen modules too: a loss may be computed through them
        return self.granted == "fp16" or any(row.is_part and row.compute == "fp16" for row in rows)

    def forward(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass: backend flags, simulation, autocast; all restored on exit."""
        from halfstep.precision.contexts import make_forward_context

        return make_forward_context(self)

    def backend(self) -> AbstractContextManager[None]:
        """Return the context of backward and the optimizer: backend flags and simulated kernels, no autocast."""
        from halfstep.precision.contexts import make_backend_context

        return make_backend_context(self)

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        from halfstep.precision.apply import apply

        return apply(self, model)

    def __str__(self) -> str:
        return format_plan(self)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            fields = dict(parse_json(text))
            rows = tuple(PlanRow(**row) for row in fields.pop("rows"))
            frozen = tuple(PlanRow(**row) for row in fields.pop("frozen"))
            gains = tuple(Gain(**gain) for gain in fields.pop("gains"))
            lines = {name: tuple(fields[name]) for name in ("warnings", "memory_trials", "blocks", "shard_blocks")}
            return cls(**{**fields, **lines, "rows": rows, "frozen": frozen, "gains": gains})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fix = "use the plan.json of a run folder"
            raise PrecisionError(f"this is not a stored plan: {error}", fix=fix) from error


def fold_rows(rows: tuple[PlanRow, ...]) -> list[tuple[tuple[str, ...], PlanRow]]:
    """Group equal rows: return their module names and one of them, in order of first appearance."""
    groups: dict[tuple[str, ...], list[PlanRow]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.storage, row.compute, row.reason), []).append(row)
    return [(tuple(row.module for row in group), group[0]) for group in groups.values()]


def format_plan(plan: Plan) -> str:
    """Format the plan as plain text: asked, granted, why; then the rows, equal ones grouped; then the warnings."""
    granted = f"{plan.granted}, simulated (numerics only, never speed)" if plan.simulated else plan.granted
    lines = [
        f"precision  asked {plan.asked}, granted {granted}",
        f"device     {plan.device_name}" + (f" ({plan.device})" if plan.device else " (not on this machine)"),
        f"why        {plan.reason}",
    ]
    if plan.mode:
        lines.append(f"steps      {plan.mode}: {plan.mode_reason}")
    lines += [f"gained     {gain}" for gain in plan.gains]
    lines += [f"memory     low: {plan.memory_reason}"] if plan.memory_reason else []
    lines += [f"           {line}" for line in plan.memory_trials]
    lines += [f"ranks      {reason}" for reason in (plan.shard_reason, plan.reduce_reason) if reason]
    if plan.rows or plan.frozen:
        rows = fold_rows((*plan.rows, *plan.frozen))
        body = [(_format_names(names), row.storage, row.compute, row.reason) for names, row in rows]
        lines += ["", *align_columns([("module", "storage", "compute", "why"), *body])]
    return "\n".join(lines + [f"warning: {warning}" for warning in plan.warnings])


def _format_names(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return names[0]
    shown = textwrap.shorten(", ".join(names), width=40, placeholder=" …")
    return f"{len(names)} modules: {shown}"


def align_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with its columns padded to equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
