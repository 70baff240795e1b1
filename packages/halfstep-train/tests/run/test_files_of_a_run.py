"""Files of a run that hold something else: the run goes on without what it can do without, and names the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import CheckpointError
from halfstep_train.cli.report import write_report
from halfstep_train.report.page.read_run import read_run
from whole_runs import newest, resume, run

OTHER = ("[7]", '{"other": []}')
BOMB = "[" * 100_000 + "]" * 100_000
"""Nested too deeply for a recursive reader."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("files") / "run", {"train.epochs": 1})


def test_a_run_goes_on_without_the_record_of_its_data(trained: Path) -> None:
    for epochs, text in enumerate((*OTHER, BOMB), start=newest(trained).state["position"]["epoch"] + 1):
        (trained / "data.json").write_text(text)
        resume(trained, f"train.epochs={epochs}")
        assert newest(trained).state["position"]["epoch"] == epochs


def test_a_run_does_not_go_on_without_knowing_its_best_checkpoint(trained: Path) -> None:
    """It would drop that one as an old one."""
    file = trained / "checkpoints" / "best.json"
    written = file.read_text()
    for text in (*OTHER, BOMB):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"best.json cannot be read"):
            resume(trained, "train.epochs=9")
    file.write_text(written)


@pytest.mark.parametrize("name", ["plan.json", "settled.json"])
def test_a_plan_and_settings_that_are_not_as_written_are_named_with_their_file(trained: Path, name: str) -> None:
    written = (trained / name).read_text()
    for text in (*OTHER, BOMB, written[:-5], written.replace("fp32", "bf16", 1)):
        (trained / name).write_text(text)
        with pytest.raises(CheckpointError, match=rf"cannot use .*{name}") as refused:
            resume(trained, "train.epochs=9")
        assert "config.yaml" in refused.value.fix
    (trained / name).write_text(written)


@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_a_page_of_a_run_names_the_file_that_is_no_record(tmp_path: Path, name: str) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    (folder / "report" / name).write_text('"text"')
    with pytest.raises(CheckpointError, match=name) as refused:
        read_run(folder)
    assert "remove it" in refused.value.fix


def test_an_edit_of_the_config_that_changes_a_step_is_refused_unless_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1, "optimizer.lr": 0.001})
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.002").replace("epochs: 1", "epochs: 2"))
    with pytest.raises(CheckpointError, match=r"config\.yaml was edited: optimizer\.lr: 0\.001 -> 0\.002") as refused:
        resume(folder)
    assert "put them back, or accept them with --allow-changes" in refused.value.fix
    resume(folder, "log.quiet=false", allow_changes=True)
    said = capsys.readouterr().out
    assert "optimizer.lr: 0.001 -> 0.002" in said
    assert "train.epochs: 1 -> 2" in said
    resume(folder, "train.epochs=3")  # accepted once, the edit is the run's own setting
    assert newest(folder).state["position"]["epoch"] == 3


def test_a_config_that_names_another_workload_is_refused(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("tiny_workload:build", "drawing_workload:build_sampling"))
    with pytest.raises(CheckpointError, match="was edited: workload: tiny_workload:build -> drawing"):
        resume(folder, "train.epochs=2", allow_changes=True)


def test_a_record_that_is_nested_too_deeply_is_named_with_its_line(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{BOMB}\n{{}}\n")
    with pytest.raises(CheckpointError, match=r"line \d+ of .*metrics.jsonl is not a record"):
        read_run(folder)


def test_a_link_in_a_run_folder_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    names = (
        "config.yaml",
        "plan.json",
        "settled.json",
        "metrics.jsonl",
        "report/summary.json",
        "checkpoints/best.json",
    )
    named = {name: tmp_path / name.replace("/", "-") for name in names}
    for name, file in named.items():
        (folder / name).rename(file)
        (folder / name).symlink_to(file)
    (tmp_path / "thesis.txt").write_text("years of work")
    (folder / ".lock").unlink(missing_ok=True)
    for name in (".lock", "report/report.html"):
        (folder / name).symlink_to(tmp_path / "thesis.txt")
    before = {name: file.read_bytes() for name, file in named.items()}
    resume(folder, "train.epochs=2", "train.early_stopping_patience=9")
    write_report([folder], None)
    assert {name: file.read_bytes() for name, file in named.items()} == before
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert not [name for name in (*names, "report/report.html") if (folder / name).is_symlink()]
