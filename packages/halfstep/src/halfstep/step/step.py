"""The step: compute, judge, commit, over one window of micro-batches.

    facts = step.compute(loss_fn, window)   forward, backward, norm, verdict: nothing committed, nothing read
    step.commit(facts)                      the device decides: a bad step is dropped by a flag, not by an `if`

A step is bad when its loss, its gradient norm or something forward wrote is not finite (or, on request, when its loss
is a spike). A bad step leaves weights, buffers, optimizer state, average, schedule and committed counter bit-identical.
Values that forward writes, such as BatchNorm statistics, are copied when the window starts and restored after a bad
step (forward_writes.py). The verdict checks them, too: a variance can overflow while loss and gradients stay finite,
and only evaluation would show it.

Order: backward on the scaled loss, norm, verdict, then one factor on every gradient (one over scale and window
weight, times clipping's factor), commit. On CUDA fused optimizers apply the factor as they read the gradients. With
`on_gradients`, gradients are unscaled first and edited by the hook; norm and verdict are computed from the result.
The host waits only for the first commit of each optimizer (see commit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, compress, islice
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.distributed.sharding import Sharding, get_locals
from halfstep.distributed.world import is_lost_rank
from halfstep.errors import ConfigError
from halfstep.precision.contexts import enter_autocast, enter_backend
from halfstep.precision.plan import Plan
from halfstep.step.batches import Batch, Weight, Window, count_samples, is_one, make_positive, read_sample_ids
from halfstep.step.clip import Clip, ComputeNorm, compute_total_norm
from halfstep.step.commit import Committer, commit_all, get_stored_values
from halfstep.step.ema import Ema
from halfstep.step.facts import Facts, Hold, Outbox, read_rng_state, restore_rng
from halfstep.step.flat import are_same_objects, get_gradient, get_is_sparse, get_version
from halfstep.step.forward_writes import Also, ForwardWrites, walk_modules
from halfstep.step.guard import SpikeMeter
from halfstep.step.norm_averages import NormAverages
from halfstep.step.ranks import BAD, RUINED, Agreed, Ranks, find_ranks
from halfstep.step.refusals import (
    check_parameters,
    refuse_half_sums,
    refuse_sharded,
    refuse_sparse,
    refuse_spread,
    refuse_unfit_loss,
)
from halfstep.step.scaler import Scaler, ScalerOptions
from halfstep.step.schedule import Schedule
from halfstep.step.signals import DelayedSignals
from halfstep.step.step_state import collect_state, load_state, refuse_unfit
from halfstep.step.tables import Rates, Values
from halfstep.step.user_warnings import report_untested_torch, warn_user

LossFn = Callable[[Batch], "Tensor | tuple[Tensor, Weight]"]
Accumulate = Callable[[LossFn, Sequence[Any], list[Tensor]], "tuple[Tensor, Weight]"]
OnGradients = Callable[[nn.Module], None]
OnCommit = Callable[[nn.Module], object]


class StepWatch(Protocol):
    """An observer of every N-th step. It is called before each step and after its commit, and only reads."""

    def is_due(self) -> bool:
        """True if the next step will be observed."""
        ...

    def begin(self) -> None: ...

    def end(self, facts: Facts, gradients: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Observe the step. `gradients` are those of a captured step, whose parameters do not have them."""
        ...


class Totals(NamedTuple):
    """Sums over the micro-batches of a window, and over all ranks."""

    loss: Tensor
    weight: Weight
    ruined: Tensor
    """True on the device if something that forward wrote is no longer finite."""
    unscale: Tensor | None
    """The factor that unscales the gradients; None if they need none."""
    agreed: Agreed | None
    """The sums over all ranks; None without ranks."""


class GuardedStep:
    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        plan: Plan,
        *,
        accumulate: int = 1,
        clip: Clip | None = None,
        schedules: Sequence[Schedule] | Rates = (),
        scaler: Scaler | ScalerOptions | None = None,
        ema: Ema | None = None,
        spikes: SpikeMeter | None = None,
        ranks: Ranks | Literal["of the model", "alone"] = "of the model",
        also: Also = (),
        on_gradients: OnGradients | None = None,
        on_commit: OnCommit | None = None,
        values: Values | None = None,
        norm_order: Iterable[Tensor] = (),
    ) -> None:
        """`norm_order`: sum the gradient norm in the order of these parameters instead of that of the groups."""
        self.model, self.plan, self.accumulate, self.clip, self.ema = model, plan, accumulate, clip or Clip(), ema
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self.rates: Rates | None = None
        self._held: list[Tensor] = []
        self._trained: list[Tensor] = []  # the parameters in `_held`, each once
        self._norm_order = {id(parameter): number for number, parameter in enumerate(norm_order)}
        trained = self.find_trained_parameters()
        refuse_spread(model, trained)
        self.device = trained[0].device
        self.ranks: Ranks | None = None
        """The ranks that train the same model together; None for a single process."""
        if ranks == "alone":
            refuse_sharded(model)
        else:
            self.ranks = find_ranks(model, trained, self.device) if ranks == "of the model" else ranks
        if self.is_first_rank:
            report_untested_torch(torch.__version__)
        self.sharding: Sharding | None = self.ranks.sharding if self.ranks is not None else None
        if isinstance(schedules, Rates):
            self.rates = schedules
        elif schedules:
            self.rates = Rates(self.optimizers, schedules, self.device)
        self.committers = [Committer(optimizer, self._find_rates(optimizer)) for optimizer in self.optimizers]
        if not isinstance(scaler, Scaler):
            scaler = Scaler(self.device, enabled=plan.needs_loss_scaling, options=scaler, accumulate=accumulate)
        self.scaler = scaler
        self.spikes = spikes or SpikeMeter(self.device)
        refuse_half_sums(trained, accumulate, self.ranks)
        self.attempted = 0
        self.generation = 0
        """Counts the times that state was loaded, which makes new tensors: a captured graph knows only the old ones."""
        self.committed = torch.zeros((), dtype=torch.int64, device=self.device)
        self._low_bits = self.committed.view(1).view(torch.float32)[0]
        self._rate = torch.zeros((), device=self.device)  # what this rank tells the others of its learning rate
        self.never = torch.zeros((), dtype=torch.bool, device=self.device)
        self.on_gradients, self.on_commit, self.values = on_gradients, on_commit, values
        if values is not None:
            values.follow(self)
        self.writes = ForwardWrites(model, also, commits=on_commit is not None)
        self.observed: Callable[[], AbstractContextManager[object]] = nullcontext
        """A context that evidence enters around forward and backward, to observe what runs in them."""
        self.on_backward: Callable[[Tensor], None] | None = None
        """Called with the loss after the last backward of a window, before anything is done to its gradients."""
        self.watch: StepWatch | None = None  # set before the first step
        self.norms: NormAverages | None = None  # set before the first step, to average BatchNorm's statistics
        self.keeps_rng = True  # whether facts of replays and of other loops hold the generators, for capsules
        self.measures_spikes = True  # whether the host looks for spikes in the losses it reads
        self.hold: Hold | None = None  # set before the first step by a loop that can repeat held steps
        self.signals = DelayedSignals()
        self.outbox = Outbox()
        self._weights: list[dict[str, Any]] = []  # where the model's modules hold their parameters
        self._modules: list[nn.Module] = []  # those that `_weights` was made from
        self._rng: dict[str, Tensor] | None = None  # the generators before a compute() that is not committed yet
        self._judged = NOT_JUDGED
        self._has_begun = False

    @property
    def is_first_rank(self) -> bool:
        return self.ranks is None or self.ranks.world.is_first

    def windows(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        """Yield windows of `accumulate` micro-batches; a last partial window still steps."""
        left = iter(batches)
        while window := list(islice(left, self.accumulate)):
            yield window

    def __call__(self, loss_fn: LossFn, window: Window) -> Facts:
        facts = self.compute(loss_fn, window)
        self.commit(facts)
        return facts

    def compute(self, loss_fn: LossFn, window: Window, replay: Accumulate | None = None) -> Facts:
        """Run forward, backward, norm and verdict. Only gradients remain: a window that is not committed is undone by
        the next compute(). To edit gradients, use `on_gradients`. `replay` takes the place of forward and
        backward."""
        if self.is_open:
            self.abandon()
        self._name_bad_weights()
        self._rng = read_rng_state(self.device)
        if self.watch is not None:
            self.watch.begin()
        try:
            facts = self.forward_backward(loss_fn, window, replay)
            self.writes.refuse_unsaved(facts.bad)
        except BaseException as error:
            unsaved = self.abandon()
            if unsaved:
                error.add_note(unsaved)
            if self.ranks is not None and isinstance(error, RuntimeError) and is_lost_rank(error):
                raise self.ranks.world.explain_loss(error) from error
            raise
        facts.ids, facts.rng = read_sample_ids(window), self._rng
        self._judged = JudgedGradients(self._trained)  # those of the verdict
        return facts

    def forward_backward(self, loss_fn: LossFn, window: Window, replay: Accumulate | None = None) -> Facts:
        """Do the device's part of `compute`: everything that a CUDA graph can hold."""
        parameters = self.find_trained_parameters()
        if self.values is not None:
            self.values.refresh()
        if self.sharding is not None:
            self.sharding.reshard()  # an evaluation leaves the root's parameters whole
        self.writes.save(parameters)
        if self.norms is not None:
            self.norms.save()
        self.clear_gradients()
        choose_gradient_types(self.optimizers, len(window))
        with self.signals.allow():
            loss, weight = (replay or self.accumulate_gradients)(loss_fn, window, parameters)
        if self.on_backward is not None:
            self.on_backward(loss)
        if self.norms is not None:
            self.norms.settle()
        if self.sharding is not None:
            self.sharding.reshard()
        self.writes.find_writes()
        with torch.set_grad_enabled(False):  # torch.no_grad() takes twice the time
            return self._judge(parameters, loss, weight, is_weighted=len(window) > 1)

    def open_window(self) -> None:
        """Save what forward may write, before the first forward pass of a window that another loop runs; once."""
        if not self.is_open:
            self._name_bad_weights()
            self._rng = read_rng_state(self.device) if self.keeps_rng else {}
            self.writes.save(self.find_trained_parameters())

    @torch.no_grad()
    def _name_bad_weights(self) -> None:
        """Name weights that are not finite before the first step; once, and waits for the device. Optimizers leave them
        as they are, so that a step that uses none of them, such as an unused row of an embedding, is not to blame."""
        if self._has_begun:
            return
        self._has_begun = True
        trained = self.find_trained_parameters()
        bad = {id(p) for p, own in zip(trained, get_locals(trained), strict=True) if not own.isfinite().all()}
        for committer in self.committers:
            committer.unchecked = bad
        names = [name for name, p in self.model.named_parameters() if id(p) in bad]
        if names:
            warn_user(
                f"parameters not finite before the first step: {', '.join(names[:3])}{', …' * (len(names) > 3)}. Steps "
                "do not fix this, and steps that use these values are dropped: initialise them, or load finite weights"
            )

    @property
    def is_open(self) -> bool:
        """True between compute() or open_window() and commit()."""
        return self._rng is not None

    @torch.no_grad()
    def judge_window(self, loss: Tensor, *, norm: Tensor | None = None, overflow: Tensor | None = None) -> Facts:
        """Return the verdict on a window that another loop has run since open_window(): its loss as given to backward,
        and the gradients as that loop has divided, reduced and clipped them. `norm` is their norm, if the loop has
        measured it; `overflow` is set if they were not finite before. Commit the facts next."""
        parameters = self.find_trained_parameters()
        self.writes.find_writes()
        self._check_reduced(parameters)
        if norm is None or not are_same_objects(parameters, self.writes.trained):  # a group was added since
            gradients = collect_gradients(parameters)
            norm = self._choose_norm(parameters)(gradients, 2.0) if gradients else torch.zeros_like(loss)
        if overflow is not None:
            norm = torch.where(overflow, float("inf"), norm)
        facts = self._decide(self._sum_up(loss, 1, self.scaler.value, is_weighted=False), norm)
        self.writes.refuse_unsaved(facts.bad)
        assert self._rng is not None
        facts.rng = self._rng
        return facts

    def abandon(self) -> str:
        """Undo a compute() that was not committed: restore buffers and generators. Calling it twice is harmless. Return
        a sentence on what could not be undone, or an empty string."""
        unsaved = ""
        with self.signals.delay():
            if self.sharding is not None:
                self.sharding.abandon_pass()
            self.clear_gradients()
            if self._rng is not None:
                unsaved = self.writes.put_back()
                restore_rng(self._rng, self.device)
            self._rng, self._judged = None, NOT_JUDGED
        return unsaved

    def commit(self, facts: Facts) -> None:
        """Let the device commit or drop the step: weights, buffers, average, schedule and counters alike."""
        if self._rng is None or facts.rng is not self._rng:
            raise ConfigError(
                "commit() takes the facts of the last compute(), once",
                why="their gradients are gone, or were already committed",
                fix="step.commit(step.compute(loss_fn, window))",
            )
        with self.signals.delay():
            try:
                self._judged.refuse_edited()
                self.look_ahead()
                self.commit_on_device(facts)
            finally:
                if facts.is_packed:
                    self._rng, self._judged = None, NOT_JUDGED
                    self.attempted += 1
                    self.outbox.send(facts)
                    if self.watch is not None:
                        self.watch.end(facts)
                else:
                    self.abandon()

    def look_ahead(self) -> None:
        """Extend the tables of rates and values to the next step. A grown table is a new tensor: no graph reads it."""
        if self.rates is not None:
            self.rates.cover(self.attempted, self.committed)
        if self.values is not None:
            self.values.look_ahead()

    def commit_on_device(self, facts: Facts) -> None:
        """Do the device's part of `commit`. Everything is written in place, so that a graph can hold it."""
        with torch.set_grad_enabled(False):
            if self.rates is not None:
                self.rates.refresh(self.committed)
            lr = self._read_first_rate()
            facts.found_inf = facts.bad.float()
            agree = self.ranks.agree_on_any if self.ranks is not None and self.sharding is not None else None
            verdict = commit_all(self.committers, facts.bad, facts.factor, facts.found_inf, agree=agree)
            if verdict is not facts.bad:
                facts.spoil(verdict)
            try:
                if self.on_commit is not None:
                    self.on_commit(self.model)
            finally:  # the optimizers have stepped: even if the hook raises, average, scale and counters must follow
                self._conclude(facts, lr)

    def _conclude(self, facts: Facts, lr: Tensor | float) -> None:
        bad = facts.bad
        if self.on_commit is not None:
            self.writes.find_commit_writes()
            self.writes.refuse_unsaved(bad)
        self.writes.restore_where(bad)
        self.committed.add_(~bad)
        if self.ema is not None:
            self.ema.update(self.committed, bad)
        if self.spikes.skips:
            self.spikes.remember(facts.loss, bad)
        if self.scaler.enabled:
            unjudged = facts.empty | facts.spoiled | facts.spike & bad
            self.scaler.update(bad, unjudged=unjudged if self.hold is None else unjudged | facts.held)
        if self.hold is not None:
            self.hold.remember(facts)
        facts.pack(self.committed, self._low_bits, lr)

    def why_never_captured(self) -> str:
        """Return why this step can never be captured, as far as known before its first step; empty if nothing does."""
        if self.sharding is not None:
            return "the model is sharded, and what FSDP gathers and reduces is not captured"
        by_host = [c.name for c in self.committers if c.method == "host"]
        if by_host:
            return f"{', '.join(by_host)} commits by the host's decision"
        cycled = ", ".join(c.name for c in self.committers if c.writes_momentum)
        return f"the schedule cycles the momentum of {cycled}, which the host sets after a wait" if cycled else ""

    def why_not_captured(self) -> str:
        """Return what keeps this step from being captured as a CUDA graph; empty if nothing does."""
        if self.device.type != "cuda":
            return f"a CUDA graph needs a CUDA device, not {self.device}"
        if reason := self.why_never_captured() or self.writes.why_not_captured:
            return reason
        return "" if all(c.stepped for c in self.committers) else "an optimizer has not taken its first step"

    def forget_writes(self) -> None:
        """Forget an uncommitted compute() and what forward writes, after state was loaded."""
        self.writes.restart_comparison()
        self._rng, self._judged = None, NOT_JUDGED

    def forget_capture(self) -> None:
        """Drop references into a graph's memory, after a capture that succeeded or failed."""
        self.clear_gradients()
        self.writes.forget()
        for committer in self.committers:
            committer.single_pass = None

    def accumulate_gradients(self, loss_fn: LossFn, window: Window, parameters: list[Tensor]) -> tuple[Tensor, Weight]:
        """Run forward and backward over the window; return the weighted sum of losses, and the sum of weights.

        A micro-batch counts by its weight relative to the first one (of several ranks: to the mean of their first
        ones). So a window of one is bit-identical to plain training, and fp16 gradients are no larger than without
        accumulation."""
        if self.ranks is not None:
            self.ranks.refuse_empty(window)
        total_loss: Tensor | None = None
        total_weight: Weight = 0.0
        unit: Weight | None = None
        with enter_backend(self.plan):  # once for the window: backward needs it as well, and entering it takes long
            for number, batch in enumerate(window, 1):
                with self._reduce_last(is_last=number == len(window)):
                    with enter_autocast(self.plan), self.observed():
                        result = loss_fn(batch)
                    loss, weight = result if isinstance(result, tuple) else (result, count_samples(batch))
                    if unit is None and self.ranks is not None:
                        unit = self.ranks.agree_on_unit(weight)
                    if not isinstance(weight, Tensor) and weight == 0:
                        # Where FSDP gathers weights in backward, the other ranks wait for this one in every pass.
                        if self.ranks is not None and (number == len(window) or self.sharding is not None):
                            self._backward(self.ranks.make_empty_loss(loss, parameters))
                        continue
                    unit = make_positive(weight) if unit is None else unit
                    share = weight / unit
                    refuse_unfit_loss(loss)
                    if loss.ndim or loss.dtype != torch.float32 or loss.device != self.device:
                        loss = loss.reshape(()).to(self.device, torch.float32)
                    loss = loss if is_one(share) else loss * share
                    self._backward(loss)
                if total_loss is None:
                    # A copy where more follow: the user may write into the loss before the sum is read.
                    total_loss, total_weight = loss.detach() if len(window) == 1 else loss.detach().clone(), share
                else:
                    total_loss, total_weight = total_loss + loss.detach(), total_weight + share
        if total_loss is None:
            return torch.full((), float("nan"), device=self.device), 0.0
        return total_loss, total_weight

    def _reduce_last(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.ranks is None else self.ranks.reduce_last(is_last=is_last)

    def _backward(self, loss: Tensor) -> None:
        with self.observed():
            self.scaler.scale(loss).backward()

    def _judge(self, parameters: list[Tensor], loss_sum: Tensor, weight: Weight, *, is_weighted: bool) -> Facts:
        self._check_reduced(parameters)
        gradients, compute_norm = collect_gradients(parameters), self._choose_norm(parameters)
        scale = self.scaler.value.clone() if self.scaler.enabled else self.scaler.value
        totals = self._sum_up(loss_sum, weight, scale, is_weighted=is_weighted)
        unscale, overflow = totals.unscale, None
        if self.on_gradients is not None:
            overflow = self._unscale_and_edit(gradients, unscale, compute_norm)
            gradients, unscale, compute_norm = collect_gradients(parameters), None, self._choose_norm(parameters)
        factor: Tensor | None = None
        if gradients:
            norm, factor = self.clip.measure(gradients, unscale, compute_norm)
        else:
            norm = torch.zeros_like(totals.loss)
        facts = self._decide(totals, norm, overflow, scale=scale if self.scaler.enabled else 1.0)
        if are_scaled_in_kernels(self.committers, parameters):
            facts.factor = factor
        elif factor is not None:
            torch._foreach_mul_(gradients, factor)
        return facts

    def _check_reduced(self, parameters: list[Tensor]) -> None:
        """Refuse gradients that are not those of all ranks."""
        if self.ranks is not None:
            refuse_sparse(parameters)
            self.ranks.refuse_unreduced(parameters, self.model)
            self.ranks.average_unsharded(parameters)

    def _sum_up(self, loss_sum: Tensor, weight: Weight, scale: Tensor, *, is_weighted: bool) -> Totals:
        """Return loss, weight and flags of the window, summed over all ranks."""
        ruined = self.writes.became_non_finite(self.device)
        ruined = self.never if ruined is None else ruined
        if self.ranks is None:
            loss = loss_sum if is_one(weight) else loss_sum / weight
            unscale = 1.0 / (scale * weight) if self.scaler.enabled or is_weighted else None
            return Totals(loss, weight, ruined, unscale, None)
        # fill_ passes a number to a kernel as an argument; torch.as_tensor would copy it, and wait for the device.
        agreed = self.ranks.agree(loss_sum, weight, ruined, self._rate.fill_(self._read_first_rate()))
        unscale = self.ranks.size / (scale * agreed.weight)  # DDP has divided by the number of ranks
        return Totals(agreed.loss, agreed.weight, agreed.has_any(RUINED), unscale, agreed)

    def _decide(
        self, totals: Totals, norm: Tensor, overflow: Tensor | None = None, *, scale: Tensor | float = 1.0
    ) -> Facts:
        """Return the verdict: bad if empty, ruined, a skipped spike, or not finite. All on the device, without a
        wait."""
        loss, weight = totals.loss, totals.weight
        spikes = self.spikes if self.measures_spikes and not self.spikes.skips else None
        facts = Facts(attempted=self.attempted, loss=loss, grad_norm=norm, scale=scale, never=self.never, spikes=spikes)
        if isinstance(weight, Tensor):
            facts.empty = facts.empty | (weight == 0)  # on the device, wherever the weight is
        elif weight == 0:
            facts.empty = torch.ones_like(facts.empty)
        facts.ruined = totals.ruined
        # x - x is 0 for a finite x and NaN otherwise, and NaN equals nothing, so one comparison tests both loss and
        # norm: fewer kernels than torch.isfinite.
        bad = loss - loss != norm - norm
        for flag in (facts.empty, facts.ruined, overflow):
            if flag is not None and flag is not self.never:
                bad = bad | flag
        if self.ranks is not None and totals.agreed is not None:
            # After a hook the norm may differ between ranks and needs another reduction; all else is equal already.
            bad = bad | totals.agreed.has_any(BAD)
            bad = bad if self.on_gradients is None else self.ranks.agree_on_any(bad)
            facts.said, facts.wait = totals.agreed.said, self.ranks.world.wait
        facts.bad = bad
        if self.spikes.skips:
            spike = self.spikes.judge(loss)
            facts.bad, facts.spike = bad | spike, spike & ~bad
        if self.hold is not None:
            self.hold.judge(facts, bad)
        return facts

    def _choose_norm(self, parameters: Sequence[Tensor]) -> ComputeNorm:
        """Return how the norm of these parameters' gradients is computed: of shards, over all ranks, each once."""
        if self.ranks is None or self.sharding is None:
            return compute_total_norm
        ranks, gradients = self.ranks, [p.grad for p in parameters if p.grad is not None]
        are_counted = list(map(self.sharding.counts, gradients))
        return lambda shards, kind: ranks.compute_norm(list(compress(shards, are_counted)), kind)

    def _unscale_and_edit(
        self, gradients: list[Tensor], unscale: Tensor | None, compute_norm: ComputeNorm
    ) -> Tensor | None:
        """Let the hook edit unscaled gradients. With loss scaling an overflow before the hook still counts, even if the
        hook removes it, as with torch's scaler: the scale has to fall."""
        assert self.on_gradients is not None
        if unscale is not None and gradients:
            torch._foreach_mul_(gradients, unscale)
        norm = compute_norm(gradients, 2.0) if self.scaler.enabled and gradients else None
        self.on_gradients(self.model)
        return None if norm is None else norm - norm != 0

    def find_trained_parameters(self) -> list[Tensor]:
        """Return each trained parameter once. Looked up at every step: a group may have been added."""
        if self.rates is not None:
            self.rates.refuse_new_groups()
        held = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if not are_same_objects(held, self._held):
            last = len(self._norm_order)
            self._held = held
            self._trained = sorted({id(p): p for p in held}.values(), key=lambda p: self._norm_order.get(id(p), last))
        return check_parameters(self._trained)

    def clear_gradients(self) -> None:
        """Drop all gradients, also of weights that no optimizer holds, where they would accumulate. Modules are those
        of the last window: nn.Module.zero_grad looks for them at every call, which takes long."""
        if self._modules is not self.writes.slots.modules:
            self._modules = self.writes.slots.modules
            self._weights = [module._parameters for module in walk_modules([self.model])]
        for parameter in chain(self._trained, chain.from_iterable(map(dict.values, self._weights))):
            if parameter is not None:
                parameter.grad = None
        for optimizer in self.optimizers:
            if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
                optimizer.zero_grad(set_to_none=True)

    def _find_rates(self, optimizer: Optimizer) -> Rates | None:
        return self.rates if self.rates is not None and self.rates.drives(optimizer) else None

    def _read_first_rate(self) -> Tensor | float:
        if (rates := self._find_rates(self.optimizers[0])) is not None:
            return rates.find_first(self.optimizers[0])
        lr = self.optimizers[0].param_groups[0]["lr"]
        lr = float("nan") if lr is None else lr  # an optimizer may find its own, as transformers' Adafactor does
        # Of any shape with one element; one in host memory is a number, which is read without a wait.
        return lr.detach().reshape(()) if isinstance(lr, Tensor) and lr.device == self.device else float(lr)

    def set_rate_factor(self, factor: float) -> None:
        """Multiply the learning rates of schedules by one factor, for plateaus and rollbacks. Written by the host."""
        if self.rates is not None:
            self.rates.set_cut(factor)

    def describe(self) -> list[tuple[str, str, int]]:
        """Return each optimizer, its commit method, and the bytes that method costs."""
        return [(c.name, c.method, c.extra_bytes) for c in self.committers]

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed step needs besides the model. Waits for the device."""
        return collect_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        refuse_unfit(self, state)
        load_state(self, state)


# --- the gradients of a window ---


def choose_gradient_types(optimizers: Sequence[Optimizer], num_micro_batches: int) -> None:
    """Accumulate gradients of bf16 weights in fp32 over several micro-batches, if the optimizer takes them: a bf16 sum
    loses small terms. A custom optimizer gets torch's default, bf16."""
    wanted = torch.bfloat16 if num_micro_batches == 1 else torch.float32
    ours = (o for o in optimizers if getattr(o, "takes_fp32_gradients", False))
    for parameter in (p for optimizer in ours for group in optimizer.param_groups for p in group["params"]):
        if parameter.dtype == torch.bfloat16 and parameter.grad_dtype != wanted:
            parameter.grad_dtype = wanted


def collect_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients: of a sharded one this rank's shard, of a sparse one its values, coalesced so that each row
    occurs once."""
    gradients = [gradient for gradient in map(get_gradient, parameters) if gradient is not None]
    if not any(map(get_is_sparse, gradients)):
        return get_locals(gradients)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # repeated rows are judged and clipped as their sum
    return [get_stored_values(p.grad) for p in parameters if p.grad is not None]


def are_scaled_in_kernels(committers: Sequence[Committer], parameters: Sequence[Tensor]) -> bool:
    """True if the optimizers' kernels scale the gradients as they read them, which saves a pass over all of them.

    The kernels divide by the inverse, which rounds differently from a multiplication unless the factor is a power of
    two. On a CPU, where a pass is cheap, gradients are multiplied instead, so that a step is bit-identical to a plain
    loop. Kernels also write the gradients back: a second optimizer of the same parameter would scale them twice."""
    on_gpu = bool(parameters) and parameters[0].device.type == "cuda"
    if not on_gpu or any(c.method != "found_inf" for c in committers):
        return False
    return len(parameters) == sum(len(group["params"]) for c in committers for group in c.optimizer.param_groups)


class JudgedGradients:
    """The gradients that the verdict was computed from: others must not be committed."""

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._parameters = parameters
        self._gradients, self._versions = self._read()

    def _read(self) -> tuple[list[Tensor | None], list[int]]:
        gradients = list(map(get_gradient, self._parameters))
        return gradients, [get_version(gradient) for gradient in gradients if gradient is not None]

    @property
    def are_edited(self) -> bool:
        gradients, versions = self._read()
        return not are_same_objects(gradients, self._gradients) or versions != self._versions

    def refuse_edited(self) -> None:
        if self.are_edited:
            raise ConfigError(
                "gradients were changed between compute() and commit(): the step is dropped",
                why="norm and finite check apply to the gradients that compute() left; the new ones were not checked",
                fix="edit them in a hook: hs.Step(..., on_gradients=edit), where edit(model) changes .grad in place, "
                "unscaled and before clipping",
            )


NOT_JUDGED = JudgedGradients()
