"""`halfstep bench --explain` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep_train.cli.main import main
from warm_processes import process

TINY = ["bench", "unet", "model.base_channels=4", "model.depth=1", "--batch-size", "2", "--image-size", "16"]
EXPLAIN = [*TINY, "--device", "cpu", "--modes", "eager", "--steps", "10", "--explain"]


pytestmark = pytest.mark.usefixtures("known_rates")


def test_each_row_has_its_longest_kernels_in_json_and_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "kinds.json"
    with pytest.raises(SystemExit) as ended:
        main([*EXPLAIN, "--json", "--save", str(saved), "--precisions", "fp32"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(saved.read_text())
    [row] = printed["rows"]
    profile = row["profile"]
    launches = {kernel["name"]: kernel["launches"] for kernel in profile["kernels"]}
    assert launches["aten::convolution_backward"] == 8  # convolutions of the model
    assert 0 < sum(profile["kinds_ms"].values()) <= row["ms"] * 1.0001  # nested times add up to at most the step
    assert {"convolution", "normalisation", "optimizer and clipping"} <= set(profile["kinds_ms"])


def test_by_default_it_profiles_the_precision_of_a_run_and_shows_no_log_of_the_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A separate process: the profiler reads its level once, and other tests have started it here.
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with process(main, EXPLAIN, output=tmp_path / "said") as explaining:
        explaining.join(timeout=120)
        said = (tmp_path / "said").read_text()
        assert explaining.exitcode == 0, said
    granted = decide("auto", probe("cpu")).granted
    assert f"halfstep eager {granted}: " in said
    assert "longest kernels" in said
    assert f"auto means {granted} here" in said
    assert "profiler_start" not in said
    assert "registerClient" not in said
