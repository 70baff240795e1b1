"""A command that a launcher started several times is refused before it writes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.cli.launchers import LAUNCHERS, refuse_many_processes
from halfstep.cli.main import main
from halfstep.errors import ConfigError


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_two_processes_of_any_launcher_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "unet", "--device", "cpu", "--out", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert f"{name}=2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", ["1", "", "many", "0"])
def test_one_process_is_no_matter_who_started_it(count: str) -> None:
    refuse_many_processes(dict.fromkeys(LAUNCHERS, count))


def test_a_job_with_several_tasks_may_start_one_process_without_srun() -> None:
    refuse_many_processes({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
    with pytest.raises(ConfigError, match="srun"):
        refuse_many_processes({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"})
