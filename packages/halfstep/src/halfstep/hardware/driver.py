"""The boundary to the machine: every call to torch's device APIs, NVML, /proc and the clock.

Nothing is decided here. Tests subclass `Driver` to simulate a T4 or a slow bf16; all code above it is real.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import format_bytes, format_count
from halfstep.hardware.clock import wait_for
from halfstep.hardware.device_facts import Kind
from halfstep.hardware.nvml import ask_nvml

if TYPE_CHECKING:
    import torch

SAMPLES = 5
"""Timed samples of one operation."""

SAMPLE_S = 0.005
"""Short operations are repeated until a sample takes about this long: launch and clock noise are microseconds."""

CPU_SAMPLING_S = 0.1

TOO_LONG_S = 0.5
"""A first run of at least this length is the measurement: loading libraries hardly matters in it."""

OTHERS_BYTES = 2 * 2**30
"""GPU memory in use, beyond our tensors, that must belong to other processes: a context and the driver take less."""

UTILISATION_PERIOD_S = 1.0
"""The longest period over which NVML averages utilisation, according to its manual."""

MACOS_FEATURES = ("FEAT_BF16", "FEAT_FHM")

BUSY_PERCENT = 10
"""Utilisation of a GPU on which this process has nothing running; a desktop stays below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """What a driver reports about one accelerator."""

    kind: Kind
    device: str
    name: str
    capability: tuple[int, int] | None = None
    architecture: str = ""
    has_fp64: bool = True
    memory_total_bytes: int = 0
    uuid: str = ""
    driver: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuDescription:
    """What the operating system reports about the CPU."""

    cpuinfo: str
    """Text of /proc/cpuinfo; empty if there is none."""
    brand: str
    features: frozenset[str]
    """CPU features by macOS' `FEAT_*` names; on Linux they are in cpuinfo."""
    cores: int
    memory_total_bytes: int
    memory_free_bytes: int | None
    kernel: str


class Driver:
    """The real machine."""

    def read_torch_version(self) -> str:
        import torch

        return str(torch.__version__)

    def list_accelerators(self) -> tuple[Accelerator, ...]:
        """Return every accelerator torch can use, best kind first."""
        import torch

        found: list[Accelerator] = []
        if torch.cuda.is_available():
            found += [_describe_cuda(index) for index in range(torch.cuda.device_count())]
        if torch.xpu.is_available():
            found += [_describe_xpu(index) for index in range(torch.xpu.device_count())]
        if torch.backends.mps.is_available():
            found.append(_describe_mps())
        return tuple(found)

    def describe_processor(self) -> CpuDescription:
        cpuinfo = Path("/proc/cpuinfo")
        return CpuDescription(
            cpuinfo=cpuinfo.read_text() if cpuinfo.exists() else "",
            brand=_read_sysctl("machdep.cpu.brand_string") or platform.processor(),
            features=frozenset(name for name in MACOS_FEATURES if _read_sysctl(f"hw.optional.arm.{name}") == "1"),
            cores=os.cpu_count() or 1,
            memory_total_bytes=_read_page_bytes("SC_PHYS_PAGES") or 0,
            memory_free_bytes=_read_available_bytes(),
            kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        )

    def read_free_bytes(self, device: str) -> int | None:
        """Return the free memory of an accelerator. A separate call: on CUDA it opens a context of about 500 MB."""
        import torch

        if device.startswith("cuda"):
            return int(torch.cuda.mem_get_info(device)[0])
        if device == "mps":
            return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
        return None

    def read_load(self) -> float:
        """Return the load average over a minute; 0 if the system does not provide it."""
        with contextlib.suppress(AttributeError, OSError):
            return os.getloadavg()[0]
        return 0.0

    def describe_load(self) -> str:
        """Describe other work on the CPU; empty if there is none."""
        load, cores = self.read_load(), os.cpu_count() or 1
        return f"the CPU has other work (load {load:.1f} on {format_count(cores, 'core')})" if load > cores else ""

    def describe_gpu_users(self, device: str) -> str:
        """Describe other processes on the GPU; empty if there are none."""
        others = self.describe_other_use(device)
        return f"the GPU is in use by others ({others})" if others else ""

    def describe_other_use(self, device: str) -> str:
        """Describe the use of this GPU by other processes; empty if there is none, or it is unknown."""
        import torch

        if not device.startswith("cuda"):
            return ""
        # Our own share is what torch reserved; the CUDA contexts of all processes remain in `others`.
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        percent = _read_utilisation(device)
        if percent >= BUSY_PERCENT:
            time.sleep(UTILISATION_PERIOD_S)  # our own recent kernels were counted too
            percent = _read_utilisation(device)
        if others > OTHERS_BYTES or percent >= BUSY_PERCENT:
            return f"{format_bytes(others)} taken and {percent} % busy"
        return ""

    def get_device(self, device: str) -> torch.device:
        """Return the torch device for tensors."""
        import torch

        return torch.device(device)

    def read_clock(self) -> float:
        return time.perf_counter()

    def time_run(self, run: Callable[[], object], device: str, *, work: str) -> float:
        """Return the time of one `run`. `work` names it (`matmul bf16`) for tests that fake the clock."""
        del work
        warm_up = self._sample(run, device, 1)  # libraries load, kernels are chosen
        if device == "cpu" and warm_up > TOO_LONG_S:  # on a GPU the first run loads libraries
            return warm_up
        once = self._sample(run, device, 1)  # warm: decides how many runs make one sample
        if once > CPU_SAMPLING_S:  # more runs of it would use up the time of other formats
            return once
        repeats = min(50, max(1, round(SAMPLE_S / max(once, 1e-6))))
        if device != "cpu":
            return statistics.median(self._sample(run, device, repeats) for _ in range(SAMPLES))
        # Other processes share the cores of a CPU and can only add time: take the best of more samples.
        enough = min(4 * SAMPLES, max(SAMPLES, round(CPU_SAMPLING_S / (once * repeats))))
        return min(self._sample(run, device, repeats) for _ in range(enough))

    def _sample(self, run: Callable[[], object], device: str, repeats: int) -> float:
        import torch

        if device.startswith("cuda"):
            # Events are timed by the GPU, so launch times of the host do not count.
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.device(device):
                torch.cuda.synchronize()
                start.record()
                for _ in range(repeats):
                    run()
                end.record()
                end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / repeats
        wait_for(torch.device(device))
        began = self.read_clock()
        for _ in range(repeats):
            run()
        wait_for(torch.device(device))
        return (self.read_clock() - began) / repeats


def _describe_cuda(index: int) -> Accelerator:
    import torch

    # torch calls AMD GPUs cuda as well; torch.version.hip tells them apart.
    properties = torch.cuda.get_device_properties(index)
    is_rocm = torch.version.hip is not None
    version = ask_nvml(torch.device("cuda", index), lambda nvml, handle: str(nvml.nvmlSystemGetDriverVersion()))
    return Accelerator(
        kind="rocm" if is_rocm else "cuda",
        device=f"cuda:{index}",
        name=properties.name,
        capability=None if is_rocm else (properties.major, properties.minor),
        architecture=properties.gcnArchName if is_rocm else f"sm_{properties.major}{properties.minor}",
        memory_total_bytes=properties.total_memory,
        uuid=str(getattr(properties, "uuid", "")),
        driver=f"ROCm {torch.version.hip}" if is_rocm else f"NVIDIA {version or 'driver of unknown version'}",
    )


def _describe_xpu(index: int) -> Accelerator:
    import torch

    properties: Any = torch.xpu.get_device_properties(index)
    return Accelerator(
        kind="xpu",
        device=f"xpu:{index}",
        name=str(properties.name),
        has_fp64=bool(properties.has_fp64),
        memory_total_bytes=int(properties.total_memory),
        driver=str(properties.driver_version),
    )


def _describe_mps() -> Accelerator:
    import torch

    return Accelerator(
        kind="mps",
        device="mps",
        name=_read_sysctl("machdep.cpu.brand_string") or "Apple GPU",
        memory_total_bytes=torch.mps.recommended_max_memory(),
        driver=f"macOS {platform.mac_ver()[0]}",
    )


def _read_utilisation(device: str) -> int:
    """Return the percentage of the last sampling period in which kernels ran; 0 if NVML does not answer."""
    import torch

    used = ask_nvml(torch.device(device), lambda nvml, handle: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
    return used or 0


def _read_sysctl(key: str) -> str:
    if platform.system() != "Darwin":
        return ""
    answer = subprocess.run(["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def _read_page_bytes(name: str) -> int | None:
    """Convert a sysconf page count to bytes; None if the system does not provide it."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return None


def _read_available_bytes() -> int | None:
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    # MemAvailable counts caches that the kernel can drop; free pages alone are nearly none on a busy machine.
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kib[0] * 1024 if kib else _read_page_bytes("SC_AVPHYS_PAGES")
