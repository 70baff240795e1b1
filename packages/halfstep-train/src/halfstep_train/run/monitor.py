"""GPU utilisation, power and memory during a run: a thread that queries NVML and appends to monitor.jsonl.

It samples once per second, or less often if a query takes long: its share of the time stays below MOST_SHARE. NVML's
calls release the GIL. For a device without NVML, such as a CPU, nothing is recorded.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.disk import parse_json
from halfstep.hardware.clock import Clock
from halfstep.hardware.nvml import ask_nvml

if TYPE_CHECKING:
    import torch

INTERVAL_S = 1.0
MOST_SHARE = 0.005
"""Largest share of the time spent in queries."""
LIMITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that slow a busy GPU; the other bits are idling and settings (nvml.h)."""

Record = dict[str, Any]
Ask = Callable[["torch.device", Callable[[Any, Any], Any]], Any]


def list_limits(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in LIMITS.items() if bits & bit)


def take_sample(nvml: Any, handle: Any) -> Record:
    """Query all values once; a value that this GPU or driver does not provide is None."""
    questions: dict[str, Callable[[], Any]] = {
        "utilization": lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "clock_mhz": lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "temperature_c": lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        # The older of its two names: drivers before 535 have no other.
        "throttled": lambda: ", ".join(list_limits(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))),
    }
    answers = dict.fromkeys(questions)
    for name, question in questions.items():
        with suppress(nvml.NVMLError):
            answers[name] = question()
    return answers


class Monitor:
    """Records of one device: sums in memory, every sample on disk."""

    def __init__(
        self,
        device: torch.device,
        file: Path,
        *,
        interval_s: float = INTERVAL_S,
        ask: Ask = ask_nvml,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.file, self.interval_s, self._clock = file, interval_s, clock
        self._nvml: tuple[Any, Any] | None = ask(device, lambda nvml, handle: (nvml, handle))
        self._before_s = _read_last_elapsed_s(file)  # a resumed run continues the time axis
        self._start_s = clock()
        self.latest: Record = {}
        self.num_samples = 0
        self.is_steady = False
        """Whether steps are compiled and captured: before that, utilization does not describe a step."""
        self.num_steady, self.busy_sum = 0, 0.0
        self.spent_s = 0.0
        self.trouble = ""
        """Why it stopped early, such as a full disk."""
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_able(self) -> bool:
        return self._nvml is not None

    @property
    def utilization(self) -> float | None:
        """Return the mean percentage since steps became steady; None if nothing was recorded."""
        return self.busy_sum / self.num_steady if self.num_steady else None

    def mark_steady(self) -> None:
        """Mark the end of the start-up: utilization counts from here."""
        self.is_steady = True

    def start(self) -> None:
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._watch, name="halfstep-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def summarise(self) -> str:
        """Return `97%, 640 W`, for the progress bar."""
        busy, power = self.latest.get("utilization"), self.latest.get("power_w")
        shown = [f"{busy}%" if busy is not None else "", f"{power:.0f} W" if power is not None else ""]
        return ", ".join(filter(None, shown))

    def _watch(self) -> None:
        try:
            # Unbuffered, one write per record: a killed run loses at most the last line.
            with self.file.open("ab", buffering=0) as out:
                while not self._is_over.wait(self._choose_pause_s()):
                    out.write(json.dumps(self.record_sample()).encode() + b"\n")
        except OSError as error:
            self.trouble = f"{self.file}: {error.strerror}"

    def record_sample(self) -> Record:
        assert self._nvml is not None
        before_s = self._clock()
        found = take_sample(*self._nvml)
        now_s = self._clock()
        self.latest = {"elapsed_s": round(self._before_s + now_s - self._start_s, 3), "steady": self.is_steady, **found}
        self.spent_s += now_s - before_s
        if found["utilization"] is not None:
            self.num_samples += 1
            if self.is_steady:
                self.num_steady += 1
                self.busy_sum += found["utilization"]
        return self.latest

    def _choose_pause_s(self) -> float:
        """Return the interval, or longer if needed to keep the share of the time."""
        # pause >= cost / share keeps cost / (cost + pause) below the share.
        looks = max(self.num_samples, 1)
        return max(self.interval_s, self.spent_s / looks / MOST_SHARE)


@contextmanager
def monitor_device(device: torch.device, file: Path, *, records: bool = True) -> Iterator[Monitor]:
    """Record during the block, on the rank with `records`; on a device without NVML there is no file."""
    monitor = Monitor(device, file)
    if records:
        monitor.start()
    try:
        yield monitor
    finally:
        monitor.stop()


def _read_last_elapsed_s(file: Path) -> float:
    """Return the elapsed seconds at which a resumed run continues."""
    for line in reversed(file.read_text().splitlines() if file.exists() else []):
        with suppress(ValueError, KeyError, TypeError):  # cut short by a kill
            return float(parse_json(line)["elapsed_s"])
    return 0.0
