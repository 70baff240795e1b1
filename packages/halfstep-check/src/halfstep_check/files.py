"""Finding and reading the files to check: bounded, never executed, and never a traceback for what a user hands in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from halfstep_check.shared.config_text import decode_text
from halfstep_check.shared.errors import ConfigError

MAX_BYTES = 600_000
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist", "build", "venv", "env", "wandb", "outputs"}
FOREIGN_FOLDERS = {
    *("vendor", "vendors", "vendored", "third_party", "thirdparty", "3rdparty", "external", "externals", "extern"),
    *("submodules", "tests", "test"),
}
"""Other people's code, and code that is wrong on purpose."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
SHELL_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
PIN_FILES = ("requirements.txt", "requirement.txt", "pyproject.toml", "setup.py", "environment.yml", "poetry.lock")
MAX_PROJECT_CONFIG_BYTES = 50_000
"""A project's own configs are small; larger JSON and YAML files there are data."""


def read_text(path: Path) -> str:
    """Return the text of a file, or an error that says what is wrong with it."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{path}: {path.stat().st_size:,} bytes are too many for a config or script",
                fix="give the config or script itself",
            )
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", fix="check the path") from error
    if b"\0" in data:
        raise ConfigError(f"{path} is a binary file", fix="give YAML, JSON, TOML, Python or shell files")
    return decode_text(data, path)


def read_text_or_none(path: Path) -> str | None:
    try:
        return read_text(path)
    except ConfigError:
        return None


def list_scripts(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder in order, without caches, environments and hidden folders."""
    yield from (path for path in walk_files(folder) if path.suffix == ".py")


def list_project_files(folder: Path) -> Iterator[Path]:
    """Yield the scripts of a project, and files small enough to be configs."""
    for path in walk_files(folder):
        small = path.suffix in (*CONFIG_SUFFIXES, *SHELL_SUFFIXES) and get_size(path) <= MAX_PROJECT_CONFIG_BYTES
        if path.suffix == ".py" or small or path.name in PIN_FILES:
            yield path


def walk_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        passed_over = SKIPPED_FOLDERS | FOREIGN_FOLDERS
        visible = (name for name in folders if name not in passed_over and not name.startswith("."))
        folders[:] = sorted(name for name in visible if not _is_past_run(Path(root) / name))
        yield from (Path(root) / name for name in sorted(names))


def _is_past_run(folder: Path) -> bool:
    """Match folders of past runs: their configs are not those of the next run."""
    return all((folder / name).is_file() for name in ("config.yaml", "plan.json", "metrics.jsonl"))


def get_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
