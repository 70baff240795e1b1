"""docs/guides hold: every line of ours sets what the page says, parses, runs, or is refused in those words."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import halfstep as hs
from halfstep.errors import ConfigError
from halfstep_train.cli.main import build_app, main, normalise_dashes
from halfstep_train.report.config_view import dump_config
from halfstep_train.workloads import load

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs" / "guides").glob("guide_*.md"))
HEADER = ["the guide", "halfstep", "sets", "what differs"]


@dataclass(frozen=True)
class Row:
    guide: str
    theirs: str
    ours: tuple[str, ...]
    sets: dict[str, object]
    refusal: str


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def code_in(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def setting(code: str) -> tuple[str, object]:
    """`train.epochs=5`: JSON where it is, else text, so that `off` stays a word."""
    key, value = code.split("=", 1)
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def rows_of(page: str) -> list[Row]:
    """Those of the table "Line by line", the last of a page."""
    rows, guide = [], page.removeprefix("# ").split(":")[0]
    for line in page.partition("## Line by line")[2].splitlines():
        if line.startswith("| ") and cells_of(line) != HEADER:
            theirs, ours, sets, _ = cells_of(line)
            settings = dict(setting(code) for code in code_in(sets))
            rows.append(Row(guide, theirs, code_in(ours), settings, sets.partition("refused: ")[2]))
    return rows


ROWS = [row for page in PAGES for row in rows_of(page.read_text())]


def kind_of(row: Row) -> str:
    """What its line of ours is: a command to train, another command, Python, or lines of a config."""
    return next(
        (start for start in ("halfstep train", "halfstep", "torchrun", "hs.") if row.ours[0].startswith(start)),
        "config",
    )


def of_kind(kind: str, *, refused: bool = False) -> list[Row]:
    return [row for row in ROWS if kind_of(row) == kind and bool(row.refusal) == refused]


def named(row: Row) -> str:
    return f"{row.guide}-{' '.join(row.ours)}"


def assert_sets(view: dict[str, dict[str, object]], row: Row) -> None:
    assert row.sets, "a line that sets nothing is not a line of a config"
    assert {key: view[key]["value"] for key in row.sets} == row.sets


def config_file(row: Row, folder: Path) -> str:
    path = folder / "my.yaml"
    path.write_text("\n".join(["workload: unet", *row.ours]) + "\n")
    return str(path)


def test_all_five_guides_are_there_and_every_row_has_a_line_of_ours() -> None:
    assert {row.guide for row in ROWS} == {f"Guide {number}" for number in range(5)}
    assert all(row.ours for row in ROWS)


@pytest.mark.parametrize("row", of_kind("config"), ids=named)
def test_config_lines_set_what_the_page_says(row: Row, tmp_path: Path) -> None:
    assert_sets(dump_config(load(config_file(row, tmp_path)))["settings"], row)


@pytest.mark.parametrize("row", of_kind("config", refused=True), ids=named)
def test_config_lines_that_are_not_there_yet_are_refused(row: Row, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(row.refusal)):
        load(config_file(row, tmp_path))


@pytest.mark.parametrize("row", of_kind("halfstep train"), ids=named)
def test_train_commands_set_what_the_page_says(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*shlex.split(row.ours[0])[1:], "--show-config", "--json"])
    assert not stopped.value.code
    assert_sets(json.loads(capsys.readouterr().out)["settings"], row)


@pytest.mark.parametrize("row", of_kind("torchrun"), ids=named)
def test_several_processes_get_the_settings_that_the_page_says(
    row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(row.ours[0])
    size = words[1].removeprefix("--nproc_per_node=")
    for name, value in {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        main([*words[words.index("halfstep") + 1 :], "--show-config", "--json"])
    assert not stopped.value.code
    assert_sets(json.loads(capsys.readouterr().out)["settings"], row)


@pytest.mark.parametrize("row", of_kind("halfstep"), ids=named)
def test_other_commands_parse(row: Row) -> None:
    words = normalise_dashes(shlex.split(row.ours[0])[1:])
    commands = get_command(build_app()).commands  # type: ignore[attr-defined]
    commands[words[0]].make_context(words[0], words[1:])


@pytest.mark.parametrize("row", of_kind("hs."), ids=named)
def test_python_runs(row: Row) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a CPU may lack the format, and then says what runs instead
        made = eval(row.ours[0], {"hs": hs, "model": model, "optimizer": optimizer})
    if not isinstance(made, hs.Step):
        return
    before = model.weight.clone()
    (window,) = made.windows([torch.ones(1, 2)] * (4 if "accumulate=4" in row.ours[0] else 1))
    assert made(lambda batch: model(batch).square().mean(), window).committed
    assert not torch.equal(before, model.weight)
