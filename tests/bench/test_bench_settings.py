"""What is timed by default, and that the user's words win."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.bench.settings import bench_config, default_precisions, in_precision, run_by
from halfstep.config.classification import ResNetConfig
from halfstep.config.unet import UNetConfig
from halfstep.errors import ConfigError
from halfstep.hardware.gpus import known_gpu


def test_every_model_is_timed_with_the_same_optimizer_at_the_same_rate() -> None:
    for workload in ("unet", "resnet50", "vit_b_16"):
        config = bench_config(workload, [], {}, small=False)
        assert (config.optimizer.name, config.optimizer.lr, config.optimizer.lr_per) == ("adamw", 1e-4, 0)
        assert (config.schedule.name, config.train.clip_norm) == ("constant", 1.0)


def test_what_is_stated_wins_in_a_word_a_flag_or_a_file(tmp_path: Path) -> None:
    assert bench_config("resnet50", ["optimizer.name=sgd"], {}, small=False).optimizer.name == "sgd"
    file = tmp_path / "mine.yaml"
    file.write_text("workload: unet\noptimizer:\n  lr: 0.25\n")
    config = bench_config(str(file), ["schedule.name=linear"], {"batch_size": 3}, small=True)
    assert (config.optimizer.lr, config.schedule.name, config.train.batch_size) == (0.25, "linear", 3)


def test_a_gpu_gets_the_full_model_and_a_cpu_the_demos() -> None:
    full, small = (bench_config("unet", [], {}, small=small) for small in (False, True))
    assert isinstance(full, UNetConfig)
    assert isinstance(small, UNetConfig)
    assert (full.data.image_size, full.model.base_channels) == (512, 64)
    assert (small.data.image_size, small.model.base_channels) == (64, 8)
    resnet = bench_config("resnet50", [], {"image_size": 224}, small=False)
    assert isinstance(resnet, ResNetConfig)
    assert (resnet.data.image_size, resnet.model.width, resnet.data.dir) == (224, 64, None)


def test_accumulation_and_other_optimizers_beside_peers_are_refused() -> None:
    with pytest.raises(ConfigError, match="train.accumulate=2"):
        bench_config("unet", ["train.accumulate=2"], {}, small=True)
    with pytest.raises(ConfigError, match="optimizer.name=sgd"):
        bench_config("unet", ["optimizer.name=sgd"], {}, small=True, against=["plain"])


def test_a_row_runs_its_precision_or_not_at_all() -> None:
    config = bench_config("unet", [], {}, small=True)
    assert in_precision(config, "bf16", simulate=False).precision.strict
    simulated = in_precision(config, "bf16", simulate=True).precision
    assert (simulated.simulate, simulated.strict) == (True, False)
    assert run_by(config, "eager").train.fast == "off"


def test_the_default_precisions_are_those_the_device_has() -> None:
    assert default_precisions(known_gpu("h200")) == ("fp32", "tf32", "bf16", "fp16")
    assert default_precisions(known_gpu("v100")) == ("fp32", "fp16")
