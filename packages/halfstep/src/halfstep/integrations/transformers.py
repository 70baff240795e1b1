"""The guarded and the captured step inside the transformers Trainer. docs/integrations/transformers.md is its guide.

    class MyTrainer(HalfstepMixin, Trainer): ...

    MyTrainer(model=model, args=args, train_dataset=data).train()                        guard
    MyTrainer(model=model, args=args, train_dataset=data, halfstep="captured").train()   captured

guard       the Trainer's loop, division, clipping and order; the verdict decides what its optimizer.step() does.
captured    the whole step is an hs.Step: a CUDA graph where the loss can be traced. `training_step` collects the window
            that `get_batch_samples` announced and makes the step at its last micro-batch. The Trainer's clipping then
            only reports the norm, and its optimizer and scheduler step nothing.

Everything begins in the callback `on_train_begin`, where model, optimizer and scheduler exist and a checkpoint is
loaded, and ends behind the Trainer's loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from halfstep.errors import ConfigError, explain_missing
from halfstep.evidence.replay import Replayed
from halfstep.fast.fast_path import Fast, FastMode, say
from halfstep.integrations.accelerate import AccelerateGuard, refuse_unfit_accelerator
from halfstep.integrations.captured import CapturedLoop, find_obstacle
from halfstep.integrations.guard import HostAdvice, take_host_options
from halfstep.own_loop.arguments import check_choice
from halfstep.own_loop.evidence import replay as replay_capsule

with explain_missing(__name__, {"transformers": "transformers"}, "pip install 'transformers>=5.22'"):
    from transformers import Trainer, TrainerCallback

HOST = "the transformers Trainer"
LIMITS = ("state.global_step and callbacks, which count dropped steps",)
ADVICE = HostAdvice(
    overflow="TrainingArguments(bf16=True)",
    clip="TrainingArguments(max_grad_norm=1.0)",
    step="trainer.optimizer.step()",
    replay="hs.integrations.transformers.replay(trainer, {!r})",
)
ITEMS, INDEX = "num_items_in_batch", "index"

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object  # the Trainer comes later in the bases of the user's class


class HalfstepMixin(_Base):  # type: ignore[misc]
    """Put this before Trainer, or a subclass of it, in your class's bases. It adds arguments to the Trainer's.

    Arguments:
        halfstep: "guard" or "captured".
        schedule, capsules, max_consecutive, also: as in halfstep.integrations.guard.HostGuard;
            `replay(trainer, capsule)` names the cause of a bad step.
        fast: how the captured step runs, as in hs.Step: "auto", "graph", "compile" or "off".
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer not in order or order.index(HalfstepMixin) > order.index(Trainer):
            raise ConfigError(
                f"{cls.__name__} does not have HalfstepMixin before Trainer in its bases",
                why="Python would call the Trainer's methods first, and nothing would be guarded",
                fix=f"class {cls.__name__}(HalfstepMixin, Trainer)",
            )

    def __init__(
        self,
        *args: Any,
        halfstep: Literal["guard", "captured"] = "guard",
        fast: FastMode = "auto",
        **kwargs: Any,
    ) -> None:
        check_choice("halfstep", halfstep, ("guard", "captured"))
        self._hs_level, self._hs_fast = halfstep, fast
        self._hs_options: Any = take_host_options(kwargs)
        self._hs_steps: AccelerateGuard | CapturedLoop | None = None
        self._hs_window: list[Any] = []
        self._hs_num_batches = 1
        self._hs_norm: Tensor | None = None
        self._hs_last_loss: Tensor | None = None  # the last good one
        self._hs_filters_logs = False
        self._hs_num_dropped = 0
        super().__init__(*args, **kwargs)
        refuse_unfit_accelerator(self.accelerator)
        self.add_callback(_Beginning(self))

    @property
    def halfstep(self) -> AccelerateGuard | CapturedLoop | None:
        """Return the guard or the captured step of the current training; None outside of train()."""
        return self._hs_steps

    @property
    def num_dropped(self) -> int:
        """Return the number of dropped steps of the current training, or of the last one; waits for the device."""
        return self._hs_num_dropped if self._hs_steps is None else self._hs_steps.num_dropped

    train_dataset: Any
    data_collator: Any

    # --- the beginning and the end of training ---

    def _begin(self) -> None:
        refuse_unfit_accelerator(self.accelerator)
        why_not = self._find_why_not_captured() if self._hs_level == "captured" else ""
        if why_not:
            say(f"guards the steps of {HOST} instead of capturing them: {why_not}")
        is_captured = self._hs_level == "captured" and not why_not
        self._hs_last_loss = None
        if is_captured:
            self._hs_steps = self._begin_captured()
        else:
            self._hs_steps = guard = AccelerateGuard(
                self.accelerator, self.model_wrapped, self.optimizer, host=HOST, advice=ADVICE, limits=LIMITS,
                **self._hs_options,
            )  # fmt: skip
            self._put_scheduler(guard.follow(self.lr_scheduler))
        self._hs_steps.announce()
        # The Trainer looks at each loss on the host to repair its log, which waits. The same is done on the device.
        self._hs_filters_logs = self.args.logging_nan_inf_filter and hasattr(self, "_tr_loss")
        if self._hs_filters_logs:
            self.args.logging_nan_inf_filter = False

    def _begin_captured(self) -> CapturedLoop:
        args = self.args
        captured = CapturedLoop(
            HOST, self.model, self.optimizer.optimizer, self.lr_scheduler, ADVICE, precision=self._choose_precision(),
            fast=Fast(self._hs_fast, num_steps=max(self.state.max_steps, 1)),
            clip_norm=max(args.max_grad_norm or 0.0, 0.0), accumulate=args.gradient_accumulation_steps,
            limits=[*LIMITS, "on_pre_optimizer_step is called after the step"],
            **{name: value for name, value in self._hs_options.items() if name != "schedule"},
        )  # fmt: skip
        self._hs_window = []
        self._put_scheduler(captured.scheduler)
        captured._replace(self.optimizer, "step", lambda *args: None)
        captured._replace(self.accelerator, "clip_grad_norm_", lambda *args, **kwargs: self._hs_norm)
        return captured

    def _put_scheduler(self, scheduler: Any) -> None:
        self.lr_scheduler = self.callback_handler.lr_scheduler = scheduler

    def _end(self) -> None:
        """Give everything back to the Trainer; harmless if nothing has begun."""
        steps, self._hs_steps = self._hs_steps, None
        if steps is not None:
            self._hs_num_dropped = steps.num_dropped
            steps.close()
            self._put_scheduler(getattr(self.lr_scheduler, "inner", self.lr_scheduler))
        if self._hs_filters_logs:
            self.args.logging_nan_inf_filter, self._hs_filters_logs = True, False

    def _choose_precision(self) -> str:
        named = {"fp16": "fp16", "bf16": "bf16"}.get(self.accelerator.mixed_precision)
        return named or ("tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32")

    def _find_why_not_captured(self) -> str:
        if obstacle := find_obstacle(self.args.device, self.accelerator.num_processes):
            return obstacle
        if self.accelerator.scaler is not None or self.accelerator.mixed_precision in ("fp16", "fp8"):
            return f"the Trainer scales the loss of {self.accelerator.mixed_precision} itself: use bf16=True"
        for name in ("training_step", "get_batch_samples"):
            owners = [kind for kind in type(self).__mro__ if name in vars(kind) and kind is not HalfstepMixin]
            if owners and owners[0] is not Trainer:
                return f"{owners[0].__name__} has its own {name}"
        return ""

    # --- the loop ---

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super()._inner_training_loop(*args, **kwargs)
            if self._hs_steps is not None:
                self._hs_steps.finish()
            return result
        finally:
            self._end()  # also of a training that raised: auto_find_batch_size begins again with the same optimizer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._hs_window, self._hs_num_batches = [], len(batches)
        return batches, num_items

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        index = inputs.pop(INDEX, None) if self._hs_options.get("capsules") is not None else None
        steps = self._hs_steps
        if steps is None:
            return super().training_step(model, inputs, num_items_in_batch)
        batch = {**inputs}
        batch |= {} if num_items_in_batch is None else {ITEMS: num_items_in_batch}
        batch |= {} if index is None else {INDEX: index}
        if isinstance(steps, CapturedLoop):
            self._hs_window.append(self._prepare_inputs(batch))
            if len(self._hs_window) < self._hs_num_batches:
                return torch.zeros((), device=self.args.device)  # the last micro-batch brings the loss of the window
            model.train()
            window, self._hs_window = self._hs_window, []
            facts = steps(self._compute_window_loss, window)
            self._hs_norm, loss = facts.grad_norm.clone(), facts.loss.clone()
        else:
            steps.open_window()
            steps.keep(batch)
            loss = super().training_step(model, inputs, num_items_in_batch)
        return self._replace_bad_loss(loss) if self._hs_filters_logs else loss

    def _replace_bad_loss(self, loss: Tensor) -> Tensor:
        """Return what the log adds up: in place of a bad loss, the last good one, or 0 before the first, as in the
        Trainer: a NaN would stay in its sum for ever."""
        last = torch.zeros_like(loss) if self._hs_last_loss is None else self._hs_last_loss
        self._hs_last_loss = torch.where(loss.isfinite(), loss, last)
        return self._hs_last_loss

    def _compute_window_loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """Return the loss of a micro-batch as an hs.Step takes it: the step averages what the Trainer adds up."""
        inputs = {name: value for name, value in batch.items() if name not in (ITEMS, INDEX)}
        num_items = batch.get(ITEMS)
        loss = self.compute_loss(self.model, inputs, num_items_in_batch=num_items)
        is_scaled = self.loss_is_scaled_for_ga if hasattr(self, "loss_is_scaled_for_ga") else None
        if is_scaled is None:
            is_scaled = self.model_accepts_loss_kwargs and num_items is not None or self.compute_loss_func is not None
        return (loss * self._hs_num_batches if is_scaled and self._hs_num_batches > 1 else loss), 1

    # --- logs ---

    def _get_learning_rate(self) -> Any:
        """Return the rate of the newest step. The Trainer asks at every step: a tensor, so that nothing waits."""
        if self._hs_steps is None or getattr(self._hs_steps, "schedule", "exact") == "read":
            return super()._get_learning_rate()
        rate = self.optimizer.param_groups[0]["lr"]
        return rate.clone() if isinstance(rate, Tensor) else rate

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        rate = logs.get("learning_rate")
        if isinstance(rate, Tensor):
            logs["learning_rate"] = float(rate)
        super().log(logs, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader; with capsules its batches also hold the numbers of their samples."""
        sampling = getattr(self.args, "train_sampling_strategy", "random")
        is_plain = str(getattr(sampling, "value", sampling)) in ("random", "sequential")
        is_plain = is_plain and not getattr(self.args, "group_by_length", False)
        data, collate = self.train_dataset, self.data_collator
        has_capsules = self._hs_options.get("capsules") is not None
        if not has_capsules or not is_plain or isinstance(data, IterableDataset) or data is None:
            return super().get_train_dataloader()
        self.train_dataset = NumberedData(data)
        self.data_collator = NumberedCollator(self._get_collator_with_removed_columns(collate, description="training"))
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset, self.data_collator = data, collate


class _Beginning(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: HalfstepMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._begin()


# --- the cause of a bad step ---


def replay(trainer: HalfstepMixin, capsule: str | os.PathLike[str]) -> Replayed:
    """Find out why a step of this trainer went bad. ::

        print(hs.integrations.transformers.replay(trainer, "capsules/00000123"))

    The trainer's `capsules` names the folder of the capsules.
    """
    return replay_capsule(capsule, trainer.model, trainer._compute_window_loss)


class NumberedData(Dataset[tuple[int, Any]]):
    """Samples with their numbers in the dataset; not dicts, so that no column of them is removed."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return int(number), self.data[number]


class NumberedCollator:
    def __init__(self, collate: Callable[..., Any]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[tuple[int, Any]]) -> Any:
        batch = self.collate([item for _, item in items])
        if hasattr(batch, "keys"):
            batch[INDEX] = torch.tensor([number for number, _ in items])
        return batch
