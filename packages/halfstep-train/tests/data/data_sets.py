"""Tiny trees in the layouts of public data sets, with their names and file formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (24, 16)
"""Width and height."""


def picture(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE[1], SIZE[0], 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def mask(path: Path, *values: int, palette: bool = False) -> None:
    """Stripes of these values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stripes = np.array(values, dtype=np.uint8)[np.arange(SIZE[0]) * len(values) // SIZE[0]]
    image = Image.fromarray(np.tile(stripes, (SIZE[1], 1)))
    if palette:
        image.putpalette([(7 * k) % 256 for k in range(768)])
    image.save(path, **({"optimize": False} if path.suffix == ".gif" else {}))


def drive(root: Path) -> None:
    for part, first in (("training", 21), ("test", 1)):
        for k in range(first, first + 2):
            picture(root / part / "images" / f"{k:02}_{part}.tif", k)
            mask(root / part / "1st_manual" / f"{k:02}_manual1.gif", 0, 255)
            mask(root / part / "mask" / f"{k:02}_{part}_mask.gif", 0, 255)
    mask(root / "test" / "2nd_manual" / "01_manual2.gif", 0, 255)


def camvid(root: Path) -> None:
    for part, name in (("train", "0001TP_006690"), ("val", "0016E5_07959"), ("test", "Seq05VD_f00000")):
        picture(root / part / f"{name}.png")
        mask(root / f"{part}annot" / f"{name}.png", *range(12))


def camvid_colours(root: Path) -> None:
    for part, name in (("train", "0001TP_006690"), ("val", "0016E5_07959"), ("test", "Seq05VD_f00000")):
        picture(root / part / f"{name}.png")
        labels = np.zeros((SIZE[1], SIZE[0], 3), dtype=np.uint8)
        labels[:4], labels[4:8] = (64, 128, 64), (192, 0, 128)
        (root / f"{part}_labels").mkdir(parents=True, exist_ok=True)
        Image.fromarray(labels).save(root / f"{part}_labels" / f"{name}_L.png")


def camvid_one_folder(root: Path) -> None:
    for name in ("0001TP_006690", "0016E5_07959"):
        picture(root / "images" / f"{name}.png")
        mask(root / "labels" / f"{name}_P.png", 0, 4, 21, 30)
    (root / "codes.txt").write_text("Animal\n")


def cityscapes(root: Path, *, train_ids: bool = True) -> None:
    for part, city in (("train", "aachen"), ("train", "bremen"), ("val", "lindau"), ("test", "berlin")):
        stem = f"{city}_000000_000019"
        picture(root / "leftImg8bit" / part / city / f"{stem}_leftImg8bit.png")
        truth = root / "gtFine" / part / city
        mask(truth / f"{stem}_gtFine_labelIds.png", 0, 7, 8, 26)
        mask(truth / f"{stem}_gtFine_color.png", 1, 2, 3)
        mask(truth / f"{stem}_gtFine_instanceIds.png", 5, 6, 7)
        (truth / f"{stem}_gtFine_polygons.json").write_text("{}")
        if train_ids:
            mask(truth / f"{stem}_gtFine_labelTrainIds.png", 0, 1, 13, 255)


def voc(root: Path) -> None:
    folder = root / "VOCdevkit" / "VOC2012"
    for name in ("2007_000032", "2007_000039", "2007_000033", "2008_000001"):
        picture(folder / "JPEGImages" / f"{name}.jpg")
    for name in ("2007_000032", "2007_000039", "2007_000033"):
        mask(folder / "SegmentationClass" / f"{name}.png", 0, 1, 15, 255, palette=True)
        mask(folder / "SegmentationObject" / f"{name}.png", 0, 1, 2, 255, palette=True)
    lists = folder / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_000032\n2007_000039\n")
    (lists / "val.txt").write_text("2007_000033\n")
    (lists / "trainval.txt").write_text("2007_000032\n2007_000039\n2007_000033\n")


def ade20k(root: Path) -> None:
    folder = root / "ADEChallengeData2016"
    for part, name in (("training", "ADE_train_00000001"), ("validation", "ADE_val_00000001")):
        picture(folder / "images" / part / f"{name}.jpg")
        mask(folder / "annotations" / part / f"{name}.png", 0, 1, 5, 150)
    (folder / "objectInfo150.txt").write_text("Idx\n")


def tgs(root: Path) -> None:
    for name in ("000e218f21", "003c477d7c", "00441f1cf2"):
        picture(root / "train" / "images" / f"{name}.png")
        mask(root / "train" / "masks" / f"{name}.png", 0, 255)
    picture(root / "test" / "images" / "0005bb9630.png")
    (root / "depths.csv").write_text("id,z\n")


def dsb2018(root: Path) -> None:
    for k, name in enumerate(("00071198d059", "003cee89357d")):
        picture(root / "stage1_train" / name / "images" / f"{name}.png", k)
        mask(root / "stage1_train" / name / "masks" / "07a9bf1d7594.png", 255, 0, 0, 0)
        mask(root / "stage1_train" / name / "masks" / "0e548d0af63a.png", 0, 0, 255, 0)
    picture(root / "stage1_test" / "0a849e0eb15f" / "images" / "0a849e0eb15f.png")
