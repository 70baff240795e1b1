"""A run folder names code in its config: commands that look at a run import only what its user trained with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfstep.errors import ConfigError
from halfstep_train.cli.main import main
from halfstep_train.run.evidence import replay_run
from halfstep_train.run.folder import load_stored
from halfstep_train.workloads.base.import_path import sign_code
from whole_runs import run as train_tiny

EXAMPLE = Path(__file__).parents[4] / "examples" / "own_workload.py"
MODULE = "code_of_runs"
WORKLOAD = f"{MODULE}:KIND"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run of the user's workload in the working folder, whose import leaves the file `ran`; it is gone now."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path(f"{MODULE}.py").write_text(EXAMPLE.read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    settings = ("train.max_steps=4", "device=cpu", "data.num_workers=0", "log.quiet=true")
    halfstep("train", WORKLOAD, "--out", "run", *settings)
    forget(tmp_path)
    yield tmp_path / "run"
    sys.modules.pop(MODULE, None)


def forget(folder: Path) -> None:
    sys.modules.pop(MODULE, None)
    (folder / "ran").unlink(missing_ok=True)


def halfstep(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


LOOKS = [
    ("evaluate", "run"),
    ("evaluate", "run", "--help"),
    ("predict", "run", "run/data"),
    ("verify", "run"),
    ("ledger", "run"),
    ("dry-run", "--target", "fp16", "run"),
]


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_code_of_another_account_is_run_only_with_trust(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "another"))
    assert halfstep(*words) == 2
    told = capsys.readouterr().err
    assert f"names the code {WORKLOAD}, which differs from the code that trained this run" in told
    assert str(folder.parent / f"{MODULE}.py") in told
    assert "--trust" in told
    assert not (folder.parent / "ran").exists()
    assert halfstep(*words, "--trust") in (0, 1)  # findings of so short a run are not the matter
    assert (folder.parent / "ran").exists()


@pytest.mark.parametrize("words", [*LOOKS[:3], LOOKS[4]], ids=" ".join)
def test_a_user_is_not_asked_about_the_code_of_their_runs(folder: Path, words: tuple[str, ...]) -> None:
    assert halfstep(*words) == 0


def test_code_that_was_changed_after_the_training_is_run_only_with_trust(folder: Path) -> None:
    module = folder.parent / f"{MODULE}.py"
    module.write_text(module.read_text() + "\n# changed\n")
    assert halfstep("evaluate", "run") == 2
    assert not (folder.parent / "ran").exists()
    assert halfstep("evaluate", "run", "--trust") == 0
    assert halfstep("train", "--resume", "run", "train.max_steps=6") == 0  # trained with it, the user knows it
    assert halfstep("evaluate", "run") == 0


@pytest.mark.parametrize("words", [("report", "run"), ("top", "run", "--once")], ids=" ".join)
def test_a_page_about_a_run_imports_no_code_of_users(folder: Path, words: tuple[str, ...]) -> None:
    assert halfstep(*words) == 0
    assert not (folder.parent / "ran").exists()


def test_a_replay_runs_code_of_another_account_only_with_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    capsule = train_tiny(tmp_path / "run", {"train.epochs": 1, "model.options.poisoned": [2]}) / "capsules" / "00000002"
    replay_run(capsule)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.raises(ConfigError, match="names the code tiny_workload:build"):
        replay_run(capsule)
    replay_run(capsule, trust=True)


def test_code_named_by_a_reference_is_not_overlooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text("workload: ${globals.name}\nglobals: {name: 'code_never_run:build'}\n")
    with pytest.raises(ConfigError, match="names the code"):
        load_stored(tmp_path / "config.yaml", {}, trust=False)


def test_the_files_around_a_module_are_signed_and_none_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outer_of_runs" / "inner").mkdir(parents=True)
    files = [tmp_path / "outer_of_runs" / name for name in ("__init__.py", "inner/work.py")]
    signatures = []
    for content in ("raise SystemExit", "raise SystemExit  # changed"):
        for file in files:
            file.write_text(content)
            signatures.append(sign_code(["outer_of_runs.inner.work:build"]))
    assert len({str(one) for one in signatures}) == 4
    assert (tmp_path / "cache" / "halfstep" / "code.key").stat().st_mode & 0o077 == 0
