"""What does each of halfstep's own kernels gain alone? Time the training step with one part on and off.

    python benchmarks/kernel_gains.py [--only unet,head] [--pairs 9] [--seconds 520] [--out DIR]
    python benchmarks/kernel_gains.py --dry

A part that is off is replaced in the training process by what halfstep would use without it:

    stem         the first convolution by cuDNN
    pool         torch's max pooling, with kept indices, of a normalised map that is written
    head         the last 1×1 convolution by cuDNN, of a normalised map that is written
    upsample     the transposed convolution by cuDNN, copied into the concatenation
    normalise    BatchNorm and ReLU as the same formulas compiled by inductor; a formula that it fails on runs eagerly
    group_norm   residual blocks compiled one by one (torch.compile), where they run by our kernels otherwise
    attention    backward of attention over few tokens by torch
    ema          the average by torch's operations on chunks (step/ema.py)
    adamw        torch's fused AdamW, which writes the scaled gradients back

Cases and their settings are those of the other speed benchmarks, in bf16, captured as one CUDA graph. Each case trains
once with all parts and once without each, every time in its own process. The processes of a group of cases, as many as
the GPU's memory holds, compile side by side; one at a time has the device while kernels are chosen (row_turns.py).
Then windows alternate between the two processes of a pair (speed_commits.py). `ratio` is the time without the part
over the time with it, with its 95 % interval. A variant whose part was never asked for reports that as its problem.

`--dry` runs on a CPU: every variant builds a small model and applies its switch; those that Triton's interpreter can
run must give the loss and the gradients of the kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from halfstep.errors import summarise_error
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe
from halfstep.step import commit, ema
from halfstep_train.bench.bench import BenchRequest, HalfstepRunner, list_runners
from halfstep_train.bench.problem import build_problem, build_random_workload, load_bench_config
from halfstep_train.config.schema import RunConfig
from halfstep_train.kernels import chain, normalise, resnet_chain, stem, transformer_chain, unet_chain
from halfstep_train.kernels.fast_forms import force
from halfstep_train.kernels.normalise import GradientSums, Norm
from halfstep_train.run.engine import make_engine
from recording import store
from row_turns import TURNS, Turn
from speed_cases import CASES as SPEED_CASES
from speed_cases import SCHEDULE, config_of
from speed_commits import ENDLESS, T_95, Trainer, WindowClock, compare
from speed_processes import own_decisions

WINDOW_S = 0.35
MOST_GB, CONTEXT_GB, MOST_PROCESSES = 115, 1, 14
"""What the processes of one group may take of an H200, with its CUDA context each, and of 16 cores."""
COMPILING_SHARE = 0.7
"""Of the time that is left to a group: a variant that is not compiled by then is left out."""
ALL_ON = "all on"
NORM_BLOCKS = ("ResnetBlock2D", "TimedBlock", "ResidualBlock")
"""Blocks that run by our GroupNorm kernels."""
INTERPRETED = ("stem", "pool", "head", "upsample", "normalise", "group_norm")
"""Parts whose replacement runs on a CPU too; group_norm's is made with the workload."""
GRADIENT_BOUND = 1e-3
"""Relative, of fp32 sums in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    config: Callable[[bool], RunConfig]
    """Whether small, to the config."""
    parts: tuple[str, ...]
    ms: float
    """Of a step, about: it sets the number of steps of a window."""
    gb: float
    """Of one process, about."""


def vision(name: str, small_workload: str, *small: str) -> Callable[[bool], RunConfig]:
    words = (*small, "train.batch_size=2")
    return lambda is_small: (
        load_bench_config(small_workload, words, {}, small=False) if is_small else config_of(SPEED_CASES[name])
    )


def diffusion(name: str) -> Callable[[bool], RunConfig]:
    def config(is_small: bool) -> RunConfig:
        import diffusion_speed  # needs diffusers

        made: RunConfig = diffusion_speed.config_of(name, is_small)
        return made

    return config


def radio(is_small: bool) -> RunConfig:
    import radiodiff_speed as speed

    small = (*speed.SMALL, *speed.SMALL_UNET) if is_small else ()
    return load_bench_config("radiodiff", (*speed.COMMON, *small, "ema.enabled=true"), {}, small=False)


def gpt2(is_small: bool) -> RunConfig:
    import gpt2_speed as speed

    size = {"batch_size": speed.SMALL_BATCH if is_small else 16}
    return load_bench_config("gpt2", speed.SMALL if is_small else (), size, small=False)


def steve(is_small: bool) -> RunConfig:
    import steve_speed as speed

    words = (*speed.SMALL["steve"], "train.batch_size=2") if is_small else ("train.batch_size=24",)
    return load_bench_config("steve", words, {}, small=False)


def slotcontrast(is_small: bool) -> RunConfig:
    import slotcontrast_speed as speed

    words = (*speed.WORDS, *(speed.SMALL if is_small else ("train.batch_size=64",)))
    return load_bench_config("slotcontrast", words, {}, small=False)


SMALL_UNET = ("data.image_size=16", "model.base_channels=16", "model.depth=1")
SMALL_RESNET = ("resnet18", "data.image_size=32")
SMALL_VIT = ("vit_s_16", "data.image_size=32")
RESNET = ("stem", "pool", "normalise")
AVERAGED = ("group_norm", "ema", "adamw")

CASES = {
    "unet": Case(
        config=vision("unet", "unet", *SMALL_UNET), parts=("stem", "pool", "head", "upsample", "normalise", "adamw"),
        ms=21, gb=6,
    ),
    "resnet50_64": Case(config=vision("resnet50_64", *SMALL_RESNET), parts=(*RESNET, "adamw"), ms=9, gb=4),
    "vit_l_64": Case(config=vision("vit_l_64", *SMALL_VIT), parts=("attention", "adamw"), ms=50, gb=17),
    "ddpm": Case(config=diffusion("ddpm"), parts=AVERAGED, ms=33, gb=5),
    "vae": Case(config=diffusion("vae"), parts=AVERAGED, ms=36, gb=5),
    "gpt2": Case(config=gpt2, parts=("adamw",), ms=32, gb=8),
    "radiodiff": Case(config=radio, parts=AVERAGED, ms=75, gb=9),
    "resnet50_256": Case(config=vision("resnet50_256", *SMALL_RESNET), parts=RESNET, ms=29, gb=13),
    "steve": Case(config=steve, parts=("adamw",), ms=41, gb=8),
    "slotcontrast": Case(config=slotcontrast, parts=("adamw",), ms=142, gb=7),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases and parts, with commas; all unless given")
    parser.add_argument("--pairs", type=int, default=9, choices=[dof + 1 for dof in T_95])
    parser.add_argument("--seconds", type=float, default=520, help="for everything")
    parser.add_argument("--dry", action="store_true", help="build and switch every variant on a CPU")
    parser.add_argument("--merge", help="JSON of an earlier call, whose other results are kept")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--train", nargs=2, metavar=("CASE", "PART"), help=argparse.SUPPRESS)  # a training process
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train)
        return
    cases = select_cases(arguments.only, parser)
    if arguments.dry:
        sys.exit(try_on_cpu(cases))
    time_parts(cases, arguments)


def select_cases(only: str, parser: argparse.ArgumentParser) -> dict[str, Case]:
    words = {word for word in only.split(",") if word}
    if unknown := words - set(CASES) - set(PARTS):
        parser.error(f"unknown {', '.join(sorted(unknown))}: there are {', '.join([*CASES, *PARTS])}")
    names, parts = words & set(CASES) or set(CASES), words & set(PARTS) or set(PARTS)
    chosen = {
        name: dataclasses.replace(case, parts=tuple(part for part in case.parts if part in parts))
        for name, case in CASES.items()
        if name in names
    }
    return {name: case for name, case in chosen.items() if case.parts}


# --- the process that starts the others ---


def time_parts(cases: dict[str, Case], arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + arguments.seconds
    gains: dict[str, dict[str, Any]] = json.loads(Path(arguments.merge).read_text())["gains"] if arguments.merge else {}

    def note(case: str, part: str, found: dict[str, Any]) -> None:
        gains.setdefault(case, {})[part] = found
        print(case, part, json.dumps({key: value for key, value in found.items() if key != "pairs_ms"}), flush=True)
        settings = {"precision": "bf16", "mode": "graph", "pairs": arguments.pairs}
        store("kernel_gains", {**settings, "gains": gains}, torch.device("cuda"), arguments.out)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hardware.json").write_text(json.dumps(measure(probe("cuda")).to_dict()))
        for group in group_cases(cases):
            time_group(group, Path(folder), deadline, arguments.pairs, note)


def group_cases(cases: dict[str, Case]) -> list[dict[str, Case]]:
    """Split the cases, in order, into groups whose processes fit the device at once."""
    groups: list[dict[str, Case]] = [{}]
    for name, case in cases.items():
        together = [*groups[-1].values(), case]
        num_processes = sum(1 + len(other.parts) for other in together)
        gb = sum((1 + len(other.parts)) * (other.gb + CONTEXT_GB) for other in together)
        if groups[-1] and (gb > MOST_GB or num_processes > MOST_PROCESSES):
            groups.append({})
        groups[-1][name] = case
    return groups


def time_group(
    cases: dict[str, Case], folder: Path, deadline: float, pairs: int, note: Callable[[str, str, dict[str, Any]], None]
) -> None:
    jobs = [(name, part) for name, case in cases.items() for part in (ALL_ON, *case.parts)]
    began = time.monotonic()
    compiled_by = began + COMPILING_SHARE * (deadline - began)
    if began > deadline - 60:
        for name, part in jobs:
            if part != ALL_ON:
                note(name, part, {"problem": "no time was left to start it"})
        return
    trainers = {job: start(*job, folder, num_beside=len(jobs)) for job in jobs}
    try:
        problems = {job: wait_until_ready(trainers[job], log_of(folder, *job), compiled_by) for job in jobs}
        print(f"{time.monotonic() - began:.0f} s to compile {len(jobs)} variants of {', '.join(cases)}", flush=True)
        for name, part in jobs:
            if part == ALL_ON:
                continue
            problem = problems[name, ALL_ON] or problems[name, part]
            if not problem and time.monotonic() > deadline:
                problem = "no time was left to time it"
            if problem:
                note(name, part, {"problem": problem})
            else:
                found = time_pair(trainers[name, ALL_ON], trainers[name, part], pairs)
                lines = log_of(folder, name, part).read_text(errors="replace").splitlines()
                remarks = [line for line in lines if "runs eagerly: " in line]
                note(name, part, {**found, "remarks": remarks} if remarks else found)
    finally:
        for trainer in trainers.values():
            trainer.process.kill()
            trainer.process.wait()


def start(name: str, part: str, folder: Path, *, num_beside: int) -> Trainer:
    threads = max(2, (os.cpu_count() or 2) // num_beside)
    with log_of(folder, name, part).open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--train", name, part],
            env={**os.environ, TURNS: str(folder), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    return Trainer(process, process.stdin, process.stdout)


def log_of(folder: Path, name: str, part: str) -> Path:
    return folder / f"{name}-{part.replace(' ', '_')}.log"


def wait_until_ready(trainer: Trainer, log: Path, until: float) -> str:
    """Return why this process cannot be timed; "" if it can."""
    timer = threading.Timer(max(0.0, until - time.monotonic()), trainer.process.kill)
    timer.start()
    try:
        trainer.wait()
        return ""
    except RuntimeError as error:
        if time.monotonic() >= until:
            return "not compiled in time"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{error}: {lines[-1][-400:] if lines else 'no output'}"  # the exception, without paths of the machine
    finally:
        timer.cancel()


def time_pair(with_part: Trainer, without_part: Trainer, pairs: int) -> dict[str, Any]:
    try:
        found = compare(with_part, without_part, num_pairs=pairs)
        gb = {"with_gb": with_part.read_peak_bytes() / 1e9, "without_gb": without_part.read_peak_bytes() / 1e9}
    except (RuntimeError, OSError) as error:
        return {"problem": str(error)}
    times = {"with_ms": found.pop("old_ms"), "without_ms": found.pop("new_ms")}
    return {**times, "gain_ms": times["without_ms"] - times["with_ms"], **gb, **found}


# --- a training process ---


def train(name: str, part: str) -> None:
    """Train a case, without a part unless it is ALL_ON, and time windows on demand."""
    case, turn = CASES[name], Turn()
    calls: list[str] = []
    engines: list[Any] = []

    def check_then_leave() -> None:
        if part != ALL_ON and not calls:
            raise RuntimeError(f"{part} was never asked for: this case does not use it here")
        if engines[0].mode != "graph":
            raise RuntimeError(f"ran as {engines[0].mode}: {'; '.join(runner.remarks)}")
        turn.leave()

    def make_and_keep(*arguments: Any) -> Any:
        engines[:] = [make_engine(*arguments)]  # not those of trials: they hold a model each
        return engines[0]

    with own_decisions(), switch_off(part, calls), replaced_everywhere(make_engine, make_and_keep):
        hardware = turn.hardware("cuda")
        problem = turn.lent_to(build_problem(case.config(False), torch.device(hardware.device)))
        request = BenchRequest(precisions=("bf16",), modes=("graph",), schedule=SCHEDULE)
        [runner] = list_runners(problem, request, hardware)
        assert isinstance(runner, HalfstepRunner), runner
        runner.train(ENDLESS, WindowClock(max(4, round(WINDOW_S * 1e3 / case.ms)), check_then_leave))


# --- switches ---


@contextlib.contextmanager
def switch_off(part: str, calls: list[str]) -> Iterator[None]:
    """Replace a part; `calls` fills as its replacement is used."""
    with contextlib.ExitStack() as stack:
        for original, replacement in PARTS[part](calls) if part != ALL_ON else ():
            stack.enter_context(replaced_everywhere(original, replacement))
        yield


@contextlib.contextmanager
def replaced_everywhere(original: object, replacement: object) -> Iterator[None]:
    """Every module of halfstep that imported `original` has `replacement` within."""
    found = [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.partition(".")[0] == "halfstep"
        for name, value in vars(module).items()
        if value is original
    ]
    assert found, f"no module has {original}"
    for module, name in found:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name in found:
            setattr(module, name, original)


Replacements = list[tuple[object, object]]


def refused(original: Callable[..., bool], calls: list[str]) -> tuple[object, object]:
    """A test that says no; a call that would have said yes counts."""

    def refuse(*arguments: Any) -> bool:
        if original(*arguments):
            calls.append(original.__name__)
        return False

    return original, refuse


def counted(original: object, replacement: Any, calls: list[str]) -> tuple[object, object]:
    """An autograd function in place of another: its `apply` counts."""

    class Counted(replacement):  # type: ignore[misc]
        @classmethod
        def apply(cls, *arguments: Any) -> Any:
            calls.append(replacement.__name__)
            return replacement.apply(*arguments)

    return original, Counted


def without_stem(calls: list[str]) -> Replacements:
    return [refused(stem.can_run_stem, calls)]


def without_pool(calls: list[str]) -> Replacements:
    return [counted(unet_chain.PoolConv, TorchPoolConv, calls), counted(resnet_chain.StemPool, TorchStemPool, calls)]


def without_head(calls: list[str]) -> Replacements:
    return [counted(unet_chain.Head, TorchHead, calls)]


def without_upsample(calls: list[str]) -> Replacements:
    return [counted(unet_chain.UpConcatConv, TorchUpConcatConv, calls)]


def without_attention(calls: list[str]) -> Replacements:
    return [refused(transformer_chain.is_short, calls)]


def without_ema(calls: list[str]) -> Replacements:
    return [refused(ema.can_use_kernel, calls)]


def without_adamw(calls: list[str]) -> Replacements:
    return [refused(commit.can_run_single_pass, calls)]


def without_group_norm(calls: list[str]) -> Replacements:
    def compiled_blocks(config: RunConfig) -> Any:
        workload = build_random_workload(config)
        blocks = dict(workload.blocks)
        for kind in blocks:
            if kind.__name__ in NORM_BLOCKS:
                blocks[kind] = None
                calls.append(kind.__name__)
        return dataclasses.replace(workload, blocks=blocks)

    return [(build_random_workload, compiled_blocks)]


def without_normalise(calls: list[str]) -> Replacements:
    torch._dynamo.config.recompile_limit = 64  # one for each shape of a map
    compiled = torch.compile(dynamic=False, backend="eager" if "--dry" in sys.argv else "inductor")
    formulas = (torch_statistics, torch_apply, torch_sums, torch_raw)
    statistics, apply, sums, raw = (compiled_or_eager(formula, compiled(formula)) for formula in formulas)

    def compute_norm(y: Tensor, norm: nn.BatchNorm2d) -> Norm:
        calls.append("compute_norm")
        norm.num_batches_tracked.add_(1)  # type: ignore[union-attr,operator]
        running = norm.running_mean, norm.running_var
        return Norm(
            *statistics(y.detach(), norm.weight.detach(), norm.bias.detach(), *running, norm.eps, norm.momentum)
        )

    def normalise_map(y: Tensor, norm: Norm, *, out: Tensor | None = None) -> Tensor:
        z: Tensor = apply(y, norm.scale, norm.offset, out)
        return z

    def sum_gradients(dz: Tensor, y: Tensor, norm: Norm) -> GradientSums:
        return GradientSums(*sums(dz, y, *norm))

    def compute_raw_gradient(g: Tensor, y: Tensor, norm: Norm, totals: GradientSums, *, masked: bool) -> Tensor:
        return raw(g, y, *norm, totals.g, totals.gx, masked).contiguous(memory_format=torch.channels_last)

    return [
        (normalise.compute_norm, compute_norm),
        (normalise.normalise, normalise_map),
        (normalise.sum_gradients, sum_gradients),
        (normalise.compute_raw_gradient, compute_raw_gradient),
    ]


def compiled_or_eager(formula: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Run a formula compiled, and eagerly from the first call on that the compiler fails on."""
    use = [compiled]

    def run(*arguments: Any) -> Any:
        try:
            return use[0](*arguments)
        except Exception as error:  # whatever the compiler raises; the formula's own errors come again below
            if use[0] is formula:
                raise
            print(f"{formula.__name__} runs eagerly: {summarise_error(error)}", file=sys.stderr)
            use[0] = formula
            return formula(*arguments)

    return run


PARTS: dict[str, Callable[[list[str]], Replacements]] = {
    "stem": without_stem,
    "pool": without_pool,
    "head": without_head,
    "upsample": without_upsample,
    "normalise": without_normalise,
    "group_norm": without_group_norm,
    "attention": without_attention,
    "ema": without_ema,
    "adamw": without_adamw,
}


# --- BatchNorm and ReLU in plain torch, for the compiler (formulas: kernels/normalise.py) ---


def columns(vector: Tensor) -> Tensor:
    return vector[:, None, None]


def torch_statistics(
    y: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float, momentum: float
) -> tuple[Tensor, ...]:
    variance, mean = torch.var_mean(y.float(), dim=(0, 2, 3), correction=0)
    count = y.numel() // y.shape[1]
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * (count / (count - 1)), momentum)
    inverse = (variance + eps).rsqrt()
    scale = weight * inverse
    return mean, inverse, scale, bias - mean * scale


def torch_apply(y: Tensor, scale: Tensor, offset: Tensor, out: Tensor | None) -> Tensor:
    z = F.relu(y.float() * columns(scale) + columns(offset)).to(y.dtype)
    return z if out is None else out.copy_(z)


def torch_masked(g: Tensor, y: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return torch.where(y.float() * columns(scale) + columns(offset) > 0, g.float(), 0.0)


def torch_sums(
    dz: Tensor, y: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, offset: Tensor
) -> tuple[Tensor, ...]:
    g = torch_masked(dz, y, scale, offset)
    total, product = g.sum((0, 2, 3)), (g * (y.float() - columns(mean))).sum((0, 2, 3))
    return total, product, inverse * product


def torch_raw(
    g: Tensor, y: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, offset: Tensor,
    sum_g: Tensor, sum_gx: Tensor, masked: bool,
) -> Tensor:  # fmt: skip
    g = torch_masked(g, y, scale, offset) if masked else g.float()
    count = y.numel() // y.shape[1]
    slope = inverse.square() * sum_gx / count
    dy = columns(scale) * (g - columns(sum_g / count) - (y.float() - columns(mean)) * columns(slope))
    return dy.to(y.dtype)


# --- pooling, upsampling and the head by torch's and cuDNN's kernels, between our BatchNorm kernels ---


def gradient_through_norm(dz: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, GradientSums]:
    sums = normalise.sum_gradients(dz, y, norm)
    return normalise.compute_raw_gradient(dz, y, norm, sums, masked=True), sums


class TorchPoolConv(unet_chain.PoolConv):
    @staticmethod
    def forward(ctx: Any, y: Tensor, _weight: Tensor, _bias: Tensor, w_conv: Tensor, norm: Norm) -> Any:
        w, full = chain.cast_weight(y, w_conv), normalise.normalise(y, norm)
        z, indices = torch.ops.aten.max_pool2d_with_indices(full, [2, 2], [2, 2])
        ctx.save_for_backward(y, w, z, full, indices, *norm)
        n, channels, height, width = y.shape
        return chain.convolve(z, w, 1, 1), y.new_empty(1).expand(n, 2 * channels, height, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        y, w, z, full, indices, *vectors = ctx.saved_tensors
        with chain.SideStream(y.device) as side:
            dz, dw = chain.convolve_backward(side, gradients[0], z, w, 1, 1, (True, ctx.needs_input_grad[3]))
            dfull = torch.ops.aten.max_pool2d_with_indices_backward(
                dz, full, [2, 2], [2, 2], [0, 0], [1, 1], False, indices
            )
            dfull += gradients[1][:, : y.shape[1]]
            dy, sums = gradient_through_norm(dfull, y, Norm(*vectors))
        return dy, sums.weight, sums.g, dw, None


class TorchStemPool(resnet_chain.StemPool):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, _weight: Tensor, _bias: Tensor, norm: nn.BatchNorm2d, keep: bool, strides: Any, *ws: Tensor
    ) -> Any:
        how = normalise.compute_norm(y, norm)
        full = normalise.normalise(y, how)
        z, indices = torch.ops.aten.max_pool2d_with_indices(full, [3, 3], [2, 2], [1, 1])
        found, cast = resnet_chain.convolve_readers(z, ws, strides)
        ctx.save_for_backward(y, full, indices, z, *how, *cast)
        ctx.strides = strides
        ctx.set_materialize_grads(False)
        return z, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, *gradients: Tensor) -> Any:
        y, full, indices, z, *kept = ctx.saved_tensors
        wants = ctx.needs_input_grad
        with chain.SideStream(z.device) as side:
            dzs, dws = resnet_chain.compute_reader_gradients(side, gradients, z, kept[4:], ctx.strides, True, wants[6:])
            total = sum(dzs[1:], dzs[0]) if dz is None else sum(dzs, dz)
            assert isinstance(total, Tensor)
            dfull = torch.ops.aten.max_pool2d_with_indices_backward(
                total.contiguous(memory_format=torch.channels_last), full,
                [3, 3], [2, 2], [1, 1], [1, 1], False, indices,
            )  # fmt: skip
            dy, sums = gradient_through_norm(dfull, y, Norm(*kept[:4]))
        return (dy, sums.weight, sums.g, None, None, None, *dws)


class TorchHead(unet_chain.Head):
    @staticmethod
    def forward(ctx: Any, y: Tensor, _weight: Tensor, _bias: Tensor, w_out: Tensor, b_out: Tensor, norm: Norm) -> Any:
        w, z = w_out.to(y.dtype), normalise.normalise(y, norm)
        ctx.save_for_backward(y, z, w, *norm)
        return torch.ops.aten.convolution(z, w, b_out.to(y.dtype), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        y, z, w, *vectors = ctx.saved_tensors
        dz, dw, db = torch.ops.aten.convolution_backward(
            gradients[0], z, w, [len(w)], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
        )
        dy, sums = gradient_through_norm(dz.contiguous(memory_format=torch.channels_last), y, Norm(*vectors))
        return dy, sums.weight, sums.g, dw, db, None


class TorchUpConcatConv(unet_chain.UpConcatConv):
    @staticmethod
    def forward(
        ctx: Any, promise: Tensor, skip: Tensor, skip_norm: Norm, deep: Tensor, _weight: Tensor, _bias: Tensor,
        w_up: Tensor, b_up: Tensor, w_conv: Tensor, norm: Norm, keep: bool,
    ) -> Any:  # fmt: skip
        w, w_up = chain.cast_weight(deep, w_conv), chain.cast_weight(deep, w_up)
        z = normalise.normalise(deep, norm)
        n, channels, height, width = skip.shape
        shape = (n, channels + len(b_up), height, width)
        cat = torch.empty(shape, dtype=skip.dtype, device=skip.device, memory_format=torch.channels_last)
        normalise.normalise(skip, skip_norm, out=cat[:, :channels])
        with torch.autocast(deep.device.type, enabled=False):
            cat[:, channels:] = F.conv_transpose2d(z, w_up, b_up.to(deep.dtype), stride=2)
        ctx.save_for_backward(skip, deep, w, w_up, z, cat, *norm)
        return chain.convolve(cat, w, 1, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        skip, deep, w, w_up, z, cat, *vectors = ctx.saved_tensors
        with chain.SideStream(deep.device) as side:
            dcat, dw = chain.convolve_backward(side, gradients[0], cat, w, 1, 1, (True, ctx.needs_input_grad[8]))
            assert dcat is not None
            dhalf = dcat[:, skip.shape[1] :].contiguous(memory_format=torch.channels_last)
            side.keep(dhalf)
            with side.work_aside():
                _, dw_up, db_up = transposed_gradients(dhalf, z, w_up, [False, True, True])
            dz, _, _ = transposed_gradients(dhalf, z, w_up, [True, False, False])
            ddeep, sums = gradient_through_norm(dz.contiguous(memory_format=torch.channels_last), deep, Norm(*vectors))
        return dcat, None, None, ddeep, sums.weight, sums.g, dw_up, db_up, dw, None, None


def transposed_gradients(dy: Tensor, z: Tensor, w: Tensor, wants: list[bool]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dy, z, w, [w.shape[1]], [2, 2], [0, 0], [1, 1], True, [0, 0], 1, wants
    )
    return found


# --- on a CPU ---


def try_on_cpu(cases: dict[str, Case]) -> int:
    """Return how many variants fail."""
    failed = 0
    for name, case in cases.items():
        kernels: tuple[float, float] | None = None
        for part in (ALL_ON, *case.parts):
            calls: list[str] = []
            try:
                found = run_small(name, part, calls)
                kernels = kernels or found
                if part in INTERPRETED and not calls:
                    raise AssertionError("the replacement was not used")
                near = all(abs(a - b) <= GRADIENT_BOUND * abs(b) for a, b in zip(found, kernels, strict=True))
                failed += not near
                state = f"{'ok' if near else 'DIFFERS'}: loss {found[0]:.6f}, gradient norm {found[1]:.6f}"
            # Any error of one variant is reported, and the others go on.
            except Exception as error:
                failed += 1
                state = f"FAILED: {type(error).__name__}: {summarise_error(error)}"
            print(f"{name:13s} {part:11s} {state}; replaced {len(calls)}", flush=True)
    return failed


def run_small(name: str, part: str, calls: list[str]) -> tuple[float, float]:
    """Return the loss and the norm of all gradients of a small model in fp32, with kernels interpreted."""
    with switch_off(part, calls), force(True, "chain"):
        config = CASES[name].config(True)
        torch.manual_seed(0)
        problem = build_problem(config, torch.device("cpu"))
        model = problem.make_model().to(memory_format=torch.channels_last).train()
        torch.manual_seed(0)
        batch = problem.prepare(problem.host_batch)
        for key, value in batch.items():
            batch[key] = value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value
        loss = problem.loss(model, batch)
        loss.backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        return float(loss.detach()), float(torch.stack(norms).norm())


if __name__ == "__main__":
    main()
