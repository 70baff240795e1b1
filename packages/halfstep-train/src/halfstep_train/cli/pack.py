"""`halfstep pack`: decode an image folder once into one file."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from halfstep.errors import ConfigError, DataError, format_bytes, format_count, suggest_command
from halfstep_train.cli.options import Json, map_flags, option, read_given
from halfstep_train.report.console import dump_json

OnBadFile = Literal["error", "skip"]


def command(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|CONFIG.yaml",
            help="A folder of train/<class>/* and val/<class>/*, or of <class>/*; or a config with data.cache.",
        ),
    ],
    size: Annotated[int, option("Side of the stored images in pixels.", min=1)] = 256,
    out: Annotated[Path | None, option("Output file; default: inside DIR.", metavar="FILE")] = None,
    on_bad_file: Annotated[OnBadFile, option("Stop at a bad file, or skip it.")] = "error",
    as_json: Json = False,
) -> None:
    """Decode every image of a folder once into one file, for fast reading.

    Training with `data.cache=true` reads that file instead of the images. It is checked when opened, and rebuilt when
    the folder changes or training splits it differently.

    Example:

        halfstep pack data/imagenet100

        halfstep pack data/photos --size 320 --on-bad-file skip

    A config with `data.cache: latents` packs the latents of every image:

        halfstep pack latent.yaml
    """
    if folder.suffix in (".yaml", ".yml") and not folder.is_dir():
        return pack_config(context, folder, as_json=as_json)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {kind}", fix="give the folder of train/<class>/* and val/<class>/*, or of <class>/*")
    summary = pack_folder(folder, out, size, on_bad_file)
    if as_json:
        return typer.echo(dump_json(summary))
    classes = format_count(summary["classes"], "class", "classes")
    typer.echo(
        f"{summary['file']}: {summary['train']:,} training and {summary['val']:,} validation images of {classes} at "
        f"{size} pixels, {format_bytes(summary['bytes'])}"
    )
    for why in summary["left_out"]:
        typer.echo(f"left out: {why}")
    if not summary["made"]:
        typer.echo("The file exists and matches the folder: nothing was packed.")
    return typer.echo(f"Use it: {suggest_command('train', 'WORKLOAD', '--data-dir', folder)} {summary['use']}")


def pack_config(context: typer.Context, path: Path, *, as_json: bool) -> None:
    """Pack what the config's workload can precompute; all settings come from the config."""
    from halfstep_train.run.interrupts import raise_at_once
    from halfstep_train.workloads import KINDS, load
    from halfstep_train.workloads.base.kind import load_part

    flags = map_flags(context)
    # A flag would silently lose against the config, so refuse it.
    for name in read_given(context).keys() & flags.keys() - {"as_json"}:
        raise ConfigError(f"{flags[name]} cannot be combined with a config", fix=f"set it in {path}")
    config = load(str(path)).config
    kind = KINDS.of(config.workload)
    if kind.pack is None:
        raise ConfigError(
            f"{config.workload} cannot be packed from a config",
            why="a config packs latents; class folders are packed without a config",
            fix=suggest_command("pack", config.data.dir or "DIR", "--size", "256") + ", if it contains class folders",
        )
    with raise_at_once("while packing"):
        summary = load_part(kind.pack)(config)
    if as_json:
        typer.echo(dump_json(summary))
        return
    typer.echo(f"{summary['file']}: {summary['text']}, {format_bytes(int(summary['bytes']))}")
    typer.echo(f"Use it: {suggest_command('train', path)}")


def pack_folder(folder: Path, out: Path | None, size: int, on_bad_file: OnBadFile) -> dict[str, Any]:
    """Pack the folder, or open a file that already matches it; return what the file holds."""
    from halfstep_train.data.image_folder import FolderLayout, find_images
    from halfstep_train.data.image_samples import PackSettings, choose_pack_path, open_or_pack
    from halfstep_train.report.run_report import PackingBar
    from halfstep_train.run.interrupts import raise_at_once

    path = out or choose_pack_path(folder, size)
    settings = PackSettings(size=size, on_bad_file=on_bad_file)
    found = find_images(folder, FolderLayout())
    start = time.perf_counter()
    with PackingBar(path) as bar, raise_at_once("while packing"):
        pack = open_or_pack(found, path, settings, progress=bar)
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "size": size,
        "classes": len(pack.classes),
        "train": len(pack.train),
        "val": len(pack.val),
        "left_out": list(pack.left_out),
        "made": bar.was_shown,
        "seconds": round(time.perf_counter() - start, 2),
        "use": format_overrides(size, on_bad_file, out),
    }


def format_overrides(size: int, on_bad_file: str, out: Path | None) -> str:
    """Return the overrides with which training uses this file."""
    from halfstep_train.workloads import KINDS

    # The defaults of any workload that reads packed files: only other values need an override.
    usual = next(KINDS[name].get_schema(name) for name in KINDS if KINDS[name].reads_packs).model_fields["data"].default
    chosen: dict[str, object] = {"cache_size": size, "on_bad_file": on_bad_file}
    others = [f"data.{name}={value}" for name, value in chosen.items() if value != getattr(usual, name)]
    return shlex.join([f"data.cache_file={out}" if out else "data.cache=true", *others])
