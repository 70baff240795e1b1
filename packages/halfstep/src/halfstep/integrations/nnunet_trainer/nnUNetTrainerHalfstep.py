"""The trainer that nnU-Net finds through nnUNet_extTrainer. It imports every file of this folder: add no other."""

from __future__ import annotations

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer as Trainer

from halfstep.integrations.nnunet import HalfstepSteps


class nnUNetTrainerHalfstep(HalfstepSteps, Trainer):  # type: ignore[misc]
    """nnUNetTrainer whose steps are guarded, and captured on a GPU."""
