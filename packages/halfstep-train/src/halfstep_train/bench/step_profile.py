"""Time a few steps of a runner, then profile as many, and classify kernels by what they do.

A profiled step is slower than a real one, above all if the host is the limit, so the same run is first timed without
the profiler. Kernel times stay valid under the profiler; idle time does not, and is limited to what the clock leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

from halfstep.errors import ConfigError, HardwareError
from halfstep.hardware.clock import Stopwatch
from halfstep_train.bench.problem import Runner

LEAST_STEPS = 3
WARM_UP_STEPS = {"cuda": 10, "cpu": 2}
"""Steps after which compilation, cuDNN's choice of algorithms and graph capture are over."""
NOT_WORK = frozenset({"Context Sync", "Stream Sync", "Event Sync"})
"""Names of waits, which the profiler lists like kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileEvent:
    """One kernel, copy or operator in the profile."""

    name: str
    start_us: float
    end_us: float
    self_us: float
    """Without nested events; on a GPU there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """The events of a few profiled steps, and the time of a step without the profiler."""

    events: tuple[ProfileEvent, ...]
    num_steps: int
    step_ms: float
    """Time per step without the profiler."""
    is_host: bool = False
    """True for CPU operators, which profiling slows down."""

    @property
    def busy_ms(self) -> float:
        """Time per step in which at least one stream is busy."""
        return self.convert_to_step_ms(compute_covered_us(self.events))

    @property
    def span_ms(self) -> float:
        """Time per step from the start of the first event to the end of the last."""
        return self.convert_to_step_ms(self._span_us)

    def convert_to_step_ms(self, us: float) -> float:
        """Convert recorded time to time per step; on a CPU scale it down to the unprofiled step time."""
        recorded_ms = us / 1e3 / self.num_steps
        if not self.is_host:
            return recorded_ms
        return recorded_ms * min(1.0, self.step_ms * self.num_steps * 1e3 / self._span_us)

    @property
    def _span_us(self) -> float:
        return max(e.end_us for e in self.events) - min(e.start_us for e in self.events)

    @property
    def launch_gap_ms(self) -> float:
        """Time per step in which nothing runs, at most what the unprofiled step leaves besides the work."""
        return max(0.0, min(self.span_ms, self.step_ms) - self.busy_ms)


def compute_covered_us(events: Iterable[ProfileEvent]) -> float:
    """Return the length of the union of all intervals."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start_us):
        total += max(0.0, event.end_us - max(event.start_us, reached))
        reached = max(reached, event.end_us)
    return total


def refuse_too_few(steps: int) -> None:
    """Raise ConfigError for too few steps."""
    if steps < LEAST_STEPS:
        raise ConfigError(
            f"--steps {steps} is too few for --explain",
            why="the time of single steps varies too much",
            fix=f"--steps {LEAST_STEPS} or more",
        )


def wake_profiler(device: torch.device) -> None:
    """Start the profiler once in the main thread: a first start in another thread prints an error."""
    with profile(activities=[_choose_activity(device)], acc_events=True):
        pass


def profile_steps(runner: Runner, *, steps: int, device: torch.device) -> StepProfile:
    """Train past the warm-up, time `steps` steps, then profile as many."""
    if device.type not in WARM_UP_STEPS:
        raise HardwareError(
            f"--explain does not support {device.type}",
            why="it profiles CUDA kernels and CPU operators",
            fix="--device cuda or --device cpu",
        )
    refuse_too_few(steps)
    session = _Session(steps, device)
    with session.profiler:
        runner.train(session.num_steps, session.count_step)
    events = tuple(_collect_events(session.profiler.events(), device))
    if not events:
        raise HardwareError(
            f"the profiler recorded nothing on {device}",
            why="another profiler uses the device, or the driver does not let this user read performance counters",
            fix="end the other profiler; NVIDIA: allow GPU performance counters for all users",
        )
    return StepProfile(
        events=events, num_steps=steps, step_ms=session.timed_s * 1e3 / steps, is_host=device.type == "cpu"
    )


class _Session:
    """Counts steps: warm-up, timed steps, one to start the profiler, profiled steps."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.device = device
        self._begin = WARM_UP_STEPS[device.type]
        self._end = self._begin + steps
        self.num_steps = self._end + 1 + steps
        self._done = 0
        self._watch = Stopwatch()
        self.timed_s = 0.0
        # One step to start the profiler, whose first step is slow.
        plan = schedule(wait=self._end, warmup=1, active=steps, repeat=1)
        self.profiler = profile(activities=[_choose_activity(device)], schedule=plan, acc_events=True)

    def count_step(self) -> None:
        self._done += 1
        if self._done in (self._begin, self._end, self._end + 1, self.num_steps) and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._done == self._begin:
            self._watch.restart()
        elif self._done == self._end:
            self.timed_s = self._watch.elapsed_s
        self.profiler.step()


def _choose_activity(device: torch.device) -> ProfilerActivity:
    # CUDA only: recording operators too would slow the host and widen the gaps to be measured.
    return ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU


def _collect_events(seen: Sequence[FunctionEvent] | None, device: torch.device) -> Iterator[ProfileEvent]:
    for event in seen or ():
        # Skip annotations (`ProfilerStep`, `Optimizer.step`): they span other events.
        if event.device_type.name != device.type.upper() or event.is_user_annotation or event.name in NOT_WORK:
            continue
        start_us, end_us = event.time_range.start, event.time_range.end
        self_us = end_us - start_us if device.type == "cuda" else event.self_cpu_time_total
        yield ProfileEvent(name=_name_event(event), start_us=start_us, end_us=end_us, self_us=self_us)


def _name_event(event: FunctionEvent) -> str:
    """Name a CPU copy with its caller, because casts and layout changes are both `aten::copy_`."""
    parent = event.cpu_parent
    return f"{event.name} in {parent.name}" if event.name == "aten::copy_" and parent else str(event.name)


class OpKind(StrEnum):
    """What a kernel or operator does."""

    CONV_FORWARD = "convolution forward"
    CONV_INPUT_GRADIENT = "convolution input gradient"
    CONV_WEIGHT_GRADIENT = "convolution weight gradient"
    CONV_BACKWARD = "convolution backward"
    """Both gradients in one operator, as on a CPU."""
    MATMUL = "matrix product"
    ATTENTION = "attention"
    FUSED = "fused by the compiler"
    """Elementwise operators, normalisations and their reductions in one Triton or C++ kernel."""
    CHAIN = "fused by hand"
    """Normalisations, activations and their reductions in halfstep's own kernels between convolutions or matmuls."""
    ELEMENTWISE = "elementwise"
    """One operator per kernel; also pooling, concatenation, softmax and losses."""
    NORMALISATION = "normalisation"
    REDUCTION = "reduction"
    CAST = "cast"
    LAYOUT = "layout copy"
    OPTIMIZER = "optimizer and clipping"
    COPY_IN = "copy from the host"
    COPY_OUT = "copy to the host"
    COPY = "copy on the device"
    FILL = "fill"
    BOOKKEEPING = "allocation and autograd"
    """On a CPU only: the overhead of an operator."""
    OTHER = "other"


MEMORY_BOUND = {
    OpKind.FUSED,
    OpKind.CHAIN,
    OpKind.ELEMENTWISE,
    OpKind.NORMALISATION,
    OpKind.REDUCTION,
    OpKind.CAST,
}
MEMORY_BOUND |= {OpKind.LAYOUT, OpKind.OPTIMIZER, OpKind.COPY, OpKind.FILL}
"""Kinds with few operations per byte, limited by memory bandwidth."""

_AROUND = r"(?:convolution_backward|convolution|_unsafe_view|view|permute|transpose|unsqueeze|expand|t)_"
"""Operators that add no work to a pointwise Triton kernel."""

_COPY = r"direct_copy_kernel_cuda"

OWN_RULES: tuple[tuple[OpKind, str], ...] = (
    (OpKind.CONV_FORWARD, r"^_convolve$"),
    (OpKind.CONV_WEIGHT_GRADIENT, r"^_weight_gradient$"),
    (OpKind.MATMUL, r"^(?:doubled|halved|weight_parts)_kernel$"),
    (OpKind.ATTENTION, r"^_attention\w*$"),
    (OpKind.OPTIMIZER, r"^_(?:update|count|average)$"),
    (
        OpKind.CHAIN,
        r"^(?:logits|head_\w+|pool\w*)_kernel$|^_(?:partial_sums|finish\w*|normalised|gradient_of_raw)$",
    ),
    (
        OpKind.CHAIN,
        r"^_(?:join\w*|pair_gradients|pool\w*|pad|arrange|add_norm\w*|gelu\w*|packed|rows_to_gradients|group_\w+|add_branch|row_sums)$",
    ),
)
"""halfstep's kernels, in kernels/ and step/; only their names are plain Python identifiers."""

KERNEL_RULES: tuple[tuple[OpKind, str], ...] = (
    (OpKind.COPY_IN, r"^Memcpy HtoD"),
    (OpKind.COPY_OUT, r"^Memcpy DtoH"),
    (OpKind.COPY, r"^Memcpy"),
    (OpKind.FILL, r"^Memset"),
    (OpKind.ATTENTION, r"^triton_tem_.*(?:attention|sdpa)"),
    (OpKind.CONV_FORWARD, r"^triton_tem_.*convolution"),
    (OpKind.MATMUL, r"^triton_tem_"),
    (OpKind.OPTIMIZER, r"^triton_for_"),  # the compiler's foreach kernels
    (OpKind.CAST, rf"^triton_poi_fused_(?:{_AROUND})*_to_copy_(?:{_AROUND})*\d+$"),
    (OpKind.LAYOUT, rf"^triton_poi_fused_(?:{_AROUND})*clone_(?:{_AROUND})*\d+$"),
    (OpKind.FUSED, r"^triton_"),
    (OpKind.ATTENTION, r"flash_(?:fwd|bwd)|flash::|fmha|sdpa|flashattn|flash_attn"),
    # Kernels that cuDNN runs around the backward of its attention.
    (OpKind.ATTENTION, r"cudnn::fusion::(?:compute_dot_do_o|convert_dq)"),
    # A foreach copy between equal types is a copy, between different types a cast.
    (OpKind.COPY, r"multi_tensor_apply_kernel.*native::Copy<([\w:]+), \1>"),
    (OpKind.CAST, r"multi_tensor_apply_kernel.*native::Copy<"),
    (OpKind.OPTIMIZER, r"multi_tensor_apply_kernel|FusedAdam|FusedSgd|FusedAdagrad|lerp|kOptimizer"),
    (OpKind.LAYOUT, r"nchwToNhwc|nhwcToNchw|nhwcAddPadding|tensorTransform|transpose_readWrite"),
    (OpKind.CONV_WEIGHT_GRADIENT, r"wgrad|conv\w*_(?:grad|backward)_weight|bwd_filter"),
    (OpKind.CONV_INPUT_GRADIENT, r"dgrad|conv_depthwise\w*_backward|bwd_data"),
    (OpKind.CONV_FORWARD, r"fprop|convFwd|convolve|conv2d|conv_depthwise|winograd|fft2d|im2col"),
    # Strided copies within one type change the layout; contiguous ones are vectorised; the rest are casts.
    (OpKind.LAYOUT, rf"gpu_kernel_impl_nocast<.*{_COPY}"),
    (OpKind.COPY, rf"vectorized_elementwise_kernel<.*{_COPY}|{_COPY}.*WithoutCast"),
    (
        OpKind.CAST,
        rf"{_COPY}|float16\w*_copy_kernel|bfloat16\w*_copy_kernel|float8\w*_copy_kernel|convertTensor_kernel",
    ),
    (OpKind.NORMALISATION, r"batch_?norm|bn_(?:fw|bw)|(?:layer|group|rms)_?norm|RowwiseMoments|GammaBetaBackward"),
    (OpKind.NORMALISATION, r"ComputeInternalGradients|ComputeFusedParams|ComputeBackwardFusedParams"),
    (OpKind.MATMUL, r"gemm|nvjet|gemv|cublas|splitK|cutlass"),
    (OpKind.FILL, r"FillFunctor|setTensor\dd"),
    (OpKind.REDUCTION, r"reduce_kernel|DeviceReduce|reduce_1Block|dot_kernel"),
    (OpKind.ELEMENTWISE, r"elementwise|softmax|pool|nll_loss|CatArrayBatched|upsample|dropout|embedding"),
    (OpKind.ELEMENTWISE, r"index|gather|scatter|_pad\d?d|triu_tril|scalePackedTensor|cub::Device|where_kernel"),
)

OPERATOR_RULES: tuple[tuple[OpKind, str], ...] = (
    # The compiler's C++ kernels are not recorded one by one: they are the self time of their graph.
    (OpKind.FUSED, r"cpp_fused|^## Call CompiledFxGraph"),
    (OpKind.ATTENTION, r"^aten::_?scaled_dot_product|attention"),
    (OpKind.CONV_BACKWARD, r"^aten::\w*convolution\w*_backward|^aten::_slow_conv\w*_backward"),
    (OpKind.CONV_FORWARD, r"^aten::\w*convolution|^aten::\w*conv\dd|^mkldnn::_convolution"),
    (OpKind.MATMUL, r"^aten::(?:addmm|mm|bmm|baddbmm|matmul|linear|dot|mv|addmv)_?$|^mkl|^mkldnn::_linear"),
    (OpKind.OPTIMIZER, r"^aten::_fused_|^aten::_foreach|^aten::lerp|^aten::(?:linalg_vector_norm|_amp_)"),
    (OpKind.NORMALISATION, r"(?:batch|layer|group|rms)_norm"),
    (OpKind.CAST, r"copy_ in aten::_to_copy$"),
    (OpKind.LAYOUT, r"copy_ in aten::(?:clone|contiguous)$"),
    (OpKind.COPY, r"^aten::copy_"),
    (OpKind.FILL, r"^aten::(?:fill_|zero_|zeros|ones|full)"),
    (OpKind.REDUCTION, r"^aten::(?:sum|mean|amax|amin|max|min|norm|var|std|all|any)$"),
    (
        OpKind.BOOKKEEPING,
        r"^aten::(?:empty|as_strided|view|_?reshape|t$|transpose|permute|expand|detach|to$|slice)",
    ),
    (
        OpKind.BOOKKEEPING,
        r"^aten::(?:_to_copy|clone|contiguous|resize|resolve|flatten|unsqueeze|squeeze|select|item)",
    ),
    (
        OpKind.BOOKKEEPING,
        r"^aten::(?:_unsafe_view|_local_scalar|alias|set_|lift|result_type|narrow|unbind|split|chunk)",
    ),
    (OpKind.BOOKKEEPING, r"^autograd::|^torch::autograd::|Backward\d+$|^detach"),
    (OpKind.BOOKKEEPING, r"^Torch-Compiled|^CompiledFunction|^TorchDynamo|^AOTDispatcher|^Pregraph"),
    (OpKind.ELEMENTWISE, r"^aten::"),
)


def _compile_rules(rules: tuple[tuple[OpKind, str], ...]) -> tuple[tuple[OpKind, re.Pattern[str]], ...]:
    return tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in rules)


_KERNELS, _OPERATORS = _compile_rules(OWN_RULES + KERNEL_RULES), _compile_rules(OPERATOR_RULES)


def classify_kernel(name: str) -> OpKind:
    """Classify a CUDA kernel, memory copy or memset by name."""
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), OpKind.OTHER)


def classify_operator(name: str) -> OpKind:
    """Classify a CPU operator by name; `aten::copy_ in PARENT` is a copy made by the operator PARENT."""
    return next((kind for kind, pattern in _OPERATORS if pattern.search(name)), OpKind.OTHER)
