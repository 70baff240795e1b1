"""`hs.Step`: the guarded step for a custom training loop. docs/own_loop.md is its guide."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.errors import ConfigError
from halfstep.evidence.watch import Watch
from halfstep.fast.certificate import Certificate
from halfstep.fast.fast_path import Fast, FastMode, FastPath, split_results
from halfstep.fast.fp8_trial import plan_fp8_trial
from halfstep.hardware.probe import probe
from halfstep.own_loop import arguments
from halfstep.own_loop.data_position import DataPosition
from halfstep.own_loop.evidence import count_rows, make_recorder
from halfstep.own_loop.loss import LossChecker, UnguardedNetworks, suggest_ways
from halfstep.own_loop.schedule_argument import LoopSchedules, Paced
from halfstep.precision.apply import apply
from halfstep.precision.decide import Precision
from halfstep.precision.plan import Plan
from halfstep.step.batches import Batch
from halfstep.step.clip import Clip
from halfstep.step.commit import watch_for_second_step
from halfstep.step.ema import Ema
from halfstep.step.facts import Facts, Reading
from halfstep.step.forward_writes import Also, TensorSlot
from halfstep.step.guard import ADVICE_FOR_LOOPS, Guard, GuardOptions, SpikeMeter, Verdict
from halfstep.step.ranks import refuse_differing_rates, refuse_differing_steps
from halfstep.step.scaler import Scaler
from halfstep.step.schedule import Schedule
from halfstep.step.snapshots import Snapshots
from halfstep.step.step import GuardedStep, LossFn, OnCommit, OnGradients
from halfstep.step.step_state import refuse_unfit
from halfstep.step.user_warnings import DroppedSteps, warn_user
from halfstep.step.verdicts import VerdictHandler

if TYPE_CHECKING:
    from halfstep.distributed.sharded_files import BackgroundSave

OneSchedule = LRScheduler | Schedule | Paced


class Step:
    """One optimizer step of your loop: chooses the precision, drops bad steps completely, stops after several in a row.

    It replaces autocast, GradScaler, `unscale_`, `clip_grad_norm_`, `zero_grad`, `optimizer.step` and
    `scheduler.step`::

        import halfstep as hs

        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
        step = hs.Step(model, optimizer, "auto", clip_norm=1.0, accumulate=4, schedule=hs.per_step(scheduler))


        def loss_fn(batch):  # returns the loss, or (loss, weight)
            return F.cross_entropy(model(batch["x"]), batch["y"])


        for epoch in range(epochs):
            for window in step.windows(loader):  # lists of 4 batches; the last may be shorter
                outcome = step(loss_fn, window)
            print(outcome.loss, outcome.lr, outcome.grad_norm)

    A step is bad when its loss, its gradient norm or anything that forward writes, such as BatchNorm statistics, is not
    finite; with skip_spikes also when its loss is a spike. A bad step changes nothing: weights, buffers, optimizer
    state, average and schedule stay bit-identical. In fp16 an overflow halves the loss scale; in other precisions five
    bad steps in a row raise hs.TrainingStopped.

    On a GPU the first steps run eagerly; then the whole step is captured as a CUDA graph, if `loss_fn` can be traced,
    and later compiled, if that pays off. One line on stderr and `step.mode` report what runs; `step.certificate`
    reports what it was compared with.

    A call left over from the old loop, such as optimizer.step(), gives one warning and still takes effect; backward()
    inside loss_fn is refused.

    Arguments:
        model: what is trained, already on its device and in its dtype. Several modules: torch.nn.ModuleList([a, b]).
        optimizer: one of torch.optim or your own, or a list of them. fused=True makes skipping free. On a GPU torch's
            unfused ones become fused (SGD) or capturable unless fast="off".
        precision: "auto", "bf16", "fp16", "tf32", "fp32", "fp8" or a torch dtype; hs.Precision("bf16", modules={...})
            has more settings. If the device lacks it, the next best is used, with a warning; `print(step.plan)` shows
            what runs and why.
        fast: "auto" captures and compiles as described above; "graph" captures torch's own kernels, "compile" those of
            Inductor from the start; "off" runs eagerly. hs.Fast(num_steps=100_000) has more settings.
        memory: "low" recomputes the repeated blocks of the model in backward instead of keeping their activations.
        clip_norm: limit of the gradient norm; 0 or None turns clipping off.
        clip_type: "l2" or "inf" norm over all gradients, or "value" for each entry.
        accumulate: batches in one optimizer step. Each is weighted by its number of samples, or by the weight that
            loss_fn returns.
        shard_reduce: when gradients of a model sharded by `fully_shard` are reduced over the ranks: after "each" batch,
            or after the "last" of a step, which is faster and keeps whole gradients in memory until then.
        schedule: the learning-rate schedule: `hs.per_step(scheduler)`, `hs.per_epoch(scheduler)` with `epoch_ended()`,
            ReduceLROnPlateau with `validated(metric)`, a function of the step that returns a multiplier, or a list with
            one of them, or None, for each optimizer. A torch scheduler alone counts as per step. Without schedule= you
            control the learning rate: step your own scheduler, or write into param_groups.
        ema_decay: between 0 and 1: keeps an average of the weights for `averaged()`; 0 or None keeps none. The decay
            rises to this value during the first steps.
        guard: {"max_consecutive": 5} bad steps in a row raise; {"on_fault": "rollback"} returns to a snapshot instead,
            taken in host memory every "snapshot_every" steps, and multiplies the learning rate by "lr_cut".
        scaler: settings of fp16's loss scale, {"init_scale": 65536, "growth_interval": 2000}, or a GradScaler, whose
            settings and scale are taken over. Other precisions need none: they ignore it, a GradScaler with a warning.
        skip_spikes: also drop steps whose loss is far above the last 64.
        also: a module or tensor, or several, that loss_fn writes into although this step does not train them, such as a
            generator while its discriminator is trained. A bad step restores them, too.
        on_gradients: called with the model to edit its gradients: they are unscaled, but not yet checked or clipped.
        on_commit: called with the model once the optimizers have stepped, to move a teacher or a target network. Name
            those networks in also=, so that a bad step restores them.
        watch: measure the numbers of each module every N steps, and warn before one leaves its range; 0 turns it
            off. `print(step.watched)` shows them (docs/watch.md).
        capsules: a folder for the batches and weights of a bad step, or of one in which loss_fn raised;
            `hs.replay(capsule, model, loss_fn)` names the cause.
        on_outcome: called with the Outcome of each step two steps later, when reading it costs no wait: for logging.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] = (),  # refused: a forgotten one gets an explanation
        precision: str | torch.dtype | Precision = "auto",
        *,
        fast: FastMode | Fast = "auto",
        memory: Literal["normal", "low"] = "normal",
        clip_norm: float | None = 0.0,
        clip_type: Literal["l2", "inf", "value"] = "l2",
        accumulate: int = 1,
        shard_reduce: Literal["each", "last"] = "each",
        schedule: OneSchedule | Sequence[OneSchedule | None] | None = None,
        ema_decay: float | None = 0.0,
        guard: GuardOptions | Mapping[str, Any] | None = None,
        scaler: torch.amp.GradScaler | Mapping[str, float] | None = None,
        skip_spikes: bool = False,
        also: Also = (),
        on_gradients: OnGradients | None = None,
        on_commit: OnCommit | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        watch: int = 0,
        capsules: str | os.PathLike[str] | None = None,
        **unknown: Never,  # refused here with a suggestion, and by type checkers
    ) -> None:
        arguments.refuse_unknown(unknown, Step.__init__)
        model, optimizers = arguments.check_model_and_optimizers(model, optimizer)
        device = arguments.find_device(model)
        options, scaling = arguments.make_guard_options(guard), arguments.make_scaler_options(scaler)
        folder, asked = arguments.check_folder(capsules), arguments.read_precision(precision)
        captures = arguments.read_fast(fast)
        decay = arguments.check_number("ema_decay", ema_decay, below=1.0)
        limit = arguments.check_number("clip_norm", clip_norm)
        accumulate, clip = arguments.check_count("accumulate", accumulate), Clip(limit=limit, kind=clip_type)
        plan, fp8 = plan_fp8_trial(asked, probe(str(device)), model)
        arguments.refuse_uncallable(on_gradients=on_gradients, on_commit=on_commit, on_outcome=on_outcome)
        arguments.warn_of_idle_scaler(scaler, plan)
        arguments.refuse_recast(model, plan)
        arguments.check_choice("memory", memory, ("normal", "low"))
        arguments.check_choice("shard_reduce", shard_reduce, ("each", "last"))
        sharded = arguments.check_sharded(model, plan, capsules=folder, has_fp8=fp8 is not None)
        arguments.refuse_unrelated_optimizers(model, optimizers)
        self._schedules = LoopSchedules(schedule, optimizers, device)
        apply(plan, model, casts_storage=False)
        changed = arguments.make_capturable(optimizers, self._schedules.rates) if captures.mode != "off" else []
        if memory == "low":
            arguments.recompute_repeated_blocks(model)
        self._step = GuardedStep(
            model, optimizers, plan, accumulate=accumulate, clip=clip,
            schedules=self._schedules.rates or (), scaler=scaling, ema=Ema(model, decay=decay) if decay else None,
            spikes=SpikeMeter(device, skips=skip_spikes), also=also, on_gradients=on_gradients,
            on_commit=on_commit, norm_order=model.parameters(),  # as in clip_grad_norm_(model.parameters(), ...)
        )  # fmt: skip
        if self._step.ranks is not None:
            self._step.ranks.reduces_last = shard_reduce == "last"
        floor = self._step.scaler.options.min_scale
        self._guard = Guard(options, scaling=plan.needs_loss_scaling, min_scale=floor, advice=ADVICE_FOR_LOOPS)
        if self._step.ranks is not None:
            refuse_differing_steps(self._step.ranks.world, optimizers, {
                "precision": plan.granted, "simulate": asked.simulate, "accumulate": accumulate, "clip_norm": limit,
                "clip_type": clip_type, "ema_decay": decay, "skip_spikes": skip_spikes, "shard_reduce": shard_reduce,
                **{f"guard.{name}": value for name, value in dataclasses.asdict(options).items()},
                **{f"scaler.{name}": value for name, value in dataclasses.asdict(scaling).items()}, **sharded,
            })  # fmt: skip
            self._guard.observers.append(refuse_differing_rates)
        self._dropped = DroppedSteps(low_scale=self._step.scaler.low if plan.needs_loss_scaling else None)
        if self._step.is_first_rank:
            self._guard.observers.append(self._dropped.observe)
        if on_outcome is not None:
            self._guard.observers.append(lambda facts, reading: on_outcome(Outcome(reading)))
        every = arguments.check_count("watch", watch) if watch else 0
        notice = warn_user if self._step.is_first_rank else lambda text: None  # all ranks measure
        self._watch = Watch(self._step, every, notice=notice) if every else None
        self._recorder = make_recorder(folder, self._step, spikes=skip_spikes) if folder else None
        self._step.keeps_rng = self._recorder is not None
        if self._recorder is not None:
            self._recorder.watches = {"": self._watch} if self._watch is not None else {}
            self._guard.observers.append(self._recorder.observe)
        self._schedules.follow(self._step.committed)
        self._guard.observers.append(lambda facts, reading: self._schedules.note(reading.committed))
        self._loss = LossChecker(self._step)
        self._snapshots = LoopSnapshots(every=options.snapshot_every, margin=options.margin)
        self._verdicts = VerdictHandler(
            guard=self._guard, model=model, step=self._step, snapshots=self._snapshots,
            cut_rates=lambda: self._step.set_rate_factor(self._guard.rate_factor), report=self._report_rollback,
            suggest=lambda: suggest_ways(self._loss.last, has_capsules=self._recorder is not None),
        )  # fmt: skip
        self._strangers = UnguardedNetworks(self._step.writes)
        self._passes = 0
        self._fast = FastPath(
            self._step, captures, changed_optimizers=changed, pardon=self._guard.pardon,
            fp8=fp8,
        )  # fmt: skip
        self._guard.observers.append(self._fast.observe)
        world = self._step.ranks.world if self._step.ranks is not None else None
        self._position = DataPosition(world.rank, world.size) if world is not None else DataPosition()
        self._saving: BackgroundSave | None = None
        """The save of a sharded model that `hs.save` began last."""
        self._attempted_untrained = -1
        """The attempted steps as long as the window that was yielded last is not trained on; -1 outside of a pass."""
        for one in optimizers:
            watch_for_second_step(one, (
                f"{type(one).__name__}.step() was called in addition to hs.Step, which already steps it: weights are "
                "updated twice, once unguarded. Remove optimizer.step() and scaler.step(optimizer)"
            ))  # fmt: skip
        hints = (committer.hint for committer in self._step.committers)
        for hint in filter(None, (*self.plan.warnings, *self._schedules.hints, *hints)):
            warnings.warn(hint, stacklevel=2)

    # --- training ---

    def windows(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        """Yield windows of `accumulate` batches; the last may be shorter. At the end the last steps are checked.

        After `load_state_dict` or `hs.load` the first call continues with the very next batch (docs/resume.md).
        """
        if self._passes and self._schedules.has_any("epoch"):
            warnings.warn("schedule= is per epoch, but step.epoch_ended() was not called after the last pass over the "
                          "data: the learning rate stays as it is", stacklevel=2)  # fmt: skip
        first = self.attempted
        try:
            for number, window in enumerate(self._step.windows(self._position.follow(batches))):
                self._attempted_untrained = first + number
                yield window
        finally:
            self._attempted_untrained = -1
        self._passes += 1
        self.finish()
        self._dropped.end_pass(self.attempted)

    def __call__(self, loss_fn: LossFn, window: Iterable[Batch] | None = None) -> Outcome:
        """Compute, judge and commit one window. `loss_fn(batch)` returns the loss, or (loss, weight)."""
        began = time.monotonic()
        with self._step.signals.delay():  # but not in forward and backward, which can be undone
            batches = self._check(loss_fn, window)

            def run_eagerly(function: LossFn) -> Facts:
                facts = self._compute(function, batches)
                self._commit(facts)
                return facts

            try:
                if self._loss.is_new(loss_fn):
                    facts = run_eagerly(loss_fn)
                else:
                    facts = self._fast.run(loss_fn, batches, run_eagerly)
                if self._recorder is not None:
                    self._recorder.keep(facts.attempted, batches)
                if self._watch is not None:
                    self._look(loss_fn, batches, facts)
                # Waits for the step before the last, so that this is its time.
                self._verdicts.act_on(self._guard.watch(facts))
            finally:
                self._fast.in_steps_s += time.monotonic() - began - self._fast.aside_s
                self._fast.aside_s = 0.0
        return Outcome(facts)

    def _look(self, loss_fn: LossFn, batches: list[Batch], facts: Facts) -> None:
        """Let the watch observe this step, in a side step if its code was captured or compiled."""
        assert self._watch is not None
        if self._watch.lacks_activations and not self._fast.why_eager:
            if self._fast.is_pure:
                code = split_results(loss_fn, is_alone=True)
                self._watch.look_aside(code, batches[0], num_rows=count_rows(batches[0]))
            else:
                self._watch.stop_activations("loss_fn changes Python objects, so a side step cannot run it")
        self._watch.finish(facts)

    def compute(self, loss_fn: LossFn, window: Iterable[Batch]) -> Facts:
        """Run forward, backward and verdict, the first half of a call. Nothing is committed yet."""
        return self._compute(loss_fn, self._check(loss_fn, window))

    def _check(self, loss_fn: LossFn, window: Iterable[Batch] | None) -> list[Batch]:
        self._take_loaded()
        self._schedules.refuse_written_rates()
        arguments.refuse_non_finite_settings(self._step.optimizers)
        arguments.refuse_no_function(loss_fn)
        batches = arguments.read_window(window, self._step.accumulate)
        if self._guard.options.on_fault == "rollback" and self._snapshots.is_due(self.attempted):
            self._snapshots.take(self._step.model, self._step)
        self._position.warn_if_unread()
        return batches

    def _take_loaded(self) -> None:
        """Continue from states that the user's code has loaded into optimizers and schedulers since the last step."""
        loaded = [committer.optimizer for committer in self._step.committers if committer.has_new_groups]
        if not loaded and not any(driven.is_loaded for driven in self._schedules.driven):
            return
        if self._fast.asked != "off":  # a state may be of an optimizer in another form, which the groups take over
            arguments.make_capturable(loaded, self._schedules.rates)
        self._schedules.take_loaded(loaded)
        for committer in self._step.committers:
            committer.forget()
        self._step.generation += 1
        self._snapshots.states.clear()  # of another history

    def _compute(self, loss_fn: LossFn, batches: list[Batch]) -> Facts:
        checked = self._loss.wrap(loss_fn, is_alone=len(batches) == 1)
        is_new = self._loss.is_new(loss_fn)
        is_observed = self._watch is not None and self._watch.is_due()
        if self._recorder is None and not is_new and not is_observed:
            return self._step.compute(checked, batches)
        with contextlib.ExitStack() as watched:
            if self._watch is not None and is_observed:
                watched.enter_context(self._watch.enter_real_step())
            if self._recorder is not None:
                watched.enter_context(self._recorder.watch(batches))
            if is_new:
                watched.enter_context(self._strangers.watch(loss_fn))
            facts = self._step.compute(checked, batches)
            if is_new:
                self._loss.refuse_unreached()
                self._loss.hint_at_forward_outside(ran=self._strangers.ran_own)
            return facts

    def commit(self, facts: Facts) -> None:
        """Commit: the optimizers step, or everything stays as it was. The second half of a call."""
        with self._step.signals.delay():
            self._commit(facts)
            if self._watch is not None:
                self._watch.finish(facts)
            self._verdicts.act_on(self._guard.watch(facts))

    def _commit(self, facts: Facts) -> None:
        before = self.attempted
        try:
            self._step.commit(facts)
        except BaseException:
            if self.attempted > before:  # the step is made, and `on_commit` raised
                self._guard.pending.append(facts)
            raise

    def grad(
        self,
        outputs: Tensor,
        inputs: Tensor | Sequence[Tensor],
        *,
        create_graph: bool = True,
        allow_unused: bool = False,
    ) -> Any:
        """Return the gradient of `outputs` with respect to `inputs`, in fp32, for a loss that uses it: a gradient
        penalty.

        In fp16 the sum of `outputs` is scaled and the gradient unscaled, so that it does not vanish; if it overflows,
        the step is dropped. Returns a tensor for one input, a tuple for several; `create_graph` and `allow_unused` are
        torch.autograd.grad's. ::

            x = real.clone().requires_grad_()
            penalty = (step.grad(critic(x), x).flatten(1).norm(dim=1) - 1).square().mean()
        """
        return self._loss.grad(outputs, inputs, create_graph=create_graph, allow_unused=allow_unused)

    def epoch_ended(self) -> None:
        """Advance schedules given as `hs.per_epoch(...)`. Call it after each epoch."""
        self._passes = 0
        self._position.end_pass()
        self._take_loaded()
        self._schedules.epoch_ended()

    def end_pass(self) -> None:
        """End a pass over the data that was left by `break` or is to be resumed: the next one starts from scratch."""
        self._position.end_pass()

    def validated(self, metric: float | Tensor) -> None:
        """Pass a validation metric to `schedule=ReduceLROnPlateau(...)`, as `scheduler.step(metric)` does in torch.

        Call it after each validation.
        """
        self._take_loaded()
        self._schedules.validated(float(metric))

    def finish(self) -> None:
        """Check the last steps, which the guard has not seen yet, and wait until a sharded model's save is on the disk.

        `windows` and `with step:` call it at their end."""
        if self._watch is not None:
            self._watch.drain()
        self._verdicts.act_on(self._guard.drain())
        if self._saving is not None:
            self._saving.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            self.finish()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights and buffers into the model inside this context, to evaluate or save them."""
        if self._step.ema is None:
            raise ConfigError("this step keeps no average of the weights", fix="hs.Step(..., ema_decay=0.999)")
        with self._step.ema.swap_in():
            yield

    # --- state and description ---

    @property
    def model(self) -> nn.Module:
        """Return the model that is trained."""
        return self._step.model

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers as a list, even if there is only one."""
        return self._step.optimizers

    @property
    def scaler(self) -> Scaler:
        """Return fp16's loss scale; it is not `enabled` in other precisions."""
        return self._step.scaler

    @property
    def ema(self) -> Ema | None:
        """Return the average of the weights; None without ema_decay."""
        return self._step.ema

    @property
    def plan(self) -> Plan:
        """Return the precision plan: what runs in which precision, and why; evaluate inside `step.plan.forward()`."""
        return self._step.plan

    @property
    def attempted(self) -> int:
        """Return the number of steps so far, including dropped ones."""
        return self._step.attempted

    @property
    def committed(self) -> int:
        """Return the number of steps that changed the weights; waits for the device."""
        return int(self._step.committed)

    @property
    def mode(self) -> str:
        """Return how steps run now: "eager", "graph", "compile+graph", or "compile" with graph breaks. ", tuned"
        follows for tuned code, ", commit eager" if graphs contain only forward and backward."""
        return self._fast.mode

    @property
    def certificate(self) -> Certificate:
        """Return what captured steps were compared with, and the results."""
        return self._fast.certificate

    @property
    def watched(self) -> Watch:
        """Return what `watch=` has observed: print it for a table; `.warnings` lists what will leave its range."""
        if self._watch is None:
            raise ConfigError("this step watches nothing", fix="hs.Step(..., watch=200)")
        self._watch.drain()
        return self._watch

    @property
    def epoch(self) -> int:
        """Return the number of passes over the data that have ended: `for epoch in range(step.epoch, epochs)`."""
        return self._position.epoch

    @property
    def batch(self) -> int:
        """Return the number of batches of the current pass so far, also after resuming: `tqdm(initial=step.batch)`."""
        return self._position.num_yielded

    def describe(self) -> list[tuple[str, str, int]]:
        """Return each optimizer, how its bad steps are dropped, and the bytes that costs."""
        return self._step.describe()

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed loop needs except the model; waits for the device. `hs.save` stores both."""
        self._take_loaded()
        if self.attempted == self._attempted_untrained:
            warn_user("state_dict() was called before the step of a window, which a resumed loop skips: save after it")
        if self._passes and self._schedules.has_any("epoch"):
            warn_user("state_dict() was called after a pass over the data and before step.epoch_ended(): a resumed "
                      "loop begins the next epoch without that call. Save after step.epoch_ended()")  # fmt: skip
        return {
            **self._step.state_dict(),
            "guard": self._guard.state_dict(),
            "schedules": self._schedules.state_dict(),
            "position": self._position.state_dict(),
            **({"watch": self.watched.state_dict()} if self._watch is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict`, or refuse what does not fit and change nothing.

        Without its "position" the generators stay as they are, and a new pass over the data begins.
        """
        self._take_loaded()
        self.refuse_unfit(state)
        schedules = state.get("schedules", {})
        self._guard.load_state_dict(state.get("guard", {}))
        self._step.load_state_dict(state)
        self._schedules.load_state_dict(schedules)
        self._snapshots.states.clear()  # of another history
        if self._watch is not None and "watch" in state:
            self._watch.load_state_dict(state["watch"])
        if "position" in state:
            self._position.load_state_dict(state["position"])

    def refuse_unfit(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that `load_state_dict` could not load; nothing is changed."""
        refuse_unfit(self._step, state)
        self._schedules.refuse_unfit(state.get("schedules", {}), int(state["committed"]))

    def __repr__(self) -> str:
        names = ", ".join(committer.name for committer in self._step.committers)
        return (
            f"Step({type(self._step.model).__name__}, {names}, {self.plan.granted} on {self._step.device}, "
            f"accumulate={self._step.accumulate}, {self.mode}, {self.attempted} steps made)"
        )

    # --- inside ---

    def _report_rollback(self, text: str, verdict: Verdict, committed: int, guard: Guard) -> None:
        self._schedules.go_back()
        warn_user(text)


# --- what became of a step ---


class Outcome:
    """The outcome of one step. The first property read waits for the device, so read it when you report.

    `item()`, `float()` and `f"{outcome:.3f}"` give the loss, so that a loop's logging lines can stay as they are.
    """

    def __init__(self, facts: Facts | Reading) -> None:
        self._facts = facts

    @property
    def reading(self) -> Reading:
        """Return everything at once, as plain numbers."""
        if isinstance(self._facts, Facts):
            self._facts = self._facts.read()
        return self._facts

    @property
    def step(self) -> int:
        """Return the number of this step: the attempted steps before it."""
        return self.reading.attempted

    @property
    def loss(self) -> float:
        """Return the window's loss, unscaled."""
        return self.reading.loss

    def item(self) -> float:
        """Return the window's loss, as `loss.item()` does in a plain loop."""
        return self.loss

    def __float__(self) -> float:
        return self.loss

    def __format__(self, spec: str) -> str:
        return format(self.loss, spec) if spec else repr(self)

    @property
    def grad_norm(self) -> float:
        """Return the norm over all gradients, unscaled, before clipping."""
        return self.reading.grad_norm

    @property
    def lr(self) -> float:
        """Return the learning rate of the step: that of the first parameter group of the first optimizer."""
        return self.reading.lr

    @property
    def scale(self) -> float:
        """Return the loss scale of the step; 1 without loss scaling."""
        return self.reading.scale

    @property
    def committed(self) -> bool:
        """True if the step changed the weights."""
        return not self.reading.is_bad

    @property
    def reason(self) -> str:
        """Return why the step was dropped; empty if it was committed."""
        return self.reading.reason

    def __repr__(self) -> str:
        r = self.reading
        became = "committed" if self.committed else f"skipped: {r.reason}"
        return f"Outcome(step {r.attempted} {became}, loss {r.loss:.4g}, grad_norm {r.grad_norm:.4g}, lr {r.lr:.2e})"


# --- rollback ---


class LoopSnapshots(Snapshots):
    """Snapshots that include tensors outside of the model that steps write, such as a teacher's."""

    def collect(self, model: nn.Module, step: GuardedStep) -> dict[str, Any]:
        outside = {slot.name: slot.held for slot in self._list_outside(step)}
        return {**super().collect(model, step), "outside": outside}

    def go_back(self, state: Mapping[str, Any], model: nn.Module, step: Any) -> None:
        super().go_back(state, model, step)
        for slot in self._list_outside(step):
            held, then = slot.held, state["outside"].get(slot.name)
            if held is not None and then is not None:
                if held.shape == then.shape:
                    held.detach().copy_(then)
                else:  # such as a recurrent state of another batch size
                    slot.owner[slot.key] = then.to(held.device, copy=True)

    def _list_outside(self, step: GuardedStep) -> list[TensorSlot]:
        return step.writes.find_tensors_outside_model(step.find_trained_parameters())
