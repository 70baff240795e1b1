"""What is timed by default, and that the user's words win."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import ConfigError
from halfstep_train.bench.bench import find_reduced_settings
from halfstep_train.bench.problem import (
    load_bench_config,
)
from halfstep_train.workloads.classification.config import ResNetConfig
from halfstep_train.workloads.segmentation.config import UNetConfig


def test_what_is_stated_wins_in_a_word_a_flag_or_a_file(tmp_path: Path) -> None:
    assert load_bench_config("resnet50", ["optimizer.name=sgd"], {}, small=False).optimizer.name == "sgd"
    file = tmp_path / "mine.yaml"
    file.write_text("workload: unet\noptimizer:\n  lr: 0.25\n")
    config = load_bench_config(str(file), ["schedule.name=linear"], {"batch_size": 3}, small=True)
    assert (config.optimizer.lr, config.schedule.name, config.train.batch_size) == (0.25, "linear", 3)


def test_a_gpu_gets_the_full_model_and_a_cpu_the_demos() -> None:
    full, small = (load_bench_config("unet", [], {}, small=small) for small in (False, True))
    assert isinstance(full, UNetConfig)
    assert isinstance(small, UNetConfig)
    assert (full.data.image_size, full.model.base_channels) == (512, 64)
    assert (small.data.image_size, small.model.base_channels) == (64, 8)
    resnet = load_bench_config("resnet50", [], {"image_size": 224}, small=False)
    assert isinstance(resnet, ResNetConfig)
    assert (resnet.data.image_size, resnet.model.width, resnet.data.dir) == (224, 64, None)


def test_accumulation_and_other_optimizers_beside_peers_are_refused() -> None:
    with pytest.raises(ConfigError, match="train.accumulate=2"):
        load_bench_config("unet", ["train.accumulate=2"], {}, small=True)
    with pytest.raises(ConfigError, match="optimizer.name=sgd"):
        load_bench_config("unet", ["optimizer.name=sgd"], {}, small=True, against=["plain"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("schedule.warmup_steps=5", "schedule.warmup_steps=5, but peers train with 0"),
        ("train.clip_type=value", "train.clip_type=value, but peers train with l2"),
        ("scaler.init_scale=4", "scaler.init_scale=4, but peers train with 65536"),
        ("precision.modules.head=fp32", "precision.modules={'head': 'fp32'}, but peers train with {}"),
    ],
)
def test_what_peers_are_not_given_is_refused_beside_them_and_only_there(word: str, said: str) -> None:
    load_bench_config("unet", [word], {}, small=True)
    with pytest.raises(ConfigError) as refused:
        load_bench_config("unet", [word], {}, small=True, against=["plain"])
    assert refused.value.what == said


def test_what_halfstep_and_peers_both_have_may_be_stated_beside_them() -> None:
    words = ["optimizer.betas=[0.5, 0.9]", "optimizer.eps=1e-6", "train.clip_norm=0", "train.channels_last=false"]
    assert load_bench_config("resnet50", words, {}, small=True, against=["plain"]).optimizer.betas == (0.5, 0.9)


def test_a_network_is_reduced_on_a_cpu_unless_it_is_given_a_folder_or_its_full_size() -> None:
    assert find_reduced_settings(load_bench_config("resnet18", [], {}, small=True)) == {
        "model.width": 16,
        "model.blocks": [1, 1, 1, 1],
    }
    assert find_reduced_settings(load_bench_config("resnet18", [], {}, small=False)) == {}
    assert find_reduced_settings(load_bench_config("resnet18", ["data.dir=x"], {}, small=True)) == {}
    full = ["model.width=64", "model.blocks=[2, 2, 2, 2]"]
    assert find_reduced_settings(load_bench_config("resnet18", full, {}, small=True)) == {}
