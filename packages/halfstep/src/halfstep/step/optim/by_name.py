"""Optimizers by name, in their fastest form for the device: fused where torch has it, capturable where not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import ConfigError, suggest_nearest

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
FUSED = ("sgd", "adam", "adamw", "adagrad")
CAPTURABLE = ("rmsprop", "nadam", "radam", "adamax", "adadelta", "asgd", "rprop")

FUSED_DEVICES: dict[str, tuple[str, ...]] = {"adagrad": ("cpu",)}
"""Where torch's fused kernels exist: on all supported devices, except that Adagrad has none for CUDA (2.11 and
2.13)."""

ParamGroups = list[dict[str, Any]]
Options = Mapping[str, Any]


def build_optimizer(name: str, groups: ParamGroups, *, lr: float, options: Options | None = None) -> Optimizer:
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}", fix=suggest_nearest(name, OPTIMIZERS))
    kind, device_type = cast("Callable[..., Optimizer]", OPTIMIZERS[name]), groups[0]["params"][0].device.type
    has_fused = name in FUSED and device_type in FUSED_DEVICES.get(name, (device_type,))
    # Capturable keeps step counters on the device; torch allows it on accelerators only.
    has_capturable = name in CAPTURABLE and device_type in ("cuda", "xpu")
    form = {"fused": True} if has_fused else {"capturable": True} if has_capturable else {}
    try:
        return kind(groups, lr=lr, **form, **dict(options or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {name!r} cannot be built with lr={lr}, {dict(options or {})}", why=str(error)
        ) from error


def make_parameter_groups(
    model: nn.Module, weight_decay: float, *, decay_all: bool = False, parts: tuple[str, ...] = ()
) -> ParamGroups:
    """Group parameters by weight decay: norms and biases (at most one dimension) do not decay unless requested.

    `parts` are the trained modules or parameters by name; empty: all.
    """
    trained = [p for name, p in model.named_parameters() if p.requires_grad and (not parts or is_within(name, parts))]
    if not trained:
        where = f"{', '.join(parts)} of the model" if parts else "the model"
        raise ConfigError(f"{where} has no trainable parameters", fix="unfreeze some of its parameters")
    decayed = [p for p in trained if decay_all or p.ndim > 1]
    plain = [p for p in trained if not (decay_all or p.ndim > 1)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def is_within(name: str, parts: Iterable[str]) -> bool:
    """True if a parameter or buffer is one of these, or inside one of these modules."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)
