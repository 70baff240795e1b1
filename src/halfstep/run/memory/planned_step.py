"""A run's step traced without running it: its model, phases, optimizers and average, on tensors without content."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from halfstep.config.schema import RunConfig
from halfstep.data.seeds import Key
from halfstep.errors import HalfstepError, ModelError, summarise_error
from halfstep.hardware.gpus import known_gpu
from halfstep.models.first_values import unfilled
from halfstep.models.recompute import Recompute, Recomputing
from halfstep.precision.decide import decide
from halfstep.precision.frozen import apply_frozen_
from halfstep.precision.plan import Plan
from halfstep.run.assemble import build_workload
from halfstep.run.frozen import modules_of
from halfstep.run.memory.pretence import Pretence, run_backward
from halfstep.run.memory.trace import Recorder, Trace
from halfstep.run.optimizing import Length, optimizing
from halfstep.run.phases import phase_config, trains
from halfstep.step.batches import batch_length
from halfstep.step.ema import Ema
from halfstep.step.optim.adamw8bit import AdamW8bit, empty_state
from halfstep.step.optim.adamw_bf16 import AdamWBf16, at_once
from halfstep.step.optim.by_name import CAPTURABLE
from halfstep.step.optim.codes import signed_table, unsigned_table
from halfstep.tune.layout import convolves_images, in_layout_of
from halfstep.tune.memory_low import MemorySetting
from halfstep.tune.own_blocks import found_blocks, recompute_blocks_
from halfstep.tune.trials import first_batch
from halfstep.workloads import KINDS
from halfstep.workloads.base.kind import Store
from halfstep.workloads.base.workload import Batch, Forward, Loss, Workload

SEEN = 2
"""Samples that are really made; all others have their shapes."""
HAS_ALL_FORMATS = "H200"
"""Its plan is traced: formats that a GPU lacks are refused before."""
BATCHES_AHEAD = 3
"""As loaded: the one that is trained on, and two that are copied ahead (data/prefetch.py)."""
EMA_PIECES = 3
"""As large as the largest of the average's, on the way to it."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is there whatever runs, in bytes; `update` only while the optimizer updates."""

    weights: int
    frozen: int
    optimizer: int
    average: int
    update: int


@dataclass(frozen=True, slots=True)
class _Turn:
    """One phase, or the only one."""

    config: RunConfig
    forward: Forward
    loss: Loss
    trained: tuple[str, ...]
    parts: tuple[str, ...]
    groups: tuple[Any, ...]
    compiles: bool = True


class PlannedStep:
    """A workload to be traced, and its config; nothing of it is ever computed."""

    def __init__(self, config: RunConfig, workload: Workload, raw: Batch) -> None:
        self.config, self.workload, self.raw = config, workload, raw
        self.pretence = Pretence(workload.modules())
        # A run that begins knows which of them pass the check; those with forms of their own are not captured so.
        self.blocks: Collection[str] = () if workload.blocks else found_blocks(workload.model)
        self.recomputes = bool(self.blocks) or any(isinstance(m, Recomputing) for m in workload.model.modules())
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in workload.model.modules())

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.workload.model.parameters())

    def traces(self, precision: str, recompute: Recompute, batch_size: int, *, chains: bool) -> list[Trace]:
        """One of each phase: forward and backward of one micro-batch."""
        with self.pretence.entered(chains=chains) as kernels, _explained(self.config.workload):
            plan = self._placed(precision, recompute)
            for value in self.workload.values.values():
                value.value = torch.empty(())
            batch = self._batch(batch_size)
            found = []
            for turn in self._turns():
                kernels.clear()
                found.append(self._traced(turn, plan, batch))
                found[-1].is_chain, found[-1].compiles = chains and bool(kernels), turn.compiles
            return found

    def fixed(self, precision: str, setting: MemorySetting) -> Fixed:
        """Weights, optimizer state and average, as the run would have them."""
        signed_table(), unsigned_table()  # made of real numbers, once
        with self.pretence.entered(), _explained(self.config.workload):
            self._placed(precision, "none")
            model = self.workload.model
            frozen = [t for m in modules_of(self.workload.frozen).values() for t in (*m.parameters(), *m.buffers())]
            optimizers = [self._optimizer(turn, setting) for turn in self._turns()]
            states = [_state_bytes(optimizer) for optimizer in optimizers]
            updates = map(self._update_bytes, optimizers, states)
            average = Ema(model, self.workload.ema_parts).shadows if self.config.ema.enabled else []
            return Fixed(
                weights=_bytes((*model.parameters(), *model.buffers())),
                frozen=_bytes(frozen),
                optimizer=sum(states),
                average=_bytes(average),
                update=max(updates) + EMA_PIECES * max((shadow.nbytes for shadow in average), default=0),
            )

    def sample_flops(self) -> int:
        """Of forward and backward, nothing recomputed; a multiplication and an addition are two."""
        with self.pretence.entered(), _explained(self.config.workload), torch.no_grad():
            # Attention in parts: of the CPU's fused kernel the counter knows nothing.
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                self.workload.forward(self.workload.model.eval(), self._batch(SEEN))
            # Backward: one product for the input's gradient, one for the weight's.
            return 3 * int(counter.get_total_flops()) // SEEN

    def input_bytes(self, *batch_sizes: int) -> dict[int, tuple[int, int]]:
        """By size: of batches as they are loaded, and of one that is ready for the model."""
        with self.pretence.entered(), _explained(self.config.workload):
            return {size: (self._raw_bytes(size), _bytes(self._batch(size).values())) for size in batch_sizes}

    def _raw_bytes(self, batch_size: int) -> int:
        return BATCHES_AHEAD * sum(t.nbytes for t in _of_size(self.raw, batch_size).values())

    # --- placing ---

    def _placed(self, precision: str, recompute: Recompute) -> Plan:
        model, frozen = self.workload.model, modules_of(self.workload.frozen)
        parts = self.config.precision.modules
        if precision == "tf32":  # parts in fp32 take the same memory; that both cannot hold together is a run's concern
            parts = {name: "tf32" if asked == "fp32" else asked for name, asked in parts.items()}
        wish = self.config.precision.model_copy(
            update={"default": precision, "simulate": False, "strict": False, "modules": parts}
        )
        decided = decide(wish, known_gpu(HAS_ALL_FORMATS), model, frozen=frozen)
        plan = dataclasses.replace(decided, device="cpu", simulated=False)
        plan.apply(model)
        apply_frozen_(plan, frozen)
        layout, takes_it = self.config.train.channels_last, KINDS.of(self.config.workload).takes_channels_last
        if layout is True or layout == "auto" and takes_it and precision != "fp32":
            for module in self.workload.modules():
                _lay_out_(module)
        if not (self.config.train.activation_checkpointing and recompute == "none"):
            recompute_blocks_(model, recompute, self.blocks)
        return plan

    def _batch(self, batch_size: int) -> Batch:
        key = Key.of_training(self.config.train.seed, 0, 0, 0, 0, batch_size)
        try:
            prepared = self.workload.prepared(_of_size(self.raw, batch_size), key=key, training=True)
        except Exception:  # numpy, a generator: prepared for real, and only the shapes are taken
            prepared = _of_size(self._really_prepared(), batch_size)
        return in_layout_of(self.workload.model, prepared)

    def _really_prepared(self) -> Batch:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        key = Key.of_training(self.config.train.seed, 0, 0, 0, 0, batch_length(self.raw))
        with unset_fake_temporarily():
            return self.workload.prepared(self.raw, key=key, training=True)

    # --- phases ---

    def _turns(self) -> Iterator[_Turn]:
        workload, model = self.workload, self.workload.model
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        if not workload.phases:
            yield _Turn(self.config, workload.forward, workload.loss, tuple(names), (), workload.groups)
        for phase in workload.phases:
            own, forward = phase_config(self.config, phase), phase.forward or workload.forward
            trained = tuple(name for name in names if trains(phase, name))
            yield _Turn(own, forward, phase.loss, trained, phase.parameters, phase.groups, phase.compiles)

    def _traced(self, turn: _Turn, plan: Plan, batch: Batch) -> Trace:
        model = self.workload.model.train()
        named = dict(model.named_parameters())
        wanted = {name: p.requires_grad for name, p in named.items()}
        for name, parameter in named.items():
            parameter.requires_grad_(wanted[name] and name in turn.trained)
        known = [t for m in self.workload.modules() for t in (*m.parameters(), *m.buffers())]
        try:
            with Recorder((*known, *batch.values()), named.values(), is_strict=plan.granted == "fp32") as recorder:
                with plan.forward():
                    outputs = turn.forward(model, batch)
                    found: Any = turn.loss(outputs, batch)
                    loss = (found[0] if isinstance(found, tuple) else found).float()
                recorder.in_backward = True
                with plan.backend():
                    run_backward(loss)
            gradients = [p.grad for p in named.values() if p.grad is not None]
            trace: Trace = recorder.settle(gradients)
            del outputs, found, loss
            return trace
        finally:
            for name, parameter in named.items():
                parameter.grad = None
                parameter.requires_grad_(wanted[name])

    def _optimizer(self, turn: _Turn, setting: MemorySetting) -> Optimizer:
        if turn.config.optimizer.name != "adamw":
            setting = dataclasses.replace(setting, optimizer_bits=32)
        model, length = self.workload.model, Length(1, 1)
        return optimizing(turn.config, model, setting, length, parts=turn.parts, groups=turn.groups)[0]

    def _update_bytes(self, optimizer: Optimizer, state_bytes: int) -> int:
        """What an update takes besides the state: fp32 copies of bf16 weights, or a copy to take back a bad step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if isinstance(optimizer, AdamWBf16):
            return max(8 * sum(p.numel() for p in some) for some in at_once(parameters))
        is_selected = self.config.optimizer.name in CAPTURABLE
        return _bytes(parameters) + state_bytes if is_selected else 0


def _state_bytes(optimizer: Optimizer) -> int:
    """Of the state once it is built; parameters of one shape have the same."""
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            alike.setdefault((number, parameter.shape, parameter.dtype), []).append(parameter)
    firsts = {parameters[0]: len(parameters) for parameters in alike.values()}
    return sum(firsts[parameter] * _bytes(state) for parameter, state in _built_states(optimizer, list(firsts)))


def _built_states(optimizer: Optimizer, parameters: list[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    if isinstance(optimizer, AdamW8bit):
        yield from ((p, [*empty_state(p).values(), *optimizer.low_of(p).values()]) for p in parameters)
        return
    held = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update({name: False for name in ("fused", "foreach", "capturable") if name in group})
        group["params"] = [p for p in parameters if any(p is own for own in group["params"])]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except Exception:
        if not optimizer.state:
            raise
        # Some read numbers to update; by then their state is there, and that is all we want.
    for group, all_of_them in zip(optimizer.param_groups, held, strict=True):
        group["params"] = all_of_them
    for parameter in parameters:
        parameter.grad = None
        yield parameter, [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]


class NoSamples:
    """A data set that nobody reads."""

    def __len__(self) -> int:
        return 64

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        raise AssertionError("counting reads no data")


def planned_step(config: RunConfig, store: Store | None = None) -> PlannedStep:
    """The step of a config: of its data where a folder is given, else of made-up data of the usual shape.

    `store` is what is known of the data, where somebody has looked at them before."""
    kind = KINDS.of(config.workload)
    small = config.changed(train={"batch_size": SEEN})
    if config.data.dir is not None and store is None or kind.over is None or kind.random_batch is None:
        with unfilled():  # nobody reads the weights
            workload = build_workload(config)
        return PlannedStep(config, workload, first_batch(small, workload))
    if store is None:
        assert kind.random_store is not None, "a family that makes batches says what they are of"
        store = kind.part("random_store")(config)
    over = kind.part("over")
    try:
        with torch.device("meta"):  # no time or memory for weights that nobody reads
            workload = over(config, store, NoSamples())
    except (NotImplementedError, RuntimeError):
        workload = over(config, store, NoSamples())
    return PlannedStep(config, workload, kind.make_batch(small, store))


def _of_size(batch: Batch, num_samples: int) -> Batch:
    """The same batch with so many samples, without content."""
    seen = batch_length(batch)
    return {
        name: torch.empty((num_samples, *value.shape[1:]), dtype=value.dtype)
        if value.ndim and len(value) == seen
        else torch.empty(value.shape, dtype=value.dtype)
        for name, value in batch.items()
    }


def _lay_out_(module: nn.Module) -> None:
    if not convolves_images(module):
        return
    for parameter in module.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@contextmanager
def _explained(workload: str) -> Iterator[None]:
    try:
        yield
    except HalfstepError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            _cannot_be_traced(workload, error),
            why="its memory is counted on tensors without content, and something in forward or loss asks for values "
            "(.item(), an `if` on a tensor, numpy)",
            fix="keep that out of forward and loss, or let the run find its batch: train.auto_batch=true",
        ) from error
    except Exception as error:
        raise ModelError(
            _cannot_be_traced(workload, error),
            why="its memory is counted in a step of forward, loss and backward on tensors without content, which ended",
            fix="see whether the same step trains: halfstep train ... train.max_steps=1",
        ) from error


def _cannot_be_traced(workload: str, error: Exception) -> str:
    return f"a step of {workload} cannot be traced: {type(error).__name__}: {summarise_error(error)}"
