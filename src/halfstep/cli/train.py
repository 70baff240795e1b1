"""`halfstep train`: argv -> config -> run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli.options import (
    DATA,
    PRECISION,
    RUN,
    SHOW,
    BatchSize,
    DataDir,
    Device,
    Epochs,
    ImageSize,
    MaxSteps,
    MaybeWords,
    Precision,
    Simulate,
    Strict,
    option,
    with_flags,
)
from halfstep.cli.run_place import new_folder, resumed_folder, start_on, stopped_after
from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.config.load import Loaded

PRESETS = "fast, quality, lowmem, stable, debug; classifiers: quick, nvidia90, guide, deit."
MIXED = "Mixed precision on (bf16, or --precision-type) or off (fp32)."
OVERRIDES = "YAML file whose values replace those of the config."
VALIDATION = "Say how validation counts its samples."
LEDGER = "Record what steps really compute in, once per mode."


class Flags:
    """Settings with a flag of their own, by the name the config room knows."""

    precision: Precision = None
    mixed_precision: Annotated[bool | None, option(MIXED, panel=PRECISION)] = None
    precision_type: Annotated[str | None, option("bf16 or fp16, with --mixed-precision.", panel=PRECISION)] = None
    bf16: Annotated[bool | None, option("Same as --precision bf16.", "--bf16", panel=PRECISION)] = None
    fp16: Annotated[bool | None, option("Same as --precision fp16.", "--fp16", panel=PRECISION)] = None
    use_optimizations: Annotated[
        bool | None, option("TF32 instead of strict fp32.", "--use-optimizations", panel=PRECISION)
    ] = None
    strict: Strict = None
    simulate: Simulate = None
    data_dir: DataDir = None
    batch_size: BatchSize = None
    image_size: ImageSize = None
    epochs: Epochs = None
    max_steps: MaxSteps = None
    lr: Annotated[float | None, option("Learning rate.", panel=DATA)] = None
    num_workers: Annotated[int | None, option("Processes that read the data.", panel=DATA)] = None
    seed: Annotated[int | None, option("Seed for weights, order and augmentation.", panel=DATA)] = None
    preset: Annotated[str | None, option(PRESETS, panel=DATA)] = None
    device: Device = None
    ledger: Annotated[bool | None, option(LEDGER, "--ledger", panel=RUN)] = None
    ledger_every: Annotated[int | None, option("Like --ledger, and again every N steps.", panel=RUN)] = None
    tensorboard: Annotated[bool | None, option("Write TensorBoard events.", "--tensorboard", panel=RUN)] = None
    quiet: Annotated[bool | None, option("Only warnings and the summary.", "--quiet", "-q", panel=RUN)] = None


@with_flags(Flags)
def command(
    words: MaybeWords = None,
    overrides_file: Annotated[Path | None, option(OVERRIDES, "--config-overrides-file", panel=DATA)] = None,
    check_validation: Annotated[bool, option(VALIDATION, "--check-validation", panel=DATA)] = False,
    gpus: Annotated[str | None, option("How many GPUs (8), or which (0,1): one process each.", panel=RUN)] = None,
    out: Annotated[Path | None, option("The run's folder.", panel=RUN, show_default="runs/WORKLOAD-TIME")] = None,
    resume: Annotated[Path | None, option("Continue the run in this folder.", panel=RUN)] = None,
    continue_from: Annotated[Path | None, option("Same as --resume.", "--continue", panel=RUN)] = None,
    allow_changes: Annotated[
        bool, option("With --resume: accept other settings.", "--allow-changes", panel=RUN)
    ] = False,
    dry: Annotated[
        bool, option("Train and keep nothing: the run's folder is removed.", "--dry", "-n", panel=RUN)
    ] = False,
    log_dir: Annotated[Path | None, option("Parent folder of the run's folder.", panel=RUN)] = None,
    timeout: Annotated[str | None, option("Save and stop after DD:HH:MM:SS.", panel=RUN)] = None,
    show_config: Annotated[
        bool, option("Every setting, its value and its source.", "--show-config", panel=SHOW)
    ] = False,
    as_json: Annotated[bool, option("With --show-config: for scripts.", "--json", panel=SHOW)] = False,
    schema: Annotated[Path | None, option("Write the JSON schema for editors to this file.", panel=SHOW)] = None,
    **settings: Any,
) -> None:
    """Train a workload, or what a config file describes.

    Workloads: unet, resnet18, resnet34, resnet50, resnet101, resnet152, vit_s_16, vit_b_16, vit_l_16, vae, diffusion,
    radiodiff_vae, radiodiff, slotcontrast, steve, slotcontrast_steve, gpt2, gpt2_medium, gpt2_large, gpt2_xl, or one of
    your own by import path (my_pkg.my_mod:build). Without --data-dir they train on generated demo data.

    Flags win over KEY=VALUE words, those over the file, the file over the preset. Flags take - and _ alike.

    Example:

        halfstep train unet --data-dir data/carvana --bf16 --epochs 20 optimizer.lr=3e-4

        halfstep train resnet50 --data-dir data/photos train.fast=graph

        halfstep train unet --data-dir data/carvana train.memory=low

        halfstep train --resume runs/unet-20250101-120000 --epochs 40
    """
    resume = resumed_folder(resume, continue_from)
    loaded = loaded_from(words or [], settings, resume, overrides_file)
    if resume and out:
        raise ConfigError(f"--resume {resume} continues in its own folder, not in --out {out}", fix="leave --out")
    if as_json and not show_config:
        raise ConfigError("--json needs --show-config", fix="a run's metrics are JSON: metrics.jsonl in its folder")
    if check_validation:
        typer.echo("validation reads every sample once, in order, by its index; data.val_size is compared", err=True)
    if schema or show_config:
        return looked_at(loaded, schema, is_shown=show_config, as_json=as_json)
    if gpus is not None:
        start_on(gpus, settings["device"] or loaded.config.device, os.environ)
    from halfstep.distributed.launch import launch_of
    from halfstep.run.train import train

    place = new_folder(out, log_dir, dry=dry and not resume, name=loaded.config.workload)
    with place as folder, stopped_after(timeout):
        train(loaded, out=folder, resume=resume, allow_changes=allow_changes, launch=launch_of(os.environ))
    return None


def loaded_from(
    words: list[str], flags: dict[str, object], resume: Path | None, overrides_file: Path | None = None
) -> Loaded:
    """The first word names the workload or the file. With --resume the run's own config is the file, and what another
    one says on top of it has to be the same."""
    from halfstep.config.load import is_file
    from halfstep.workloads import KINDS, load

    target, overrides = (words[0], words[1:]) if words and "=" not in words[0] else ("", words)
    if resume:
        if is_file(target, KINDS):
            asked = load(target, flags=flags, overrides=overrides, overrides_file=overrides_file)
            target, flags, overrides, overrides_file = asked.config.workload, {}, words_of(asked), None
        from halfstep.run.folder import RunFolder
        from halfstep.run.resume import as_settled

        folder = RunFolder.open(str(resume))
        stored = load(str(folder.config))
        if target and target != (workload := stored.config.workload):
            raise ConfigError(f"--resume {resume} is a {workload} run, not {target}", fix=f"leave {target} out")
        again = load(str(folder.config), flags=flags, overrides=overrides, overrides_file=overrides_file)
        return as_settled(again, stored, folder.settled().decided)
    if not target:
        raise ConfigError(
            "nothing to train", fix="name a workload or a file first: halfstep train unet, halfstep train my.yaml"
        )
    return load(target, flags=flags, overrides=overrides, overrides_file=overrides_file)


def words_of(loaded: Loaded) -> list[str]:
    """Everything that was said, whoever said it, as KEY=VALUE words."""
    from halfstep.config.dump import plain

    found: dict[str, object] = {}
    whole = plain(loaded.config)
    for path in (path for path, origin in loaded.origins.items() if origin.layer != "default" and path != "workload"):
        value: Any = whole
        said: list[str] = []
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:  # below it keys are the user's own
                break
            value = value[name]
            said.append(name)
        found[".".join(said)] = value
    return [f"{path}={json.dumps(value)}" for path, value in found.items()]


def write_schema(workload: str, path: Path) -> None:
    from halfstep.config.dump import json_schema
    from halfstep.workloads import KINDS

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(json_schema(KINDS.of(workload).schema(workload)), indent=2) + "\n")
    except FileExistsError:
        raise ConfigError(f"{path} exists already", fix="choose another name, or remove it first") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote the schema of {workload} to {path}")


def looked_at(loaded: Loaded, schema: Path | None, *, is_shown: bool, as_json: bool) -> None:
    """What is asked for without training: the schema's file, the config on the screen."""
    from halfstep.report.config_view import config_as_json, show_config
    from halfstep.report.evaluation_view import result_console

    if schema:
        write_schema(loaded.config.workload, schema)
    if is_shown and as_json:
        typer.echo(json.dumps(config_as_json(loaded), indent=2))
    elif is_shown:
        show_config(loaded, result_console(160))
