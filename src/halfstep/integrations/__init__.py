"""halfstep inside the trainers people already use. Each module imports its host when it is used:

hs.integrations.accelerate.guard(accelerator, model, optimizer)
class MyTrainer(hs.integrations.transformers.HalfstepMixin, transformers.Trainer)
"""

from __future__ import annotations

import importlib
from typing import Any

_HOSTS = ("accelerate", "lightning", "monai", "nnunet", "timm", "transformers")

__all__ = list(_HOSTS)


def __getattr__(name: str) -> Any:
    if name in _HOSTS:
        return importlib.import_module(f"halfstep.integrations.{name}")
    raise AttributeError(f"halfstep.integrations has no {name!r}; hosts: {', '.join(_HOSTS)}")


def __dir__() -> list[str]:
    return sorted(__all__)
