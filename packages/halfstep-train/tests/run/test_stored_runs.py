"""Stored runs continue with the bits that were recorded when they were stored: training has not changed since."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfstep_train.cli.main import main
from warm_processes import process

STORED = Path(__file__).parent / "stored_runs"
ROUNDING = 1e-4
"""On another CPU or torch sums are ordered otherwise; four steps of training spread that."""


def here() -> dict[str, str]:
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "machine": platform.machine(), "capability": capability}


@pytest.mark.parametrize("workload", ["unet", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_a_stored_run_continues_with_the_recorded_bits(workload: str, tmp_path: Path) -> None:
    """U-Net: simulated fp16 with scaling, accumulation, average, snapshots.
    ResNet: simulated bf16, class folders."""
    shutil.copytree(STORED / workload, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("DATA_DIR", str(tmp_path / "data")))
    # A process of its own: what ran before in this one may have switched oneDNN off, and sums would round otherwise.
    words, said = ["train", "--resume", str(tmp_path / "run"), "train.max_steps=9"], tmp_path / "said"
    with process(main, words, output=said) as resumed:
        resumed.join(timeout=120)
        assert resumed.exitcode == 0, said.read_text()
    is_same_machine = json.loads((STORED / workload / "after" / "where.json").read_text()) == here()
    for name in ("model", "ema"):
        expected = load_file(STORED / workload / "after" / f"{name}.safetensors")
        found = load_file(tmp_path / "run" / "checkpoints" / "step-00000009" / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if is_same_machine:
                assert torch.equal(found[key], value), key
            else:
                torch.testing.assert_close(found[key], value, rtol=ROUNDING, atol=ROUNDING)
