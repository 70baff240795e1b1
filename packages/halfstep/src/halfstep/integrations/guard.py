"""The guard for a trainer's own loop: it judges and commits. Division, clipping and order stay the host's.

    guard = HostGuard("Accelerate", model, optimizer, advice)    after the host has wrapped both
    model(batch)                          a hook opens the window: what forward may write is saved
    guard.record(loss)                    where the host calls backward, with the loss before scaling
    guard.note_norm(norm, parameters)     where the host clips by norm, if it does
    guard.look_at_gradients()             before the host clips by value, if it does
    guard.step()                          in place of optimizer.step(), or of scaler.step(optimizer), scaler.update()
    scheduler = guard.follow(scheduler)   for the host: a dropped step does not move it

The library's step (step/step.py) judges on the device: loss, norm of the gradients as the host left them, and what
forward wrote. step/commit.py chooses how the verdict reaches the optimizer.

A schedule has two ways. "exact": the learning rate is a table on the device, indexed by the calls of scheduler.step()
that followed a good step; the host's scheduler catches up where it is read (`settle`). "read": the host reads the
verdict once per step and leaves the scheduler alone after a bad one. Both give the same rates.

A GradScaler remains the host's. A gradient that overflows lowers its scale, as it should. If the loss itself, or a
buffer, is not finite, no scale would have helped: then scale and growth counter keep their bits.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.errors import ConfigError, format_count
from halfstep.evidence.recorder import Recorder
from halfstep.fast.fast_path import say
from halfstep.hardware.probe import probe
from halfstep.own_loop.arguments import check_choice, check_folder, make_guard_options
from halfstep.own_loop.evidence import make_recorder
from halfstep.own_loop.loss import suggest_ways
from halfstep.precision.decide import decide
from halfstep.step.batches import read_sample_ids
from halfstep.step.clip import compute_total_norm
from halfstep.step.commit import watch_for_second_step
from halfstep.step.facts import Facts, Reading
from halfstep.step.flat import Snapshot
from halfstep.step.forward_writes import Also
from halfstep.step.guard import Advice, Guard
from halfstep.step.ranks import refuse_differing_rates, refuse_differing_steps
from halfstep.step.scaler import FAR_BELOW, USUAL_FIRST, Scaler
from halfstep.step.schedule import Curve, cycles_momentum
from halfstep.step.step import GuardedStep, JudgedGradients, collect_gradients
from halfstep.step.tables import Rates
from halfstep.step.user_warnings import DroppedSteps, warn_user
from halfstep.step.verdicts import VerdictHandler

Way = Literal["exact", "read"]
GUARDED = "_halfstep_guard"
"""A mark on optimizers and hosts: two guards of one optimizer would judge each step twice."""
AHEAD = 256  # steps that a schedule is asked for in advance


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAdvice(Advice):
    """What a user of a host can do against several bad steps in a row; `step` is what makes guarded steps, `replay` the
    call that names the cause of one."""

    step: str
    replay: str = Recorder.replay


class HostOptions(TypedDict, total=False):
    """Arguments that all hosts take; HostGuard explains them. A captured step has no use for `schedule`."""

    schedule: Literal["auto", "exact", "read"]
    capsules: str | os.PathLike[str] | None
    max_consecutive: int
    also: Also


def take_host_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove those arguments from `options`, and return them."""
    check_choice("schedule", options.get("schedule", "auto"), ("auto", "exact", "read"))
    return {name: options.pop(name) for name in HostOptions.__annotations__ if name in options}


class HostSteps:
    """What a guard and a captured step have in common: schedulers, counts, lines on stderr, and the way back."""

    _step: GuardedStep
    _warnings: DroppedSteps
    last_facts: Facts | None = None
    """The facts of the newest step, on the device; None before the first."""

    def __init__(self, host: str, optimizer: Optimizer, limits: Iterable[str]) -> None:
        refuse_second_guard(optimizer)
        self.host, self.optimizer, self.limits = host, optimizer, list(limits)
        self._schedulers: list[FollowedScheduler] = []
        self._undo: list[Callable[[], object]] = []
        self._num_told = 0  # steps when their total was printed

    @property
    def dropped(self) -> bool:
        """True if the newest step was dropped; waits for the device. For what the host does not guard, such as an
        average of the weights."""
        return self.last_facts is not None and bool(self.last_facts.bad)

    @property
    def attempted(self) -> int:
        """Return the number of steps so far, including dropped ones."""
        return self._step.attempted

    @property
    def num_dropped(self) -> int:
        """Return the number of steps that were dropped, overflows of fp16 included; waits for the device."""
        return self.attempted - self.committed

    @property
    def committed(self) -> int:
        """Return the number of steps that moved the weights; waits for the device."""
        return int(self._step.committed)

    def announce(self) -> None:
        """Print one line: what is guarded, how, and what this host does not allow."""
        if self._step.is_first_rank:
            say(str(self))

    def __str__(self) -> str:
        return self._describe() + (f"; not guarded: {'; '.join(self.limits)}" if self.limits else "")

    def _describe(self) -> str:
        raise NotImplementedError

    def settle(self) -> None:
        """Bring the host's schedulers up to date; waits for the device. Call it before a log, save or evaluation."""
        for scheduler in self._schedulers:
            scheduler.settle()

    def finish(self) -> None:
        """Judge the last steps, which were not read yet, settle the schedulers, and print how many steps were dropped.
        Call it when training ends."""
        self.settle()
        try:
            self._judge_rest()
        finally:
            if self._step.is_first_rank and self.attempted != self._num_told:
                self._num_told, num = self.attempted, self.num_dropped
                num_overflows = num - self._warnings.num_dropped
                which = f", {num_overflows} of them overflows of fp16's gradients" if num_overflows else ""
                say(f"{num or 'none'} of {format_count(self.attempted, 'step')} of {self.host} dropped{which}")

    def _judge_rest(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Give the loop back to the host: let optimizer, schedulers and methods be as if never guarded."""
        self.settle()
        while self._undo:
            self._undo.pop()()
        for scheduler in self._schedulers:
            scheduler.let_go()

    def _mark(self, *owners: object) -> None:
        for owner in owners:
            setattr(owner, GUARDED, self)
            self._undo.append(partial(delattr, owner, GUARDED))

    def _replace(self, owner: Any, name: str, make: Callable[..., Any]) -> None:
        """Put a method on the object in place of its class's, until `close`. `make` gets the one before it first."""
        before, held = getattr(owner, name), vars(owner).get(name)

        def run(*args: Any, **kwargs: Any) -> Any:
            return make(before, *args, **kwargs)

        # torch's schedulers warn of an optimizer whose step() was replaced after they were made.
        run._wrapped_by_lr_sched = name == "step"  # type: ignore[attr-defined]
        vars(owner)[name] = run
        undo = partial(vars(owner).pop, name, None) if held is None else partial(setattr, owner, name, held)
        self._undo.append(undo)

    def guard_average(self, owner: Any, name: str, average: nn.Module) -> None:
        """Let a host's method that averages weights after every step leave the average alone after a dropped one, until
        `close`. Copies the average at every step."""

        def update(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            snapshot = Snapshot([*average.parameters(), *average.buffers()])
            snapshot.save()
            result = before(*args, **kwargs)
            if self.last_facts is not None:
                with torch.no_grad():
                    snapshot.restore_where(self.last_facts.bad)
            return result

        self._replace(owner, name, update)

    def _store_plain_rates(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Store learning rates as numbers, so that a checkpoint loads without this guard."""
        self.settle()
        for scheduler in self._schedulers:
            scheduler.write_plain_rates(state["param_groups"])


class HostGuard(HostSteps):
    """Check and commit the steps of one optimizer in a host's loop.

    Arguments:
        host: the name of the trainer, for messages.
        model: the module that the host calls, wrapped as it is called; or several of them.
        optimizer: a torch optimizer, not the host's wrapper around it.
        advice: what a user of this host can do, for errors and warnings.
        precision: what the host computes in: "fp32", "bf16", "fp16"; used by capsules and their replay.
        scaler: the host's GradScaler, if it has one.
        schedule: "exact" keeps learning rates on the device and waits for nothing; the scheduler catches up when it is
            read or saved. "read" reads the verdict once per step. "auto" takes exact on a GPU with a fused optimizer.
        capsules: a folder for the batches and weights of a bad step; `keep(batch)` gives it the batches.
        max_consecutive: bad steps in a row that raise hs.TrainingStopped.
        also: modules or tensors that the loss writes into although the optimizer does not train them.
        limits: what cannot be guarded in this host, for the line that `announce` prints.
    """

    def __init__(
        self,
        host: str,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer,
        advice: HostAdvice,
        *,
        precision: str = "fp32",
        schedule: Literal["auto", "exact", "read"] = "auto",
        scaler: torch.amp.GradScaler | None = None,
        capsules: str | os.PathLike[str] | None = None,
        max_consecutive: int = 5,
        also: Also = (),
        limits: Iterable[str] = (),
    ) -> None:
        check_choice("schedule", schedule, ("auto", "exact", "read"))
        options, folder = make_guard_options({"max_consecutive": max_consecutive}), check_folder(capsules)
        super().__init__(host, optimizer, limits)
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        plain = join_models([unwrap_model(one) for one in self.models])
        plan = decide(precision, probe(str(device)), plain, simulate=device.type == "cpu")
        off = Scaler(device, enabled=False)  # the host has scaled and clipped
        self._step = GuardedStep(join_models(self.models), optimizer, plan, scaler=off, also=also)
        self.schedule: Way = self._choose_way(schedule)
        self._may_read = schedule == "auto"  # if a scheduler turns out not to fit a table
        self._loss: Tensor | None = None
        self._overflow: Tensor | None = None
        self._norm: tuple[Tensor, JudgedGradients] | None = None
        self._has_warned = False
        self._batches: list[Any] = []
        self._guard = Guard(options, scaling=self.scaler is not None, advice=advice)
        self._recorder = make_recorder(folder, self._step, spikes=False, model=plain) if folder else None
        self._verdicts = VerdictHandler(
            guard=self._guard, model=plain, step=self._step,
            suggest=lambda: suggest_ways(None, has_capsules=self._recorder is not None),
        )  # fmt: skip
        self._step.keeps_rng, self._step.measures_spikes = self._recorder is not None, False
        self._warnings = DroppedSteps(low_scale=USUAL_FIRST / FAR_BELOW if self.scaler is not None else None)
        if self._step.ranks is not None:
            settings = {"guard": options, "schedule": self.schedule, "host": host}
            refuse_differing_steps(self._step.ranks.world, self._step.optimizers, settings)
            self._guard.observers.append(refuse_differing_rates)
        if self._step.is_first_rank:
            self._guard.observers.append(self._warnings.observe)
        if self._recorder is not None:
            self._recorder.replay = advice.replay
            self._guard.observers.append(self._record_fault)
        hooks = [
            *(one.register_forward_pre_hook(_OpenWindow(self)) for one in self.models),
            optimizer.register_state_dict_post_hook(self._store_plain_rates),
            optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: self.settle()),
            optimizer.register_load_state_dict_post_hook(self._forget),
        ]
        self._undo += [hook.remove for hook in hooks]
        warning = f"{type(optimizer).__name__}.step() bypassed the guard inside {host}: call {advice.step} instead"
        self._undo.append(watch_for_second_step(optimizer, warning))
        self._mark(optimizer)

    def _choose_way(self, asked: Literal["auto", "exact", "read"]) -> Way:
        reads_rate = all(one.takes_tensor_lr and one.method != "host" for one in self._step.committers)
        if asked == "exact" and not reads_rate:
            name = type(self.optimizer).__name__
            raise ConfigError(
                f"schedule='exact' needs an optimizer that reads its learning rate on the device; this {name} does not",
                why="it takes the rate as a number, which the host knows only after a wait",
                fix=f"{name}(..., fused=True), or schedule='read': one wait per step",
            )
        if asked == "auto":
            return "exact" if reads_rate and self._step.device.type != "cpu" else "read"
        return asked

    def _record_fault(self, facts: Any, reading: Reading) -> None:
        assert self._recorder is not None
        # Searching for fp16's scale overflows: routine, and no fault to keep.
        is_search = self._warnings.is_overflow(reading)
        self._recorder.observe(facts, replace(reading, is_bad=False) if is_search else reading)

    # --- what the host's loop calls ---

    def open_window(self) -> None:
        """Save what forward may write, before the first forward pass of a step. The hook on the model calls it."""
        if not self._step.is_open:
            for scheduler in self._schedulers:
                scheduler.follow_again()
            self._step.open_window()
            self._loss, self._overflow, self._norm, self._batches = None, None, None, []

    def keep(self, batch: Any) -> None:
        """Keep a micro-batch of the window for a capsule, until the step is known to be good."""
        if self._recorder is not None:
            self.open_window()
            self._batches.append(batch)

    def record(self, loss: Tensor, *, share: float = 1.0) -> None:
        """Add the loss of a micro-batch to the window, where the host calls backward; `share` is what it counts."""
        self.open_window()
        own = loss.detach().to(self._step.device, torch.float32, copy=True)
        own = own.sum() if own.ndim else own
        own = own if share == 1 else own * share
        self._loss = own if self._loss is None else self._loss + own

    @torch.no_grad()
    def look_at_gradients(self) -> None:
        """Note whether gradients are finite before the host clips them by value, which makes an infinite one finite."""
        gradients = collect_gradients(self._step.find_trained_parameters())
        if gradients and self.scaler is None:  # which looks at them when it unscales
            norm = compute_total_norm(gradients, math.inf)
            self._add_overflow(norm - norm != 0)

    def note_norm(self, norm: Tensor, parameters: Iterable[Tensor]) -> None:
        """Take over the norm that the host has clipped by, so that it is not measured again."""
        trained = self._step.writes.trained  # when the window began
        if set(map(id, trained)) <= set(map(id, parameters)):
            self._norm = norm, JudgedGradients(trained)

    def _add_overflow(self, flag: Tensor) -> None:
        self._overflow = flag if self._overflow is None else self._overflow | flag

    def step(self) -> None:
        """Let the optimizer step, or leave every bit as it was. Replaces optimizer.step(), and with a GradScaler also
        scaler.step(optimizer) and scaler.update()."""
        if not self._step.is_open:
            names = ", ".join(type(one).__name__ for one in self.models)
            raise ConfigError(
                f"the optimizer steps, but the guarded model ({names}) was not called since the last step",
                why="to undo a bad step, everything that its forward pass writes is saved when it is called",
                fix=f"guard the module that your loop calls, as {self.host} has wrapped it",
            )
        if self._loss is None and not self._has_warned:
            self._has_warned = True
            warn_user(f"{self.host}'s backward was not called in this step, so the loss is not checked")
        with torch.no_grad():
            facts = self._judge_and_commit()
        self.last_facts = facts
        if self._recorder is not None:
            self._recorder.keep(facts.attempted, self._batches)
        self._verdicts.act_on(self._guard.watch(facts))

    def _judge_and_commit(self) -> Facts:
        loss = torch.zeros((), device=self._step.device) if self._loss is None else self._loss
        if self.scaler is not None:
            self._unscale(self.scaler)
        for scheduler in self._schedulers:
            scheduler.refresh()
        norm = None if self._norm is None or self._norm[1].are_edited else self._norm[0]
        facts = self._step.judge_window(loss, norm=norm, overflow=self._overflow)
        if self.scaler is not None:
            assert self.scaler._scale is not None
            facts.scale = self.scaler._scale.clone()
        facts.ids = read_sample_ids(self._batches)
        self._step.commit(facts)
        if self.scaler is not None:
            self._update_scale(self.scaler, facts)
        return facts

    def follow(self, scheduler: Any) -> Any:
        """Return a replacement for the host's scheduler. One that follows a metric is returned as it is."""
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            self.limits.append(f"{type(scheduler).__name__} is left to the host")
            return scheduler
        is_cycled = cycles_momentum(scheduler)
        if self.schedule == "exact" and (self._schedulers or is_cycled):
            if not self._may_read:
                what = "changes momentum, too" if is_cycled else "is the second scheduler of this optimizer"
                raise ConfigError(
                    f"schedule='exact' is not possible: {type(scheduler).__name__} {what}",
                    why="the device has one table, for learning rates",
                    fix="schedule='read': one wait per step",
                )
            self.schedule = "read"
            for earlier in self._schedulers:
                earlier.let_go()
        guarded = GuardedScheduler(scheduler, self)
        self._schedulers.append(guarded)
        return guarded

    def _judge_rest(self) -> None:
        if self._loss is not None and self.attempted == 0:
            step = self._guard.advice.step  # type: ignore[attr-defined]
            warn_user(f"backward was called inside {self.host}, but no guarded step followed: call {step}")
        self._verdicts.act_on(self._guard.drain())

    def _describe(self) -> str:
        num_buffers = sum(1 for one in self.models for _ in one.buffers())
        buffers = f" and {format_count(num_buffers, 'buffer')}" if num_buffers else ""
        ways = {
            "found_inf": "drops a bad step in its kernel, without a wait",
            "select": "is restored after a bad step",
            "host": "waits for the verdict once per step",
        }
        commits = ", ".join(f"{name} {ways[method]}" for name, method, _ in self._step.describe())
        parts = [f"guards {self.host}: loss, gradients{buffers}", commits]
        if self._schedulers:
            names = ", ".join(type(scheduler.inner).__name__ for scheduler in self._schedulers)
            how = "exact without a wait" if self.schedule == "exact" else "one host read per step"
            parts.append(f"schedule {names}: {how}")
        if self.scaler is not None:
            parts.append("the loss scale changes on overflows only")
        return "; ".join(parts)

    # --- inside ---

    def _unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Unscale the gradients unless the host has, and take over what that found."""
        state = scaler._per_optimizer_states[id(self.optimizer)]
        if state["stage"] is OptState.READY:
            scaler.unscale_(self.optimizer)
        for found in scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"].values():
            self._add_overflow(found.to(self._step.device) != 0)

    def _update_scale(self, scaler: torch.amp.GradScaler, facts: Facts) -> None:
        """Let the scaler see an overflow of gradients; a fault that no scale could prevent leaves its bits."""
        assert scaler._scale is not None
        assert scaler._growth_tracker is not None
        held = [scaler._scale, scaler._growth_tracker]
        then = [one.clone() for one in held]
        scaler.update()
        loss = facts.loss
        is_other = (loss - loss != 0) | facts.ruined | facts.spoiled
        for one, before in zip(held, then, strict=True):
            one.copy_(torch.where(is_other, before, one))

    def _step_optimizer(self, before: Callable[..., Any], closure: Any = None) -> None:
        """Take the place of the step() of a host's optimizer."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure) cannot be guarded",
                why="the closure evaluates the model inside the step, so the step cannot be checked in advance",
                fix="use an optimizer that steps without a closure",
            )
        self.step()

    def _forget(self, optimizer: Optimizer) -> None:
        """Start over from the state that was loaded into the optimizer."""
        for committer in self._step.committers:
            committer.forget()
        self._step.forget_writes()
        for scheduler in self._schedulers:
            scheduler.forget()


def join_models(models: Sequence[nn.Module]) -> nn.Module:
    return models[0] if len(models) == 1 else nn.ModuleList(models)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile."""
    while hasattr(model, "_orig_mod") or isinstance(model, DistributedDataParallel):
        model = getattr(model, "_orig_mod" if hasattr(model, "_orig_mod") else "module")
    return model


class _OpenWindow:
    """A forward hook of the guarded model. A copy of the model, such as an average, gets one that does nothing."""

    def __init__(self, guard: HostGuard | None) -> None:
        self._guard = guard

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._guard is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._guard.open_window()

    def __deepcopy__(self, memo: Any) -> _OpenWindow:
        return _OpenWindow(None)


def check_loop(host: Any, model: Any, optimizer: Any, is_prepared: Callable[[Any], bool], use: str) -> list[nn.Module]:
    """Return the models of a loop that `guard` is given; refuse what `use` would not give it."""
    models = list_models("guard", model, optimizer, use)
    for one in (optimizer, *models):
        if not is_prepared(one):
            raise ConfigError(
                f"this {type(one).__name__} was not prepared by this {type(host).__name__}",
                why="the guard replaces methods of the prepared object, but your loop calls those of another",
                fix=use,
            )
    return models


def refuse_unguardable(name: str, fix: str) -> None:
    raise ConfigError(
        f"{name} cannot be guarded",
        why="it shards gradients or steps the optimizer by itself, so a single step cannot be checked or dropped",
        fix=fix,
    )


def refuse_second_guard(owner: object) -> None:
    if hasattr(owner, GUARDED):
        raise ConfigError(
            f"this {type(owner).__name__} is already guarded, inside {getattr(owner, GUARDED).host}",
            why="two guards would check each step twice, or not know which of two optimizers a loss is for",
            fix="call guard once; to guard again, first call close() on the old guard",
        )


def list_models(taker: str, model: Any, optimizer: Any, fix: str) -> list[nn.Module]:
    """Return the models of a loop as a list; refuse something else, and models that are not all that are trained."""
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    for one in models or [None]:
        if not isinstance(one, nn.Module):
            raise ConfigError(f"{taker} takes a model, or a list of models, not {type(one).__name__}", fix=fix)
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"{taker} takes an optimizer after the model, not {type(optimizer).__name__}", fix=fix)
    known = {id(parameter) for one in models for parameter in one.parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_others = sum(id(parameter) not in known for parameter in trained)
    if num_others:
        raise ConfigError(
            f"{num_others} of the {len(trained)} parameters of the optimizer do not belong to the given models "
            f"({', '.join(type(unwrap_model(one)).__name__ for one in models)})",
            why="to undo a bad step, everything that the forward pass of a trained model writes is saved",
            fix="pass every model that the optimizer trains, as a list if there are several",
        )
    return models


# --- schedules ---


class FollowedScheduler:
    """Take the place of a host's scheduler, which catches up with the device where it is read or saved.

    `count_good` returns how often it has to be stepped in all, and waits for the device."""

    def __init__(self, inner: LRScheduler, optimizer: Optimizer, count_good: Callable[[], int]) -> None:
        self.inner, self._optimizer, self._count_good = inner, optimizer, count_good
        self._plain = self._read_rates()  # the rates that the inner scheduler has set, as numbers
        self._num_settled = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the device has moved on, if the step was good."""

    def _read_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def settle(self) -> None:
        num_due = self._count_good() - self._num_settled
        if not num_due:
            return
        groups = self._optimizer.param_groups
        held = [group["lr"] for group in groups]  # tensors that the optimizer reads on the device
        self.write_plain_rates(groups)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch asks for optimizer.step() first, which was replaced
            for _ in range(num_due):
                self.inner.step()
        self._num_settled += num_due
        self._plain = self._read_rates()
        for group, rate in zip(groups, held, strict=True):
            group["lr"] = rate

    def write_plain_rates(self, groups: list[dict[str, Any]]) -> None:
        for group, rate in zip(groups, self._plain, strict=False):
            group["lr"] = rate

    def let_go(self) -> None:
        self.write_plain_rates(self._optimizer.param_groups)

    def get_last_lr(self) -> list[Any]:
        self.settle()
        return self.inner.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return self.inner.state_dict()

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "_optimizer"):  # while it is copied, before it has attributes
            raise AttributeError(name)
        return getattr(self.inner, name)


class GuardedScheduler(FollowedScheduler):
    """Follow the steps of a HostGuard: `step()` after a dropped step moves nothing.

    "exact": the rates are a table on the device (step/tables.py). `step()` adds one to a device counter if the newest
    step was good; the scheduler itself is stepped later, in `settle`, as often as the counter says.
    "read": `step()` reads the verdict of the newest step.

    A scheduler that follows epochs is stepped after several steps, whatever became of the last one.
    """

    def __init__(self, inner: LRScheduler, guard: HostGuard) -> None:
        super().__init__(inner, guard.optimizer, self._count_called)
        self._guard, self._plain = guard, []  # with "read" the inner scheduler writes its rates itself
        self._rates: Rates | None = None
        self._count = torch.zeros((), dtype=torch.int64, device=guard._step.device)
        self._num_called = 0
        self._num_seen = guard.attempted  # steps of the guard at the last call
        self._follows_one = False  # whether the last call came after exactly one
        self._is_stale = guard.schedule == "exact"
        self.follow_again()

    # --- the host's calls ---

    def step(self, *args: Any, **kwargs: Any) -> None:
        last, num_new = self._guard.last_facts, self._guard.attempted - self._num_seen
        if num_new:  # none: Accelerate steps a scheduler once for each rank
            self._num_seen, self._follows_one = self._guard.attempted, num_new == 1
        bad = last.bad if last is not None and self._follows_one else None
        if self._rates is None:
            if bad is None or not bool(bad):
                # torch's schedulers ask for optimizer.step() first, which a kernel may have replaced.
                self.inner.optimizer._opt_called = last is not None  # type: ignore[attr-defined]
                self.inner.step(*args, **kwargs)
            return
        if args or kwargs:
            raise ConfigError(
                f"{type(self.inner).__name__}.step was given an argument, but its rates come from a device table",
                why="a table cannot follow a step that is set from outside",
                fix="schedule='read': one wait per step",
            )
        self._num_called += 1
        self._count.add_(1 if bad is None else ~bad)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.settle()
        self.inner.load_state_dict(state)
        self.forget()

    # --- the guard's calls ---

    def refresh(self) -> None:
        """Write the rates of the step that is about to commit."""
        if self._rates is not None:
            self._rates.cover(self._num_called, self._count)
            self._rates.refresh(self._count)

    def _count_called(self) -> int:
        is_behind = self._rates is not None and not self._is_stale and self._num_called > 0
        return int(self._count) if is_behind else self._num_settled

    def forget(self) -> None:
        """Make the table anew before the next step: a state was loaded."""
        self._is_stale = self._guard.schedule == "exact"

    def follow_again(self) -> None:
        if not self._is_stale:
            return
        self._plain = self._read_rates()
        self.write_plain_rates(self._optimizer.param_groups)
        self._count.zero_()
        self._num_called = self._num_settled = 0
        curve, device = Curve(self.inner), self._count.device
        self._rates = Rates(
            [self._optimizer],
            [lambda count, group=group: curve(count)[group] for group in range(len(self._plain))],  # type: ignore[misc]
            device,
            base=[1.0] * len(self._plain),
            chunk=AHEAD,
            dtype=torch.float64 if device.type == "cpu" else torch.float32,
        )
        self._rates.bind(self._optimizer)
        self._is_stale = False

    def let_go(self) -> None:
        if self._rates is not None and not self._is_stale:
            self.settle()
            super().let_go()
        self._rates, self._is_stale, self._plain = None, False, []
