"""MONAI's SupervisedTrainer with guarded, captured steps. docs/integrations/monai.md is its guide.

    trainer = SupervisedTrainer(..., iteration_update=hs.integrations.monai.HalfstepUpdate("bf16", clip_norm=1.0))

The object makes each iteration in place of SupervisedTrainer's own method: it prepares the batch, runs inferer and loss
function in hs.Step, and fills engine.state.output as MONAI does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from halfstep.errors import ConfigError
from halfstep.own_loop.fast import say
from halfstep.own_loop.step import Step

# Events and keys are MONAI's enumerations of strings; these are their values.
IMAGE, LABEL, PRED, LOSS = "image", "label", "pred", "loss"


class HalfstepUpdate:
    """One iteration of a SupervisedTrainer, as an hs.Step.

    Arguments:
        precision: "auto", "bf16", "fp16", "tf32", "fp32", in place of the trainer's amp=True.
        step_options: more arguments of hs.Step: clip_norm, schedule, ema_decay, capsules, guard, ...

    `step` is the hs.Step, once the first iteration has begun. Save it with the trainer's own objects:
    CheckpointSaver(save_dict={"network": network, "optimizer": optimizer, "halfstep": update}).
    """

    def __init__(self, precision: str | torch.dtype = "auto", **step_options: Any) -> None:
        self.precision, self.step_options = precision, step_options
        self.step: Step | None = None
        self._engine: Any = None
        self._last_event: Any = None
        self._fires: list[Any] = []  # events inside forward that have handlers
        self._kept: dict[str, Any] = {}
        self._stored: Mapping[str, Any] | None = None

    def __call__(self, engine: Any, batchdata: Any) -> dict[str, Any]:
        if batchdata is None:
            raise ValueError("Must provide batch data for current iteration.")
        step = self._make_step(engine) if self.step is None else self.step
        prepared = engine.prepare_batch(batchdata, engine.state.device, engine.non_blocking, **engine.to_kwargs)
        inputs, targets, args, kwargs = prepared if len(prepared) == 4 else (*prepared, (), {})
        engine.state.output = {IMAGE: inputs, LABEL: targets}
        engine.network.train()
        # Plain tensors: a MetaTensor runs Python code for every operation, which cannot be traced.
        batch = {"inputs": inputs, "targets": targets, "args": args, "kwargs": kwargs}
        step(self._compute_loss, [tree_map(_make_plain, batch)])
        engine.state.output |= {PRED: _restore_meta(self._kept[PRED], inputs), LOSS: self._kept[LOSS]}
        engine.fire_event(self._last_event)
        return engine.state.output

    def _compute_loss(self, batch: dict[str, Any]) -> Tensor:
        engine = self._engine
        pred = engine.inferer(batch["inputs"], engine.network, *batch["args"], **batch["kwargs"])
        kept = {PRED: tree_map(_detach, pred)}
        if self._fires:
            engine.state.output |= kept
            engine.fire_event(self._fires[0])
        loss: Tensor = engine.loss_function(pred, batch["targets"]).mean()
        kept[LOSS] = loss.detach().clone()
        if self._fires:
            engine.state.output |= kept
            engine.fire_event(self._fires[1])
        self._kept = kept
        return loss

    def _make_step(self, engine: Any) -> Step:
        if engine.amp:
            raise ConfigError(
                "SupervisedTrainer(amp=True) has its own autocast and scaler",
                why="the step chooses the precision, and scales the loss in fp16",
                fix='leave amp=True out: HalfstepUpdate("bf16") or HalfstepUpdate("fp16")',
            )
        if getattr(engine, "accumulation_steps", 1) != 1:
            raise ConfigError(
                f"SupervisedTrainer(accumulation_steps={engine.accumulation_steps}) cannot be guarded",
                why="the trainer gives one batch at a time, and a step needs all batches of its window",
                fix="accumulation_steps=1 with a larger batch, or hs.Step(accumulate=...) in your own loop",
            )
        self._engine = engine
        from monai.engines.utils import IterationEvents as E

        events = [E.FORWARD_COMPLETED, E.LOSS_COMPLETED, E.BACKWARD_COMPLETED]
        self._last_event = E.MODEL_COMPLETED
        heard = [event for event in events if engine._event_handlers[event]]
        self._fires = events[:2] if set(heard) & set(events[:2]) else []
        options = dict(self.step_options)
        if events[2] in heard:
            options.setdefault("on_gradients", lambda model: engine.fire_event(events[2]))
        self.step = Step(engine.network, engine.optimizer, self.precision, **options)
        if self._stored is not None:
            self.step.load_state_dict(self._stored)
        limits = "; ".join(
            ["lr schedulers in handlers, which follow iterations or epochs", "averages in handlers"]
            + [f"not captured: handlers of {', '.join(str(event) for event in heard)}"] * bool(heard)
        )
        say(f"runs MONAI's iterations in {self.step.plan.granted} as hs.Step does: a bad one changes nothing; not "
            f"guarded: {limits}")  # fmt: skip
        return self.step

    def state_dict(self) -> dict[str, Any]:
        # Without the position in the data and the generators: MONAI has its own loader, and a checkpoint that is
        # loaded with weights_only=True may not hold numpy's state.
        state = {} if self.step is None else self.step.state_dict()
        state.pop("position", None)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.step is not None:
            self.step.load_state_dict(state)
        else:
            self._stored = state or None


def _detach(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _make_plain(value: Any) -> Any:
    as_tensor = getattr(value, "as_tensor", None)
    return value if as_tensor is None else as_tensor()


def _restore_meta(pred: Any, inputs: Any) -> Any:
    """Give predictions the meta information of the inputs, as SupervisedTrainer(compile=True) does."""
    from monai.data import MetaTensor

    if not isinstance(inputs, MetaTensor):
        return pred
    meta = {"meta": inputs.meta, "applied_operations": inputs.applied_operations}
    return tree_map(lambda one: MetaTensor(one, **meta) if isinstance(one, Tensor) else one, pred)
