"""Profile a few steps of a row after its timed ones, for `halfstep bench --explain`: longest kernels, kinds, idle time.

A profiled step is slower than a real one, above all if the host is the limit, so the profile is read next to the time
of the steps without the profiler. Kernel times stay valid under the profiler; idle time does not, and is limited to
what the clock leaves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

from halfstep.errors import HardwareError
from halfstep.hardware.clock import wait_for

NUM_STEPS = 5
TOP_KERNELS = 10
NOT_WORK = frozenset({"Context Sync", "Stream Sync", "Event Sync"})
"""Names of waits, which the profiler lists like kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """Time of one kernel, or on a CPU operator, per step, over all launches."""

    name: str
    ms: float
    launches: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """Where the time of a step goes."""

    idle_ms: float
    """Time in which no kernel runs."""
    launches: float
    kinds_ms: dict[str, float]
    """Time by kind of kernel, the longest first; more than the step takes where streams overlap."""
    kernels: tuple[KernelTime, ...]
    """The longest kernels."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "kernels": [asdict(kernel) for kernel in self.kernels]}


class ProfiledSteps:
    """Profiles `NUM_STEPS` steps: create it after a step, then call it after each of the following `num_steps`."""

    num_steps = 1 + NUM_STEPS
    """One more than are profiled, because the profiler's first step is slow."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._done = device, 0
        plan = schedule(wait=0, warmup=1, active=NUM_STEPS, repeat=1)
        self._profiler = profile(activities=[_choose_activity(device)], schedule=plan, acc_events=True)
        self._profiler.start()

    def __call__(self) -> None:
        self._done += 1
        if self._done in (1, self.num_steps):  # so that exactly the kernels of these steps are recorded
            wait_for(self.device)
        self._profiler.step()
        if self._done == self.num_steps:
            self._profiler.stop()

    def summarise(self, step_ms: float) -> StepProfile:
        """Return the profile; `step_ms` is the time of a step without the profiler."""
        events = [event for event in self._profiler.events() or () if _is_work(event, self.device)]
        if not events:
            raise HardwareError(
                f"the profiler recorded nothing on {self.device}",
                why="another profiler uses the device, or the driver does not let this user read performance counters",
                fix="end the other profiler; NVIDIA: allow GPU performance counters for all users",
            )
        return summarise_events(events, NUM_STEPS, step_ms, is_host=self.device.type == "cpu")


def wake_profiler(device: torch.device) -> None:
    """Start the profiler once in the main thread: a first start in another thread prints an error."""
    with profile(activities=[_choose_activity(device)], acc_events=True):
        pass


def _choose_activity(device: torch.device) -> ProfilerActivity:
    # CUDA only: recording operators too would slow the host and widen the gaps to be measured.
    return ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU


def _is_work(event: FunctionEvent, device: torch.device) -> bool:
    # Annotations (`ProfilerStep`, `Optimizer.step`) span other events.
    is_here = event.device_type.name == device.type.upper()
    return is_here and not event.is_user_annotation and event.name not in NOT_WORK


def summarise_events(events: Iterable[FunctionEvent], num_steps: int, step_ms: float, *, is_host: bool) -> StepProfile:
    """Sum the events by kernel and by kind. `is_host`: CPU operators, which profiling slows down and which nest."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    span_ms = (max(end for _, end in spans) - spans[0][0]) / 1e3 / num_steps
    # Profiled operators of a CPU take longer: scale them down to the unprofiled step.
    scale = min(1.0, step_ms / span_ms) if is_host else 1.0
    kernels = defaultdict[str, list[float]](list)
    for event in events:
        us = event.self_cpu_time_total if is_host else event.time_range.end - event.time_range.start
        kernels[str(event.name)].append(us * scale / 1e3 / num_steps)
    kinds_ms = defaultdict[str, float](float)
    for name, times_ms in kernels.items():
        kinds_ms[classify_kernel(name)] += sum(times_ms)
    longest = sorted(kernels, key=lambda name: -sum(kernels[name]))[:TOP_KERNELS]
    busy_ms = sum(_list_covered_us(spans)) * scale / 1e3 / num_steps
    return StepProfile(
        idle_ms=max(0.0, min(span_ms * scale, step_ms) - busy_ms),
        launches=sum(map(len, kernels.values())) / num_steps,
        kinds_ms=dict(sorted(kinds_ms.items(), key=lambda item: -item[1])),
        kernels=tuple(
            KernelTime(name=name, ms=sum(kernels[name]), launches=len(kernels[name]) / num_steps) for name in longest
        ),
    )


def _list_covered_us(spans: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Yield what each of the sorted intervals adds to their union."""
    reached = float("-inf")
    for start, end in spans:
        yield max(0.0, end - max(start, reached))
        reached = max(reached, end)


KINDS = {
    # A Triton kernel of the compiler is named after every operator it contains, also of a convolution before it. Of
    # halfstep's own kernels only the names start with an underscore and a letter; mangled names of C++ start with _Z.
    "fused": r"^triton_(?!tem_|for_)|^(?:logits|head_\w+|pool\w*)_kernel$|cpp_fused|^## Call CompiledFxGraph"
    r"|^_(?!attention|convolve|weight_gradient|update$|count$|average$)[a-y]\w*$",
    "copy, cast or fill": r"^Mem(?:cpy|set)|copy|convertTensor|ToNhwc|ToNchw|nhwcAddPadding|tensorTransform"
    r"|transpose_readWrite|FillFunctor|setTensor\d|^aten::(?:fill|zero|clone|contiguous)",
    "attention": r"attention|flash|fmha|sdpa|scaled_dot_product|dot_do_o|convert_dq",
    "optimizer and clipping": r"multi_tensor_apply|Fused(?:Adam|Sgd|Adagrad)|lerp|^triton_for_|linalg_vector_norm"
    r"|^_(?:update|count|average)$|^aten::_(?:fused|foreach|amp)_",
    "convolution": r"conv(?!ert)|fprop|dgrad|wgrad|bwd_(?:data|filter)|winograd|fft2d|im2col|^_weight_gradient$",
    "normalisation": r"norm(?!al)|bn_(?:fw|bw)|RowwiseMoments|GammaBeta|ComputeInternalGradients|FusedParams",
    "matrix product": r"gemm|gemv|nvjet|cublas|splitK|cutlass|^triton_tem_|^(?:doubled|halved|weight_parts)_kernel$"
    r"|^aten::(?:add|b|badd)?mm$|^aten::(?:linear|dot|mv)$|^mkl",
    "elementwise or reduction": r"elementwise|reduce_(?:kernel|1Block)|DeviceReduce|softmax|pool|nll_loss|upsample"
    r"|dropout|embedding|index|gather|scatter|_pad\d?d|triu_tril|scalePackedTensor|cub::Device|where_kernel|^aten::",
}
"""A pattern of the names of each kind's kernels, and of a CPU's operators; the first that matches counts."""


def classify_kernel(name: str) -> str:
    """Return the kind of a CUDA kernel, memory copy or CPU operator by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
