"""Events of torch's profiler: kernels on the device, and what was running when each was launched.

Events are those of a chrome trace, which all supported torch versions write in one form: `cat`, `name`, `tid`, `args`,
and `ts` and `dur` in microseconds. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_HOST = ("cpu_op", "user_annotation", "python_function")
GRAPH_LAUNCH = "cudaGraphLaunch"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, copy or memset on the device."""

    name: str
    shape: tuple[int, ...]
    """Grid and block, or the bytes of a copy: what tells launches of one name apart."""
    start_us: float
    duration_us: float
    correlation: int
    """The number of the call that launched it."""


def list_kernels(events: Iterable[Event]) -> list[Kernel]:
    """Return everything that ran on the device, ordered by start time."""
    found = [_parse_kernel(event) for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE]
    return sorted(found, key=lambda kernel: kernel.start_us)


def _parse_kernel(event: Event) -> Kernel:
    args = event.get("args", {})
    # Copies and memsets have no grid: their size tells them apart.
    shape = (*args.get("grid", ()), *args.get("block", ())) or (args.get("bytes", 0),)
    return Kernel(
        name=str(event["name"]),
        shape=tuple(int(size) for size in shape),
        start_us=float(event["ts"]),
        duration_us=float(event.get("dur", 0.0)),
        correlation=int(args.get("correlation", -1)),
    )


def split_replays(events: Sequence[Event]) -> list[list[Kernel]]:
    """Return the kernels of each launched graph, in launch order."""
    launches = [e for e in events if e.get("cat") in LAUNCHES and str(e["name"]).startswith(GRAPH_LAUNCH)]
    by_launch: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in list_kernels(events):
        by_launch[kernel.correlation].append(kernel)
    numbers = [int(e["args"]["correlation"]) for e in sorted(launches, key=lambda e: float(e["ts"]))]
    return [by_launch[number] for number in numbers if by_launch[number]]


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A kernel and what the launching thread was doing, outermost first."""

    kernel: Kernel
    within: tuple[Event, ...]
    before: Event | None = None
    """The next event of that thread that has an autograd sequence number."""


def list_launches(events: Sequence[Event]) -> list[LaunchedKernel]:
    """Return kernels in launch order, each with the host events around its launch."""
    stacks = _stack_launches(events)
    with_launch = [(stacks[k.correlation], k) for k in list_kernels(events) if k.correlation in stacks]
    with_launch.sort(key=lambda pair: pair[0][0])
    return [LaunchedKernel(kernel, within, before) for (_, within, before), kernel in with_launch]


def _stack_launches(events: Sequence[Event]) -> dict[int, tuple[float, tuple[Event, ...], Event | None]]:
    """Return, by correlation id, when a kernel was launched, inside which events, and before which."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in (*LAUNCHES, *ON_HOST):
            by_thread[event["tid"]].append(event)
    found: dict[int, tuple[float, tuple[Event, ...], Event | None]] = {}
    for own in by_thread.values():
        # By start; of events with the same start the longer is the enclosing one.
        own.sort(key=lambda event: (float(event["ts"]), -float(event.get("dur", 0.0))))
        following = _find_following(own)
        stack: list[Event] = []
        for number, event in enumerate(own):
            # Events of a thread are nested: those that ended before this one began do not enclose it.
            while stack and _get_end(stack[-1]) <= float(event["ts"]):
                stack.pop()
            if event["cat"] in ON_HOST:
                stack.append(event)
            elif "correlation" in event.get("args", {}):
                found[int(event["args"]["correlation"])] = float(event["ts"]), tuple(stack), following[number]
    return found


def _find_following(own: Sequence[Event]) -> list[Event | None]:
    """Return, for each event of a thread, the next one with an autograd sequence number."""
    after: list[Event | None] = [None] * len(own)
    numbered: Event | None = None
    # Backwards, so that the next numbered event is known at each position.
    for number in range(len(own) - 1, -1, -1):
        after[number] = numbered
        if get_sequence_number(own[number]) is not None:
            numbered = own[number]
    return after


def get_sequence_number(event: Event) -> int | None:
    """Return the number of the autograd node that the event created, or whose backward it runs."""
    number = event.get("args", {}).get("Sequence number")
    return None if number is None else int(number)


def list_input_types(event: Event) -> list[str]:
    return [str(kind) for kind in event.get("args", {}).get("Input type", ())]


def _get_end(event: Event) -> float:
    return float(event["ts"]) + float(event.get("dur", 0.0))
