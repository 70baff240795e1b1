"""Whole runs on a real GPU: deterministic resume, a real out-of-memory, no waits in the loop."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import Interrupted, MemoryLimitError
from halfstep.state_files import pack
from halfstep_train.report.metrics_file import read
from halfstep_train.run.train import train
from halfstep_train.workloads import from_dict, load
from halfstep_train.workloads.segmentation.demo import write_demo
from tiny_training import assert_same_bits
from whole_runs import newest

pytestmark = pytest.mark.gpu


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest(folder)
    _, tensors = pack(checkpoint.state)
    named = {f"model.{k}": v for k, v in checkpoint.model.items()} | {f"ema.{k}": v for k, v in checkpoint.ema.items()}
    return named | tensors


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deterministic_cuda_resumes_bit_for_bit(tmp_path: Path, precision: str) -> None:
    flag = tmp_path / "signal"
    values = {
        "precision.default": precision, "data.dir": "anywhere", "data.num_workers": 2, "train.batch_size": 3,
        "train.accumulate": 3, "train.epochs": 5, "train.checkpoint_every": 2, "train.deterministic": True,
        "ema.enabled": True, "log.quiet": True, "device": "cuda", "model.options.poisoned": [2, 3, 9],
        "model.options.signal_file": str(flag), "model.options.signal_step": 6,
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    whole = train(load("tiny_workload:build", overrides=overrides), out=tmp_path / "whole")
    flag.touch()
    with pytest.raises(Interrupted):
        train(load("tiny_workload:build", overrides=overrides), out=tmp_path / "parts")
    parts = train(load(str(tmp_path / "parts" / "config.yaml")), resume=tmp_path / "parts")
    assert_same_bits(tensors_of(whole), tensors_of(parts))


@pytest.fixture
def little_memory():
    """A hard limit on what torch may take: an allocation beyond it is a real OutOfMemoryError."""
    gc.collect()  # earlier tests' graphs and models
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.2e9) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def unet_run(folder: Path, **values: Any) -> Path:
    write_demo(folder / "data", num_images=20, side=256)
    settings = {
        "data.dir": str(folder / "data"), "data.image_size": 256, "data.num_workers": 0, "train.batch_size": 16,
        "train.epochs": 2, "precision": "bf16", "log.quiet": True, "device": "cuda", "model.base_channels": 32,
    }  # fmt: skip
    return train(from_dict("unet", {**settings, **values}), out=folder / "run")


def test_out_of_memory_is_explained(tmp_path: Path, little_memory: None) -> None:
    with pytest.raises(MemoryLimitError, match="batch size 16") as error:
        unet_run(tmp_path)
    assert "train.batch_size=8 train.accumulate=2" in error.value.fix


def test_auto_batch_halves_the_micro_batch_and_goes_on(
    tmp_path: Path, little_memory: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unet_run(tmp_path, **{"train.auto_batch": True})
    said = capsys.readouterr().err
    assert "continuing with micro-batches of" in said
    assert "BatchNorm now sees smaller batches" in said
    assert len([r for r in read(folder / "metrics.jsonl") if r["kind"] == "val"]) == 2
    checkpoint = newest(folder)
    assert checkpoint.state["pieces"] > 1


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_a_unet_trains_in_every_precision(tmp_path: Path, precision: str) -> None:
    folder = unet_run(tmp_path, **{"precision": precision, "train.batch_size": 4, "train.epochs": 6})
    last = [r for r in read(folder / "metrics.jsonl") if r["kind"] == "val"][-1]
    assert last["loss"] < 1.2
    assert json.loads((folder / "plan.json").read_text())["granted"] == precision
