"""How the verdict reaches an optimizer: one of three methods, chosen by what the optimizer can do.

    found_inf   fused SGD, Adam, AdamW, Adagrad and our AdamW8bit and AdamWBf16 read the flag inside their kernel: free;
                in a CUDA graph AdamW's kernel, and Adam's without decay, is our own (single_pass.py), with torch's bits
    select      torch's other optimizers, Muon among them: save parameters and state, step, restore by `where` if bad:
                costs a copy
    host        anything else, an optimizer with state on the host, and one whose step() runs the user's code
                (a hook, a `step` replaced on the instance), which must not run for a bad step: one wait per step

In a sharded model, optimizers that treat each number alone step this rank's shards (`ShardTwin`).

Only torch's classes use `select`: a custom optimizer may keep Python numbers or replace its state tensors, which cannot
be restored from outside.

The first commit of a parameter is always decided on the host, with one wait: optimizers create their state then, and
fused SGD with momentum leaves an *uninitialised* buffer after a skipped first step (seen on torch 2.11 and 2.13).

An optimizer can write NaN from finite gradients: 0 / 0 in Adam with eps=0, the root of a negative number in a centred
RMSprop. After `select` and `host` the weights are checked: `select` restores them, `host` ends with an error. After
fused kernels they are not checked, because that costs a pass over all weights: with eps > 0 and a finite learning rate
these kernels write finite numbers; with eps = 0 `select` is used.
"""

from __future__ import annotations

import copy
import inspect
import operator
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer, _muon, lr_scheduler
from torch.optim import optimizer as torch_hooks

from halfstep.distributed.sharding import get_local, get_locals, has_dtensor, is_dtensor, wrap_local
from halfstep.errors import ConfigError, HalfstepError, ModelError
from halfstep.step.clip import compute_total_norm
from halfstep.step.flat import (
    Memory,
    Snapshot,
    are_same_objects,
    get_dtype,
    get_gradient,
    get_is_sparse,
    is_writable_in_place,
)
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16, JudgedAdamW
from halfstep.step.optim.by_name import OPTIMIZERS
from halfstep.step.optim.cycled_adam import step_cycled_adam, takes_tensor_betas
from halfstep.step.optim.single_pass import SinglePass, can_run_single_pass
from halfstep.step.tables import Rates

CommitMethod = Literal["found_inf", "select", "host"]

READS_FLAG_IN_KERNEL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, AdamW8bit, AdamWBf16)
KNOWN = {*OPTIMIZERS.values(), *READS_FLAG_IN_KERNEL}
ELEMENTWISE = KNOWN - {torch.optim.Adafactor, torch.optim.Muon}
SMALLEST_EPS = torch.finfo(torch.float32).tiny

COMMITTING, WATCHED = "_halfstep_commits", "_halfstep_watches"
"""Marks on the optimizer itself, because two steps may share one."""


def choose_commit_method(optimizer: Optimizer) -> CommitMethod:
    """Return the cheapest method that leaves everything bit-identical on a bad step."""
    refuse_closure(optimizer)
    groups = optimizer.param_groups
    is_fused = all(group.get("fused") for group in groups)
    # The exact class: a subclass may override step() and ignore the flag.
    if type(optimizer) in READS_FLAG_IN_KERNEL and is_fused and not divides_by_zero(optimizer):
        return "found_inf"
    on_host = all(p.device.type == "cpu" for group in groups for p in group["params"])
    is_torchs = type(optimizer) in OPTIMIZERS.values()
    return "select" if is_torchs and (on_host or is_fused or _is_capturable(optimizer)) else "host"


def refuse_closure(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step() cannot be called without an argument, such as LBFGS."""
    # Of the class: a scheduler replaces step() of the instance, and its wrapper's signature has `self`, too.
    _, *given = inspect.signature(type(optimizer).step).parameters.values()
    if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in given):
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure in its step()",
            why="it evaluates the model several times in one step, so the step cannot be checked as a whole",
            fix="use an optimizer that steps without one, such as AdamW; SAM's second pass fits into on_gradients= "
            "(docs/loop_kinds.md)",
        )


def divides_by_zero(optimizer: Optimizer) -> bool:
    """True if eps is so small that 0 / (0 + eps) is NaN in fp32."""
    found = (group.get("eps", 1.0) for group in optimizer.param_groups)
    return any(isinstance(eps, float | int) and eps < SMALLEST_EPS for eps in found)


def runs_other_code(optimizer: Optimizer) -> bool:
    """True if step() runs more than the optimizer's class has: a hook, or a `step` replaced on the instance."""
    if type(optimizer) not in KNOWN:
        return False  # a custom class: its step() is committed by the host anyway
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(), optimizer._optimizer_step_post_hooks.values(),
        torch_hooks._global_optimizer_pre_hooks.values(), torch_hooks._global_optimizer_post_hooks.values(),
    )  # fmt: skip
    if any(hook is not warn_of_second_step for hook in hooks):
        return True
    step: Any = vars(optimizer).get("step")
    # torch's schedulers wrap step() on the instance to note that it was called.
    is_scheduled = getattr(step, "__globals__", None) is vars(lr_scheduler)
    return step is not None and not (is_scheduled and step.__wrapped__ is type(optimizer).step)


def get_stored_values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient that are scaled and judged: of a sparse one those it stores, of a sharded one
    this rank's."""
    return gradient._values() if gradient.is_sparse else get_local(gradient)


def _is_capturable(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.Muon:  # it counts no steps, and `step_muon` takes learning rates on the device
        return all(p.is_cuda for group in groups for p in group["params"])
    return all(group.get("capturable") for group in groups)


class CommitWay(NamedTuple):
    """How one commit is made."""

    method: CommitMethod
    by_host: bool  # the host waits for the verdict and decides whether to step
    is_undone: bool  # what the optimizer writes is put back where the step is bad

    @property
    def can_fail(self) -> bool:
        """True if the optimizer may raise or write non-finite numbers: all but fused kernels after their first step."""
        return self.by_host or self.method != "found_inf"


class CommitUndo:
    """A copy of what an optimizer is about to write: parameters that have a gradient, and their state.

    The copy's memory is freed when the step is over; where each tensor is in it is kept for the next one, as `last`,
    because looking at hundreds of tensors takes longer than copying them."""

    def __init__(
        self, optimizer: Optimizer, parameters: list[Tensor], *, by_host: bool, last: CommitUndo | None = None
    ) -> None:
        self.optimizer, self.parameters, self.by_host = optimizer, parameters, by_host
        self.state = {p: dict(own) for p in parameters if (own := optimizer.state.get(p))}
        # Restored by the host only: numbers that custom optimizers count in groups, and lists of tensors.
        self.groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for own in self.state.values() if by_host else ():
            own.update((k, copy.deepcopy(v)) for k, v in own.items() if isinstance(v, list | dict))
        state = (value for own in self.state.values() for value in own.values() if isinstance(value, Tensor))
        self.held = get_locals([*parameters, *state])
        self.memory: Memory
        self.snapshot: Snapshot
        if last is not None and are_same_objects(self.held, last.held) and not last.memory.has_changed():
            self.memory, self.snapshot = last.memory, last.snapshot
        else:
            written = [*self.held[: len(parameters)], *filter(is_writable_in_place, self.held[len(parameters) :])]
            self.memory, self.snapshot = Memory(written), Snapshot(written)
        self.snapshot.save()

    def restore_where(self, bad: Tensor) -> None:
        if not self.by_host:
            self.snapshot.restore_where(bad)  # torch's optimizers write their state in place
        elif bool(bad):
            self.restore()
        self.snapshot.forget()

    def restore(self) -> None:
        self.snapshot.restore()
        self.snapshot.forget()
        for p in self.parameters:
            self.optimizer.state.pop(p, None)
            if p in self.state:
                self.optimizer.state[p] = self.state[p]
        for group, then in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(then)


class Committer:
    def __init__(self, optimizer: Optimizer, rates: Rates | None) -> None:
        self.optimizer, self.rates = optimizer, rates
        self._take_groups()
        self.stepped: dict[Tensor, bool] = {}  # parameters it has stepped -> whether it keeps state for them
        self._settled: tuple[list[Any], list[bool]] | None = None
        """Parameters and state of the last commit that built no state: most steps find the same."""
        self._fused_adam: FusedAdam | None = None
        self._undo: CommitUndo | None = None  # of the last commit that was copied
        self._twin: ShardTwin | None = None  # steps in place of the optimizer if parameters are sharded
        self.unchecked: set[int] = set()  # ids of parameters that were not finite before the first step
        self.single_pass: SinglePass | None = None  # while a step is captured: replaces torch's kernel

    def _take_groups(self) -> None:
        """Choose the method by the groups, which are new dicts after `load_state_dict`, and bind the rates to them."""
        optimizer, rates = self.optimizer, self.rates
        self.groups = list(optimizer.param_groups)
        self._own_method = choose_commit_method(optimizer)
        is_capturable = self._own_method == "select" and _is_capturable(optimizer)
        self.takes_tensor_lr = self._own_method == "found_inf" or is_capturable
        is_cycled = rates is not None and rates.cycles(optimizer)
        self.reads_betas = is_cycled and is_capturable and takes_tensor_betas(optimizer)
        self.writes_momentum = is_cycled and not self.reads_betas
        """True if a schedule cycles its momentum, and its kernels take that as a number from the host."""
        if rates is not None and self.takes_tensor_lr:
            rates.bind(optimizer, betas=self.reads_betas)

    @property
    def has_new_groups(self) -> bool:
        """True if the user's code has loaded state into the optimizer, or added a group."""
        return not are_same_objects(self.groups, self.optimizer.param_groups)

    @property
    def method(self) -> CommitMethod:
        return "host" if runs_other_code(self.optimizer) else self._own_method

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def hint(self) -> str:
        """Return a warning about the cost or risk of this optimizer, or an empty string."""
        if runs_other_code(self.optimizer):
            return (
                f"{self.name}.step() runs a hook or was replaced on the instance: each step waits for the device, so "
                "that a dropped one does not run that code; on_commit= does not wait"
            )
        if divides_by_zero(self.optimizer):
            return f"{self.name} has eps=0: 0 / 0 is NaN wherever a gradient stays 0. Fix: eps=1e-8"
        return ""

    @property
    def extra_bytes(self) -> int:
        """Return the bytes that the method needs while a step commits."""
        if self.method != "select":
            return 0
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        state = [value for own in self.optimizer.state.values() for value in own.values() if torch.is_tensor(value)]
        return sum(t.numel() * t.element_size() for t in (*parameters, *state))

    def choose(self) -> CommitWay:
        """Return how the next commit is made."""
        method, parameters = self.method, self._with_grad()
        self._prepare_twin()
        # Parameters with sparse gradients are not copied: a copy of a whole table would cost more than a wait.
        is_sparse = any(map(get_is_sparse, map(get_gradient, parameters)))
        is_first = self._has_first(parameters)
        by_host = method == "host" or is_first or method == "select" and is_sparse
        return CommitWay(method=method, by_host=by_host, is_undone=method == "select" and not is_sparse)

    def copy(self, way: CommitWay) -> CommitUndo:
        self._undo = CommitUndo(self.optimizer, self._with_grad(), by_host=way.by_host, last=self._undo)
        return self._undo

    def commit(self, way: CommitWay, bad: Tensor, factor: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Step the optimizer with gradients times `factor`. If `bad` is set, the kernel or the host leaves everything
        unchanged; `commit_all` undoes what `select` writes."""
        if self.rates is not None and self.writes_momentum:
            self.rates.write_momenta(self.optimizer)
        if way.method == "found_inf" and not way.by_host:
            return self._commit_in_kernel(bad, factor, bad.float() if found_inf is None else found_inf)
        if factor is not None:
            torch._foreach_mul_([get_stored_values(p.grad) for p in self._with_grad() if p.grad is not None], factor)
        return self._commit_by_host(bad) if way.by_host else self._step()

    def left_non_finite(self) -> Tensor | None:
        """Return on the device whether a stepped parameter is not finite; None if there is none to check."""
        dense = [p for p in self._with_grad() if p.grad is not None and not p.grad.is_sparse]
        filled = [p for p in get_locals(p for p in dense if id(p) not in self.unchecked) if p.numel()]
        if not filled:
            return None
        worst = compute_total_norm(filled, float("inf"))
        return worst - worst != 0

    def release_gradients(self) -> None:
        if self._twin is not None:
            self._twin.drop_gradients()

    def forget(self) -> None:
        """Note which parameters have state, and bind the rates again, after state was loaded into new tensors."""
        self._settled = self._twin = None
        self.stepped = {p: bool(own) for p, own in self.optimizer.state.items()}
        self._take_groups()

    def open_capture(self, device: torch.device) -> SinglePass | None:
        """Prepare a capture. The result has to live as long as the graph, and be filled after the capture."""
        self.single_pass = SinglePass(self.optimizer, device) if can_run_single_pass(self.optimizer, device) else None
        return self.single_pass

    def _has_first(self, parameters: list[Tensor]) -> bool:
        """True if the optimizer has to build the state of one of these. Looked up by parameter only where parameters or
        state are others than at the last commit: hashing hundreds of tensors takes long."""
        states = list(self.optimizer.state.values())
        held, are_filled = [*parameters, *states], list(map(bool, states))
        if self._settled is not None and are_filled == self._settled[1] and are_same_objects(held, self._settled[0]):
            return False
        is_first = any(map(self._is_first, parameters))
        self._settled = None if is_first else (held, are_filled)
        is_adam = type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not is_first
        self._fused_adam = FusedAdam(self._stepped) if is_adam else None
        return is_first

    @property
    def _stepped(self) -> Optimizer:
        """Return what step() is called on: the optimizer, or its twin that holds shards."""
        return self.optimizer if self._twin is None else self._twin.twin

    def _prepare_twin(self) -> None:
        """Make the twin that steps shards, if parameters are sharded and each number can be stepped alone."""
        is_sharded = any(has_dtensor(group["params"]) for group in self.optimizer.param_groups)
        if not is_sharded or type(self.optimizer) not in ELEMENTWISE or runs_other_code(self.optimizer):
            self._twin = None
        elif self._twin is None or not self._twin.fits():
            self._twin, self._settled = ShardTwin(self.optimizer), None
        if self._twin is not None:
            self._twin.take_gradients()

    def _is_first(self, parameter: Tensor) -> bool:
        """True if the optimizer has to build the parameter's state, also after it was cleared."""
        has_state = self.stepped.get(parameter)
        return has_state is None or has_state and not self.optimizer.state.get(parameter)

    def _commit_by_host(self, bad: Tensor) -> None:
        if bool(bad):
            return
        self._begin_momentum()
        self._step()
        self.stepped |= {p: bool(self.optimizer.state.get(p)) for p in self._with_grad()}

    def _begin_momentum(self) -> None:
        """Create momentum buffers for parameters that first step after the others: fused SGD cannot begin them."""
        if type(self.optimizer) is not torch.optim.SGD or self.method != "found_inf" or not self.stepped:
            return
        for group in self._stepped.param_groups:
            for p in group["params"]:
                if group["momentum"] and p.grad is not None and not self._stepped.state[p]:
                    # A first step makes the buffer the gradient g; m * b + (1 - d) * g is g for b = g * d / m.
                    first = p.grad * (group["dampening"] / group["momentum"])
                    self._stepped.state[p]["momentum_buffer"] = first

    def _commit_in_kernel(self, bad: Tensor, factor: Tensor | None, found_inf: Tensor) -> None:
        if self.single_pass is not None and self.single_pass.fits_gradients:
            return self.single_pass.record(bad, factor)
        # torch's GradScaler sets these attributes for fused optimizers, whose kernels skip if found_inf is 1, divide by
        # grad_scale, and write the gradient back.
        said = {"found_inf": found_inf}
        if factor is not None:
            said["grad_scale"] = factor.float().reciprocal()
        if self._twin is not None:
            self._twin.take_settings()
        if self._fused_adam is not None and self._fused_adam.step(**said):
            return None
        vars(self._stepped).update(said)
        try:
            self._step()
        finally:
            for name in said:
                delattr(self._stepped, name)

    def _step(self) -> None:
        if self.rates is not None and not self.takes_tensor_lr:
            self.rates.write_floats(self.optimizer)
        if self._twin is not None:
            self._twin.take_settings()
        setattr(self._stepped, COMMITTING, True)
        try:
            is_muon = type(self.optimizer) is torch.optim.Muon and self.method != "host"
            if is_muon and any(isinstance(group["lr"], Tensor) for group in self.optimizer.param_groups):
                step_muon(self.optimizer)
            elif self.reads_betas:
                step_cycled_adam(self._stepped)
            else:
                self._stepped.step()
            if self._twin is not None:
                self._twin.share_state()
        finally:
            setattr(self._stepped, COMMITTING, False)

    def _with_grad(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]


class FusedAdam:
    """Call the kernel of torch's fused Adam and AdamW as their step() does, without the code around it: finding
    states by parameter, grouping tensors and the profiler take longer than the kernel of a small model.

    It knows the parameters that have a gradient and their states; a change in either makes a new one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.groups = optimizer, list(optimizer.param_groups)
        self.sizes = [len(group["params"]) for group in self.groups]
        self.parameters = [[p for p in group["params"] if p.grad is not None] for group in self.groups]
        self.states = [[optimizer.state[p] for p in parameters] for parameters in self.parameters]

    def step(self, found_inf: Tensor, grad_scale: Tensor | None = None) -> bool:
        """Make a step, if the groups are the same and torch would give each to one kernel as it is; else return
        False."""
        if not are_same_objects(self.groups, self.optimizer.param_groups):
            return False
        if [len(group["params"]) for group in self.groups] != self.sizes:
            return False
        gradients = [list(map(get_gradient, parameters)) for parameters in self.parameters]
        if not all(map(self._takes_group, self.groups, self.parameters, gradients)):
            return False
        good = torch.rsub(found_inf, 1)
        for group, parameters, own, states in zip(self.groups, self.parameters, gradients, self.states, strict=True):
            if not parameters:
                continue
            has_max = group["amsgrad"]
            steps = list(map(_get_count, states))
            # torch adds 1 and subtracts the flag after the kernel, which does not read the count of a bad step. A list:
            # a single tensor is taken for a number, and the host would wait for it.
            torch._foreach_add_(steps, [good] * len(steps))
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            kernel(
                parameters, own, list(map(_get_mean, states)), list(map(_get_square, states)),
                [s["max_exp_avg_sq"] for s in states] if has_max else [],
                steps, amsgrad=has_max, lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
                grad_scale=grad_scale, found_inf=found_inf,
            )  # fmt: skip
        return True

    def _takes_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> bool:
        if not parameters or not group["fused"] or group["differentiable"] or isinstance(group["betas"][0], Tensor):
            return not parameters
        # The kernel refuses parameters and states of several kinds itself; gradients may be wider than their parameter.
        lr, kinds = group["lr"], {parameters[0].dtype, *map(get_dtype, gradients)}
        return len(kinds) == 1 and (not isinstance(lr, Tensor) or lr.get_device() in (-1, parameters[0].get_device()))


_get_count, _get_mean, _get_square = map(operator.itemgetter, ("step", "exp_avg", "exp_avg_sq"))


def step_muon(optimizer: Any) -> None:
    """Make a step of torch's Muon with learning rates on the device: its own step() reads them on the host, which a
    CUDA graph cannot hold. It rounds the product of update and rate, which torch's does not."""
    for group in optimizer.param_groups:
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        buffers: list[Tensor] = []
        optimizer._init_group(group, parameters, gradients, buffers)
        lr, momentum = group["lr"], group["momentum"]
        for p, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
            buffer.lerp_(gradient, 1 - momentum)
            update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
            update = _muon._zeropower_via_newtonschulz(
                update, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            rate = _muon._adjust_lr(lr, group["adjust_lr_fn"], p.shape)
            # In fp32: next to bf16 weights a tensor without dimensions would be rounded to bf16.
            p.copy_(p.float() * (1 - lr * group["weight_decay"]) - update.float() * rate)


def commit_all(
    committers: Sequence[Committer],
    bad: Tensor,
    factor: Tensor | None,
    found_inf: Tensor | None = None,
    *,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Step all optimizers or none. Return the verdict: `bad`, or an optimizer wrote non-finite numbers. `found_inf` is
    `bad` as a number, if the caller has it. `agree` returns whether a flag is set on any of the ranks that hold shards.

    An optimizer that raises may have stepped some of its groups. Copying all weights at every step to restore those
    would cost more than resuming from a checkpoint, so the error gets a note. Optimizers that stepped before it
    are restored: they are copied if a later one may raise or write non-finite weights. Copies are restored last to
    first: if two optimizers step a parameter, the first copy has its value from before both."""
    ways = [committer.choose() for committer in committers]
    copies: list[CommitUndo] = []
    for number, (committer, way) in enumerate(zip(committers, ways, strict=True)):
        if way.is_undone or any(later.can_fail for later in ways[number + 1 :]):
            copies.append(committer.copy(way))
        try:
            committer.commit(way, bad, factor, found_inf)
            spoiled = committer.left_non_finite() if way.method != "found_inf" else None
            if agree is not None and way.method != "found_inf":
                spoiled = agree(torch.zeros_like(bad) if spoiled is None else spoiled)
            if spoiled is not None and not way.is_undone:
                _refuse_spoiled(committer, spoiled & ~bad)
            if spoiled is not None:
                bad, found_inf = bad | spoiled, None
        except BaseException as error:
            for undo in reversed(copies):
                undo.restore()
            # Our errors are raised before anything is written, or say so.
            if not (way.is_undone or isinstance(error, HalfstepError)):
                error.add_note(
                    f"halfstep: {committer.name} may have updated some of its parameters when it raised; the step is "
                    "not counted, and weights may be between two steps. To continue, load model and step from your "
                    "last checkpoint"
                )
            raise
        finally:
            committer.release_gradients()
    for undo in reversed(copies):
        undo.restore_where(bad)
    return bad


def _refuse_spoiled(committer: Committer, spoiled: Tensor) -> None:
    if bool(spoiled):
        raise ModelError(
            f"{committer.name}.step() produced non-finite weights from finite gradients",
            why="its arithmetic failed, such as 0 / 0 with eps=0; the update of this optimizer cannot be undone",
            fix="load your last checkpoint, and give the optimizer an eps above 0 or a lower learning rate",
        )


# --- the shards of a sharded model ---
# torch's optimizers accept DTensors, but dispatch every operation on them in Python, which takes longer than the
# kernels of a small shard, and fused SGD and Adagrad have no DTensor kernels at all. An optimizer that treats each
# number alone computes the same from the local tensors. So a twin of the user's optimizer holds those, steps them, and
# shares its state with the user's one, where each tensor appears as the DTensor that it is a shard of: checkpoints see
# the whole. AdamW8bit cuts its blocks per shard. Its codes have no meaning in another shard, so they stay plain.


class ShardTwin:
    """A copy of an optimizer that holds this rank's shards of its parameters, and the same state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = _list_parameters(optimizer)
        self.shards = get_locals(self.parameters)
        self.twin: Optimizer = object.__new__(type(optimizer))
        # Without a `step` that torch's schedulers have set on the instance: it would step the original.
        vars(self.twin).update({key: value for key, value in vars(optimizer).items() if key != "step"})
        by_parameter = dict(zip(self.parameters, self.shards, strict=True))
        self.twin.param_groups = [
            {**group, "params": [by_parameter[p] for p in group["params"]]} for group in optimizer.param_groups
        ]
        self.twin.state = defaultdict(dict)
        for parameter, own in optimizer.state.items():
            self.twin.state[by_parameter[parameter]] = _map_tensors(own, get_local)
        if isinstance(self.twin, JudgedAdamW):
            self.twin.numbers = {by_parameter[p]: number for p, number in self.twin.numbers.items()}

    def fits(self) -> bool:
        """True if the optimizer holds the same parameters, those the same memory, and no state was removed."""
        found = _list_parameters(self.optimizer)
        if not are_same_objects(found, self.parameters) or not are_same_objects(get_locals(found), self.shards):
            return False
        return len(self.optimizer.state) == len(self.twin.state)

    def take_gradients(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None if parameter.grad is None else get_local(parameter.grad)

    def drop_gradients(self) -> None:
        for shard in self.shards:  # or their memory would stay after the next zero_grad
            shard.grad = None

    def take_settings(self) -> None:
        """Take over the groups' settings: a schedule or the user may have written them."""
        for group, own in zip(self.optimizer.param_groups, self.twin.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})

    def share_state(self) -> None:
        """Show the user's optimizer the state that the twin has built."""
        vars(self.optimizer).update(_opt_called=True)  # torch's schedulers warn if their optimizer never stepped
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            own = self.twin.state.get(shard)
            if own and not self.optimizer.state.get(parameter):
                is_whole = is_dtensor(parameter) and not isinstance(self.twin, AdamW8bit)

                def wrap(value: Tensor, like: Tensor = parameter, size: torch.Size = shard.shape) -> Tensor:
                    return wrap_local(value, like) if value.shape == size else value

                self.optimizer.state[parameter] = _map_tensors(own, wrap) if is_whole else own


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _map_tensors(state: dict[str, Any], change: Any) -> dict[str, Any]:
    return {key: change(value) if isinstance(value, Tensor) else value for key, value in state.items()}


# --- an optimizer.step() that was left in the loop ---


def watch_for_second_step(optimizer: Optimizer, warning: str) -> Callable[[], None]:
    """Warn once when the user's loop steps an optimizer that a guarded step steps. Return a function that ends this."""
    # One that wraps another, as Lookahead or Accelerate's, may have left torch's constructor out.
    if not hasattr(optimizer, WATCHED) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer.register_step_pre_hook(warn_of_second_step)
    setattr(optimizer, WATCHED, warning)
    return lambda: setattr(optimizer, WATCHED, "")


def warn_of_second_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    warning = getattr(optimizer, WATCHED, "")
    if warning and not getattr(optimizer, COMMITTING, False):
        setattr(optimizer, WATCHED, "")  # once is enough
        # At the user's line: Accelerate ignores warnings that come from torch's schedulers, which wrap step().
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals["__name__"].startswith(("torch.", __name__)):
            level, frame = level + 1, frame.f_back
        warnings.warn(warning, stacklevel=level)
