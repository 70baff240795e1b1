"""Describe a device: table rows, and rates and speedups formatted the same way everywhere. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfstep.errors import format_bytes
from halfstep.formats import FORMATS
from halfstep.hardware.device_facts import Hardware, Measurement, Op

OP_NAMES: dict[Op, str] = {"matmul": "matmul", "conv_nchw": "convolution", "conv_nhwc": "channels_last convolution"}


def describe_identity(hardware: Hardware) -> list[tuple[str, str]]:
    """Return name and value of each known fact about the device, one pair per line."""
    architecture, total, free = [hardware.architecture], hardware.memory_total_bytes, hardware.memory_free_bytes
    if hardware.capability is not None:
        architecture.append("compute capability {}.{}".format(*hardware.capability))
    architecture.append("tensor cores" if hardware.tensor_cores else "no tensor cores" * (hardware.kind == "cuda"))
    memory = format_bytes(total) if total else ""
    memory += f", {format_bytes(free)} free" if total and free is not None else ""
    pairs = [
        ("architecture", ", ".join(filter(None, architecture))),
        ("memory", memory),
        ("bandwidth", f"{hardware.bandwidth_gb_s:.0f} GB/s measured" if hardware.bandwidth_gb_s else ""),
        ("driver", hardware.driver),
        ("torch", hardware.torch_version),
        ("rates from", hardware.published_source if hardware.published_tflops else ""),
        ("checked", hardware.published_check),
    ]
    return [(name, value) for name, value in pairs if value]


def make_format_columns(hardware: Hardware) -> dict[str, list[str]]:
    """Return the cells by column title, one row per format; empty columns are left out."""
    unit, per_tflops = _choose_unit(hardware.measurements)  # one unit for the whole table

    def rates(op: Op) -> list[str]:
        return _make_cells(hardware, op, lambda m: _format_number(m.tflops * per_tflops))

    def speedups(op: Op) -> list[str]:
        return _make_cells(hardware, op, lambda m: format_speedup(m.speedup))

    columns: dict[str, list[str]] = {
        "format": list(FORMATS),
        "support": [hardware.get_support(name) for name in FORMATS],
        "published\nTFLOPS": [_format_number(hardware.published_tflops.get(name)) for name in FORMATS],
        f"matmul\n{unit}": rates("matmul"),
        "matmul\nx fp32": speedups("matmul"),
        "matmul\nerror": _make_cells(hardware, "matmul", lambda m: f"{m.error:.0e}"),
        f"conv\n{unit}": rates("conv_nchw"),
        "conv\nx fp32": speedups("conv_nchw"),
        f"NHWC\n{unit}": rates("conv_nhwc"),
        "NHWC\nx fp32": speedups("conv_nhwc"),
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _make_cells(hardware: Hardware, op: Op, cell: Callable[[Measurement], str]) -> list[str]:
    found = (hardware.find_measurement(op, name) for name in FORMATS)
    return [cell(measurement) if measurement else "" for measurement in found]


def _format_number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_speedup(speedup: float) -> str:
    """Return `2.0`, or `1/199` for a slowdown of more than ten times."""
    return f"{speedup:.1f}" if speedup >= 0.1 else f"1/{1 / speedup:.0f}"


def _choose_unit(measurements: Sequence[Measurement]) -> tuple[str, float]:
    """Choose GFLOPS for slow devices: a CPU's rates are unreadable in TFLOPS."""
    fastest = max((m.tflops for m in measurements), default=1.0)
    return ("TFLOPS", 1.0) if fastest >= 1 else ("GFLOPS", 1e3)
