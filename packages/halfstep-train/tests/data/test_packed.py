from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from data.picture_folders import smooth_picture, write_split
from halfstep.errors import DataError
from halfstep_train.data.image_folder import FolderLayout, ImageFolder, find_images
from halfstep_train.data.image_samples import (
    EvaluationFiles,
    EvaluationImages,
    PackSettings,
    TrainingFiles,
    TrainingImages,
    choose_pack_path,
    open_or_pack,
)
from halfstep_train.data.loader import Loader
from halfstep_train.workloads.classification.augment import prepare_images
from halfstep_train.workloads.classification.config import ImageAugmentConfig

SMALL = PackSettings(size=32, workers=2)


@pytest.fixture
def folder(tmp_path: Path) -> ImageFolder:
    return find_images(write_split(tmp_path / "data", train=5, val=3, size=(96, 72)), FolderLayout())


def test_a_pack_holds_every_image_with_its_class_and_true_size(folder: ImageFolder, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    made = open_or_pack(folder, tmp_path / "a.pack", SMALL, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 16) for i in range(1, 17)]
    assert (len(made.train), len(made.val)) == (10, 6)
    assert made.train.labels.tolist() == list(folder.train.labels)
    assert made.classes == folder.classes
    assert made.train.names[0] == "train/bird/0.jpg"
    assert np.array_equal(made.train.sizes, np.tile([96, 72], (10, 1)))
    again = open_or_pack(folder, tmp_path / "a.pack", SMALL)
    assert torch.equal(again.train.pixels, made.train.pixels)
    assert sorted(os.listdir(tmp_path)) == ["a.pack", "data"]


def test_packed_crops_show_what_the_files_crops_show(folder: ImageFolder, tmp_path: Path) -> None:
    made = open_or_pack(folder, tmp_path / "a.pack", PackSettings(size=96))
    files = next(Loader(TrainingFiles(folder.train, size=48), batch_size=10, seed=2).iterate_epoch(3))
    stored = next(Loader(TrainingImages(made.train), batch_size=10, seed=2).iterate_epoch(3))
    assert torch.equal(files["index"], stored["index"])
    first, second = (prepare_images(batch, 48, changes=ImageAugmentConfig(), key=(0, 7)) for batch in (files, stored))
    # Smooth pictures: a few of 255 levels from JPEG and the second interpolation, where another crop differs by 50.
    assert (first - second).abs().mean() < 0.03
    other = prepare_images(next(Loader(TrainingImages(made.train), batch_size=10, seed=2).iterate_epoch(4)), 48)
    assert (first - other).abs().mean() > 0.3


def test_packed_evaluation_is_the_files_evaluation(folder: ImageFolder, tmp_path: Path) -> None:
    made = open_or_pack(folder, tmp_path / "a.pack", SMALL)
    (files,) = Loader(EvaluationFiles(folder.val, size=28), batch_size=6, shuffle=False).iterate_epoch(0)
    (stored,) = Loader(EvaluationImages(made.val, size=28), batch_size=6, shuffle=False).iterate_epoch(0)
    assert "box" not in stored
    assert (files["image"].int() - stored["image"].int()).abs().max() <= 2
    assert torch.equal(files["label"], stored["label"])


def test_another_evaluation_size_is_resampled_from_the_store(folder: ImageFolder, tmp_path: Path) -> None:
    made = open_or_pack(folder, tmp_path / "a.pack", SMALL)
    (files,) = Loader(EvaluationFiles(folder.val, size=40), batch_size=6, shuffle=False).iterate_epoch(0)
    (stored,) = Loader(EvaluationImages(made.val, size=40), batch_size=6, shuffle=False).iterate_epoch(0)
    assert (prepare_images(files, 40) - prepare_images(stored, 40)).abs().mean() < 0.03


@pytest.mark.parametrize("num_workers", [0, 3])
def test_batches_of_a_pack_are_its_samples_in_order(folder: ImageFolder, tmp_path: Path, num_workers: int) -> None:
    samples = TrainingImages(open_or_pack(folder, tmp_path / "a.pack", SMALL).train)
    batches = list(Loader(samples, batch_size=4, seed=1, num_workers=num_workers).iterate_epoch(2))
    assert [len(batch["label"]) for batch in batches] == [4, 4, 2]
    for batch in batches:
        for row, index in enumerate(batch["index"].tolist()):
            alone = samples.sample(index, key=(1, 2, index))
            assert all(torch.equal(alone[name], batch[name][row]) for name in alone)
    rest = list(Loader(samples, batch_size=4, seed=1, num_workers=num_workers).iterate_epoch(2, start_batch=1))
    assert torch.equal(rest[0]["index"], batches[1]["index"])


def test_bad_files_are_left_out_without_a_gap(folder: ImageFolder, tmp_path: Path) -> None:
    folder.train.paths[1].write_bytes(b"no picture")
    folder.val.paths[0].write_bytes(folder.val.paths[0].read_bytes()[:200])
    with pytest.raises(DataError, match=r"cannot read .*train/bird/1\.jpg"):
        open_or_pack(folder, tmp_path / "a.pack", SMALL)
    assert not (tmp_path / "a.pack").exists()
    made = open_or_pack(folder, tmp_path / "a.pack", PackSettings(size=32, on_bad_file="skip"))
    assert (len(made.train), len(made.val)) == (9, 5)
    assert len(made.left_out) == 2
    assert "1.jpg" in made.left_out[0]
    whole = open_or_pack(find_images(folder.root / "train", FolderLayout(val_fraction=0)), tmp_path / "b.pack", SKIP)
    assert torch.equal(made.train.pixels, whole.train.pixels)


SKIP = PackSettings(size=32, on_bad_file="skip")


def test_a_class_of_bad_files_only_cannot_be_packed(folder: ImageFolder, tmp_path: Path) -> None:
    for path in (folder.root / "train" / "cat").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no readable training image in class cat"):
        open_or_pack(folder, tmp_path / "a.pack", SKIP)


def test_a_fitting_pack_is_kept_and_a_change_of_the_folder_makes_a_new_one(folder: ImageFolder, tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    open_or_pack(folder, path, SMALL)
    first = path.stat().st_mtime_ns
    open_or_pack(folder, path, SMALL)
    assert path.stat().st_mtime_ns == first
    smooth_picture(77, (96, 72)).save(folder.train.paths[0])
    changed = open_or_pack(find_images(folder.root, FolderLayout()), path, SMALL)
    assert path.stat().st_mtime_ns != first
    smooth_picture(78).save(folder.root / "train" / "cat" / "new.png")
    grown = open_or_pack(find_images(folder.root, FolderLayout()), path, SMALL)
    assert len(grown.train) == len(changed.train) + 1


def test_the_pack_inside_a_folder_is_no_class_and_no_picture(folder: ImageFolder) -> None:
    open_or_pack(folder, choose_pack_path(folder.root, 32), SMALL)
    assert find_images(folder.root, FolderLayout()) == folder


def test_an_epoch_left_early_ends_its_threads(folder: ImageFolder, tmp_path: Path) -> None:
    import threading

    loader = Loader(TrainingImages(open_or_pack(folder, tmp_path / "a.pack", SMALL).train), batch_size=1, num_workers=2)
    before = threading.active_count()
    batches = loader.iterate_epoch(0)
    next(batches)
    del batches
    for _ in range(50):
        if threading.active_count() <= before:
            break
        time.sleep(0.05)
    assert threading.active_count() <= before
