"""The config of what is timed: the user's words, and below them what makes a step comparable between tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from halfstep.config.load import Loaded, load
from halfstep.config.schema import RunConfig
from halfstep.errors import ConfigError
from halfstep.hardware.facts import Hardware
from halfstep.precision.ladder import lacks

Way = Literal["eager", "compile", "graph", "auto"]
FAST: dict[Way, str] = {"eager": "off", "compile": "compile", "graph": "graph", "auto": "auto"}
"""A way to `train.fast`."""

COMPARABLE = {
    "optimizer.name": "adamw",
    "optimizer.lr": "1e-4",
    "optimizer.lr_per": "0",
    "optimizer.weight_decay": "0.01",
    "schedule.name": "constant",
    "schedule.warmup_epochs": "0",
}
"""One optimizer at one rate for every model and every tool; what the user states wins."""
UNSTATED = ("default", "demo")
NO_FOLDER = "random"
"""Any name: with a folder a workload takes its full size, without one the small size of its demo."""


def default_precisions(hardware: Hardware) -> tuple[str, ...]:
    """Those the device has; fp8 changes what a model computes too much to be run unasked."""
    return tuple(name for name in ("fp32", "tf32", "bf16", "fp16") if not lacks(name, hardware))


def default_ways(device: torch.device) -> tuple[Way, ...]:
    return ("eager", "compile", "graph") if device.type == "cuda" else ("eager", "compile")


def bench_config(
    target: str,
    overrides: Sequence[str],
    flags: Mapping[str, object],
    *,
    small: bool,
    against: Sequence[str] = (),
) -> RunConfig:
    """The config of a workload's name or file; `small` takes the size of the workload's demo, for a CPU."""
    given = dict(flags) if small else {"data_dir": NO_FOLDER, **flags}
    said = load(target, flags=given, overrides=overrides)
    unsaid = [f"{path}={value}" for path, value in COMPARABLE.items() if said.sources[path].layer in UNSTATED]
    config = load(target, flags=given, overrides=[*unsaid, *overrides]).config
    _refuse_rows_as_settings(said)
    if config.train.accumulate > 1:
        raise ConfigError(
            f"train.accumulate={config.train.accumulate}: one step of one batch is timed",
            fix="leave it at 1; a window of accumulated batches takes that many times as long, less one update",
        )
    if against and config.optimizer.name != "adamw":
        raise ConfigError(
            f"optimizer.name={config.optimizer.name}, and peers are timed with adamw", fix="leave it, or --against"
        )
    return config.model_copy(update={"data": config.data.model_copy(update={"dir": None})})


def _refuse_rows_as_settings(said: Loaded) -> None:
    """A bench varies precision and way itself, so such a word would be ignored."""
    way = next((way for way, fast in FAST.items() if fast == said.config.train.fast), "eager")
    options = {"precision.default": f"--precisions {said.config.precision.default}", "train.fast": f"--ways {way}"}
    for path, option in options.items():
        if said.sources[path].layer == "override":
            raise ConfigError(f"{said.sources[path].where}: a bench has rows of several", fix=option)


def in_precision(config: RunConfig, precision: str, *, simulate: bool) -> RunConfig:
    """The same run in this precision or not at all: a row must not show another one's time."""
    wish = config.precision.model_copy(update={"default": precision, "strict": not simulate, "simulate": simulate})
    return config.model_copy(update={"precision": wish})


def run_by(config: RunConfig, way: Way) -> RunConfig:
    """The same run in this way."""
    return config.model_copy(update={"train": config.train.model_copy(update={"fast": FAST[way]})})
