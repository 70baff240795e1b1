"""`halfstep pack`: decode an image folder once into one file."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.errors import ConfigError, DataError, format_bytes, format_count, suggest_command
from halfstep_train.cli.options import Json, map_flags, option, read_given

if TYPE_CHECKING:
    from halfstep_train.data.packed import Pack, PackSettings


def command(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|CONFIG.yaml", help="train/<class>/* and val/<class>/*, or <class>/*; or a config that caches."
        ),
    ],
    size: Annotated[int, option("Side of the stored images in pixels.", min=1)] = 256,
    out: Annotated[Path | None, option("Output file; default: inside DIR.", metavar="FILE")] = None,
    workers: Annotated[int, option("Decoding threads; 0: one per core.", min=0)] = 0,
    on_bad_file: Annotated[str, option("Stop at a bad file, or skip it.", metavar="error|skip")] = "error",
    force: Annotated[bool, option("Pack again, even if the file matches the folder.", "--force")] = False,
    verify: Annotated[
        bool, option("Only check every image of the packed file, and whether it matches DIR.", "--verify")
    ] = False,
    as_json: Json = False,
) -> None:
    """Decode every image of a folder once into one file, for fast reading.

    Training with `data.cache=true` reads that file instead of the images. It is checked when opened, and rebuilt when
    the folder changes or training splits it differently. --verify exits with 1 if the file no longer matches the
    folder.

    Example:

        halfstep pack data/imagenet100

        halfstep pack data/photos --size 320 --workers 16 --on-bad-file skip

        halfstep pack data/photos --verify --json

    A config with `data.cache: latents` packs the latents of every image:

        halfstep pack latent.yaml
    """
    if folder.suffix in (".yaml", ".yml") and not folder.is_dir():
        return pack_config(context, folder, as_json=as_json)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {kind}", fix="give the folder of train/<class>/* and val/<class>/*, or of <class>/*")
    from halfstep_train.data.packed import PackSettings, choose_pack_path

    if on_bad_file not in ("error", "skip"):
        raise ConfigError(f"unknown --on-bad-file {on_bad_file!r}", fix="use error or skip")
    settings = PackSettings(size=size, workers=workers, on_bad_file=on_bad_file)  # type: ignore[arg-type]
    path, again = out or choose_pack_path(folder, size), format_command(context, folder)
    if verify:
        summary = verify_pack(folder, path, settings, again)
    else:
        summary = make_pack(folder, path, settings, force=force)
    shown = summary | {"folder": str(folder), "use": format_overrides(settings, out), "again": again}
    show_summary(shown, as_json=as_json)
    if summary.get("stale"):
        raise typer.Exit(1)
    return None


def pack_config(context: typer.Context, path: Path, *, as_json: bool) -> None:
    """Pack what the config's workload can precompute; all settings come from the config."""
    from halfstep_train.report.console import dump_json
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
            why="a config packs latents; image folders with classes are packed without one",
            fix=suggest_command("pack", config.data.dir or "DIR", "--size", "256") + ", if it holds class folders",
        )
    with raise_at_once("while packing"):
        summary = load_part(kind.pack)(config)
    if as_json:
        typer.echo(dump_json(summary))
        return
    typer.echo(f"{summary['file']}: {summary['text']}, {format_bytes(int(summary['bytes']))}")
    typer.echo(f"Use it: {suggest_command('train', path)}")


Summary = dict[str, object]
NOT_AGAIN = {"verify", "as_json", "force", "workers"}
"""Flags that do not change what is packed."""


def make_pack(folder: Path, path: Path, settings: PackSettings, *, force: bool) -> Summary:
    """Pack the folder, or open a file that already matches it."""
    import time

    from halfstep_train.data.binary_sets import find_cifar_folder, find_idx_folder
    from halfstep_train.data.image_folder import FolderLayout, find_images
    from halfstep_train.data.packed import open_or_pack
    from halfstep_train.report.progress import PackingBar
    from halfstep_train.run.interrupts import raise_at_once

    if find_cifar_folder(folder) or find_idx_folder(folder):
        raise DataError(
            f"{folder} holds the files of CIFAR-10 or MNIST, not images",
            why="these are read as a whole, so packing would gain nothing",
            fix=f"train on them directly: {suggest_command('train', 'WORKLOAD', '--data-dir', folder)}",
        )
    found = find_images(folder, FolderLayout())
    start = time.perf_counter()
    with PackingBar(path) as bar, raise_at_once("while packing"):
        result = open_or_pack(found, path, settings, progress=bar, force=force)
    return summarise_pack(result) | {"made": bar.was_shown, "seconds": round(time.perf_counter() - start, 2)}


def format_command(context: typer.Context, folder: Path) -> str:
    """Return the command that makes this file, with every flag that was given."""
    flags = map_flags(context)
    given = (
        (flags[name], value) for name, value in read_given(context).items() if name in flags and name not in NOT_AGAIN
    )
    return suggest_command("pack", folder, *itertools.chain.from_iterable(given))


def verify_pack(folder: Path, path: Path, settings: PackSettings, again: str) -> Summary:
    """Check every image of a packed file, and whether the file matches the folder."""
    from halfstep_train.data.image_folder import FolderLayout, find_images
    from halfstep_train.data.packed import explain_stale, open_pack

    if not path.exists():
        raise DataError(f"there is no packed file {path}", fix=suggest_other_sizes(folder, again))
    try:
        pack = open_pack(path, verify_bytes=path.stat().st_size)
    except DataError as error:
        error.fix = again
        raise
    stale = explain_stale(pack, find_images(folder, FolderLayout()), settings)
    return summarise_pack(pack) | {"verified": not stale, "stale": stale}


def suggest_other_sizes(folder: Path, again: str) -> str:
    """Suggest how to verify a packed file of another size in the folder, and how to make the missing one."""
    from halfstep_train.data.packed import list_packed_sizes

    if not (sizes := list_packed_sizes(folder)):
        return again
    one, *more = (f"--size {size}" for size in sizes)
    others = f" (or {', '.join(more)})" if more else ""
    verify = suggest_command("pack", folder, "--verify", *one.split())
    return f"verify a file of another size: {verify}{others}; or pack this size: {again}"


def summarise_pack(pack: Pack) -> Summary:
    return {
        "file": str(pack.path),
        "bytes": pack.path.stat().st_size,
        "size": pack.size,
        "classes": len(pack.classes),
        "train": len(pack.train),
        "val": len(pack.val),
        "left_out": list(pack.left_out),
    }


def format_overrides(settings: PackSettings, out: Path | None) -> str:
    """Return the overrides with which training uses this file."""
    from halfstep_train.workloads import KINDS

    # The defaults of any workload that reads packed files: only other values need an override.
    usual = next(KINDS[name].get_schema(name) for name in KINDS if KINDS[name].reads_packs).model_fields["data"].default
    chosen: dict[str, object] = {"cache_size": settings.size, "on_bad_file": settings.on_bad_file}
    others = [f"data.{name}={value}" for name, value in chosen.items() if value != getattr(usual, name)]
    return shlex.join([f"data.cache_file={out}" if out else "data.cache=true", *others])


def show_summary(summary: Summary, *, as_json: bool) -> None:
    """Print what the packed file holds and how to use it."""
    if as_json:
        from halfstep_train.report.console import dump_json

        typer.echo(dump_json(summary))
        return
    left_out = summary["left_out"]
    assert isinstance(left_out, list)
    classes = format_count(int(str(summary["classes"])), "class", "classes")
    typer.echo(
        f"{summary['file']}: {summary['train']:,} training and {summary['val']:,} validation images of "
        f"{classes} at {summary['size']} pixels, {format_bytes(int(str(summary['bytes'])))}"
    )
    for why in left_out:
        typer.echo(f"left out: {why}")
    if summary.get("stale"):
        typer.echo(f"STALE: {summary['stale']}. Pack it again: {summary['again']}")
        return
    if summary.get("verified"):
        typer.echo("Every image was checked, and the file matches the folder.")
    elif not summary["made"]:
        typer.echo("The file exists and matches the folder: nothing was packed (--force packs again).")
    typer.echo(f"Use it: {suggest_command('train', 'WORKLOAD', '--data-dir', summary['folder'])} {summary['use']}")
