"""`halfstep train`: argv -> config -> run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.run_place import new_folder, resumed_folder, start_on, stopped_after
from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.config.load import Loaded

PRECISION, DATA, RUN, SHOW = "Precision", "Data and training", "Run", "Look without training"
PIPE_WIDTH = 160
NOT_SETTINGS = {
    "words", "out", "resume", "allow_changes", "show_config", "schema", "as_json", "dry", "continue_from", "log_dir",
    "config_overrides_file", "check_validation", "timeout", "gpus",
}  # fmt: skip
"""Parameters that say what to do with a config; every other one is a setting, by the name the config room knows."""


def command(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKLOAD|CONFIG.yaml KEY=VALUE", help="What to train, then settings to change."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="auto, fp32, tf32, bf16, fp16, fp8, bf16-true, or another tool's name.", rich_help_panel=PRECISION
        ),
    ] = None,
    mixed_precision: Annotated[
        bool | None,
        typer.Option(help="Mixed precision on (bf16, or --precision-type) or off (fp32).", rich_help_panel=PRECISION),
    ] = None,
    precision_type: Annotated[
        str | None, typer.Option(help="bf16 or fp16, with --mixed-precision.", rich_help_panel=PRECISION)
    ] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16", help="Same as --precision bf16.", rich_help_panel=PRECISION)
    ] = None,
    fp16: Annotated[
        bool | None, typer.Option("--fp16", help="Same as --precision fp16.", rich_help_panel=PRECISION)
    ] = None,
    use_optimizations: Annotated[
        bool | None, typer.Option("--use-optimizations", help="TF32 instead of strict fp32.", rich_help_panel=PRECISION)
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="Refuse to fall back to another precision.", rich_help_panel=PRECISION),
    ] = None,
    simulate: Annotated[
        bool | None,
        typer.Option("--simulate", help="Numerics of a format this hardware lacks.", rich_help_panel=PRECISION),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data set.", rich_help_panel=DATA)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of one micro-batch.", rich_help_panel=DATA)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training set.", rich_help_panel=DATA)] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps at most; 0: no limit.", rich_help_panel=DATA)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", rich_help_panel=DATA)] = None,
    num_workers: Annotated[int | None, typer.Option(help="Processes that read the data.", rich_help_panel=DATA)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights, order and augmentation.", rich_help_panel=DATA)
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="fast, quality, lowmem, stable, debug; classifiers: quick, nvidia90, guide, deit.",
            rich_help_panel=DATA,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, xpu.", rich_help_panel=RUN)] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="How many GPUs (8), or which (0,1): one process each, by torchrun.", rich_help_panel=RUN),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder.", show_default="runs/WORKLOAD-TIME", rich_help_panel=RUN)
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.", rich_help_panel=RUN)] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="With --resume: accept other settings.", rich_help_panel=RUN)
    ] = False,
    dry: Annotated[
        bool,
        typer.Option("--dry", "-n", help="Train and keep nothing: the run's folder is removed.", rich_help_panel=RUN),
    ] = False,
    continue_from: Annotated[
        Path | None, typer.Option("--continue", help="Same as --resume.", rich_help_panel=RUN)
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder that the run's folder is made in.", rich_help_panel=RUN)
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="Save and stop after DD:HH:MM:SS.", rich_help_panel=RUN)] = None,
    config_overrides_file: Annotated[
        Path | None, typer.Option(help="YAML file whose values replace those of the config.", rich_help_panel=DATA)
    ] = None,
    check_validation: Annotated[
        bool, typer.Option("--check-validation", help="Say how validation counts its samples.", rich_help_panel=DATA)
    ] = False,
    ledger: Annotated[
        bool | None,
        typer.Option("--ledger", help="Observe what steps really compute in, once in each mode.", rich_help_panel=RUN),
    ] = None,
    ledger_every: Annotated[
        int | None, typer.Option(help="--ledger, and again every so many steps.", rich_help_panel=RUN)
    ] = None,
    tensorboard: Annotated[
        bool | None, typer.Option("--tensorboard", help="Write TensorBoard events.", rich_help_panel=RUN)
    ] = None,
    quiet: Annotated[
        bool | None, typer.Option("--quiet", help="Only warnings and the summary.", rich_help_panel=RUN)
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Every setting, its value and its source.", rich_help_panel=SHOW)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --show-config: for scripts.", rich_help_panel=SHOW)
    ] = False,
    schema: Annotated[
        Path | None, typer.Option(help="Write the JSON schema for editors to this file.", rich_help_panel=SHOW)
    ] = None,
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
    flags = {name: value for name, value in context.params.items() if name not in NOT_SETTINGS}
    resume = resumed_folder(resume, continue_from)
    loaded = loaded_from(words or [], flags, resume, config_overrides_file)
    if resume and out:
        raise ConfigError(
            f"--resume {resume} continues in its own folder, --out {out} has no meaning", fix="leave --out"
        )
    if check_validation:
        typer.echo("validation reads every sample once, in order, by its index; data.val_size is compared", err=True)
    if as_json and not show_config:
        raise ConfigError(
            "--json needs --show-config", fix="a run's metrics are JSON anyway: metrics.jsonl in its folder"
        )
    if schema:
        write_schema(loaded.config.workload, schema)
    if show_config:
        show(loaded, as_json=as_json)
    if not (schema or show_config):
        if gpus is not None:
            start_on(gpus, device or loaded.config.device, os.environ)
        from halfstep.run.train import train
        from halfstep.run.world import launch_of

        with (
            new_folder(out, log_dir, dry=dry and not resume, name=loaded.config.workload) as place,
            stopped_after(timeout),
        ):
            train(loaded, out=place, resume=resume, allow_changes=allow_changes, launch=launch_of(os.environ))


def loaded_from(
    words: list[str], flags: dict[str, object], resume: Path | None, overrides_file: Path | None = None
) -> Loaded:
    """The first word names the workload or the file; with --resume the run's own config is the file."""
    from halfstep.workloads import load

    target, overrides = (words[0], words[1:]) if words and "=" not in words[0] else ("", words)
    if resume:
        from halfstep.run.folder import RunFolder

        stored = load(str(RunFolder.open(str(resume)).config), flags=flags, overrides=overrides)
        if target not in ("", stored.config.workload):
            raise ConfigError(
                f"--resume {resume} is a {stored.config.workload} run, not {target}", fix=f"leave {target} out"
            )
        return stored
    if not target:
        raise ConfigError(
            "nothing to train", fix="name a workload or a file first: halfstep train unet, halfstep train my.yaml"
        )
    return load(target, flags=flags, overrides=overrides, overrides_file=overrides_file)


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


def show(loaded: Loaded, *, as_json: bool) -> None:
    from rich.console import Console

    from halfstep.report.config_view import config_as_json, show_config

    if as_json:
        typer.echo(json.dumps(config_as_json(loaded), indent=2))
    else:
        console = Console()
        # A file or a pipe has no width; rich would squeeze the table into 80 columns.
        show_config(loaded, console if console.is_terminal else Console(width=PIPE_WIDTH))
