"""Peers: the same problem trained with other tools in the same process, `--against lightning,accelerate,plain`.

Every peer gets the same model, batches and AdamW. A name alone selects two variants; `plain:graphs` selects one.
- `documented`: what the project's own pages show for the precision, with the compiler on.
- `tuned`: what performance guides recommend in addition: channels_last where it is known to help, fused AdamW, the loss
  inside the compiled region, TF32 for what stays fp32, cudnn.benchmark.
- `graphs`: `tuned` with the compiler's CUDA graphs (mode `reduce-overhead`).

Peers are not dependencies of halfstep: only `--against` needs them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from halfstep.backend_flags import set_fp32_mode
from halfstep.errors import HalfstepError, HardwareError, PrecisionError
from halfstep_train.bench.measure_row import isolate_row
from halfstep_train.bench.problem import AfterStep, Batch, Problem, Runner
from halfstep_train.kernels.fast_forms import force
from halfstep_train.report.console import silence
from halfstep_train.tune.fresh_thread import make_graph_storage

LossOf = Callable[[Batch], Tensor]


class PeerMissing(HalfstepError):
    """A peer to compare against is not installed."""


@dataclass(kw_only=True, slots=True)
class PeerRunner:
    """One peer in one variant: the problem as a user of the peer would set it up and train it."""

    name: str
    problem: Problem
    precision: str
    variant: str
    compiler: str = "inductor"
    """The backend of torch.compile; tests use a fast one."""

    @property
    def by_hand(self) -> bool:
        """True if the user tuned beyond what the documentation shows."""
        return self.variant != "documented"

    @property
    def channels_last(self) -> bool:
        """False in strict fp32 on CUDA: contiguous with cudnn.benchmark is the fastest known (benchmarks/NOTES.md)."""
        return self.by_hand and (self.precision, self.problem.device.type) != ("fp32", "cuda")

    @property
    def compile_mode(self) -> str | None:
        return "reduce-overhead" if self.variant == "graphs" else None

    def build_model(self) -> nn.Module:
        """Return the seeded model in training mode, on the host: Lightning and Accelerate move it themselves."""
        model = self.problem.make_model().train()
        # The keyword is missing in torch's type stubs.
        return cast(nn.Module, model.to(memory_format=torch.channels_last)) if self.channels_last else model  # type: ignore[call-overload]

    def build_optimizer(self, model: nn.Module, *, may_fuse: bool = True) -> torch.optim.AdamW:
        """Return AdamW over all parameters in one group, as in most guides."""
        fused = True if self.by_hand and may_fuse else None
        problem, options = self.problem, self.problem.config.optimizer.collect_options()
        decay = problem.weight_decay
        return torch.optim.AdamW(model.parameters(), lr=problem.lr, weight_decay=decay, fused=fused, **options)

    def build_loader(self, steps: int) -> DataLoader[Batch]:
        """Return a loader that repeats one batch, so that no peer waits for data."""
        return DataLoader([self.problem.host_batch] * steps, batch_size=None)  # type: ignore[arg-type]  # a list will do

    def prepare(self, batch: Batch) -> Batch:
        """Prepare a batch for the model, with images in the model's layout."""
        batch = self.problem.prepare(batch)
        if not self.channels_last:
            return batch
        images = {name: part for name, part in batch.items() if part.ndim == 4}
        return batch | {name: part.contiguous(memory_format=torch.channels_last) for name, part in images.items()}

    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of a batch that is on the device."""
        return self.problem.loss(model, self.prepare(batch))

    def compile_loss(self, model: nn.Module) -> LossOf:
        """Compile preparation, forward and loss as one region."""

        def loss(batch: Batch) -> Tensor:
            return self.compute_loss(model, batch)

        return torch.compile(loss, backend=self.compiler, mode=self.compile_mode)

    def train(self, steps: int, after_step: AfterStep) -> float:
        """Train from the seeded start; errors, including those of compilation, are raised unchanged."""
        device = self.problem.device
        if self.precision == "fp16" and device.type == "cpu" and self.name in NO_FP16_ON_CPU:
            raise HardwareError(f"{self.name} cannot train fp16 on the CPU", fix="--precisions fp32,bf16")
        if self.variant == "graphs" and device.type != "cuda":
            raise HardwareError(f"{self.name} graphs needs CUDA", fix=f"--against {self.name}")
        with isolate_peer(device), set_float32_mode(self.precision, by_hand=self.by_hand):
            torch.backends.cudnn.benchmark = self.by_hand
            if self.variant == "graphs":
                make_graph_storage()
            return PEERS[self.name](self, steps, after_step)


Loop = Callable[[PeerRunner, int, AfterStep], float]
"""Trains the given number of steps and returns the last loss."""


@contextlib.contextmanager
def isolate_peer(device: torch.device) -> Iterator[None]:
    """Silence a peer, and restore flags, seeds and environment on exit.

    `isolate_row` restores what every row may change: backend flags, memory and compiled code. Frameworks change more:
    they print and warn, set environment variables and draw random numbers. They install no signal handlers, because
    each row trains in a thread of its own.
    """
    on_cuda = device.type == "cuda"
    with (
        silence(),
        isolate_row(device),
        mock.patch.dict(os.environ),  # restores the environment
        torch.random.fork_rng(devices=[device] if on_cuda else []),
        torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),
        # Fail instead of timing a peer that silently fell back to eager.
        dynamo_config.patch(fail_on_recompile_limit_hit=True),
        # A peer's user writes torch's layers: switch off our models' fused kernels.
        force(False),
    ):
        yield


def set_float32_mode(precision: str, *, by_hand: bool) -> contextlib.AbstractContextManager[None]:
    """Make `fp32` strict and switch TF32 on for `tf32`; with bf16 or fp16, switch TF32 on only for tuned variants."""
    if precision in ("fp32", "tf32") or by_hand:
        return set_fp32_mode("ieee" if precision == "fp32" else "tf32")
    return contextlib.nullcontext()


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train_plain(peer: PeerRunner, steps: int, after_step: AfterStep) -> float:
    """Train with plain PyTorch: autocast, GradScaler for fp16, clipping after unscaling, one loss read at the end."""
    problem, device = peer.problem, peer.problem.device
    model = peer.build_model().to(device)
    optimizer = peer.build_optimizer(model)
    scaler = torch.amp.GradScaler(device.type, enabled=peer.precision == "fp16")
    autocast = torch.autocast(device.type, AUTOCAST.get(peer.precision), enabled=peer.precision in AUTOCAST)
    compiled: Any = model if peer.by_hand else torch.compile(model, backend=peer.compiler)
    loss_of = peer.compile_loss(model) if peer.by_hand else functools.partial(peer.compute_loss, compiled)
    loss = torch.tensor(float("nan"))
    for host_batch in peer.build_loader(steps):
        optimizer.zero_grad()
        batch = {name: part.to(device, non_blocking=True) for name, part in host_batch.items()}
        with autocast:
            loss = loss_of(batch)
        scaler.scale(loss).backward()
        if problem.clip_norm > 0:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), problem.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        after_step()
    return float(loss)


PRECISION = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""The precisions that every peer supports without further packages, by Lightning's names."""


MODULES = {"lightning": "lightning.pytorch", "accelerate": "accelerate"}


def import_peer(package: str) -> Any:
    """Import a peer's package; raise PeerMissing with how to install it."""
    try:
        return importlib.import_module(MODULES[package])
    except ImportError as error:
        raise PeerMissing(f"{package} cannot be imported", why=str(error), fix=f"pip install {package}") from error


def train_lightning(peer: PeerRunner, steps: int, after_step: AfterStep) -> float:
    """Train with Lightning's Trainer, which owns the loop.

    The whole module goes through torch.compile, as its documentation shows, and with `training_step` the loss: the two
    variants differ only in layout, optimizer and flags. Logger, checkpoints, progress bar and summary are off, because
    no other row has them.
    """
    lightning = import_peer("lightning")
    device = peer.problem.device
    module = _build_module(lightning, peer, after_step)
    trainer = lightning.Trainer(
        accelerator=device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision=PRECISION[peer.precision],
        max_steps=steps,
        gradient_clip_val=peer.problem.clip_norm,
        benchmark=peer.by_hand or None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    compiled = torch.compile(module, backend=peer.compiler, mode=peer.compile_mode)
    try:
        trainer.fit(compiled, peer.build_loader(steps))
    except SystemExit as stopped:  # Lightning turns Ctrl-C into SystemExit
        raise KeyboardInterrupt from stopped
    return float(module.last_loss)


def _build_module(lightning: Any, peer: PeerRunner, after_step: AfterStep) -> Any:
    """Build the LightningModule of the problem, which calls back after each step."""

    class PeerModule(lightning.LightningModule):  # type: ignore[misc]
        last_loss = torch.tensor(float("nan"))

        def __init__(self) -> None:
            super().__init__()
            self.model = peer.build_model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return peer.compute_loss(self.model, batch)

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            self.last_loss = outputs["loss"]
            after_step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            # In fp16 Lightning leaves unscaling to a fused optimizer; clipping before that would clip scaled gradients.
            clips_scaled = peer.precision == "fp16" and peer.problem.clip_norm > 0
            return peer.build_optimizer(self.model, may_fuse=not clips_scaled)

    class ClippingModule(PeerModule):
        """Clips in a hook, because under autocast the Trainer's own clipping refuses every fused optimizer."""

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
        ) -> None:
            if gradient_clip_val:
                clip_grad_norm_(self.model.parameters(), gradient_clip_val)

    return ClippingModule() if peer.by_hand and peer.precision == "bf16" else PeerModule()


MIXED_PRECISION = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}


def train_accelerate(peer: PeerRunner, steps: int, after_step: AfterStep) -> float:
    """Train with `prepare`, `backward` and `clip_grad_norm_` of an Accelerator in the user's loop.

    Documented: its TorchDynamoPlugin compiles the model, and the loader copies as by default. Tuned: the prepared model
    is compiled together with the loss, and the loader's copies do not block.
    """
    with _open_accelerator(peer) as accelerator:
        model = peer.build_model()
        model, optimizer, loader = accelerator.prepare(model, peer.build_optimizer(model), peer.build_loader(steps))
        loss_of: LossOf = peer.compile_loss(model) if peer.by_hand else functools.partial(peer.compute_loss, model)
        loss = torch.tensor(float("nan"))
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(batch)
            accelerator.backward(loss)
            if peer.problem.clip_norm > 0:
                accelerator.clip_grad_norm_(model.parameters(), peer.problem.clip_norm)
            optimizer.step()
            after_step()
        return float(loss)


@contextlib.contextmanager
def _open_accelerator(peer: PeerRunner) -> Iterator[Any]:
    """Open a fresh Accelerator; reset its process-wide state before and after."""
    accelerate = import_peer("accelerate")
    _reset(accelerate)
    try:
        accelerator = accelerate.Accelerator(
            cpu=peer.problem.device.type == "cpu",
            mixed_precision=MIXED_PRECISION[peer.precision],
            dynamo_plugin=accelerate.utils.TorchDynamoPlugin(backend="no" if peer.by_hand else peer.compiler),
            dataloader_config=accelerate.DataLoaderConfiguration(non_blocking=peer.by_hand),
        )
        # Set it again, because the compiler plugin switches TF32 on in runs without mixed precision.
        with set_float32_mode(peer.precision, by_hand=peer.by_hand):
            yield accelerator
            accelerator.free_memory()
    finally:
        _reset(accelerate)


def _reset(accelerate: Any) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


PEERS: Mapping[str, Loop] = {"plain": train_plain, "lightning": train_lightning, "accelerate": train_accelerate}
NO_FP16_ON_CPU = ("lightning", "accelerate")
"""Lightning would train in bf16 instead and Accelerate in fp32, each with only a warning."""


UNASKED = ("documented", "tuned")
"""Variants that a name without a colon selects."""


def parse_peer_name(peer: str) -> str:
    """Return `plain` for `plain` and for `plain:graphs`."""
    return peer.partition(":")[0]


def list_variants(peer: str) -> tuple[str, ...]:
    """Return the variants that a peer of `--against` selects."""
    asked = peer.partition(":")[2]
    return (asked,) if asked else UNASKED


def require_peers(peers: Sequence[str]) -> None:
    """Raise PeerMissing for a peer that is not installed, before anything is timed."""
    for name in {parse_peer_name(peer) for peer in peers} & MODULES.keys():
        with silence():  # their imports warn
            import_peer(name)


def list_peers(peers: Sequence[str], problem: Problem, precision: str, *, _compiler: str = "inductor") -> list[Runner]:
    """Return runners for the given peers and variants. Tests pass a fast torch.compile backend as `_compiler`."""
    if precision not in PRECISION:
        raise PrecisionError(f"peers cannot be timed in {precision!r}", fix="leave out that precision or --against")
    if problem.num_phases > 1:
        # A peer's loop makes one optimizer step per iteration, so it would do different work.
        what = f"{problem.config.workload} trains in {problem.num_phases} phases"
        raise HardwareError(what, fix="leave --against out")
    return [
        PeerRunner(
            name=parse_peer_name(peer), problem=problem, precision=precision, variant=variant, compiler=_compiler
        )
        for peer in peers
        for variant in list_variants(peer)
    ]
