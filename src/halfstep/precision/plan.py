"""The Plan: the decision as data. Frozen, printable before any work, stored with the run. No torch at import."""

from __future__ import annotations

import dataclasses
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from halfstep.errors import PrecisionError

if TYPE_CHECKING:
    import torch

RowKind = Literal["default", "module", "frozen", "island"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One module (or a pattern of them): how its weights are stored, what it computes in, and why."""

    module: str
    storage: str
    compute: str
    reason: str
    kind: RowKind = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What was asked, what was granted, why they differ, and one row a module."""

    asked: str
    granted: str
    """One of fp32, tf32, bf16, fp16, fp8, bf16-true."""
    reason: str
    device: str
    device_name: str
    simulated: bool = False
    """Numerics of `granted` on hardware that lacks it: never a statement about speed."""
    rows: tuple[Row, ...] = ()
    warnings: tuple[str, ...] = ()
    """What the user must see once: a fall down the ladder, an ignored wish."""

    @property
    def compute(self) -> str:
        """Format of matmuls and convolutions: `granted` without what it says of storage."""
        return self.granted.removesuffix("-true")

    @property
    def needs_loss_scaling(self) -> bool:
        return self.granted == "fp16"

    def forward(self) -> AbstractContextManager[None]:
        """The one context a forward pass runs in: backend flags, simulation, autocast; all restored on exit."""
        from halfstep.precision.apply import forward_context

        return forward_context(self)

    def backend(self) -> AbstractContextManager[None]:
        """Backend flags and simulated kernels without autocast: what backward and the optimizer run in."""
        from halfstep.precision.apply import backend_context

        return backend_context(self)

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give the model's parts the storage and compute of their rows, in place."""
        from halfstep.precision.apply import apply

        return apply(self, model)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            fields: dict[str, Any] = json.loads(text)
            rows = tuple(Row(**row) for row in fields.pop("rows"))
            return cls(**{**fields, "rows": rows, "warnings": tuple(fields["warnings"])})
        except (ValueError, KeyError, TypeError) as error:
            raise PrecisionError(f"this is not a stored plan: {error}", fix="use the plan.json of a run folder") from error
