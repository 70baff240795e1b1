"""The `halfstep` command: collects the commands, normalises flags, turns our errors into messages and exit codes."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import typer

from halfstep.cli import check, detect, evaluate, formats, guide, pack, plan, predict, train
from halfstep.errors import HalfstepError, Interrupted

app = typer.Typer(
    name="halfstep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("check")(check.command)
app.command("detect")(detect.command)
app.command("evaluate")(evaluate.command)
app.command("formats", context_settings={"ignore_unknown_options": True})(formats.command)  # `formats -3.5`
app.command("guide")(guide.command)
app.command("pack")(pack.command)
app.command("plan")(plan.command)
app.command("predict")(predict.command)
app.command("train")(train.command)


def show_version(asked: bool) -> None:
    if asked:
        from halfstep import __version__

        typer.echo(f"halfstep {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Show the version."),
) -> None:
    """Mixed-precision training for PyTorch: fast, safe and provable."""


def with_dashes(argv: Sequence[str]) -> list[str]:
    """`--data_dir X` and `--data-dir X` are the same flag; values and `key=value` overrides stay as they are."""
    stop = list(argv).index("--") if "--" in argv else len(argv)
    dashed = [re.sub(r"^--[^=]+", lambda flag: flag.group().replace("_", "-"), word) for word in argv[:stop]]
    return dashed + list(argv[stop:])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit 0 only when what it says holds, 1 for findings, 2 for the user's own mistake."""
    try:
        app(with_dashes(sys.argv[1:] if argv is None else argv))
    except HalfstepError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # `halfstep formats | head`: the reader has seen enough.
        sys.stderr.close()
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)


def show_error(error: HalfstepError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    mark = ("stopped: ", "bold yellow") if isinstance(error, Interrupted) else ("error: ", "bold red")
    console.print(Text.assemble(mark, error.what), soft_wrap=True)
    for label, text in (("why", error.why), ("fix", error.fix)):
        if text:
            console.print(Text(f"  {label}: ", style="bold") + Text(text), soft_wrap=True)
