"""A file of `--save` as `--baseline` reads it: what is compared, checked before anything is timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from halfstep.bench.row import Row
from halfstep.errors import CheckpointError

VERSION: Literal[1] = 1
"""Of the file's layout."""
NOT_OURS = "it is JSON of another kind, or of another version's bench"
SHOWN = 40
"""Characters of a value that is wrong."""

Milliseconds = Annotated[float, Field(ge=1e-6, le=1e9)]
"""Of a step: none takes less than a nanosecond, and nobody waits eleven days."""


class StoredRow(BaseModel):
    """What a comparison reads of a row."""

    model_config = ConfigDict(frozen=True)
    name: str
    variant: str
    precision: str
    reason: str
    simulated: bool
    window_ms: tuple[Milliseconds, ...]
    peak_bytes: Annotated[int, Field(ge=0)] | None

    @model_validator(mode="after")
    def _is_measured_or_says_why_not(self) -> StoredRow:
        if not self.window_ms and not self.reason:
            raise ValueError("window_ms is empty and no reason says why")
        return self

    def row(self) -> Row:
        """Without what is not compared."""
        return Row(**dict(self))


class StoredProblem(BaseModel):
    """What was trained; older files do not tell all settings."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, JsonValue]
    settings: dict[str, JsonValue] = {}


class Stored(BaseModel):
    """An earlier bench."""

    model_config = ConfigDict(frozen=True)
    device: str
    versions: dict[str, str | None]
    problem: StoredProblem
    rows: tuple[StoredRow, ...]
    repeated: StoredRow | None = None


def read(path: Path) -> Stored:
    """What `--save` wrote; CheckpointError tells what is wrong with any other file."""
    try:
        text = path.read_text()
        found = json.loads(text)
    except OSError as error:
        raise _no_record(path, f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _no_record(path, "it is not text") from error
    except RecursionError as error:
        raise _no_record(path, NOT_OURS) from error
    except ValueError as error:
        raise _no_record(path, f"it is not JSON: {error}" if text.strip() else "it is empty") from error
    if not isinstance(found, dict) or found.get("bench") != VERSION:
        is_explained = isinstance(found, dict) and "explained" in found
        raise _no_record(path, "it is one of --explain, without times to compare" if is_explained else NOT_OURS)
    try:
        # From the text, where a list may be a tuple; of Python's own types strictness takes none for another.
        return Stored.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise _no_record(path, _complaint(error.errors()[0])) from error


def _complaint(detail: ErrorDetails) -> str:
    """`rows.0.window_ms.2 is "abc": input should be a valid number`."""
    where, said = ".".join(map(str, detail["loc"])), detail["msg"]
    if detail["type"] == "missing":
        return f"{where} is missing"
    if detail["type"] == "value_error":
        return f"{where}: {detail['ctx']['error']}"
    return f"{where} is {_shown(detail['input'])}: {said[:1].lower()}{said[1:]}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _no_record(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"--baseline {path} is not a file of halfstep bench --save",
        why=why,
        fix="save one first: the same command with --save NEW.json in place of --baseline",
    )
