from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data import data_sets
from data.data_sets import SIZE, mask, picture
from halfstep.errors import ConfigError, DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.segmentation.build import build
from halfstep_train.workloads.segmentation.config import UNetDataConfig
from halfstep_train.workloads.segmentation.data import FoundPairs, Pair, SegmentationData, find_pairs, split_pairs


def built(root: Path, **settings: Any) -> Workload:
    data = {"dir": str(root), **settings}
    model = {"base_channels": 1, "depth": 1}
    return build(from_dict("unet", {"data": data, "model": model}).config)  # type: ignore[arg-type]


def names(samples: object) -> list[str]:
    assert isinstance(samples, SegmentationData)
    return [f"{pair.image.name} {pair.mask.name}" for pair in samples.pairs]


def about(workload: Workload) -> str:
    return "\n".join(value for _, value in workload.about)


def cityscapes_label_ids(root: Path) -> None:
    data_sets.cityscapes(root, train_ids=False)


CITY = "aachen_000000_000019_leftImg8bit.png aachen_000000_000019_gtFine"
COLOURS = [[0, 0, 0], [64, 128, 64], [192, 0, 128]]


@pytest.mark.parametrize(
    ("write", "name", "counts", "pair", "values", "ignored", "has_background"),
    [
        (data_sets.drive, "DRIVE", (2, 2), "22_training.tif 22_manual1.gif", [0, 255], None, True),
        (data_sets.camvid, "CamVid", (1, 1), "0016E5_07959.png 0016E5_07959.png", list(range(11)), 11, False),
        (data_sets.camvid_colours, "CamVid", (1, 1), "0016E5_07959.png 0016E5_07959_L.png", COLOURS, None, False),
        (
            data_sets.camvid_one_folder,
            "CamVid",
            (1, 1),
            "0016E5_07959.png 0016E5_07959_P.png",
            [0, 4, 21, 30],
            None,
            False,
        ),
        (data_sets.cityscapes, "Cityscapes", (2, 1), f"{CITY}_labelTrainIds.png", [0, 1, 13], 255, False),
        (cityscapes_label_ids, "Cityscapes", (2, 1), f"{CITY}_labelIds.png", [0, 7, 8, 26], None, False),
        (data_sets.voc, "Pascal VOC", (2, 1), "2007_000039.jpg 2007_000039.png", [0, 1, 15], 255, True),
        (data_sets.ade20k, "ADE20K", (1, 1), "ADE_val_00000001.jpg ADE_val_00000001.png", [1, 5, 150], 0, False),
        (data_sets.tgs, "train", (1, 2), "000e218f21.png 000e218f21.png", [0, 255], None, True),
    ],
)
def test_a_known_data_set_is_found_with_its_split_void_value_and_background(
    tmp_path: Path,
    write: Callable[[Path], None],
    name: str,
    counts: tuple[int, int],
    pair: str,
    values: list[Any],
    ignored: int | None,
    has_background: bool,
) -> None:
    write(tmp_path)
    workload = built(tmp_path, val_fraction=0.5)
    assert (len(workload.train_samples), len(workload.val_samples)) == counts
    assert pair in names(workload.train_samples) + names(workload.val_samples)
    assert workload.store["mask_values"] == values
    assert workload.store["ignored_value"] == ignored
    assert name in about(workload)
    assert ("model.background" in workload.settled) != has_background
    assert ("all classes, like" in workload.scoring) != has_background


def test_a_background_may_be_named_for_a_data_set_without_one(tmp_path: Path) -> None:
    data_sets.ade20k(tmp_path)
    config = from_dict("unet", {"data": {"dir": str(tmp_path)}, "model": {"background": "first"}})
    asked = build(config.config)  # type: ignore[arg-type]
    assert "model.background" not in asked.settled
    assert "the background, mask value" in asked.scoring


def test_drives_test_part_alone_is_a_data_set_and_without_masks_is_not_used(tmp_path: Path) -> None:
    data_sets.drive(tmp_path)
    alone = built(tmp_path / "test", val_fraction=0)
    assert names(alone.train_samples) == ["01_test.tif 01_manual1.gif", "02_test.tif 02_manual1.gif"]
    for path in (tmp_path / "test" / "1st_manual").iterdir():
        path.unlink()
    workload = built(tmp_path, val_fraction=0.5)
    assert len(workload.train_samples) == len(workload.val_samples) == 1
    assert "validation" not in about(workload)


def test_the_150_classes_of_ade20k_are_no_blurred_edges(tmp_path: Path) -> None:
    data_sets.ade20k(tmp_path)
    [path] = (tmp_path / "ADEChallengeData2016" / "annotations" / "training").iterdir()
    Image.fromarray((np.arange(SIZE[0] * SIZE[1]) % 151).astype(np.uint8).reshape(SIZE[::-1])).save(path)
    workload = built(tmp_path)
    assert len(workload.store["mask_values"]) == 150
    assert not workload.notes


@pytest.mark.parametrize("name", ["valid.txt", "val.txt"])
def test_a_list_beside_images_without_a_validation_part_is_named_with_its_setting(tmp_path: Path, name: str) -> None:
    data_sets.camvid_one_folder(tmp_path)
    (tmp_path / name).write_text("0016E5_07959.png\n")
    assert f"data.val_list={tmp_path / name}" in about(built(tmp_path, val_fraction=0.5))
    asked = built(tmp_path, val_list=str(tmp_path / name))
    assert names(asked.val_samples) == ["0016E5_07959.png 0016E5_07959_P.png"]
    assert "is not used" not in about(asked)


@pytest.mark.parametrize("below", ["", "stage1_train"])
def test_kaggles_nuclei_become_one_mask_a_picture(tmp_path: Path, below: str) -> None:
    data_sets.dsb2018(tmp_path)
    workload = built(tmp_path / below, image_size=SIZE[0], val_fraction=0)
    assert names(workload.train_samples) == ["003cee89357d.png masks", "00071198d059.png masks"]
    assert workload.store["mask_values"] == [0, 255]
    classes = workload.train_samples.sample(0, key=(0, 0, 0))["mask"]
    assert classes[0, :: SIZE[0] // 4].tolist() == [1, 0, 1, 0]
    assert isinstance(workload.train_samples, SegmentationData)
    assert len(list(workload.train_samples.files())) == 6


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_a_validation_part_beside_training_is_used(tmp_path: Path, val: str, inside: bool) -> None:
    for part, name in (("train", "a"), (val, "b")):
        images, masks = (f"{part}/images", f"{part}/masks") if inside else (f"images/{part}", f"masks/{part}")
        picture(tmp_path / images / f"{name}.png")
        mask(tmp_path / masks / f"{name}.png", 0, 1)
    workload = built(tmp_path)
    assert (names(workload.train_samples), names(workload.val_samples)) == (["a.png a.png"], ["b.png b.png"])
    assert val in about(workload)


def test_any_names_and_any_validation_folder_are_reached_by_patterns(tmp_path: Path) -> None:
    for part, name in (("a", "t1"), ("b", "t2")):
        for patient in ("p1", "p2"):
            picture(tmp_path / part / patient / f"scan_{name}.png")
            mask(tmp_path / part / patient / f"scan_{name}_gt.png", 0, 1)
    workload = built(
        tmp_path,
        images="a/**/{id}",
        masks="a/**/{id}_gt.png",
        val_images="b/**/{id}",
        val_masks="b/**/{id}_gt.png",
    )
    assert names(workload.train_samples) == ["scan_t1.png scan_t1_gt.png"] * 2
    assert names(workload.val_samples) == ["scan_t2.png scan_t2_gt.png"] * 2


def test_masks_that_two_parts_share_are_not_missing_an_image(tmp_path: Path) -> None:
    for part, name in (("early", "1"), ("late", "2")):
        picture(tmp_path / part / f"{name}.png")
        mask(tmp_path / "masks" / f"{name}.png", 0, 1)
    workload = built(tmp_path, images="early", val_images="late", val_masks="masks")
    assert (names(workload.train_samples), names(workload.val_samples)) == (["1.png 1.png"], ["2.png 2.png"])


def test_half_a_validation_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.val_masks"):
        built(tmp_path, val_images="late")


def test_twins_are_refused_with_the_key_that_chooses_and_chosen_by_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "imgs" / f"{name}.png")
        picture(tmp_path / "imgs" / f"{name}.tif")
        mask(tmp_path / "masks" / f"{name}.png", 0, 1)
        mask(tmp_path / "masks" / f"{name}.gif", 0, 1)
    with pytest.raises(DataError, match=r"a\.png and a\.tif have the same id a") as refused:
        built(tmp_path)
    assert "data.images=imgs/{id}.png" in refused.value.fix
    with pytest.raises(DataError, match=r"a\.gif and a\.png") as refused:
        built(tmp_path, images="imgs/{id}.tif", masks="masks")
    assert "data.masks=masks/{id}.gif" in refused.value.fix
    workload = built(tmp_path, images="imgs/{id}.tif", masks="masks/{id}.gif", val_fraction=0)
    assert names(workload.train_samples) == ["a.tif a.gif", "b.tif b.gif"]


def test_two_layouts_that_both_fit_are_named_with_the_keys_to_set(tmp_path: Path) -> None:
    for folder in ("masks", "labels"):
        mask(tmp_path / folder / "a.png", 0, 1)
    picture(tmp_path / "images" / "a.png")
    with pytest.raises(DataError, match=r"images \+ masks, and images \+ labels") as refused:
        built(tmp_path)
    assert "data.images=images data.masks=masks" in refused.value.fix
    assert names(built(tmp_path, masks="labels", val_fraction=0).train_samples) == ["a.png a.png"]


def test_a_data_set_among_other_folders_is_named_and_not_used(tmp_path: Path) -> None:
    data_sets.tgs(tmp_path / "one")
    picture(tmp_path / "two" / "1.jpg")
    with pytest.raises(DataError, match=r"2 folders.*one") as refused:
        built(tmp_path)
    assert f"data.dir={tmp_path / 'one'}" in refused.value.fix


@pytest.mark.parametrize(
    ("values", "setting", "classes", "ignored"),
    [
        ((0, 1, 2, 255), "auto", [0, 1, 2], 255),
        ((0, 1, 2, 255), None, [0, 1, 2, 255], None),
        ((0, 255), "auto", [0, 255], None),
        ((0, 128, 255), "auto", [0, 128, 255], None),
        ((0, 1, 2), 2, [0, 1], 2),
    ],
)
def test_255_is_ignored_beside_numbered_classes_alone(
    tmp_path: Path, values: tuple[int, ...], setting: Any, classes: list[int], ignored: int | None
) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "imgs" / f"{name}.png")
        mask(tmp_path / "masks" / f"{name}.png", *values)
    model = {"base_channels": 1, "depth": 1, "ignore_index": setting}
    workload = build(from_dict("unet", {"data": {"dir": str(tmp_path)}, "model": model}).config)  # type: ignore[arg-type]
    assert workload.store["mask_values"] == classes
    assert workload.store["ignored_value"] == ignored
    assert ("model.ignore_index=null" in about(workload)) == (setting == "auto" and ignored is not None)


def test_a_size_that_nobody_set_follows_the_pictures_and_is_stored(tmp_path: Path) -> None:
    data_sets.tgs(tmp_path)
    workload = built(tmp_path)
    assert workload.settled == {"data.image_size": 24}  # the longer side; a depth of 1 divides it
    assert workload.store["image_size"] == 24
    assert "24×16" in about(workload)
    deep = from_dict("unet", {"data": {"dir": str(tmp_path)}, "model": {"base_channels": 1, "depth": 4}}).config
    assert build(deep).store["image_size"] == 32  # type: ignore[arg-type]


def test_a_pattern_for_one_and_a_folder_for_the_other_go_together(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "train" / "image" / f"{name}.png")
        mask(tmp_path / "train" / "label" / f"{name}.png", 0, 1)
    workload = built(tmp_path, images="train/image/{id}.png", masks="train/label", val_fraction=0)
    assert names(workload.train_samples) == ["a.png a.png", "b.png b.png"]
    with pytest.raises(DataError, match=r"no train/none/\{id\} and train/label/ in"):
        built(tmp_path, images="train/none/{id}", masks="train/label")
    with pytest.raises(DataError, match=r"is called train/image/\{id\}\.tif"):
        built(tmp_path, images="train/image/{id}.tif", masks="train/label")


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def ids(pairs: tuple[Pair, ...]) -> list[str]:
    return [pair.id for pair in pairs]


def settings(root: Path | str | None = None, **values: Any) -> UNetDataConfig:
    return UNetDataConfig(dir=root and str(root), **{"val_fraction": 0, **values})


def find(root: Path, bad_files: BadFiles | None = None, **values: str) -> FoundPairs:
    return find_pairs(settings(root, **values), bad_files or BadFiles("error"))


def numbered(count: int) -> tuple[Pair, ...]:
    return tuple(Pair(id=str(i), image=Path(f"{i}.png"), mask=Path(f"{i}_mask.png")) for i in range(count))


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("imgs/{}.jpg", "masks/{}_mask.gif"),
        ("imgs/{}.png", "masks/{}.png"),
        ("image/{}.tif", "label/{}.npy"),
        ("images/{}.PNG", "labels/{}.png"),
        ("train/image/{}.png", "train/label/{}.png"),
    ],
)
def test_the_common_layouts_are_found_in_natural_order(tmp_path: Path, image: str, mask: str) -> None:
    for name in ("10", "2", "1"):
        touch(tmp_path, image.format(name), mask.format(name))
    touch(tmp_path, str(Path(image).parent / ".DS_Store"), str(Path(image).parent / "readme.txt"))
    found = find(tmp_path)
    assert ids(found.train) == ["1", "2", "10"]
    assert found.val == ()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["imgs/a.png", "imgs/b.png", "masks/a_mask.png"], "imgs/b.png has no partner"),
        (["imgs/a.png", "masks/a_mask.png", "masks/b_mask.png"], "masks/b_mask.png has no partner"),
        (["imgs/a.png", "imgs/a.jpg", "masks/a_mask.png"], "same id"),
        (["imgs/a.txt", "masks/a_mask.png"], "no images in"),
        (["pictures/a.png"], "no imgs/ and masks/"),
    ],
)
def test_a_wrong_folder_is_explained(tmp_path: Path, names: list[str], said: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(DataError, match=said):
        find(tmp_path)


def test_lonely_files_are_skipped_and_counted_on_request(tmp_path: Path) -> None:
    touch(tmp_path, "imgs/a.png", "imgs/b.png", "masks/a_mask.png", "masks/c_mask.png")
    bad_files = BadFiles("skip")
    assert ids(find(tmp_path, bad_files).train) == ["a"]
    assert len(bad_files.skipped) == 2


@pytest.mark.parametrize(("count", "fraction", "held"), [(20, 0.25, 5), (2, 0.01, 1), (2, 0.99, 1), (1, 0, 0)])
def test_a_split_is_repeatable_and_leaves_something_to_each_part(count: int, fraction: float, held: int) -> None:
    pairs = numbered(count)
    train, val = split_pairs(pairs, settings(val_fraction=fraction))
    assert len(val) == held
    assert sorted(ids(train) + ids(val)) == sorted(ids(pairs))
    assert (train, val) == split_pairs(pairs, settings(val_fraction=fraction))
    with pytest.raises(DataError, match="only one image"):
        split_pairs(numbered(1), settings(val_fraction=0.1))


def test_a_list_of_ids_is_the_split_and_the_rest_trains(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("# held out\n4\n\n3.png\n")
    train, val = split_pairs(numbered(5), settings(val_list=str(tmp_path / "val.txt")))
    assert (ids(train), ids(val)) == (["0", "1", "2"], ["4", "3"])


def test_lists_that_overlap_or_name_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n")
    (tmp_path / "b.txt").write_text("2\n")
    (tmp_path / "c.txt").write_text("77\n")
    with pytest.raises(DataError, match="in both lists: 2"):
        split_pairs(numbered(5), settings(train_list=str(tmp_path / "a.txt"), val_list=str(tmp_path / "b.txt")))
    with pytest.raises(DataError, match="77"):
        split_pairs(numbered(5), settings(val_list=str(tmp_path / "c.txt")))
    with pytest.raises(DataError, match=r"none\.txt"):
        split_pairs(numbered(5), settings(val_list=str(tmp_path / "none.txt")))
