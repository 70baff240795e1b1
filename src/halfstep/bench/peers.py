"""The others in the field, timed on the same problem in the same process: `--against lightning,accelerate,plain`.

A peer's name stands for two runners: as its documentation shows, and once more tuned by hand (see `peer_setup`). One
variant alone is `plain:graphs`. Peers are not dependencies of halfstep: only who compares needs them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

from halfstep.backend_flags import fp32_mode
from halfstep.bench.apart import isolate_row
from halfstep.bench.problem import AfterStep, Batch, Problem, Runner
from halfstep.errors import ConfigError, HalfstepError, HardwareError, PrecisionError, format_count, suggest_nearest
from halfstep.kernels.fast_forms import force
from halfstep.tune.fresh_thread import place_for_graphs

Variant = Literal["documented", "tuned", "graphs"]
LossOf = Callable[[Batch], Tensor]


class PeerMissing(HalfstepError):
    """A peer to compare against is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSetup:
    """A problem in the hands of a peer's user."""

    problem: Problem
    precision: str
    variant: Variant
    compiler: str = "inductor"
    """The backend of torch.compile; tests take a light one."""

    @property
    def by_hand(self) -> bool:
        """Whether the user did more than the documentation shows."""
        return self.variant != "documented"

    @property
    def channels_last(self) -> bool:
        """Not in strict fp32 on CUDA: the fastest known there is contiguous with cuDNN's trials, as tuned ones run.

        In channels_last it was timed without trials alone, and gained nothing (benchmarks/NOTES.md).
        """
        return self.by_hand and (self.precision, self.problem.device.type) != ("fp32", "cuda")

    @property
    def compile_mode(self) -> str | None:
        return "reduce-overhead" if self.variant == "graphs" else None

    def model(self) -> nn.Module:
        """Seeded and in training mode, still on the host: Lightning and Accelerate move it themselves."""
        model = self.problem.make_model().train()
        # torch knows the keyword, its stubs do not.
        return cast(nn.Module, model.to(memory_format=torch.channels_last)) if self.channels_last else model  # type: ignore[call-overload]

    def optimizer(self, model: nn.Module, *, may_fuse: bool = True) -> torch.optim.AdamW:
        """Over all parameters alike, as every guide writes it."""
        fused = True if self.by_hand and may_fuse else None
        problem, options = self.problem, self.problem.config.optimizer.options()
        decay = problem.weight_decay
        return torch.optim.AdamW(model.parameters(), lr=problem.lr, weight_decay=decay, fused=fused, **options)

    def loader(self, steps: int) -> DataLoader[Batch]:
        """The same batch again and again, for no peer shall wait for data."""
        return DataLoader(_Repeated(self.problem.host_batch, steps), batch_size=None)

    def prepared(self, batch: Batch) -> Batch:
        """What the model sees, images in the model's layout."""
        batch = self.problem.prepare(batch)
        return {name: _convert_to_channels_last(part) for name, part in batch.items()} if self.channels_last else batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Of a batch as it arrived on the device."""
        return self.problem.loss(model, self.prepared(batch))

    def compiled_loss(self, model: nn.Module) -> LossOf:
        """Preparation, forward and loss as one compiled region."""

        def loss(batch: Batch) -> Tensor:
            return self.loss(model, batch)

        return torch.compile(loss, backend=self.compiler, mode=self.compile_mode)


Loop = Callable[[PeerSetup, int, AfterStep], float]
"""Trains so many steps and returns the last loss."""


class _Repeated(Dataset[Batch]):
    def __init__(self, batch: Batch, times: int) -> None:
        self._batch, self._times = batch, times

    def __len__(self) -> int:
        return self._times

    def __getitem__(self, index: int) -> Batch:
        return self._batch


def _convert_to_channels_last(part: Tensor) -> Tensor:
    return part.contiguous(memory_format=torch.channels_last) if part.ndim == 4 else part


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def isolate_peer(device: torch.device) -> Iterator[None]:
    """Quiet and with nothing compiled; flags, seeds, environment and signal handlers are put back on exit."""
    on_cuda = device.type == "cuda"
    with (
        silence(),
        isolate_row(device),
        _restore_environment(),
        _restore_signals(),
        torch.random.fork_rng(devices=[device] if on_cuda else []),
        torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),
        # A peer that silently stopped being compiled would be timed as something it is not.
        dynamo_config.patch(fail_on_recompile_limit_hit=True),
        # Our models would compute in our own fast forms: a peer's user writes torch's layers.
        force(False),
    ):
        yield


@contextlib.contextmanager
def set_float32_mode(precision: str, *, by_hand: bool) -> Iterator[None]:
    """`fp32` is strict and `tf32` is not; beside bf16 or fp16, TF32 is on for those who know of it, else as found."""
    if precision in ("fp32", "tf32") or by_hand:
        with fp32_mode("ieee" if precision == "fp32" else "tf32"):
            yield
    else:
        yield


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No warnings and no log lines below errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def _restore_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _restore_signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread set handlers, so nobody else could have
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train_plain(setup: PeerSetup, steps: int, after_step: AfterStep) -> float:
    """Stock PyTorch, with the loss read once, at the end."""
    problem, device = setup.problem, setup.problem.device
    model = setup.model().to(device)
    optimizer = setup.optimizer(model)
    scaler = torch.amp.GradScaler(device.type, enabled=setup.precision == "fp16")
    autocast = torch.autocast(
        device.type, dtype=AUTOCAST.get(setup.precision, torch.bfloat16), enabled=setup.precision in AUTOCAST
    )
    loss_of = _build_loss(setup, model)
    loss = torch.tensor(float("nan"))
    for host_batch in setup.loader(steps):
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


def _build_loss(setup: PeerSetup, model: nn.Module) -> LossOf:
    if setup.by_hand:
        return setup.compiled_loss(model)
    compiled = cast(nn.Module, torch.compile(model, backend=setup.compiler))
    return functools.partial(setup.loss, compiled)


PRECISION = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
IMPORT_NAMES = ("lightning.pytorch", "pytorch_lightning")
"""The two packages it is published as."""


def import_lightning() -> Any:
    """The package under either of its names, or how to get it."""
    reasons = []
    for name in IMPORT_NAMES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise PeerMissing("lightning cannot be imported", why="; ".join(reasons), fix="pip install lightning")


def train_lightning(setup: PeerSetup, steps: int, after_step: AfterStep) -> float:
    """Lightning's Trainer around the problem."""
    lightning = import_lightning()
    device = setup.problem.device
    module = _build_module(lightning, setup)
    counter = _build_counter(lightning, after_step)
    trainer = lightning.Trainer(
        accelerator=device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision=PRECISION[setup.precision],
        max_steps=steps,
        gradient_clip_val=setup.problem.clip_norm,
        benchmark=setup.by_hand or None,
        callbacks=[counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    compiled = torch.compile(module, backend=setup.compiler, mode=setup.compile_mode)
    try:
        trainer.fit(compiled, setup.loader(steps))
    except SystemExit as stopped:  # what it makes of Ctrl-C
        raise KeyboardInterrupt from stopped
    return float(counter.loss)


def _build_module(lightning: Any, setup: PeerSetup) -> Any:
    class PeerModule(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = setup.model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return setup.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            # In fp16 it leaves unscaling to a fused optimizer, and clipping before that would clip scaled gradients.
            clips_scaled = setup.precision == "fp16" and setup.problem.clip_norm > 0
            return setup.optimizer(self.model, may_fuse=not clips_scaled)

    class ClippingModule(PeerModule):
        """Under autocast the Trainer's own clipping refuses every fused optimizer, so its user takes the hook."""

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
        ) -> None:
            if gradient_clip_val:
                clip_grad_norm_(self.model.parameters(), gradient_clip_val)

    return ClippingModule() if setup.by_hand and setup.precision == "bf16" else PeerModule()


def _build_counter(lightning: Any, after_step: AfterStep) -> Any:
    class Counter(lightning.Callback):  # type: ignore[misc]
        loss = torch.tensor(float("nan"))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.loss = outputs["loss"]
            after_step()

    return Counter()


MIXED_PRECISION = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}


def import_accelerate() -> Any:
    """The package, or how to get it."""
    try:
        return importlib.import_module("accelerate")
    except ImportError as error:
        raise PeerMissing("accelerate cannot be imported", why=str(error), fix="pip install accelerate") from error


def train_accelerate(setup: PeerSetup, steps: int, after_step: AfterStep) -> float:
    """Accelerate at the head of its user's loop."""
    with _open_accelerator(setup) as accelerator:
        model = setup.model()
        model, optimizer, loader = accelerator.prepare(model, setup.optimizer(model), setup.loader(steps))
        loss_of: LossOf = setup.compiled_loss(model) if setup.by_hand else functools.partial(setup.loss, model)
        loss = torch.tensor(float("nan"))
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(batch)
            accelerator.backward(loss)
            if setup.problem.clip_norm > 0:
                accelerator.clip_grad_norm_(model.parameters(), setup.problem.clip_norm)
            optimizer.step()
            after_step()
        return float(loss)


@contextlib.contextmanager
def _open_accelerator(setup: PeerSetup) -> Iterator[Any]:
    """An Accelerator of its own: the state it shares process-wide is emptied before and after."""
    accelerate = import_accelerate()
    _reset(accelerate)
    try:
        accelerator = accelerate.Accelerator(
            cpu=setup.problem.device.type == "cpu",
            mixed_precision=MIXED_PRECISION[setup.precision],
            dynamo_plugin=accelerate.utils.TorchDynamoPlugin(backend="no" if setup.by_hand else setup.compiler),
            dataloader_config=accelerate.DataLoaderConfiguration(non_blocking=setup.by_hand),
        )
        # Once more, because its compiler plugin switches TF32 on in a run that asked for no mixed precision.
        with set_float32_mode(setup.precision, by_hand=setup.by_hand):
            yield accelerator
            accelerator.free_memory()
    finally:
        _reset(accelerate)


def _reset(accelerate: Any) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


PEERS: Mapping[str, Loop] = {"plain": train_plain, "lightning": train_lightning, "accelerate": train_accelerate}
IMPORTS: Mapping[str, Callable[[], object]] = {"lightning": import_lightning, "accelerate": import_accelerate}
PEER_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""What each of them takes without further packages."""

FP16_ON_CPU = {"lightning": "it would train in bf16 instead", "accelerate": "it would train in fp32 instead"}
"""Who cannot, and what it would do without saying so to anybody who reads no warnings."""


@dataclass(kw_only=True, slots=True)
class PeerRunner:
    """One peer in one variant, ready to train."""

    name: str
    variant: str
    precision: str
    setup: PeerSetup
    loop: Loop

    def train(self, steps: int, after_step: AfterStep) -> float:
        """Train from the seeded start; whatever goes wrong inside, compilation included, is raised as it came."""
        if steps < 1:
            raise ConfigError(f"{format_count(steps, 'step')} cannot be trained", fix="ask for at least one")
        by_hand, device = self.setup.by_hand, self.setup.problem.device
        if self.precision == "fp16" and device.type == "cpu" and self.name in FP16_ON_CPU:
            raise HardwareError(f"{self.name} cannot train fp16 on the CPU", why=FP16_ON_CPU[self.name])
        if self.variant == "graphs" and device.type != "cuda":
            raise HardwareError(f"{self.name} graphs needs CUDA", why="the compiler captures CUDA graphs only")
        with isolate_peer(device), set_float32_mode(self.precision, by_hand=by_hand):
            torch.backends.cudnn.benchmark = by_hand
            if self.variant == "graphs":
                place_for_graphs()
            return self.loop(self.setup, steps, after_step)


VARIANTS: tuple[Variant, ...] = get_args(Variant)
UNASKED: tuple[Variant, ...] = ("documented", "tuned")
"""What a name alone stands for."""


def parse_peer_name(word: str) -> str:
    """`plain` of `plain` and of `plain:graphs`."""
    return word.partition(":")[0]


def list_variants(word: str) -> tuple[Variant, ...]:
    """Those that a word of `--against` stands for."""
    asked = word.partition(":")[2]
    return tuple(variant for variant in VARIANTS if variant == asked) if asked else UNASKED


def require_peers(words: Sequence[str]) -> None:
    """Raise ConfigError for one nobody knows, PeerMissing for one not installed: before anything is timed."""
    known = [*PEERS, *(f"{name}:{variant}" for name in PEERS for variant in VARIANTS)]
    for word in words:
        if word not in known:
            raise ConfigError(f"unknown peer {word!r}", fix=suggest_nearest(word, known))
        if parse_peer_name(word) in IMPORTS:
            with silence():  # their imports warn
                IMPORTS[parse_peer_name(word)]()


def list_peers(words: Sequence[str], problem: Problem, precision: str, *, _compiler: str = "inductor") -> list[Runner]:
    """Runners of the named peers and variants. `_compiler` is for tests: the light backends of torch.compile."""
    require_peers(words)
    if precision not in PEER_PRECISIONS:
        raise PrecisionError(
            f"peers cannot be timed in {precision!r}",
            why=f"without further packages they take {', '.join(PEER_PRECISIONS)}",
            fix="leave that precision or --against out",
        )
    if problem.num_phases > 1:
        raise HardwareError(
            f"{problem.config.workload} trains in {problem.num_phases} phases",
            why="a peer's loop makes one optimizer step, so it would be timed at other work",
            fix="leave --against out",
        )
    return [
        PeerRunner(name=name, variant=variant, precision=precision, setup=setup, loop=PEERS[name])
        for word in words
        for name in [parse_peer_name(word)]
        for variant in list_variants(word)
        for setup in [PeerSetup(problem=problem, precision=precision, variant=variant, compiler=_compiler)]
    ]
