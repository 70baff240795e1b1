"""Trace a run's step without computing it: its model, phases, optimizers and weight average on tensors without content.

The tensors are torch's fake tensors on the CPU, because autograd on fake CUDA tensors aborts the process if torch was
built without CUDA. `Pretence` switches on what a GPU does differently: CUDA's autocast lists, attention that never
stores its scores, and our own kernels, which allocate their outputs and are not launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from halfstep.errors import HalfstepError, ModelError, summarise_error
from halfstep.hardware.gpus import look_up_gpu
from halfstep.own_loop.repeated_blocks import find_blocks, recompute_blocks_
from halfstep.precision.apply import apply_frozen_
from halfstep.precision.decide import decide
from halfstep.precision.op_lists import use_cuda_op_lists
from halfstep.precision.plan import Plan
from halfstep.recompute import Recompute, Recomputing
from halfstep.step.batches import count_samples
from halfstep.step.ema import Ema
from halfstep.step.optim.adamw8bit import AdamW8bit, make_state
from halfstep.step.optim.adamw_bf16 import AdamWBf16, split_for_memory
from halfstep.step.optim.by_name import CAPTURABLE
from halfstep.step.optim.codes import make_signed_table, make_unsigned_table
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.loader import Key, TensorSamples
from halfstep_train.kernels.fast_forms import force, pretend_launches
from halfstep_train.models.initial_values import skip_initialisation
from halfstep_train.run.assemble import Length, build_optimizer, build_workload, configure_phase, has_parameter
from halfstep_train.run.frozen_modules import get_modules
from halfstep_train.run.memory.sharded import ShardUnit, list_units, name_parameters
from halfstep_train.run.memory.step_trace import AllocationRecorder, StepTrace
from halfstep_train.run.multi_rank import group_blocks
from halfstep_train.tune.channels_last import match_layout, wants_channels_last
from halfstep_train.tune.trials import MemorySetting, load_first_batch
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.workload import Batch, Phase, Workload

SEEN = 2
"""Samples in the batch that is really made; larger batches are empty tensors of the same shapes."""
HAS_ALL_FORMATS = "H200"
"""The GPU whose plan is traced; formats that the real GPU lacks are refused earlier."""
BATCHES_AHEAD = 3
"""Loaded batches on the device: the one in use, and two that are copied ahead (halfstep/prefetching.py)."""
EMA_PIECES = 3
"""Temporaries of an EMA update, each as large as the largest averaged tensor."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that do not depend on batch and mode; `update` only while the optimizer updates."""

    weights: int
    frozen: int
    optimizer: int
    average: int
    update: int


class TraceableStep:
    """A workload and its config, ready to be traced; nothing is ever computed."""

    def __init__(self, config: RunConfig, workload: Workload, raw: Batch) -> None:
        self.config, self.workload, self.raw = config, workload, raw
        self.num_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
        self.pretence = Pretence(workload.list_modules())
        # All candidates; a run that starts replaces them by those that pass tune/choose.py. Workloads that
        # name their blocks recompute them by themselves.
        self.blocks: Collection[str] = () if workload.blocks else find_blocks(workload.model)
        self.recomputes = bool(self.blocks) or any(isinstance(m, Recomputing) for m in workload.model.modules())
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in workload.model.modules())

    def trace_phases(self, precision: str, recompute: Recompute, batch_size: int, *, chains: bool) -> list[StepTrace]:
        """Trace forward and backward of one micro-batch, once per phase."""
        with self.pretence.enter(chains=chains) as kernels, _explain_failures(self.config.workload):
            plan = self._place(precision, recompute)
            self._empty_values()
            batch = self._make_input(batch_size)
            found = []
            for phase in self.phases:
                kernels.clear()
                found.append(self._trace(phase, plan, batch))
                found[-1].is_chain, found[-1].compiles = chains and bool(kernels), phase.compiles
            return found

    def measure_fixed(self, precision: str, setting: MemorySetting) -> Fixed:
        """Return the bytes of weights, optimizer state and average as the run would build them."""
        # These cache tables of real numbers: build them outside of the fake tensors.
        make_signed_table()
        make_unsigned_table()
        with self.pretence.enter(), _explain_failures(self.config.workload):
            self._place(precision, "none")
            model = self.workload.model
            frozen = [t for m in get_modules(self.workload.frozen).values() for t in (*m.parameters(), *m.buffers())]
            optimizers = [self._build_optimizer(phase, setting) for phase in self.phases]
            states = [_measure_state(optimizer) for optimizer in optimizers]
            updates = map(self._count_update_bytes, optimizers, states)
            average = Ema(model, self.workload.ema_parts).shadows if self.config.ema.enabled else []
            return Fixed(
                weights=_sum_bytes((*model.parameters(), *model.buffers())),
                frozen=_sum_bytes(frozen),
                optimizer=sum(states),
                average=_sum_bytes(average),
                update=max(updates) + EMA_PIECES * max((shadow.nbytes for shadow in average), default=0),
            )

    @functools.cached_property
    def shard_blocks(self) -> list[list[str]]:
        """Return the blocks that FSDP2 shards, of the model and of each frozen network, in order.

        FSDP2 gathers a block when it is called, so those that a step never calls as a module are left out, as are those
        that share a parameter.
        """
        called: set[nn.Module] = set()
        hook = register_module_forward_pre_hook(lambda module, _: called.add(module))
        try:
            with self.pretence.enter(), _explain_failures(self.config.workload), torch.no_grad():
                self._empty_values()
                batch = self._make_input(SEEN)
                for phase in self.phases:
                    (phase.forward or self.workload.forward)(self.workload.model.train(), batch)
        finally:
            hook.remove()
        found = []
        for module in self.workload.list_modules():
            uncalled = [name for name, part in module.named_modules() if part not in called]
            # Tied parameters must be in one unit: torch 2.11 would untie them silently.
            owners = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
            blocks = find_blocks(module, uncalled, of_any=True)
            found.append([b for b in blocks if all(owners[id(p)] == 1 for p in module.get_submodule(b).parameters())])
        return found

    @functools.cached_property
    def units(self) -> list[ShardUnit]:
        """Return what FSDP2 gathers together: groups of the model's blocks, its rest, and blocks of frozen networks."""
        own, *frozen = self.shard_blocks
        groups = [group_blocks(self.workload.model, own), *([[name] for name in names] for names in frozen)]
        return list_units(self.workload.list_modules(), groups)

    @functools.cached_property
    def input_bytes(self) -> list[tuple[int, int]]:
        """Return the bytes of loaded batches and of one prepared batch, for 2 samples and for 4."""
        with self.pretence.enter(), _explain_failures(self.config.workload):
            raw = {size: sum(t.nbytes for t in _make_batch(self.raw, size).values()) for size in (2, 4)}
            return [(BATCHES_AHEAD * raw[size], _sum_bytes(self._make_input(size).values())) for size in raw]

    # --- placing ---

    def _empty_values(self) -> None:
        for value in self.workload.values.values():
            value.value = torch.empty(())

    def _place(self, precision: str, recompute: Recompute) -> Plan:
        """Apply the plan of this precision to the model, as a run would, and switch recomputation on."""
        model, frozen = self.workload.model, get_modules(self.workload.frozen)
        parts = self.config.precision.modules
        if precision == "tf32":  # modules in fp32 take the same memory, and a plan refuses to mix the two
            parts = {name: "tf32" if asked == "fp32" else asked for name, asked in parts.items()}
        wish = self.config.precision.model_copy(
            update={"default": precision, "simulate": False, "strict": False, "modules": parts}
        )
        decided = decide(wish, look_up_gpu(HAS_ALL_FORMATS), model, frozen=frozen)
        on_gpu = dataclasses.replace(decided, device="cuda", simulated=False)
        plan = dataclasses.replace(on_gpu, device="cpu")
        plan.apply(model)
        apply_frozen_(plan, frozen)
        for module in self.workload.list_modules():
            if wants_channels_last(self.config.train.channels_last, self.config.workload, on_gpu, module):
                for kernel in (p for p in module.parameters() if p.ndim == 4):
                    kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)
        if not (self.config.train.activation_checkpointing and recompute == "none"):
            recompute_blocks_(model, recompute, self.blocks)
        return plan

    def _make_input(self, batch_size: int) -> Batch:
        """Return a prepared batch without content."""
        key = Key.for_training(self.config.train.seed, 0, 0, 0, 0, batch_size)
        try:
            prepared = self.workload.prepare_batch(_make_batch(self.raw, batch_size), key=key, training=True)
        except Exception:  # preparation uses numpy or a generator: prepare a real batch and use its shapes
            key = Key.for_training(self.config.train.seed, 0, 0, 0, 0, count_samples(self.raw))
            with unset_fake_temporarily():
                real = self.workload.prepare_batch(self.raw, key=key, training=True)
            prepared = _make_batch(real, batch_size)
        return match_layout(self.workload.model, prepared)

    # --- phases ---

    @property
    def phases(self) -> Sequence[Phase]:
        """Return the phases; without any, one that trains everything."""
        workload = self.workload
        return workload.phases or [Phase(name="all", loss=workload.loss, groups=workload.groups)]

    def _trace(self, phase: Phase, plan: Plan, batch: Batch) -> StepTrace:
        """Trace forward and backward of one phase."""
        model = self.workload.model.train()
        named = dict(model.named_parameters())
        wanted = {name: p.requires_grad for name, p in named.items()}
        for name, parameter in named.items():
            # As in a run: parameters of other phases get no gradients.
            parameter.requires_grad_(wanted[name] and has_parameter(phase, name))
        known = [t for m in self.workload.list_modules() for t in (*m.parameters(), *m.buffers())]
        try:
            with AllocationRecorder(
                (*known, *batch.values()),
                named.values(),
                named=name_parameters(self.workload.list_modules()),
                is_strict=plan.granted == "fp32",
            ) as recorder:
                with plan.forward():
                    outputs = (phase.forward or self.workload.forward)(model, batch)
                    found: Any = phase.loss(outputs, batch)
                    loss = (found[0] if isinstance(found, tuple) else found).float()
                recorder.in_backward = True
                with plan.backend():
                    run_backward(loss)
            trace: StepTrace = recorder.settle(named.values())
            del outputs, found, loss
            return trace
        finally:
            for name, parameter in named.items():
                parameter.grad = None
                parameter.requires_grad_(wanted[name])

    def _build_optimizer(self, phase: Phase, setting: MemorySetting) -> Optimizer:
        config = configure_phase(self.config, phase)
        if config.optimizer.name != "adamw":
            setting = dataclasses.replace(setting, optimizer_bits=32)
        model, length = self.workload.model, Length(1, 1)
        return build_optimizer(config, model, setting, length, parts=phase.parameters, groups=phase.groups)[0]

    def _count_update_bytes(self, optimizer: Optimizer, state_bytes: int) -> int:
        """Return the temporary bytes of an update: fp32 copies of bf16 weights, or copies to undo a bad step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if isinstance(optimizer, AdamWBf16):
            return max(8 * sum(p.numel() for p in some) for some in split_for_memory(parameters))
        # These keep a copy of weights and state, from which a bad step is undone.
        is_selected = self.config.optimizer.name in CAPTURABLE
        return _sum_bytes(parameters) + state_bytes if is_selected else 0


def _measure_state(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state, which one step on empty gradients builds."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, AdamW8bit):
        return sum(_sum_bytes([*make_state(p).values(), *optimizer.make_low_state(p).values()]) for p in parameters)
    for group in optimizer.param_groups:
        group.update({name: False for name in ("fused", "foreach", "capturable") if name in group})
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except Exception:
        if not optimizer.state:
            raise
        # Some optimizers read values to update; by then their state exists, which is all that is needed here.
    for parameter in parameters:
        parameter.grad = None
    return _sum_bytes(v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))


def build_traceable_step(config: RunConfig, store: Store | None = None) -> TraceableStep:
    """Build the step of a config from its data if a folder is given, else from random data of the usual shape.

    `store` describes the data if they have been read before.
    """
    synthetic = KINDS.of(config.workload).synthetic
    small = config.replace(train={"batch_size": SEEN})
    if config.data.dir is not None and store is None or synthetic is None:
        with skip_initialisation():  # the weights are never read
            workload = build_workload(config)
        return TraceableStep(config, workload, load_first_batch(small.train, workload))
    if store is None:
        store = synthetic.make_store(config)
    batch = synthetic.make_batch(small, store)
    try:
        with torch.device("meta"):  # no time or memory for weights that are never read
            workload = synthetic.build(config, store, TensorSamples(**batch))
    except (NotImplementedError, RuntimeError):
        workload = synthetic.build(config, store, TensorSamples(**batch))
    return TraceableStep(config, workload, batch)


def _make_batch(batch: Batch, num_samples: int) -> Batch:
    """Return an empty batch of the same shapes with `num_samples` samples."""
    seen = count_samples(batch)
    sizes = {name: (num_samples,) if v.ndim and len(v) == seen else v.shape[:1] for name, v in batch.items()}
    return {name: torch.empty((*sizes[name], *v.shape[1:]), dtype=v.dtype) for name, v in batch.items()}


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    # By storage: tied weights and views count once.
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@contextmanager
def _explain_failures(workload: str) -> Iterator[None]:
    """Turn an error while tracing into one that explains it."""
    try:
        yield
    except HalfstepError:
        raise
    except Exception as error:
        why = "memory is predicted by a step on fake tensors, which failed"
        fix = "check whether a real step works: halfstep train ... train.max_steps=1"
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            why = "memory is predicted on fake tensors, which have no values, but forward or loss reads values "
            why += "(.item(), an `if` on a tensor, numpy)"
            fix = "avoid that in forward and loss, or let the run find its batch size: train.auto_batch=true"
        what = f"a step of {workload} cannot be traced: {type(error).__name__}: {summarise_error(error)}"
        raise ModelError(what, why=why, fix=fix) from error


# --- tensors without content, treated as on a GPU ---


_Slot = tuple[dict[str, Tensor | None], str, Tensor]
"""The slots of a module, the name of one, and the original tensor in it."""


class Pretence:
    """Replace the tensors of modules by tensors without content inside `enter()`, and put the originals back."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._slots = [slot for module in modules for slot in _find_slots(module)]

    @contextlib.contextmanager
    def enter(self, *, chains: bool = False) -> Iterator[list[str]]:
        """Replace the tensors; yield the list of our own kernels that a GPU would have launched.

        `chains` runs models as in a captured step.
        """
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            pretend_launches() as kernels,
            _AttentionWithoutScores(),
            force(chains, "chain"),
            use_cuda_op_lists("cpu"),
        ):
            made = {id(own): _make_empty(own) for own in {id(own): own for *_, own in self._slots}.values()}
            for slots, name, own in self._slots:
                slots[name] = made[id(own)]
            try:
                yield kernels
            finally:
                for slots, name, own in self._slots:
                    slots[name] = own


def _find_slots(module: nn.Module) -> Iterator[_Slot]:
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    yield slots, name, tensor  # type: ignore[misc]


def _make_empty(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _AttentionWithoutScores(TorchFunctionMode):
    """Drop attention's dropout: a GPU's kernels draw it themselves, the CPU's would store all scores for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            args = args[:4] + ((0.0,) + args[5:] if len(args) > 4 else ())
        return func(*args, **kwargs)


def run_backward(loss: Tensor) -> None:
    """Run `loss.backward()` so that function modes stay active: recomputed attention stores no scores either."""
    seed = (torch.ones_like(loss),)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), seed, False, False, (), allow_unreachable=True, accumulate_grad=True)
