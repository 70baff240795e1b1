"""Kernels of a replayed CUDA graph: their names, calls and shares of the device time.

They come from the events of torch's profiler, in the form of a chrome trace, which all supported torch versions write:
`cat`, `name`, `args`, and `ts` and `dur` in microseconds. Nothing here needs a GPU.

A replay shows only a sequence of kernels. Their formats by module are those of the code that was captured.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.evidence.precision_ledger import KernelRow, Ledger

Event = Mapping[str, Any]

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
GRAPH_LAUNCH = "cudaGraphLaunch"


def split_replays(events: Sequence[Event]) -> list[list[Event]]:
    """Return what each launched graph ran on the device, in launch order."""
    launches = [e for e in events if e.get("cat") in LAUNCHES and str(e["name"]).startswith(GRAPH_LAUNCH)]
    by_launch: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE:
            by_launch[int(event.get("args", {}).get("correlation", -1))].append(event)
    numbers = [int(e["args"]["correlation"]) for e in sorted(launches, key=lambda e: float(e["ts"]))]
    return [by_launch[number] for number in numbers if by_launch[number]]


def make_captured_ledger(code: Ledger, replay: Sequence[Event], mode: str = "captured") -> Ledger:
    """Return the ledger of a captured step: that of the captured code, with the kernels of a replay."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in replay:
        times[str(event["name"])].append(float(event.get("dur", 0.0)))
    total = max(sum(map(sum, times.values())), 1e-9)
    rows = [KernelRow(name=name, calls=len(own), time_share=sum(own) / total) for name, own in times.items()]
    rows.sort(key=lambda row: -row.time_share)
    return dataclasses.replace(
        code,
        mode=mode,
        findings=(),
        kernels=tuple(rows),
        summary=f"{len(replay)} kernels; as {code.mode}: {code.summary}",
    )
