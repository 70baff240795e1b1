"""The config of what is timed: the user's words, and below them what makes a step comparable between tools."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from halfstep.config.load import Loaded
from halfstep.config.schema import RunConfig
from halfstep.config.training import ScalerConfig
from halfstep.errors import ConfigError
from halfstep.hardware.facts import Hardware
from halfstep.precision.ladder import lacks
from halfstep.report.config_view import shown
from halfstep.workloads import KINDS, load

Mode = Literal["eager", "compile", "graph", "auto"]
FAST: dict[Mode, str] = {"eager": "off", "compile": "compile", "graph": "graph", "auto": "auto"}
"""A mode to `train.fast`."""

COMPARABLE = {
    "optimizer.name": "adamw",
    "optimizer.lr": "1e-4",
    "optimizer.lr_per": "0",
    "optimizer.weight_decay": "0.01",
    "schedule.name": "constant",
    "schedule.warmup_epochs": "0",
    "schedule.warmup_steps": "0",
    "ema.enabled": "false",
}
"""One optimizer at one rate for every model and every tool; what the user states wins."""
OF_PEERS: dict[str, tuple[object, ...]] = {
    "optimizer.name": ("adamw",),
    "schedule.name": ("constant",),
    "schedule.warmup_epochs": (0,),
    "schedule.warmup_steps": (0, None),
    "train.clip_type": ("l2",),
    "train.deterministic": (False,),
    "ema.enabled": (False,),
    "guard.skip_spikes": (False,),
    "precision.modules": ({},),
    **{f"scaler.{name}": (field.default,) for name, field in ScalerConfig.model_fields.items()},
}
"""What peers train with. Settings of halfstep that none of them is given; the scaler's defaults are torch's."""
UNSTATED = ("default", "demo")
STATED_BELOW = ("preset", "file")
"""Layers that may speak of precision and mode; options of the command line have the last word."""
NO_FOLDER = "random"
"""Any name: with a folder a workload takes its full size, without one the small size of its demo."""


def default_precisions(hardware: Hardware) -> tuple[str, ...]:
    """Those the device has; fp8 changes what a model computes too much to be run unasked."""
    return tuple(name for name in ("fp32", "tf32", "bf16", "fp16") if not lacks(name, hardware))


def default_modes(device: torch.device) -> tuple[Mode, ...]:
    return ("eager", "compile", "graph") if device.type == "cuda" else ("eager", "compile")


def bench_config(
    target: str, overrides: Sequence[str], flags: Mapping[str, object], *, small: bool, against: Sequence[str] = ()
) -> RunConfig:
    """The config of a workload's name or file; `small` takes the size of the workload's demo, for a CPU."""
    said, given = load(target, flags=flags, overrides=overrides), dict(flags)
    makes_data = KINDS.of(said.config.workload).synthetic is not None
    if makes_data and not small:
        given = {"data_dir": NO_FOLDER, **flags}
        said = load(target, flags=given, overrides=overrides)
    unsaid = [f"{path}={value}" for path, value in COMPARABLE.items() if said.origins[path].layer in UNSTATED]
    config = load(target, flags=given, overrides=[*unsaid, *overrides]).config
    _refuse_rows_as_settings(said)
    if config.train.accumulate > 1:
        raise ConfigError(
            f"train.accumulate={config.train.accumulate}: one step of one batch is timed",
            fix="leave it at 1; a window of accumulated batches takes that many times as long, less one update",
        )
    if against:
        _refuse_what_peers_lack(config)
    return config.changed(data={"dir": None}) if makes_data else config


def _refuse_rows_as_settings(said: Loaded) -> None:
    """A bench varies precision and mode itself, so such a word would be ignored."""
    for option, (path, value) in _rows_said(said).items():
        if said.origins[path].layer == "override":
            raise ConfigError(f"{said.origins[path].where}: a bench has rows of several", fix=f"{option} {value}")


def _refuse_what_peers_lack(config: RunConfig) -> None:
    """Rows of one table must do the same work."""
    for path, possible in OF_PEERS.items():
        value = operator.attrgetter(path)(config)
        if value not in possible:
            raise ConfigError(
                f"{path}={shown(value)}, and peers train with {shown(possible[0])}",
                why="a row that does other work than its neighbours says nothing of their speed",
                fix=f"leave {path} at {shown(possible[0])}, or --against out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedRow:
    """What a config file or a preset says of precision or mode, and where."""

    value: str
    where: str


def stated_rows(said: Loaded) -> dict[str, StatedRow]:
    """By the option that would say otherwise, `--precisions` or `--modes`; nothing where the config is silent."""
    return {
        option: StatedRow(value=value, where=said.origins[path].where)
        for option, (path, value) in _rows_said(said).items()
        if said.origins[path].layer in STATED_BELOW
    }


def _rows_said(said: Loaded) -> dict[str, tuple[str, str]]:
    """Path and value of the settings that are rows of a bench, by the option that chooses them."""
    mode = next(mode for mode, fast in FAST.items() if fast == said.config.train.fast)
    return {"--precisions": ("precision.default", said.config.precision.default), "--modes": ("train.fast", mode)}


def in_precision(config: RunConfig, precision: str, *, simulate: bool) -> RunConfig:
    """The same run in this precision or not at all: a row must not show another one's time."""
    return config.changed(precision={"default": precision, "strict": not simulate, "simulate": simulate})


def run_by(config: RunConfig, mode: Mode) -> RunConfig:
    """The same run in this mode."""
    return config.changed(train={"fast": FAST[mode]})
