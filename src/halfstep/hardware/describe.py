"""The facts of a device in words: rows for a table. No torch, no colour."""

from __future__ import annotations

from collections.abc import Callable

from halfstep.formats import FORMATS
from halfstep.hardware.facts import Hardware, Measurement, Op

GIB = 2**30


def identity(hardware: Hardware) -> list[tuple[str, str]]:
    """What the device is: name and value, one pair a line; what is not known is left out."""
    pairs = [
        ("architecture", _architecture(hardware)),
        ("memory", _memory(hardware)),
        ("bandwidth", f"{hardware.bandwidth_gb_s:.0f} GB/s measured" if hardware.bandwidth_gb_s else ""),
        ("driver", hardware.driver),
        ("torch", hardware.torch_version),
        ("rates from", hardware.published_source if hardware.published_tflops else ""),
    ]
    return [(name, value) for name, value in pairs if value]


def _architecture(hardware: Hardware) -> str:
    parts = [hardware.architecture]
    if hardware.capability is not None:
        parts.append("compute capability {}.{}".format(*hardware.capability))
    parts.append("tensor cores" if hardware.tensor_cores else "no tensor cores" if hardware.kind == "cuda" else "")
    return ", ".join(filter(None, parts))


def _memory(hardware: Hardware) -> str:
    if not hardware.memory_total_bytes:
        return ""
    free = hardware.memory_free_bytes
    total = f"{hardware.memory_total_bytes / GIB:.1f} GiB"
    return total if free is None else f"{total}, {free / GIB:.1f} GiB free"


def format_columns(hardware: Hardware) -> dict[str, list[str]]:
    """Column title to cells, one row a format; columns that would be empty are left out."""
    # A CPU's rates are unreadable in TFLOPS.
    unit, per_tflops = (
        ("TFLOPS", 1) if max((m.tflops for m in hardware.measurements), default=1) >= 1 else ("GFLOPS", 1e3)
    )
    columns: dict[str, list[str]] = {
        "format": list(FORMATS),
        "support": [hardware.has(name) for name in FORMATS],
        "published\nTFLOPS": [_number(hardware.published_tflops.get(name)) for name in FORMATS],
        f"matmul\n{unit}": _measured(hardware, "matmul", lambda m: _number(m.tflops * per_tflops)),
        "matmul\nx fp32": _measured(hardware, "matmul", lambda m: _times(m.speedup)),
        "conv\nx fp32": _measured(hardware, "conv_nchw", lambda m: _times(m.speedup)),
        "conv NHWC\nx fp32": _measured(hardware, "conv_nhwc", lambda m: _times(m.speedup)),
        "error": _measured(hardware, "matmul", lambda m: f"{m.error:.0e}"),
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _measured(hardware: Hardware, op: Op, cell: Callable[[Measurement], str]) -> list[str]:
    found = (hardware.measured(op, name) for name in FORMATS)
    return [cell(measurement) if measurement else "" for measurement in found]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _times(speedup: float) -> str:
    return f"{speedup:.1f}" if speedup >= 0.1 else f"1/{1 / speedup:.0f}"
