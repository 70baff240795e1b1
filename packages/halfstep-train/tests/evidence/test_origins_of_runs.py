"""Lines of a workload and its models count as the user's, those of the rest of the application do not."""

from __future__ import annotations

from pathlib import Path

import pytest

import halfstep_train
from halfstep.evidence.ranges import FOREIGN
from halfstep.our_code import OURS

ROOT = Path(halfstep_train.__file__).parent


@pytest.mark.parametrize(
    ("room", "is_ours"),
    [("run", True), ("kernels", True), ("tune", True), ("data", True), ("workloads", False), ("models", False)],
)
def test_files_of_every_room_but_models_and_workloads_are_halfstep_s(room: str, is_ours: bool) -> None:
    assert (ROOT / room).is_dir()
    file = str(ROOT / room / "any.py")
    assert file.startswith(FOREIGN) is is_ours
    assert file.startswith(OURS)
