"""A driver that reports devices which are not here and times by script; all above it is real code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from halfstep.hardware.device_facts import Hardware, Measurement, Support
from halfstep.hardware.driver import Accelerator, CpuDescription, Driver
from halfstep.hardware.measure import Sizes

TINY = Sizes(matmul=32, image=(2, 8, 8), copy_bytes=4096, budget_s=10.0)

T4 = Accelerator(
    kind="cuda",
    device="cuda:0",
    name="Tesla T4",
    capability=(7, 5),
    architecture="sm_75",
    memory_total_bytes=15 * 2**30,
    uuid="11111111-2222",
    driver="NVIDIA 550.54",
)
H100 = Accelerator(
    kind="cuda",
    device="cuda:1",
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    architecture="sm_90",
    memory_total_bytes=79 * 2**30,
    uuid="33333333-4444",
    driver="NVIDIA 550.54",
)
XEON = "model name\t: Intel(R) Xeon(R) Platinum 8480+\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\n"
NEOVERSE_N1 = "Features\t: fp asimd fphp asimdhp asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


ALL_NATIVE: dict[str, Support] = dict.fromkeys(("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"), "native")


def make_hardware(
    kind: str = "cuda", name: str = "Test GPU", speeds: dict[str, float] | None = None, **support: Support
) -> Hardware:
    """Return the facts of a device with native fp32; `speeds` are gains over it."""
    measurements = tuple(
        Measurement(op="matmul", format=format, tflops=1.0, error=0.0, speedup=speed)
        for format, speed in (speeds or {}).items()
    )
    return Hardware(
        kind=kind,  # type: ignore[arg-type]
        device=kind,
        name=name,
        vendor="test",
        support=MappingProxyType({"fp32": "native", **support}),
        measurements=measurements,
    )


class FakeDriver(Driver):
    """`speedups` maps a format, or `op format`, to its gain over fp32."""

    def __init__(
        self,
        *accelerators: Accelerator,
        cpuinfo: str = NEOVERSE_N1,
        features: Sequence[str] = (),
        brand: str = "",
        speedups: Mapping[str, float] | None = None,
        others: str = "",
        free: int | None = 14 * 2**30,
        run_s: float = 0.0,
    ) -> None:
        self.seen, self.others, self.free, self.run_s = accelerators, others, free, run_s
        self.speedups = speedups or {}
        self.timed: list[str] = []
        self.clock = 0.0
        self.cpu = CpuDescription(
            cpuinfo=cpuinfo,
            brand=brand,
            features=frozenset(features),
            cores=2,
            memory_total_bytes=8 * 2**30,
            memory_free_bytes=7 * 2**30,
            kernel="Linux 6.1 test",
        )

    def read_torch_version(self) -> str:
        return "2.13.0+fake"

    def list_accelerators(self) -> tuple[Accelerator, ...]:
        return self.seen

    def describe_processor(self) -> CpuDescription:
        return self.cpu

    def describe_other_use(self, device: str) -> str:
        return self.others

    def read_free_bytes(self, device: str) -> int | None:
        return self.free

    def read_load(self) -> float:
        return 0.0

    def get_device(self, device: str) -> torch.device:
        return torch.device("cpu")

    def read_clock(self) -> float:
        self.clock += self.run_s or 0.1
        return self.clock

    def time_run(self, run: Callable[[], object], device: str, *, work: str) -> float:
        self.timed.append(work)
        gain = self.speedups.get(work, self.speedups.get(work.split()[-1], 1.0))
        return 1e-4 / gain
