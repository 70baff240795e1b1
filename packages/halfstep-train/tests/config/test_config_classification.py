from __future__ import annotations

import pytest

from halfstep.errors import ConfigError
from halfstep_train.workloads import load
from halfstep_train.workloads.classification.build import describe_augmentation
from halfstep_train.workloads.classification.config import ResNetConfig, ViTConfig


def test_small_images_get_mild_crops_and_no_flips_unless_the_settings_are_given() -> None:
    def changes(size: int, *overrides: str) -> tuple[object, object]:
        config = load("resnet18", flags={"data_dir": "digits", "image_size": size}, overrides=overrides).config
        assert isinstance(config, ResNetConfig)
        shown = describe_augmentation(config.data, None)
        assert bool(shown) == (size == 32 and not overrides), "one line says what was chosen"
        return config.data.augment.crop_area, config.data.augment.flip

    assert changes(32) == ((0.8, 1.0), 0.0)
    assert changes(224) == ((0.08, 1.0), 0.5)
    assert changes(32, "data.augment.flip=0.5") == ((0.8, 1.0), 0.5)
    assert changes(32, "data.augment.flip=0.5", "data.augment.crop_area=[0.08,1]") == ((0.08, 1.0), 0.5)


def test_a_recipes_learning_rate_grows_with_the_samples_of_a_step_and_says_so() -> None:
    loaded = load("resnet50", flags={"preset": "nvidia90"}, overrides=["train.batch_size=512", "train.accumulate=4"])
    # NVIDIA's README: 2.048 at 2048.
    assert loaded.config.optimizer.compute_peak_lr(2048) == pytest.approx(2.048)
    assert any("learning rate 2.048" in note for note in loaded.notes)


def test_without_lr_per_the_learning_rate_is_taken_as_it_is() -> None:
    loaded = load("resnet50", overrides=["train.batch_size=512"])
    assert loaded.config.optimizer.compute_peak_lr(512) == 0.1
    assert loaded.config.optimizer.collect_options() == {"momentum": 0.9, "nesterov": True}
    assert not any("learning rate" in note for note in loaded.notes)


def test_without_data_the_small_models_of_the_demo_are_trained() -> None:
    resnet, vit = load("resnet50").config, load("vit_l_16").config
    assert isinstance(resnet, ResNetConfig)
    assert isinstance(vit, ViTConfig)
    assert (resnet.model.width, resnet.model.blocks, vit.model.dim) == (16, (1, 1, 1, 1), 96)
    assert load("resnet50", flags={"data_dir": "D"}).config.model == ResNetConfig(workload="resnet50").model


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("data.augment.crop_area=[0, 1]", "greater than 0"),
        ("model.blocks=[2, 0]", "greater than or equal to 1"),
    ],
)
def test_a_setting_out_of_range_is_an_error_that_says_the_range(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("resnet50", overrides=[override])
    assert complaint in str(caught.value)
