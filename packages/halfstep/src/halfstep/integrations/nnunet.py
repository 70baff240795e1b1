"""nnU-Net v2 with guarded, captured steps. docs/integrations/nnunet.md is its guide.

nnU-Net finds trainers by name, also in the folders that the variable nnUNet_extTrainer names:

    export nnUNet_extTrainer=$(python -m halfstep.integrations.nnunet)
    nnUNetv2_train DATASET 3d_fullres 0 -tr nnUNetTrainerHalfstep

`python -m halfstep.integrations.nnunet` prints the folder, which holds nnUNetTrainerHalfstep.py and nothing else:
nnU-Net imports every file of it. That class is `HalfstepSteps` in front of nnUNetTrainer; put it in front of your own
trainer the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfstep.errors import ConfigError
from halfstep.own_loop.step import Outcome, Step
from halfstep.precision.contexts import get_autocast_dtype
from halfstep.precision.decide import Precision

if TYPE_CHECKING:
    Trainer = Any  # nnUNetTrainer, which has no types
else:
    Trainer = object

FOLDER = Path(__file__).parent / "nnunet_trainer"


class HalfstepSteps(Trainer):  # type: ignore[misc]
    """Replaces train_step of an nnUNetTrainer: bf16, bad steps are dropped, on a GPU the step is captured.

    Set these in a subclass:
        precision: as in hs.Step; nnU-Net itself trains in fp16.
        clip_norm: nnU-Net's own limit of the gradient norm.
        step_options: more arguments of hs.Step.
    """

    precision: str | Precision = "auto"
    clip_norm = 12.0
    step_options: dict[str, Any] = {}  # noqa: RUF012

    grad_scaler: Any
    _step: Step | None = None

    @property
    def num_dropped(self) -> int:
        """Return the number of dropped steps since the start or the resumption; waits for the device."""
        return 0 if self._step is None else self._step.attempted - self._step.committed

    def _do_i_compile(self) -> bool:
        return False  # the step captures, and compiles where that pays; compiled code inside it would be traced twice

    def _build_loss(self) -> Any:
        loss = super()._build_loss()
        if self.enable_deep_supervision:  # numpy's numbers, which a trace would compute with on the CPU
            loss.weight_factors = tuple(map(float, loss.weight_factors))
        return loss

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Make one step. Its loss is an Outcome, which `on_train_epoch_end` reads: reading it here would wait."""
        step = self._make_step() if self._step is None else self._step
        target = batch["target"]
        is_list = isinstance(target, list)
        on_device = {
            "data": batch["data"].to(self.device, non_blocking=True),
            "target": [t.to(self.device, non_blocking=True) for t in (target if is_list else [target])],
        }
        self._cases[step.attempted] = list(batch.get("keys", ()))
        return {"loss": step(self._compute_list_loss if is_list else self._compute_loss, [on_device])}

    def _compute_list_loss(self, batch: dict[str, Any]) -> Any:
        return self.loss(self.network(batch["data"]), batch["target"])

    def _compute_loss(self, batch: dict[str, Any]) -> Any:
        return self.loss(self.network(batch["data"]), batch["target"][0])

    def _make_step(self) -> Step:
        if self.is_ddp:
            raise ConfigError(
                f"{type(self).__name__} trains on one GPU, not on several",
                why="this trainer has not been tested on several GPUs",
                fix="-num_gpus 1, or -tr nnUNetTrainer",
            )
        self._cases: dict[int, list[str]] = {}
        options = {"capsules": Path(self.output_folder) / "capsules", **self.step_options}
        # Made at the first step: a checkpoint has been loaded by now, also into the scaler, whose scale is taken over.
        self._step = Step(
            self.network, self.optimizer, self.precision, clip_norm=self.clip_norm, scaler=self.grad_scaler,
            on_outcome=self._log_dropped, **options,
        )  # fmt: skip
        if self._step.scaler.enabled and self.grad_scaler is not None and not self._step.attempted:
            self._step.scaler.growth_tracker.fill_(self.grad_scaler._get_growth_tracker())
        if not self._step.scaler.enabled:
            self.grad_scaler = None
        self.print_to_log_file(
            f"halfstep: nnU-Net trains in {self._step.plan.granted}: a bad step changes neither weights nor momentum; "
            "the learning rate follows epochs, dropped steps included; validation and prediction are nnU-Net's own"
        )
        return self._step

    def _log_dropped(self, outcome: Outcome) -> None:
        cases = self._cases.pop(outcome.step, [])
        if not outcome.committed:
            named = f"; cases: {', '.join(cases)}" if cases else ""
            self.print_to_log_file(f"halfstep: step {outcome.step} was dropped: {outcome.reason}{named}")

    def on_train_epoch_end(self, train_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss of the committed steps; one that was dropped has none."""
        if self._step is not None:
            self._step.finish()
        outcomes = [output["loss"] for output in train_outputs]
        losses = [outcome.loss for outcome in outcomes if outcome.committed] or [float("nan")]
        super().on_train_epoch_end([{"loss": np.float32(loss)} for loss in losses])

    def on_train_end(self) -> None:
        if self._step is not None:
            num = self._step.attempted
            self.print_to_log_file(f"halfstep: {self.num_dropped} of {num} steps dropped since the start")
        super().on_train_end()

    def validation_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        with self._choose_autocast():
            return super().validation_step(batch)

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        with self._choose_autocast():
            super().perform_actual_validation(save_probabilities)

    @contextlib.contextmanager
    def _choose_autocast(self) -> Iterator[None]:
        """Let nnU-Net's autocast use the format of training: its own fp16 may overflow in weights trained in bf16."""
        kind, dtype = self.device.type, get_autocast_dtype(self._step.plan.granted) if self._step is not None else None
        before = torch.get_autocast_dtype(kind)
        torch.set_autocast_dtype(kind, before if dtype is None else dtype)
        try:
            yield
        finally:
            torch.set_autocast_dtype(kind, before)

    def save_checkpoint(self, filename: str) -> None:
        """Save as nnU-Net does, with the loss scale where it keeps its own: nnUNetTrainer can load the file."""
        if self._step is not None and self._step.scaler.enabled and self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(self._step.scaler.state_dict())
        super().save_checkpoint(filename)

    def load_checkpoint(self, filename_or_checkpoint: Any) -> None:
        super().load_checkpoint(filename_or_checkpoint)
        self._step = None  # the next one begins with what was loaded


if __name__ == "__main__":
    print(FOLDER)
