"""The column `graph` of docs/modes.md, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import ConfigError
from mode_features import FEATURES, assert_close, cells, run_with

pytestmark = pytest.mark.gpu

STEPS, RATE = 4, 1e-3
"""Of the tiny runs."""


@pytest.mark.parametrize(("name", "mode", "word"), list(cells("graph")))
def test_a_feature_in_a_captured_step_does_what_the_page_says(
    name: str, mode: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feature = FEATURES[name]
    if word == "refused":
        with pytest.raises(ConfigError):
            run_with(feature, mode, tmp_path / "run", device="cuda")
        return
    out = run_with(feature, mode, tmp_path / "run", device="cuda")
    told = capsys.readouterr()
    assert feature.shows(out)
    assert "not captured" not in told.out + told.err
    # A bias before BatchNorm has a gradient of rounding alone, and Adam moves it by the learning rate all the same.
    assert_close(out, run_with(feature, "eager", tmp_path / "eager", device="cuda"), apart=STEPS * RATE)
