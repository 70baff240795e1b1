"""The ledger of a captured step: the rows of its code, with the time and the formats of its kernels."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from halfstep.evidence.captured import Place, Placed
from halfstep.evidence.findings import Expected, findings
from halfstep.evidence.ledger import KernelRow, Ledger, LedgerRow, percent
from halfstep.evidence.observer import Product, Seen
from halfstep.precision.plan import Plan


def captured_ledger(
    plan: Plan,
    kernels: Sequence[Placed],
    code: Ledger,
    model: nn.Module,
    islands: set[str],
    frozen: Mapping[str, nn.Module] | None = None,
    mode: str = "captured",
) -> Ledger:
    """`code` is the ledger of what was captured; `islands` are modules that have one."""
    expected = Expected(plan)
    seen = _seen(expected, kernels, islands)
    found = findings(plan, seen, model, frozen or {})
    rows = _rows(code, kernels)
    listed = _listed(kernels)
    return Ledger(
        mode=mode, rows=tuple(rows), findings=tuple(found), kernels=tuple(listed), step=code.step,
        summary=_summary(kernels, sum(finding.level == "differs" for finding in found)),
    )  # fmt: skip


def _seen(expected: Expected, kernels: Sequence[Placed], islands: set[str]) -> Seen:
    """Matmuls, convolutions and attention by module. One whose function holds several layers counts as the planned
    one of them: a convolution and the normalisation before it have different formats."""
    seen = Seen()
    for place in (one.place for one in kernels):
        if place is None or place.direction == "step" or not place.format:
            continue
        module = next((name for name in place.modules if expected.compute(name) == place.format), place.modules[-1])
        is_island = place.format == "fp32" and module in islands
        seen.calls[Product(module, place.direction, place.operation, place.format, is_island)] += 1
    return seen


def _rows(code: Ledger, kernels: Sequence[Placed]) -> list[LedgerRow]:
    total = _total(kernels)
    times: dict[str, float] = defaultdict(float)
    formats: dict[tuple[str, str], set[str]] = defaultdict(set)
    for kernel, place in ((one.kernel, one.place) for one in kernels):
        for name in place.modules if place is not None else ():
            assert place is not None
            times[name] += kernel.duration_us / len(place.modules) / total
            formats[name, place.direction] |= {place.format} - {""}
    rows = [
        dataclasses.replace(
            row,
            time_share=times.pop(row.module, 0.0),
            forward=_observed(row.forward, formats[row.module, "forward"]),
            backward=_observed(row.backward, formats[row.module, "backward"]),
        )
        for row in code.rows
    ]
    return rows + [LedgerRow(module=name, planned="-", time_share=time) for name, time in times.items()]


def _observed(of_code: str, found: set[str]) -> str:
    """A kernel's format, for modules that multiply: one that is only fused with such a module has none."""
    return ", ".join(sorted(found)) if found and of_code != "-" else of_code


def _listed(kernels: Sequence[Placed]) -> list[KernelRow]:
    total = _total(kernels)
    times: dict[tuple[str, Place | None], list[float]] = defaultdict(list)
    for one in kernels:
        times[one.kernel.name, one.place].append(one.kernel.duration_us)
    rows = [
        KernelRow(
            name=name, modules=place.modules if place else (), direction=place.direction if place else "-",
            format=place.format if place else "", calls=len(own), time_share=sum(own) / total,
        )
        for (name, place), own in times.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row.time_share)


def _summary(kernels: Sequence[Placed], num_differences: int) -> str:
    total = _total(kernels)
    unmapped = sum(one.kernel.duration_us for one in kernels if one.place is None) / total
    by_format: dict[str, float] = defaultdict(float)
    for one in kernels:
        if one.place is not None and one.place.format:
            by_format[one.place.format] += one.kernel.duration_us
    of_products, longest_first = sum(by_format.values()), sorted(by_format.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{percent(time / of_products)} {name}" for name, time in longest_first)
    verdict = f"{num_differences} differ from the plan" if num_differences else "all as planned"
    return (
        f"{len(kernels)} kernels, {percent(1 - unmapped)} of their time mapped to modules, "
        f"{percent(unmapped)} not mapped; library matmuls, convolutions and attention by time: {shown or 'none'}; "
        f"{verdict}"
    )


def _total(kernels: Sequence[Placed]) -> float:
    return max(sum(one.kernel.duration_us for one in kernels), 1e-9)
