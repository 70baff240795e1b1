from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.errors import ConfigError, DataError, ModelError
from halfstep_train.data.binary_sets import ROW_BYTES
from halfstep_train.data.image_samples import EvaluationFiles, EvaluationImages, TrainingImages
from halfstep_train.data.loader import Loader
from halfstep_train.run.assemble import build_workload
from halfstep_train.workloads import load
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.classification.resnet import ResNet, build_resnet
from halfstep_train.workloads.classification.scores import ClassificationMetrics

TINY = ["data.image_size=32", "model.width=4", "model.blocks=[1, 1]", "model.stem=small", "data.num_workers=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, told apart by their colour, as JPEGs of several sizes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, num in (("train", 8), ("val", 3)):
        for number, name in enumerate(("blue", "green", "red")):
            (root / split / name).mkdir(parents=True)
            for i in range(num):
                pixels = rng.integers(0, 80, (40 + 4 * i, 48, 3), dtype=np.uint8)
                pixels[..., 2 - number] += 150
                Image.fromarray(pixels).save(root / split / name / f"{i}.jpg", quality=95)
    return root


def built(folder: Path, *words: str, workload: str = "resnet18") -> Workload:
    torch.manual_seed(0)
    return build_workload(load(workload, overrides=[f"data.dir={folder}", *words]).config)


def first_batch(workload: Workload, *, training: bool, batch_size: int = 6) -> dict[str, torch.Tensor]:
    samples = workload.train_samples if training else workload.val_samples
    loader = Loader(samples, batch_size=batch_size, shuffle=training)
    return workload.prepare(next(loader.iterate_epoch(0)), key=(0, 0), training=training)


@pytest.mark.parametrize(
    ("workload", "settings"),
    [("resnet18", "data.image_size=64 model.stem=small"), ("vit_s_16", "data.image_size=64 model.patch=8")],
)
def test_images_that_are_scaled_up_are_named_with_the_settings_that_keep_their_size(
    folder: Path, workload: str, settings: str
) -> None:
    (shown,) = [text for name, text in built(folder, workload=workload).about if name == "image size"]
    assert shown == f"224: images of 48×54 pixels are scaled up; at their own size: {settings}"
    assert "image size" not in dict(built(folder, *settings.split(), workload=workload).about)


def test_small_files_are_changed_less_even_if_they_are_scaled_up(folder: Path) -> None:
    small = built(folder, "data.augment.brightness=0.1")
    assert small.train_samples.crop_area == (0.8, 1.0)
    assert (small.settled["data.augment"].flip, small.settled["data.augment"].brightness) == (0.0, 0.1)
    assert "because of the size of the images" in dict(small.about)["augmentation"]
    given = built(folder, "data.augment.flip=0.5", "data.augment.crop_area=[0.1,1]")
    assert (given.train_samples.crop_area, dict(given.settled)) == ((0.1, 1.0), {})


def test_a_few_steps_learn_to_tell_colours_apart_and_metrics_say_so(folder: Path) -> None:
    workload = built(folder, *TINY, "data.augment.mixup=0.2", "data.augment.cutmix=1")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1, momentum=0.9)
    loader = Loader(workload.train_samples, batch_size=12)
    step = 0
    for epoch in range(12):
        for loaded in loader.iterate_epoch(epoch):
            batch = workload.prepare(loaded, key=(0, step), training=True)
            loss, weight = workload.loss(workload.forward(workload.model, batch), batch)
            assert weight == 12
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    metrics = workload.metrics()
    workload.model.eval()
    with torch.no_grad():
        for loaded in Loader(workload.val_samples, batch_size=4, shuffle=False).iterate_epoch(0):
            batch = workload.prepare(loaded, key=(0, step), training=False)
            metrics.update(workload.forward(workload.model, batch), batch)
    assert isinstance(metrics, ClassificationMetrics)
    assert sum(seen for seen, _ in metrics.count_by_class()) == 9
    assert metrics.compute()[workload.metric] > 0.9


def test_validation_may_see_larger_images_than_training(folder: Path) -> None:
    workload = built(folder, *TINY, "data.eval_size=48", "data.eval_crop_ratio=1")
    assert first_batch(workload, training=True)["image"].shape == (6, 3, 32, 32)
    assert first_batch(workload, training=False)["image"].shape == (6, 3, 48, 48)


def test_the_packed_cache_gives_the_same_labels_and_classes(folder: Path) -> None:
    files, packed = built(folder, *TINY), built(folder, *TINY, "data.cache=true", "data.cache_size=64")
    assert files.store == packed.store
    ours, theirs = (first_batch(workload, training=False) for workload in (files, packed))
    assert torch.equal(ours["label"], theirs["label"])
    assert ours["image"].shape == theirs["image"].shape


def test_a_packed_file_may_lie_elsewhere_and_packing_shows_itself_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    words = (*TINY, f"data.cache_file={tmp_path / 'a.pack'}", "data.cache_size=48")
    first = built(folder, *words)
    assert sorted(folder.iterdir()) == before
    assert f"packing 33 images into {tmp_path / 'a.pack'}" in capsys.readouterr().err
    again = built(folder, *words)
    assert capsys.readouterr().err.strip() == ""
    assert isinstance(again.train_samples, TrainingImages)
    assert len(again.train_samples) == len(first.train_samples) == 24


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    rows = np.random.default_rng(0).integers(0, 256, (4, ROW_BYTES)).astype(np.uint8)
    rows[:, 0] = range(4)
    for name in ("data_batch_1", "test_batch"):
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


def test_validation_shows_all_of_a_cifar_image_and_the_middle_of_a_picture(folder: Path, cifar: Path) -> None:
    assert built(folder, *TINY).store["eval_share"] == 0.875
    whole = built(cifar, *TINY)
    assert whole.store["eval_share"] == 1
    assert isinstance(whole.val_samples, EvaluationImages)
    shown = whole.val_samples.sample(0, key=(0, 0, 0))["image"]
    assert torch.equal(shown, whole.val_samples.images.pixels[0])
    assert built(cifar, *TINY, "data.eval_crop_ratio=0.5").store["eval_share"] == 0.5


def test_another_folder_is_evaluated_as_the_run_was(folder: Path) -> None:
    config = load("resnet18", overrides=[f"data.dir={folder}", *TINY]).config
    stored = dict(build_workload(config).store) | {"eval_share": 1.0}
    middle, whole = (build_workload(config, store).val_samples for store in (None, stored))
    assert isinstance(middle, EvaluationFiles)
    assert isinstance(whole, EvaluationFiles)
    assert (middle.share, whole.share) == (0.875, 1.0)


def test_classes_are_stored_and_other_classes_are_refused_by_name(folder: Path) -> None:
    config = load("resnet18", overrides=[f"data.dir={folder}", *TINY]).config
    store = build_workload(config).store
    assert store["classes"] == ["blue", "green", "red"]
    with pytest.raises(DataError, match="2 classes|3 classes"):
        build_workload(config, {"classes": ["blue", "green", "pink"], "titles": {}})


TINY_VIT = ["model.depth=1", "model.heads=2", "model.dim=8"]


@pytest.mark.parametrize("words", [[], ["model.patch=8"]])
def test_vit_is_built_for_the_datas_classes(folder: Path, words: list[str]) -> None:
    workload = built(folder, "data.image_size=32", *TINY_VIT, *words, workload="vit_s_16")
    batch = first_batch(workload, training=True, batch_size=2)
    assert workload.forward(workload.model, batch).shape == (2, 3)


def test_a_vit_that_cannot_tile_the_validation_image_is_refused_before_training(folder: Path) -> None:
    with pytest.raises(ConfigError, match="40 pixels: the side must be a multiple of 16"):
        built(folder, "data.image_size=32", "data.eval_size=40", *TINY_VIT, workload="vit_s_16")


def test_official_weights_need_a_new_head_for_other_classes(folder: Path, tmp_path: Path) -> None:
    theirs = build_resnet("resnet18", blocks=(1, 1), width=4, stem="small", num_classes=1000)
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    words = [*TINY, f"model.weights={tmp_path / 'resnet18.pth'}"]
    with pytest.raises(ModelError, match="1,000 classes, but the data has 3"):
        built(folder, *words)
    model = built(folder, *words, "model.replace_head=true").model
    assert isinstance(model, ResNet)
    assert torch.equal(model.conv1.weight, theirs.conv1.weight)
    assert model.fc.weight.shape[0] == 3


def test_a_stored_run_is_built_again_without_the_weights_it_started_from(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "start.pth"
    torch.save(build_resnet("resnet18", blocks=(1, 1), width=4, stem="small", num_classes=3).state_dict(), file)
    config = load("resnet18", overrides=[f"data.dir={folder}", *TINY, f"model.weights={file}"]).config
    store = build_workload(config).store
    file.unlink()
    build_workload(config, store)
    with pytest.raises(ModelError, match="no weights at"):
        build_workload(config)


def test_a_last_batch_that_batchnorm_cannot_learn_from_is_refused_before_training(folder: Path) -> None:
    small = ["data.image_size=32", "model.width=4"]
    with pytest.raises(ConfigError, match=r"batch_size=23 leaves a single sample in the last batch of 24"):
        built(folder, *small, "train.batch_size=23")
    with pytest.raises(ConfigError, match="batch_size=1 leaves a single sample"):
        built(folder, *small, "train.batch_size=1")
    built(folder, *small, "train.batch_size=22")
    built(folder, "model.width=4", "data.image_size=64", "train.batch_size=23")  # 2x2 values a channel


def test_a_class_without_validation_pictures_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "val" / "red")
    for cached in ("false", "true"):
        notes = built(tmp_path / "images", *TINY, f"data.cache={cached}", "data.cache_size=16").notes
        assert notes == ("no validation image of red: these classes are not evaluated",)


@pytest.mark.parametrize("cached", ["false", "true"])
def test_a_link_that_leads_nowhere_is_named_or_counted(folder: Path, tmp_path: Path, cached: str) -> None:
    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "train" / "red" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    words = [*TINY, f"data.cache={cached}", "data.cache_size=16"]
    with pytest.raises(DataError, match=r"gone\.jpg"):
        built(tmp_path / "images", *words)
    workload = built(tmp_path / "images", *words, "data.on_bad_file=skip")
    assert len(workload.train_samples) == 24
    assert "gone.jpg" in workload.notes[0]
