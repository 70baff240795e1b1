"""The column `graph` of docs/modes.md, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import ConfigError
from mode_features import FEATURES, assert_close, cells, run_with

pytestmark = pytest.mark.gpu

ON_A_GPU = {"device": "cuda", "optimizer.name": "sgd"}
"""Adam would move a bias before BatchNorm, whose gradient is rounding alone, by the whole learning rate."""


@pytest.mark.parametrize(("name", "mode", "word"), list(cells("graph")))
def test_a_feature_in_a_captured_step_does_what_the_page_says(
    name: str, mode: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feature = FEATURES[name]
    if word == "refused":
        with pytest.raises(ConfigError):
            run_with(feature, mode, tmp_path / "run", **ON_A_GPU)
        return
    out = run_with(feature, mode, tmp_path / "run", **ON_A_GPU)
    told = capsys.readouterr()
    assert feature.shows(out)
    assert "not captured" not in told.out + told.err
    assert_close(out, run_with(feature, "eager", tmp_path / "eager", **ON_A_GPU), apart=1e-3)
