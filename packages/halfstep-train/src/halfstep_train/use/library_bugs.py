"""`halfstep detect --bugs`: which known bugs of torch and cuDNN this machine has, and that halfstep avoids them.

Each bug has one small test that trains or computes for real, in milliseconds. It runs twice: as plain PyTorch code, and
the same with halfstep. It returns True if the symptom occurs. docs/library_bugs.md describes every bug, with its public
threads.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from halfstep.backend_flags import read_flags, set_fp32_mode, write_flags
from halfstep.hardware.probe import probe
from halfstep.own_loop.schedule_argument import per_step
from halfstep.own_loop.step import Step
from halfstep.precision.contexts import use_sound_attention
from halfstep.precision.decide import Precision, decide
from halfstep.step.schedule import PlateauFactor

Check = Callable[[str, bool], bool]
"""(device, whether halfstep is used) -> whether the symptom occurs."""


@dataclass(frozen=True, slots=True)
class LibraryBug:
    name: str
    check: Check
    what: str
    needs_gpu: bool = False
    shield: Literal["avoided", "reported"] = "avoided"


@dataclass(frozen=True, kw_only=True, slots=True)
class BugFinding:
    """What the test of one bug found here; None if it could not run without a GPU."""

    bug: LibraryBug
    is_here: bool | None = None
    is_shielded: bool | None = None

    @property
    def here(self) -> str:
        return "needs a GPU" if self.is_here is None else "yes" if self.is_here else "no"

    @property
    def with_halfstep(self) -> str:
        if not self.is_here:
            return ""
        return self.bug.shield if self.is_shielded else f"NOT {self.bug.shield}"


BUGS: list[LibraryBug] = []


def add_bug(
    name: str, what: str, *, needs_gpu: bool = False, shield: Literal["avoided", "reported"] = "avoided"
) -> Callable[[Check], Check]:
    """Declare the function below as the test of a bug."""

    def add(check: Check) -> Check:
        BUGS.append(LibraryBug(name, check, what, needs_gpu, shield))
        return check

    return add


def find_bugs(device: str) -> Iterator[BugFinding]:
    """Test every bug on this device, `cuda` or `cpu`."""
    for bug in BUGS:
        if bug.needs_gpu and device != "cuda":
            yield BugFinding(bug=bug)
            continue
        # The tests train on infinity on purpose, and halfstep warns of it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield BugFinding(bug=bug, is_here=bug.check(device, False), is_shielded=not bug.check(device, True))


# --- steps that GradScaler skips ---


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Tensor],
    scheduler: LambdaLR | None = None,
    *,
    is_guarded: bool,
) -> float:
    """Train on each batch, with hs.Step or as the PyTorch docs show it, and return the last step's learning rate."""
    if is_guarded:
        step = Step(model, optimizer, "fp32", fast="off", schedule=per_step(scheduler) if scheduler else None)
        return [step(lambda x: model(x).square().mean(), [batch]) for batch in batches][-1].lr
    scaler = torch.amp.GradScaler(batches[0].device.type, init_scale=1.0)
    for batch in batches:
        lr = float(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
    return lr


def make_batches(device: str) -> list[Tensor]:
    """Return a batch that overflows, and a good one."""
    return [torch.full((4, 4), math.inf, device=device), torch.linspace(-1, 1, 16, device=device).view(4, 4)]


def is_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@add_bug("fused-sgd", "fused SGD trains on uninitialised memory after a skipped first step")
def check_fused_sgd(device: str, is_guarded: bool) -> bool:
    model = nn.Linear(4, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # The deterministic mode fills new memory with NaN: otherwise the uninitialised buffer may hold zeros by chance.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(model, optimizer, make_batches(device), is_guarded=is_guarded)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return not is_finite(model.parameters())


@add_bug("scheduler-skip", "the learning-rate schedule advances on skipped steps")
def check_scheduler(device: str, is_guarded: bool) -> bool:
    model = nn.Linear(4, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    # The first batch is skipped, so the second makes the first optimizer step: it should have the first rate.
    return train(model, optimizer, make_batches(device), scheduler, is_guarded=is_guarded) != 1.0


@add_bug("batchnorm-nan", "a skipped step leaves NaN in BatchNorm's running statistics")
def check_batch_norm(device: str, is_guarded: bool) -> bool:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, make_batches(device), is_guarded=is_guarded)
    return not is_finite(model.buffers())


@add_bug("no-check-in-bf16", "without a GradScaler one NaN step overwrites all weights")
def check_missing_check(device: str, is_guarded: bool) -> bool:
    model = nn.Linear(4, 1, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = make_batches(device)
    if is_guarded:
        train(model, optimizer, batches, is_guarded=True)
    else:  # bf16 needs no GradScaler, so the usual loop has none
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return not is_finite(model.parameters())


# --- autocast's cache of cast weights ---


def make_bf16_step(model: nn.Module, optimizer: Optimizer, device: str) -> Step:
    precision = Precision("bf16", simulate=device == "cpu")  # CPUs may lack bf16
    return Step(model, optimizer, precision, fast="off")


@add_bug("stale-casts", "autocast around the loop trains on the first step's weights")
def check_stale_casts(device: str, is_guarded: bool) -> bool:
    model = nn.Linear(4, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device=device)
    step = make_bf16_step(model, optimizer, device) if is_guarded else None
    losses = []
    with torch.autocast(device, torch.bfloat16):  # around the whole loop
        for _ in range(2):
            if step is not None:
                losses.append(step(lambda x: (model(x) - 1).square().mean(), [x]).loss)
                continue
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses[0] == losses[1]


@add_bug("casts-without-grad", "a pass under no_grad removes the gradients of the next one (autocast's cache)")
def check_casts_without_gradients(device: str, is_guarded: bool) -> bool:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device=device)

    def compute_loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            layer(x)  # a target, a statistic, a cached feature
        return (model(x) - 1).square().mean()

    if is_guarded:
        before = layer.weight.detach().clone()
        make_bf16_step(model, optimizer, device)(compute_loss, [x])
        return torch.equal(before, layer.weight)
    with torch.autocast(device, torch.bfloat16):
        loss = compute_loss(x)
    loss.backward()
    return layer.weight.grad is None


# --- schedules and flags ---


@add_bug("plateau-below-zero", "ReduceLROnPlateau never reduces the rate of a negative metric")
def check_plateau(device: str, is_guarded: bool) -> bool:
    metrics = (-1.0, -1.0, -1.0)
    if is_guarded:
        plateau = PlateauFactor(mode="min", patience=0)
        for metric in metrics:
            plateau.observe(metric)
        return plateau.factor == 1.0
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for metric in metrics:
        scheduler.step(metric)
    return bool(optimizer.param_groups[0]["lr"] == 1.0)


@add_bug("tf32-flags", "after the new TF32 setting, reading the old one raises, also inside torch.compile")
def check_tf32_flags(device: str, is_guarded: bool) -> bool:
    before = read_flags()
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with set_fp32_mode("ieee") if is_guarded else contextlib.nullcontext():
            torch.backends.cuda.matmul.allow_tf32  # noqa: B018  what torch.compile reads
    except RuntimeError:
        return True
    finally:
        write_flags(before)
    return False


# --- GPUs ---


@add_bug("cudnn-attention", "cuDNN's attention backward returns NaN for finite inputs", needs_gpu=True)
def check_cudnn_attention(device: str, is_guarded: bool) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, 2, 64, 64)  # 64 keys: the last tile of 128 is half full
    q, k, v = (torch.randn(shape, device=device, generator=generator) * size for size in (0.1, 0.1, 1.0))
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8  # all scores are about -120
    q, k, v = leaves = [part.to(torch.bfloat16).requires_grad_() for part in (q, k, v)]
    with use_sound_attention(device) if is_guarded else contextlib.nullcontext():
        F.scaled_dot_product_attention(q, k, v).float().square().sum().backward()
    return not is_finite(leaf.grad for leaf in leaves if leaf.grad is not None)


@add_bug("lstm-in-fp16", "LSTM, GRU and RNN run in fp16 under bf16 autocast", needs_gpu=True, shield="reported")
def check_recurrent_format(device: str, is_guarded: bool) -> bool:
    model = nn.LSTM(8, 8).to(device)
    with torch.autocast(device, torch.bfloat16):
        is_here = model(torch.ones(2, 1, 8, device=device))[0].dtype == torch.float16
    return is_here and not (is_guarded and decide("bf16", probe(device), model).warnings)


@add_bug("emulated-bf16", "is_bf16_supported() is True on GPUs that only emulate bf16", needs_gpu=True)
def check_emulated_bf16(device: str, is_guarded: bool) -> bool:
    is_here = torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return is_here and not (is_guarded and decide("bf16", probe(device)).granted != "bf16")
