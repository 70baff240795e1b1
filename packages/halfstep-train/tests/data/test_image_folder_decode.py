from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.picture_folders import smooth_picture, write_split
from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.data.image_folder import FolderLayout, Listing, check_images, find_images
from halfstep_train.data.image_samples import OPEN_AT_ONCE, EvaluationFiles, TrainingFiles
from halfstep_train.data.images import ORIENTATION, open_image_file
from halfstep_train.data.loader import Loader


def decoded(path: Path) -> np.ndarray:
    with open_image_file(path) as picture:
        return np.asarray(picture.to_rgb()).astype(int)


def near(first: np.ndarray, second: np.ndarray, tolerance: float) -> bool:
    return first.shape == second.shape and float(np.abs(first - second).mean()) < tolerance


@pytest.mark.parametrize(("ending", "options"), [("jpg", {"quality": 95}), ("png", {}), ("webp", {"lossless": True})])
def test_formats_decode_to_the_same_colours(tmp_path: Path, ending: str, options: dict[str, object]) -> None:
    picture = smooth_picture(1)
    picture.save(tmp_path / f"a.{ending}", **options)
    assert near(decoded(tmp_path / f"a.{ending}"), np.asarray(picture).astype(int), 3)


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "LA", "1"])
def test_colour_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    picture = smooth_picture(2).convert(mode)
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    picture.save(path)
    assert near(decoded(path), np.asarray(picture.convert("RGB")).astype(int), 6)


def test_sixteen_bits_keep_their_brightness(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 40 * 30).reshape(30, 40).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert np.array_equal(decoded(tmp_path / "a.png")[..., 1], values >> 8)


def test_a_palette_with_transparency_decodes_without_a_warning(tmp_path: Path) -> None:
    smooth_picture(3).convert("P").save(tmp_path / "a.png", transparency=bytes(range(256)))
    assert decoded(tmp_path / "a.png").shape == (30, 40, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright_and_their_size_is_known_before_decoding(tmp_path: Path, orientation: int) -> None:
    upright = smooth_picture(4)
    turns = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }
    stored = upright
    for turn in turns.get(orientation, []):
        stored = stored.transpose(turn)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    stored.save(tmp_path / "a.jpg", quality=95, exif=exif)
    with open_image_file(tmp_path / "a.jpg") as picture:
        assert picture.size == (40, 30)
        assert near(np.asarray(picture.to_rgb()).astype(int), np.asarray(upright).astype(int), 3)


def test_a_reduced_decode_gives_a_smaller_picture_never_below_what_is_needed(tmp_path: Path) -> None:
    smooth_picture(5, (800, 600)).save(tmp_path / "a.jpg")
    for reduction, expected in ((1.9, (800, 600)), (2.0, (400, 300)), (5.0, (200, 150)), (100.0, (100, 75))):
        with open_image_file(tmp_path / "a.jpg") as picture:
            assert picture.to_rgb(reduction=reduction).size == expected


def huge_png(path: Path, width: int, height: int) -> None:
    """A few bytes that claim many pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


def test_pixels_of_32_bits_are_refused_before_training(tmp_path: Path) -> None:
    write_split(tmp_path, train=4)
    Image.fromarray(np.ones((8, 8), dtype=np.float32)).save(tmp_path / "train" / "cat" / "depth.tif")
    with pytest.raises(DataError, match=r"depth\.tif") as refused:
        check_images(find_images(tmp_path, FolderLayout()), bad_files=BadFiles("error"))
    assert "32-bit" in refused.value.why


def folder_with_bad_files(root: Path) -> Path:
    write_split(root, train=4)
    cats = root / "train" / "cat"
    whole = (cats / "0.jpg").read_bytes()
    (cats / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (cats / "text.jpg").write_text("I am no picture.")
    (cats / "empty.png").write_bytes(b"")
    huge_png(cats / "huge.png", 20_000, 20_000)
    smooth_picture(0, (1, 1)).save(cats / "one.png")
    return root


def test_bad_files_are_left_out_counted_and_named(tmp_path: Path) -> None:
    found = find_images(folder_with_bad_files(tmp_path), FolderLayout())
    bad_files = BadFiles("skip")
    kept = check_images(found, bad_files=bad_files)
    named = "\n".join(str(error) for error in bad_files.skipped)
    assert len(bad_files.skipped) == 4
    assert all(name in named for name in ("cut.jpg", "text.jpg", "empty.png", "huge.png"))
    assert "178956970 pixels" in named
    assert len(kept.train) == len(found.train) - 4
    loader = Loader(TrainingFiles(kept.train, size=16), batch_size=4)
    assert sum(len(batch["label"]) for batch in loader.iterate_epoch(0)) == 9


def test_bytes_after_the_end_of_a_picture_are_no_fault(tmp_path: Path) -> None:
    write_split(tmp_path)
    path = tmp_path / "train" / "cat" / "0.jpg"
    path.write_bytes(path.read_bytes() + bytes(10_000))
    found = find_images(tmp_path, FolderLayout())
    assert check_images(found, bad_files=BadFiles("error")) == found


def test_a_class_of_bad_files_only_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    write_split(tmp_path, train=1)
    (tmp_path / "train" / "cat" / "0.jpg").write_text("gone")
    with pytest.raises(DataError, match="no readable training image in class cat"):
        check_images(find_images(tmp_path, FolderLayout()), bad_files=BadFiles("skip"))


def test_a_file_that_breaks_during_an_epoch_is_an_error_that_names_it(tmp_path: Path) -> None:
    found = find_images(write_split(tmp_path), FolderLayout())
    found.train.paths[2].write_bytes(b"overwritten")
    with pytest.raises(DataError, match=r"2\.jpg"):
        list(Loader(TrainingFiles(found.train, size=16), batch_size=2).iterate_epoch(0))


@pytest.mark.parametrize("size", [(1, 1), (3, 700), (20_000, 20), (500, 375), (37, 200)])
def test_pictures_of_every_shape_give_samples_of_one_shape(tmp_path: Path, size: tuple[int, int]) -> None:
    smooth_picture(6, size).save(tmp_path / "a.png")
    listing = Listing(paths=(tmp_path / "a.png",), labels=(1,))
    train, val = TrainingFiles(listing, size=32), EvaluationFiles(listing, size=32)
    for epoch in range(20):
        sample = train.sample(0, key=(0, epoch, 0))
        left, top, right, bottom = sample["box"].tolist()
        assert sample["image"].shape == (48, 48, 3)
        assert 0 <= left < right <= 48
        assert 0 <= top < bottom <= 48
    assert val.sample(0, key=(0, 0, 0))["image"].shape == (32, 32, 3)


def test_evaluation_is_resize_and_centre_crop(tmp_path: Path) -> None:
    picture = smooth_picture(7, (120, 96))
    picture.save(tmp_path / "a.png")
    (image,) = [
        EvaluationFiles(Listing(paths=(tmp_path / "a.png",), labels=(0,)), size=56).sample(0, key=(0, 0, 0))["image"]
    ]
    resized = picture.resize((80, 64), Image.Resampling.BILINEAR).crop((12, 4, 68, 60))
    # The one box rounds its edges to no whole pixel, resize and crop do.
    assert (image.int() - torch.tensor(np.asarray(resized)).int()).abs().max() <= 2


def test_samples_depend_on_seed_and_epoch_and_not_on_workers(tmp_path: Path) -> None:
    files = TrainingFiles(find_images(write_split(tmp_path), FolderLayout()).train, size=16)
    one, two = (list(Loader(files, batch_size=4, seed=3, num_workers=n).iterate_epoch(1)) for n in (0, 2))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)
    keys = [(3, 1, 0), (4, 1, 0), (3, 2, 0)]
    boxes = [files.sample(0, key=key) for key in keys]
    assert not torch.equal(boxes[0]["image"], boxes[1]["image"])
    assert not torch.equal(boxes[0]["image"], boxes[2]["image"])


def test_a_batch_of_files_is_made_whole_in_shared_memory_and_equals_its_samples(tmp_path: Path) -> None:
    files = TrainingFiles(find_images(write_split(tmp_path, train=10), FolderLayout()).train, size=16)
    assert len(files) > OPEN_AT_ONCE
    (batch,) = Loader(files, batch_size=20, seed=3, num_workers=1).iterate_epoch(1)
    assert batch["image"].is_shared()
    for row, index in enumerate(batch["index"].tolist()):
        alone = files.sample(index, key=(3, 1, index))
        assert all(torch.equal(batch[name][row], alone[name]) for name in alone)
