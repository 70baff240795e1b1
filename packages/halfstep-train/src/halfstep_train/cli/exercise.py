"""`halfstep exercise`: three short experiments that teach mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from halfstep.errors import ConfigError, DataError
from halfstep_train.report.console import make_rows_table, open_result_console, print_text

if TYPE_CHECKING:
    from halfstep_train.exercises import Story


def command(
    number: Annotated[Literal[1, 2, 3], typer.Argument(metavar="1|2|3", help="Number of the exercise.")],
    data_dir: Annotated[
        str | None,
        typer.Option(help="Exercise 1: a folder with CIFAR-10's binary batches; default: generated images."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Exercise 2: folder for the chart.")] = Path(),
) -> None:
    """Run one of three exercises in mixed precision, each under two minutes on two cores.

    1: a small CNN in fp32, fp16 and bf16: time, memory, accuracy, and why they differ from common promises.
    2: overflow in fp16 on purpose: the loss scale falls, steps are skipped, training recovers; then without scaling.
    3: what stays in fp32 and why: each computation is repeated in half precision and shown to break.

    Exit code 1: a claim of the exercise was not observed.

    Example:

        halfstep exercise 2 --out lessons
    """  # fmt: skip
    if data_dir is not None and number != 1:
        raise ConfigError(f"exercise {number} takes no --data-dir", why="it needs no data", fix="leave --data-dir out")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise DataError(f"there is no folder {data_dir}", fix="check --data-dir, or leave it out for generated images")
    out.mkdir(parents=True, exist_ok=True)
    story = _run_exercise(number, data_dir, out, Console(stderr=True))
    _show(story)
    if not story.holds:
        raise typer.Exit(1)


def _run_exercise(number: int, data_dir: str | None, out: Path, screen: Console) -> Story:
    """Run one exercise; import only its module."""
    if number == 1:
        from halfstep_train.exercises.benchmark_formats import run as benchmark

        if data_dir is None:
            screen.print("no CIFAR-10 folder given: using generated images, gratings of ten classes", style="dim")
        return benchmark(data=data_dir, say=lambda line: screen.print(line, style="dim", markup=False))
    if number == 2:
        from halfstep_train.exercises.overflow import run as overflow

        return overflow(out)
    from halfstep_train.exercises.what_stays import run as what_stays

    return what_stays()


def _show(story: Story) -> None:
    """Print the table, the claims and the comments of an exercise."""
    console = open_result_console()
    console.print(Text(story.title, style="bold"))
    console.print(make_rows_table(story.titles, story.rows))
    for claim in story.claims:
        seen = Text("  seen  ", style="green") if claim.holds else Text("  NOT seen  ", style="bold red")
        print_text(console, seen + Text(claim.text))
    for line in story.comments:
        print_text(console, Text(line, style="dim"))
    if story.picture is not None:
        console.print(Text(f"picture: {story.picture}"), soft_wrap=True)
