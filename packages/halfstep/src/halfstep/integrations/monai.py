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
from halfstep.integrations.captured import CapturedLoop, detach_copy
from halfstep.integrations.guard import HostAdvice
from halfstep.own_loop.step import Step
from halfstep.precision.decide import Precision

# Events and keys are MONAI's enumerations of strings; these are their values.
IMAGE, LABEL, PRED, LOSS = "image", "label", "pred", "loss"


ADVICE = HostAdvice(
    overflow='HalfstepUpdate("bf16")',
    clip="HalfstepUpdate(clip_norm=1.0)",
    rollback='HalfstepUpdate(guard={"on_fault": "rollback"})',
    scale_floor='HalfstepUpdate(scaler={"min_scale": ...})',
    step="HalfstepUpdate",
)
LIMITS = ("lr schedulers in handlers, which follow iterations or epochs", "averages kept by handlers")


class HalfstepUpdate:
    """One iteration of a SupervisedTrainer, as an hs.Step.

    Arguments:
        precision: "auto", "bf16", "fp16", "tf32", "fp32" or an hs.Precision, in place of the trainer's amp=True.
        step_options: more arguments of hs.Step: clip_norm, schedule, ema_decay, capsules, guard, ...

    `step` is the hs.Step, once the first iteration has begun. Save this object with the trainer's own:
    CheckpointSaver(save_dict={"network": network, "optimizer": optimizer, "halfstep": update}).
    """

    def __init__(self, precision: str | torch.dtype | Precision = "auto", **step_options: Any) -> None:
        self.precision, self.step_options = precision, step_options
        self._steps: CapturedLoop | None = None
        self._engine: Any = None
        self._events: list[Any] = []  # of MONAI, in the order of an iteration
        self._fires: list[Any] = []  # events inside forward that have handlers
        self._kept: dict[str, Any] = {}
        self._stored: Mapping[str, Any] | None = None

    @property
    def step(self) -> Step | None:
        return None if self._steps is None else self._steps.step

    @property
    def num_dropped(self) -> int:
        """Return the number of steps that were dropped; waits for the device."""
        return 0 if self._steps is None else self._steps.num_dropped

    def __call__(self, engine: Any, batchdata: Any) -> dict[str, Any]:
        steps = self._steps or self._begin(engine)
        prepared = engine.prepare_batch(batchdata, engine.state.device, engine.non_blocking, **engine.to_kwargs)
        inputs, targets, args, kwargs = prepared if len(prepared) == 4 else (*prepared, (), {})
        engine.state.output = {IMAGE: inputs, LABEL: targets}
        engine.network.train()
        # Plain tensors: a MetaTensor runs Python code for every operation, which cannot be traced.
        batch = {"inputs": inputs, "targets": targets, "args": args, "kwargs": kwargs}
        steps(self._compute_loss, [tree_map(_make_plain, batch)])
        engine.state.output |= {PRED: _restore_meta(self._kept[PRED], inputs), LOSS: self._kept[LOSS]}
        engine.fire_event(self._events[3])
        return engine.state.output

    def _compute_loss(self, batch: dict[str, Any]) -> Tensor:
        engine = self._engine
        pred = engine.inferer(batch["inputs"], engine.network, *batch["args"], **batch["kwargs"])
        kept = {PRED: tree_map(detach_copy, pred)}
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

    def _begin(self, engine: Any) -> CapturedLoop:
        if engine.amp:
            raise ConfigError(
                "SupervisedTrainer(amp=True) has its own autocast and scaler",
                why="the step chooses the precision, and scales the loss in fp16",
                fix='leave amp=True out: HalfstepUpdate("bf16") or HalfstepUpdate("fp16")',
            )
        if getattr(engine, "accumulation_steps", 1) > 1:
            raise ConfigError(
                f"SupervisedTrainer(accumulation_steps={engine.accumulation_steps}) is not supported",
                why="the trainer gives one batch at a time, and hs.Step needs all batches of a step at once",
                fix="a larger batch with accumulation_steps=1, or hs.Step(..., accumulate=...) in a loop of your own",
            )
        from ignite.engine import Events
        from monai.engines.utils import IterationEvents as E

        self._engine = engine
        self._events = [E.FORWARD_COMPLETED, E.LOSS_COMPLETED, E.BACKWARD_COMPLETED, E.MODEL_COMPLETED]
        heard = [event for event in self._events[:3] if engine._event_handlers[event]]
        self._fires = self._events[:2] if set(heard) & set(self._events[:2]) else []
        options = {"precision": self.precision, **self.step_options}
        if self._events[2] in heard:
            options.setdefault("on_gradients", lambda model: engine.fire_event(self._events[2]))
        limits = [*LIMITS, *[f"not captured: handlers of {', '.join(map(str, heard))}"] * bool(heard)]
        self._steps = steps = CapturedLoop(
            "MONAI", engine.network, engine.optimizer, None, ADVICE, limits=limits, **options
        )
        if self._stored is not None:
            steps.step.load_state_dict(self._stored)
        engine.add_event_handler(Events.COMPLETED, lambda engine: steps.finish())
        steps.announce()
        return steps

    def state_dict(self) -> dict[str, Any]:
        # Without the position in the data and the generators: MONAI has its own loader, and a checkpoint that is
        # loaded with weights_only=True may not hold numpy's state.
        state = {} if self.step is None else self.step.state_dict()
        state.pop("position", None)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.step is None:
            self._stored = state or None
        else:
            self.step.load_state_dict(state)


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
