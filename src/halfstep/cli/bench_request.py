"""What `halfstep bench` was asked for, with every mistake found before anything is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from halfstep.errors import ConfigError, nearest, suggested
from halfstep.workloads import DEMO_WORKLOAD, KINDS

if TYPE_CHECKING:
    from halfstep.bench.bench import Request
    from halfstep.bench.problem import Problem
    from halfstep.bench.settings import StatedRow
    from halfstep.config.load import Loaded
    from halfstep.hardware.facts import Hardware

MODES = {
    "eager": "operation by operation",
    "compile": "model and loss through torch.compile",
    "graph": "the whole step as one CUDA graph",
    "auto": "what `halfstep train` takes by itself",
}
PEERS = {
    "plain": "a loop of your own in PyTorch",
    "lightning": "Lightning's Trainer",
    "accelerate": "Hugging Face Accelerate",
}
VARIANTS = ("documented", "tuned", "graphs")
STEPS = {"cuda": 100, "cpu": 20}
"""Timed steps by default."""
UNSET = "an empty word is most often a shell variable that is not set"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The command line's own words; None where an option was not given."""

    words: Sequence[str]
    """The workload or config file, then settings."""
    flags: Mapping[str, object]
    """Options that are settings of a run, too."""
    precisions: str | None
    modes: str | None
    against: str | None
    steps: int | None
    explain: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """What is written beside the table."""

    picture: Path | None
    save: Path | None
    force: bool

    def without_outputs(self) -> Files:
        """Where nothing was measured: an empty file would stand in the way of the same command."""
        for path in filter(None, (self.save, self.picture)):
            typer.secho(f"{path} was not written: nothing was measured", fg="yellow", err=True)
        return dataclasses.replace(self, save=None, picture=None)


def refuse_files(files: Files, *, explain: bool) -> None:
    """Files that must not be written."""
    from halfstep.bench.record import refuse_to_overwrite

    refuse_to_overwrite({"--picture": files.picture, "--save": files.save}, force=files.force)
    if files.picture:
        if explain:
            raise ConfigError(f"--explain draws no picture ({files.picture})", fix="--save FILE has all its numbers")
        from halfstep.report.picture_file import refuse_unknown_format

        refuse_unknown_format(files.picture)


def with_workload(words: Sequence[str]) -> list[str]:
    """The words with what is trained in front; the default is taken where none is named, and said."""
    if not words or "=" in words[0]:
        typer.secho(f"no workload named: this is {DEMO_WORKLOAD}", fg="yellow", err=True)
        return [DEMO_WORKLOAD, *words]
    target = words[0]
    if not target.strip():
        raise ConfigError(f"the workload is {target!r}", why=UNSET, fix="name one, such as unet, resnet50 or vit_b_16")
    if target not in tuple(KINDS) and Path(target).is_dir():
        raise ConfigError(
            f"{target} is a folder, not a workload", why="a bench needs no data", fix=_fix_of_folder(Path(target))
        )
    return list(words)


def _fix_of_folder(folder: Path) -> str:
    if (folder / "config.yaml").is_file():
        return f"the config of this run: {suggested('bench', folder / 'config.yaml')}"
    return f"halfstep bench {DEMO_WORKLOAD}"


def split(text: str | None, option: str, allowed: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """`a,b` as its words, in the order given; nothing, and a word that the option does not take, are refused."""
    if text is None:
        return ()
    found = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))
    if not found:
        fix = f"leave {option} out, or name some: {option} {','.join(list(allowed or ('fp32', 'bf16'))[:2])}"
        raise ConfigError(f"{option} {text!r} names nothing", why=UNSET, fix=fix)
    for word in found:
        if allowed and word not in allowed:
            raise _unknown(word, option, allowed)
    return found


def _unknown(word: str, option: str, allowed: Mapping[str, str]) -> ConfigError:
    """Those with a `:` are named only to who wrote one."""
    named = {name: meaning for name, meaning in allowed.items() if ":" not in name}
    return ConfigError(
        f"{option} takes no {word!r}",
        why="it takes " + ", ".join(f"{name} ({meaning})" for name, meaning in named.items()),
        fix=nearest(word, allowed if ":" in word else named),
    )


def prepared(asked: Asked) -> tuple[Hardware, Problem, Request]:
    """Everything that can be wrong is found here, before anything is measured."""
    variants = {f"{peer}:{kind}": meaning for peer, meaning in PEERS.items() for kind in VARIANTS}
    modes, against = split(asked.modes, "--modes", MODES), split(asked.against, "--against", PEERS | variants)
    from halfstep.config.precision_names import precision_name

    words = split(asked.precisions, "--precisions")
    precisions = tuple(dict.fromkeys(precision_name(word, "--precisions") for word in words))
    import torch

    from halfstep.bench.bench import Request
    from halfstep.bench.measure_row import schedule_for
    from halfstep.bench.peers import require_peers
    from halfstep.bench.problem import problem_for, refuse_too_large
    from halfstep.bench.settings import bench_config, default_modes, default_precisions
    from halfstep.hardware.probe import probe
    from halfstep.workloads import load

    require_peers(against)
    hardware = probe(str(asked.flags["device"] or "auto"))
    place = torch.device(hardware.device)
    steps = None if asked.explain else asked.steps
    schedule = schedule_for(STEPS.get(place.type, STEPS["cpu"]) if steps is None else steps, place)
    target, *overrides = asked.words
    config = bench_config(target, overrides, asked.flags, small=hardware.kind == "cpu", against=against)
    said = load(target, flags=asked.flags, overrides=overrides)
    if said.config.data.dir and config.data.dir is None:
        note = f"data.dir={said.config.data.dir} is not read: one random batch of such a run's size is trained on"
        typer.secho(note, fg="yellow", err=True)
    stated = stated_by_config(said, explain=asked.explain)
    unasked = ("auto",) if asked.explain else default_precisions(hardware)
    request = Request(
        precisions=without_auto(chosen("--precisions", precisions, stated, unasked), hardware),
        modes=chosen("--modes", modes, stated, default_modes(place)),  # type: ignore[arg-type]
        against=against,
        schedule=schedule,
    )
    refuse_too_large(config, request.precisions, request.modes, hardware)
    return hardware, problem_for(config, place), request


def stated_by_config(said: Loaded, *, explain: bool) -> dict[str, StatedRow]:
    """Rows that a config file or a preset states."""
    from halfstep.bench.settings import stated_rows

    stated = stated_rows(said)
    if explain and "--modes" in stated and stated["--modes"].value == "auto":
        del stated["--modes"]  # auto is not a mode of its own that could be explained
    return stated


def chosen(
    option: str, asked: tuple[str, ...], stated: Mapping[str, StatedRow], unasked: tuple[str, ...]
) -> tuple[str, ...]:
    """What the option asks for, else what the config states, which is said, else all that is usual here."""
    if asked or option not in stated:
        return asked or unasked
    row = stated[option]
    typer.secho(f"{option} {row.value}, as {row.where} says; {option} takes others", fg="yellow", err=True)
    return (row.value,)


def without_auto(precisions: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """`auto` as the precision that `halfstep train` takes on this device, and why it does."""
    from halfstep.precision.decide import decide

    plan = decide("auto", hardware)
    if "auto" in precisions:
        typer.secho(f"auto is {plan.granted} here: {plan.reason}", fg="yellow", err=True)
    return tuple(dict.fromkeys(plan.granted if name == "auto" else name for name in precisions))
