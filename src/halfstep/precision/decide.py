"""`decide`: a request and a device's facts become a Plan. Nothing is changed here; `Plan.apply` does that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from halfstep.config.aliases import precision_name
from halfstep.errors import PrecisionError
from halfstep.hardware.facts import Hardware
from halfstep.precision.ladder import Grant, grant
from halfstep.precision.plan import WHOLE_MODEL, Plan, Row

if TYPE_CHECKING:
    import torch


class PrecisionRequest(Protocol):
    """What the config says of precision (`config.schema.PrecisionConfig`)."""

    @property
    def default(self) -> str: ...
    @property
    def modules(self) -> Mapping[str, str]: ...
    @property
    def strict(self) -> bool: ...
    @property
    def simulate(self) -> bool: ...


def decide(
    request: str | PrecisionRequest,
    hardware: Hardware,
    model: torch.nn.Module | None = None,
    *,
    modules: Mapping[str, str] | None = None,
    fragile: Iterable[str] = (),
    strict: bool = False,
    simulate: bool = False,
) -> Plan:
    """Choose what runs. `fragile` names islands with their reasons: `"loss: Dice sums"`."""
    if not isinstance(request, str):
        modules = {**request.modules, **(modules or {})}
        strict, simulate = strict or request.strict, simulate or request.simulate
        request = request.default
    default = grant(precision_name(request), hardware, strict=strict, simulate=simulate)
    parts = {
        pattern: _for_part(pattern, grant(precision_name(asked), hardware, strict=strict, simulate=simulate), default)
        for pattern, asked in (modules or {}).items()
    }
    grants = (default, *parts.values())
    return Plan(
        asked=default.asked,
        granted=default.precision,
        reason=default.reason,
        device=hardware.device,
        device_name=hardware.name,
        simulated=any(answer.simulated for answer in grants),
        rows=(*_rows(model, default, parts, hardware), *map(_island, fragile)),
        warnings=tuple(dict.fromkeys(answer.warning for answer in grants if answer.warning)),
    )


def _for_part(pattern: str, part: Grant, default: Grant) -> Grant:
    """TF32 is one switch for forward and backward of the whole process, so a part cannot have its own."""
    if part.compute == "fp32" and default.compute == "tf32":
        raise PrecisionError(
            f"modules: {{{pattern!r}: {part.asked}}} cannot hold while the default is tf32",
            why="TF32 is one switch for the whole process, and backward runs outside the module",
            fix="use default bf16 or fp32, or an fp32_island() around what must be exact only in dtype",
        )
    if part.compute == "tf32" and default.compute != "tf32":
        warning = f"{pattern!r} asked for tf32, running fp32: TF32 is one switch for the whole process"
        return Grant(asked=part.asked, precision="fp32", reason="TF32 cannot be switched per module", warning=warning)
    return part


def _rows(model: torch.nn.Module | None, default: Grant, parts: Mapping[str, Grant], hardware: Hardware) -> list[Row]:
    if model is not None:
        from halfstep.precision.rows import rows_of  # torch is needed only once there is a model

        return rows_of(model, default, parts, cuda_lists=default.simulated or hardware.kind != "cpu")
    whole = Row(module=WHOLE_MODEL, storage=default.storage, compute=default.compute, reason="the default")
    return [whole, *(_pattern_row(pattern, part) for pattern, part in parts.items())]


def _pattern_row(pattern: str, part: Grant) -> Row:
    return Row(
        module=pattern,
        storage=part.storage,
        compute=part.compute,
        reason=part.reason if part.warning else f"asked for {part.asked}",
        kind="module",
        precision=part.precision,
    )


def _island(text: str) -> Row:
    name, _, reason = text.partition(":")
    reason = reason.strip() or "fragile in low precision"
    return Row(module=name.strip(), storage="-", compute="fp32", reason=reason, kind="island")
