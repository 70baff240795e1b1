"""`halfstep export`: write trained weights as a file that other programs load."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from halfstep.errors import ConfigError, suggest_install
from halfstep_train.cli.options import Checkpoint, Json, RunFolder, Trust, option, refuse_bad_run

FORMATS = {"safetensors": ("fp32", "fp16", "bf16"), "onnx": ("fp32", "fp16", "int8")}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def command(
    run: RunFolder,
    to: Annotated[Literal["safetensors", "onnx"], option("Kind of file.")],
    format: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"], option("Format of the weights; bf16 for safetensors, int8 for onnx.")
    ] = "fp32",
    data: Annotated[
        Path | None,
        option("Where the run's data are now, or other data to score on.", "--data", "--data-dir", metavar="DIR"),
    ] = None,
    out: Annotated[Path | None, option("New folder.", metavar="DIR", show_default="RUN/export/TO-FORMAT")] = None,
    checkpoint: Checkpoint = "best",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write trained weights as a file that other programs load, and score that file on the run's validation data.

    For U-Net, ResNet, ViT and GPT-2. safetensors: the names are torchvision's for ResNet and ViT, and transformers' for
    GPT-2. onnx: one model with a dynamic batch; int8 is calibrated on training samples. Everything is computed on this
    machine's CPU.

    Example:

        halfstep export runs/resnet50 --to onnx --format int8

        halfstep export runs/gpt2 --to safetensors --format bf16 --out gpt2_bf16
    """
    refuse_wrong_formats(to, format)
    refuse_bad_run(run, out, data)
    if out is not None and not out.name:
        raise ConfigError(f"--out {out} is the current folder", why="the export creates one", fix="--out ./NAME")
    refuse_wrong_family(run, trust=trust)
    from rich.console import Console

    from halfstep_train.report.console import open_result_console
    from halfstep_train.report.run_report import RunReport
    from halfstep_train.use.export import export, show_export

    report = RunReport(run, console=Console(stderr=True))
    found = export(run, to=to, format=format, report=report, data=data, out=out, checkpoint=checkpoint, trust=trust)
    if as_json:
        typer.echo(found.to_json())
    else:
        show_export(found, open_result_console())


def refuse_wrong_formats(to: str, format: str) -> None:
    """Refuse a format that this kind of file does not have, and missing packages, before torch is imported."""
    if format not in FORMATS[to]:
        why = "most kernels of onnxruntime do not support bf16" if format == "bf16" else ""
        raise ConfigError(f"--to {to} has no format {format}", why=why, fix=f"use --format {', '.join(FORMATS[to])}")
    missing = [name for name in ONNX_PACKAGES if to == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--to onnx needs {', '.join(missing)}, which is not installed", fix=suggest_install(*ONNX_PACKAGES)
        )


def refuse_wrong_family(run: Path, *, trust: bool) -> None:
    """Refuse a run whose family has no export, and name what it has instead."""
    from halfstep_train.cli.main import find_workload
    from halfstep_train.workloads import KINDS

    workload = find_workload([str(run)], trust=trust)
    kind = KINDS.of(workload)
    if kind.export_command:
        return
    own = f"use {run / 'model'}, which a run writes in the format of other programs when it ends"
    other = f"`halfstep predict {run}` uses its weights; in your code, torch.onnx.export(model, ...)"
    raise ConfigError(
        f"{workload} cannot be exported",
        why="this works for U-Net, ResNet, ViT and GPT-2, which take one tensor",
        fix=other if kind.export is None else own,
    )
