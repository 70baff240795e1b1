"""Files of a run that hold something else: the run goes on without what it can do without, and names the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import CheckpointError
from halfstep.report.page.read_run import read_run
from whole_runs import newest, resume, run

OTHER = ("[7]", '{"other": []}')


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("files") / "run", {"train.epochs": 1})


@pytest.mark.parametrize("name", ["settled.json", "data.json", "checkpoints/best.json"])
def test_a_run_goes_on_without_what_it_can_do_without(trained: Path, name: str) -> None:
    for epochs, text in enumerate(OTHER, start=newest(trained).state["position"]["epoch"] + 1):
        (trained / name).write_text(text)
        resume(trained, f"train.epochs={epochs}")
        assert newest(trained).state["position"]["epoch"] == epochs


def test_a_plan_that_is_none_is_named_with_its_file(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    for text in OTHER:
        (folder / "plan.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"plan\.json: this is not a stored plan") as refused:
            resume(folder, "train.epochs=2")
        assert "config.yaml" in refused.value.fix


@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_a_page_of_a_run_names_the_file_that_is_no_record(tmp_path: Path, name: str) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    (folder / "report" / name).write_text('"text"')
    with pytest.raises(CheckpointError, match=name) as refused:
        read_run(folder)
    assert "delete it" in refused.value.fix
