"""Find the capsules of a run without importing torch, so that `halfstep replay` refuses a wrong folder at once."""

from __future__ import annotations

from pathlib import Path

from halfstep.errors import CheckpointError, format_count

ABOUT, CONFIG = "capsule.json", "config.yaml"


def find_capsule(path: Path) -> Path:
    """Return the folder of a capsule, which may be named by its capsule.json; raise if there is none."""
    path = path.parent if path.name == ABOUT else path
    if not (path / ABOUT).is_file():
        raise _make_missing_error(path)
    return path


def list_capsules(folder: Path) -> list[Path]:
    """Return the capsules of a folder, oldest step first."""
    return sorted(file.parent for file in folder.glob(f"*/{ABOUT}"))


def _make_missing_error(path: Path) -> CheckpointError:
    inside = list_capsules(path) or list_capsules(path / "capsules")
    if inside:
        return CheckpointError(
            f"{path} contains {format_count(len(inside), 'capsule')}", why="one step is replayed at a time",
            fix=f"halfstep replay {inside[0]}",
        )  # fmt: skip
    if (path / CONFIG).is_file():
        why = "none of its steps was a fault, or guard.capsules was 0"
        return CheckpointError(f"the run {path} has no capsules", why=why, fix="give a run in which steps were skipped")
    return CheckpointError(f"there is no capsule {path}", fix="give a folder RUN/capsules/STEP")
