"""halfstep inside the trainers people already use. Each module imports its host when it is used:

hs.integrations.accelerate.guard(accelerator, model, optimizer)
class MyTrainer(hs.integrations.transformers.HalfstepMixin, transformers.Trainer)
lightning.Trainer(plugins=[hs.integrations.lightning.HalfstepPrecision("bf16")])
hs.integrations.lightning.guard(fabric, model, optimizer)
loss_scaler = hs.integrations.timm.HalfstepScaler(model, optimizer, "bf16")
nnUNetv2_train ... -tr nnUNetTrainerHalfstep, with nnUNet_extTrainer=$(python -m halfstep.integrations.nnunet)
SupervisedTrainer(..., iteration_update=hs.integrations.monai.HalfstepUpdate("bf16"))
"""

from __future__ import annotations

import importlib
from typing import Any

_HOSTS = ("accelerate", "lightning", "monai", "nnunet", "timm", "transformers")

__all__ = list(_HOSTS)


def __getattr__(name: str) -> Any:
    if name in _HOSTS:
        return importlib.import_module(f"halfstep.integrations.{name}")
    raise AttributeError(f"halfstep.integrations has no {name!r}; it has {', '.join(_HOSTS)}")


def __dir__() -> list[str]:
    return sorted(__all__)
