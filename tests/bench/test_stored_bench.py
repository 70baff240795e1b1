"""Files of `--save`, read back: what is compared comes back, and anything else is refused with what is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.bench.baseline import compare, earlier_rows
from halfstep.bench.record import command_line, read, save
from halfstep.bench.row import Row
from halfstep.errors import CheckpointError, HalfstepError

MEASURED = Row(
    name="halfstep", variant="eager", precision="fp32", window_ms=(9.8, 10.0, 10.1, 10.2, 11.0), peak_bytes=6_000_000
)
LOST = Row(name="halfstep", variant="graph", precision="fp8", reason="no")
RECORD: dict[str, Any] = {
    "bench": 1,
    "device": "NVIDIA H200",
    "versions": {"halfstep": "0.1.0", "torch": "2.11.0", "cuda": "13.0", "driver": None},
    "problem": {"workload": "unet", "batch_size": 8, "settings": {"train.seed": 0, "optimizer.betas": [0.9, 0.99]}},
    "rows": [MEASURED.to_dict(), LOST.to_dict()],
    "repeated": MEASURED.to_dict(),
}
NOT_OURS = "it is JSON of another kind, or of another version's bench"


def with_row(**values: object) -> bytes:
    return json.dumps(RECORD | {"rows": [RECORD["rows"][0] | values]}).encode()


def without(name: str) -> bytes:
    row = {key: value for key, value in RECORD["rows"][0].items() if key != name}
    return json.dumps(RECORD | {"rows": [row]}).encode()


def test_what_is_compared_of_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    save(RECORD, tmp_path / "bench.json")
    found = read(tmp_path / "bench.json")
    assert [row.row() for row in found.rows] == [MEASURED, LOST]
    assert found.repeated is not None
    assert found.repeated.row() == MEASURED


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"hello", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\x89PNG", "it is not text"),
        (b"[]", NOT_OURS),
        (b"{}", NOT_OURS),
        (b"[" * 100_000, NOT_OURS),
        (b'{"explained": []}', "it is one of --explain, without times to compare"),
        (b'{"bench": 1}', "device is missing"),
        (with_row(window_ms="abc"), 'rows.0.window_ms is "abc": input should be a valid array'),
        (with_row(window_ms=[1.0, "2.0"]), 'rows.0.window_ms.1 is "2.0": input should be a valid number'),
        (with_row(window_ms=[float("nan")]), "rows.0.window_ms.0 is NaN: "),
        (with_row(window_ms=[-1.0]), "rows.0.window_ms.0 is -1.0: input should be greater than or equal to 0.000001"),
        (with_row(window_ms=[]), "rows.0: window_ms is empty and no reason says why"),
        (with_row(simulated="no"), 'rows.0.simulated is "no": input should be a valid boolean'),
        (without("window_ms"), "rows.0.window_ms is missing"),
        (without("peak_bytes"), "rows.0.peak_bytes is missing"),
    ],
)
def test_a_file_that_is_no_bench_is_refused_with_what_is_wrong(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a file of halfstep bench --save") as refused:
        read(path)
    assert refused.value.why.startswith(why)


def places(value: object, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to all values inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in inside for place in ((*here, key), *places(child, (*here, key)))]


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=100, deadline=None)
@given(place=st.sampled_from(places(RECORD)), value=ANY_JSON, removes=st.booleans())
def test_any_change_of_a_file_is_compared_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Any, ...], value: object, removes: bool
) -> None:
    changed = copy.deepcopy(RECORD)
    *outer, last = place
    holder: Any = changed
    for key in outer:
        holder = holder[key]
    if removes:
        del holder[last]
    else:
        holder[last] = value
    path = tmp_path_factory.getbasetemp() / "changed.json"
    path.write_text(json.dumps(changed))
    try:
        before = earlier_rows(path, RECORD)
    except HalfstepError:
        return
    found = compare(before, [MEASURED, LOST], MEASURED)
    assert found.drift >= 1.0
    json.dumps(found.regressions + found.within_drift, allow_nan=False)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["bench", "unet", "--save", "/home/ann/results/a b.json"], "halfstep bench unet --save 'a b.json'"),
        (["bench", "unet", "--baseline=../old/b.json", "train.memory=low"],
         "halfstep bench unet --baseline=b.json train.memory=low"),
        (["bench", "unet", "--picture", "p.png"], "halfstep bench unet --picture p.png"),
        (["bench", "unet", "data.dir=/data/x"], "halfstep bench unet data.dir=/data/x"),
    ],
    ids=["a path", "a path behind =", "a name", "a setting that the result depends on"],
)  # fmt: skip
def test_a_stored_command_names_its_files_and_not_where_they_lay(words: list[str], shown: str) -> None:
    assert command_line(words) == shown
