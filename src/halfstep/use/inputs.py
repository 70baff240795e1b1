"""The files that prediction is asked for: named ones, and all below named folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from halfstep.data.files import natural_key
from halfstep.report.prediction_view import Failure
from halfstep.workloads.using import Input


def find_inputs(asked: Iterable[Path], endings: Sequence[str]) -> tuple[list[Input], list[Failure]]:
    """Each file once, in the order asked for; what is not there, or holds nothing, is a failure."""
    found: dict[Path, Input] = {}
    failed: list[Failure] = []
    for place in asked:
        below = _inputs(place, endings)
        if not below:
            why = (
                f"nothing in it that can be read ({' '.join(endings)})"
                if place.is_dir()
                else "there is no such file or folder"
            )
            failed.append(Failure(file=str(place), why=why))
        for item in below:
            found.setdefault(item.path.resolve(), item)
    return list(found.values()), failed


def _inputs(place: Path, endings: Sequence[str]) -> list[Input]:
    if place.is_file():
        return [Input(path=place, name=Path(place.name))]  # whatever its ending: the user named it
    if not place.is_dir():
        return []
    names = (path.relative_to(place) for path in place.rglob("*") if path.suffix.lower() in endings and path.is_file())
    visible = (name for name in names if not any(part.startswith(".") for part in name.parts))
    return [Input(path=place / name, name=name) for name in sorted(visible, key=lambda name: natural_key(str(name)))]
