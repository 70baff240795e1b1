"""A setting of `train.memory: low` on a bare model, without a run around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch._functorch.config as functorch_config
from torch import nn

from halfstep.recompute import set_recompute
from halfstep_train.tune.trials import MemorySetting


@contextmanager
def memory_setting(model: nn.Module, setting: MemorySetting) -> Iterator[None]:
    """The model recomputes from now on, and compiles inside, as the setting says."""
    set_recompute(model, setting.recompute)
    with functorch_config.patch(activation_memory_budget=setting.activation_budget):
        yield
