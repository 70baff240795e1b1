from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.data.images import choose_scale, describe_outliers, read_image
from halfstep_train.workloads.segmentation.data import (
    IGNORED,
    ImageFormat,
    MaskTable,
    Pair,
    Scan,
    SegmentationData,
    collect_values,
    make_table,
    parse_table,
    read_mask,
    read_values,
    resize_mask,
    scan_pairs,
)

GRAY = np.arange(48, dtype=np.uint8).reshape(6, 8)
BINARY = MaskTable(values=(0, 255))


def save(path: Path, array: np.ndarray, mode: str | None = None) -> Path:
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".pt":
        torch.save(torch.from_numpy(array), path)
    else:
        picture = Image.fromarray(array)
        (picture.convert(mode) if mode else picture).save(path)
    return path


def write_pair(root: Path, name: str, image: np.ndarray, mask: np.ndarray, ending: str = ".png") -> Pair:
    return Pair(
        id=name,
        image=save(root / f"{name}{ending}", image),
        mask=save(root / f"{name}_mask.png", mask),
    )


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.webp", "a.gif", "a.npy", "a.pt"])
def test_gray_bytes_read_alike_from_every_container(tmp_path: Path, name: str) -> None:
    if name.endswith("webp"):
        Image.fromarray(GRAY).convert("RGB").save(tmp_path / name, lossless=True)
    else:
        save(tmp_path / name, GRAY)
    image = read_image(tmp_path / name, channels=1)
    assert image.dtype == np.uint8
    assert np.array_equal(image[..., 0], GRAY)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"image": Path("a.png")}, r"it contains Python objects \(pathlib\.\S*PosixPath\), and halfstep does not"),
        (b"\x00" * 100, "it is not a file of torch.save, or it is damaged"),
        (b"just words", "it is not a file of torch.save, or it is damaged"),
        (b"", "it is not a file of torch.save, or it is damaged"),
    ],
)
def test_a_pt_file_that_is_no_tensor_is_explained_without_torchs_advice(
    content: object, why: str, tmp_path: Path
) -> None:
    if isinstance(content, bytes):
        (tmp_path / "a.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DataError, match=why) as caught:
        read_image(tmp_path / "a.pt", channels=1)
    assert "weights_only" not in str(caught.value)
    assert "torch.save(tensor, FILE)" in caught.value.fix


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "LA", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_colour_mode_becomes_the_channels_asked_for(tmp_path: Path, mode: str, channels: int) -> None:
    save(tmp_path / "a.png", GRAY * 5, mode)
    image = read_image(tmp_path / "a.png", channels=channels)
    assert image.shape == (6, 8, channels)
    assert image.dtype == np.uint8
    if mode in ("L", "RGB", "RGBA", "LA"):
        assert np.array_equal(image[..., 0], GRAY * 5)


def test_sixteen_bits_keep_their_precision(tmp_path: Path) -> None:
    deep = (np.arange(48).reshape(6, 8) * 1000).astype(np.uint16)
    for name in ("a.png", "a.tif", "a.npy"):
        image = read_image(save(tmp_path / name, deep), channels=1)
        assert image.dtype == np.float32
        np.testing.assert_allclose(image[..., 0], deep / 65535, rtol=1e-6)


def test_a_nearly_black_image_stays_nearly_black(tmp_path: Path) -> None:
    dark = np.zeros((6, 8), dtype=np.uint8)
    dark[2, 3] = 1
    data = SegmentationData(
        [write_pair(tmp_path, "a", dark, dark * 255)], table=BINARY, image=ImageFormat(size=(6, 8), channels=1)
    )
    image = data.sample(0, key=(0, 0, 0))["image"]
    assert image.dtype == torch.uint8
    assert int(image.max()) == 1


def scan_floats(root: Path, *images: np.ndarray) -> Scan:
    mask = np.zeros(images[0].shape, dtype=np.uint8)
    pairs = [write_pair(root, f"{i}", image, mask, ".npy") for i, image in enumerate(images)]
    return scan_pairs(pairs, bad_files=BadFiles("error"))


def ramp(low: float, high: float, dtype: str = "float32") -> np.ndarray:
    return np.linspace(low, high, 48).reshape(6, 8).astype(dtype)


@pytest.mark.parametrize(
    ("image", "scale"),
    [
        (ramp(0, 1), 1),
        (ramp(0, 0.2), 1),
        (ramp(0, 1.1), 1),  # interpolation overshoots
        (ramp(-2, 3), 1),
        (ramp(0, 255), 255),
        (ramp(0, 4095, "int32"), 4095),
        (ramp(0, 65535), 65535),
        (ramp(0, 0), 1),
    ],
)
def test_floats_are_scaled_by_the_range_of_the_whole_set(tmp_path: Path, image: np.ndarray, scale: float) -> None:
    scan = scan_floats(tmp_path, image, image / 2, image * 0)
    assert scan.is_float
    assert choose_scale(scan.raw.values()).scale == scale
    read = read_image(tmp_path / "0.npy", channels=1, raw_scale=scale)
    np.testing.assert_allclose(read[..., 0], image / scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("high", "outlier"), [(1, 1.02), (1, 3e38), (1, -3e38), (255, 3e38), (255, -0.3), (4095, 3e38)]
)
@pytest.mark.parametrize("num_files", [1, 2, 5])
def test_one_outlying_pixel_does_not_change_the_scale(
    tmp_path: Path, high: float, outlier: float, num_files: int
) -> None:
    images = [ramp(0, high) for _ in range(num_files)]
    images[0][2, 3] = outlier
    scan = scan_floats(tmp_path, *images)
    found = choose_scale(scan.raw.values())
    assert found.scale == pytest.approx(high)
    if abs(outlier) > high:
        [note] = describe_outliers(scan.raw, found.limit)
        assert f"(beyond {found.limit:g}, magnitudes up to {abs(outlier):g}) in 1 float image: 0.npy;" in note
    assert read_image(tmp_path / "0.npy", channels=1, raw_scale=found.scale)[2, 3, 0] == np.float32(outlier) / high


def test_one_odd_file_does_not_change_the_scale_of_the_others(tmp_path: Path) -> None:
    scan = scan_floats(tmp_path, ramp(0, 1), ramp(0, 255), ramp(0, 1))
    found = choose_scale(scan.raw.values())
    assert found.scale == 1
    assert "(beyond 1, magnitudes up to 255) in 1 float image: 1.npy;" in describe_outliers(scan.raw, found.limit)[0]


def test_floats_without_a_known_scale_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.tif contains float32 pixels, and their value range is unknown"):
        read_image(save(tmp_path / "a.tif", ramp(0, 1)), channels=1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_in_a_float_image_names_the_file(tmp_path: Path, bad: float) -> None:
    image = np.zeros((6, 8), dtype=np.float32)
    image[1, 1] = bad
    with pytest.raises(DataError, match=r"broken\.npy has NaN, infinity or numbers beyond .*fp32 \(1 value\)"):
        read_image(save(tmp_path / "broken.npy", image), channels=1)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.npy"])
def test_a_truncated_or_alien_file_is_named(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)
    path = save(tmp_path / name, noise)
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], b"not an image at all", b""):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=f"cannot read .*{name}"):
            read_image(path, channels=1)


def test_mask_values_are_sorted_and_colours_are_classes(tmp_path: Path) -> None:
    colour = np.zeros((4, 4, 3), dtype=np.uint8)
    colour[0], colour[1] = (255, 0, 0), (0, 0, 255)
    black = np.zeros((4, 4), dtype=np.uint8)
    pairs = [write_pair(tmp_path, "a", black, colour), write_pair(tmp_path, "b", black, black)]
    table = make_table(collect_values(pairs, bad_files=BadFiles("error")), ignored=None)
    assert table.values == ((0, 0, 0), (0, 0, 255), (255, 0, 0))
    classes = table.to_classes(read_mask(pairs[0].mask), pairs[0].mask)
    assert classes[:3, 0].tolist() == [2, 1, 0]
    assert np.array_equal(table.to_mask(classes), colour)
    assert table.to_classes(read_mask(pairs[1].mask), pairs[1].mask).max() == 0


def test_palette_masks_give_their_indices_and_255_can_be_ignored(tmp_path: Path) -> None:
    indices = np.array([[0, 1], [2, 255]], dtype=np.uint8)
    picture = Image.fromarray(indices)
    picture.putpalette([7, 7, 7] * 256)
    picture.save(tmp_path / "a_mask.png")
    pair = Pair(id="a", image=save(tmp_path / "a.png", indices), mask=tmp_path / "a_mask.png")
    table = make_table(collect_values([pair], bad_files=BadFiles("error")), ignored=255)
    assert table == MaskTable(values=(0, 1, 2), ignored=255)
    assert table.to_classes(read_mask(pair.mask), pair.mask).tolist() == [[0, 1], [2, IGNORED]]


def test_sixteen_bit_masks_are_painted_back_with_their_values() -> None:
    table = MaskTable(values=(0, 1000, 40000))
    mask = np.array([[0, 40000], [1000, 0]], dtype=np.uint16)
    painted = table.to_mask(table.to_classes(mask, Path("m.png")))
    assert painted.dtype == np.uint16
    assert np.array_equal(painted, mask)


def test_an_unknown_mask_value_names_file_and_value() -> None:
    with pytest.raises(DataError, match=r"m\.png has the unknown mask value 7") as caught:
        BINARY.to_classes(np.array([[0, 7], [255, 255]]), Path("m.png"))
    assert "0, 255" in str(caught.value)


def test_a_colour_mask_does_not_pass_for_gray_classes() -> None:
    blue_five = np.full((2, 2, 3), (0, 0, 5), dtype=np.uint8)
    with pytest.raises(DataError, match=r"unknown mask value \(0, 0, 5\)"):
        MaskTable(values=(0, 5)).to_classes(blue_five, Path("m.png"))


def test_tables_of_other_projects_and_json_are_understood() -> None:
    assert parse_table([0, 255]) == BINARY
    assert parse_table([[0, 0, 0], [255, 0, 0]]).values == ((0, 0, 0), (255, 0, 0))


def test_a_jpeg_mask_with_smeared_values_is_refused(tmp_path: Path) -> None:
    mask = np.zeros((32, 32), dtype=np.uint8)
    mask[5:20, 7:21] = 255
    with pytest.raises(DataError, match="JPEG is lossy"):
        read_values(save(tmp_path / "m.jpg", mask))


def test_fractions_in_a_float_mask_are_refused(tmp_path: Path) -> None:
    assert read_mask(save(tmp_path / "ok.npy", np.array([[0.0, 1.0]]))).tolist() == [[0, 1]]
    with pytest.raises(DataError, match="integers"):
        read_mask(save(tmp_path / "bad.npy", np.array([[0.0, 0.5]])))


def test_a_size_mismatch_names_both_sizes(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "a", GRAY, GRAY[:4])
    with pytest.raises(DataError, match=r"a\.png is 8×6 pixels, but its mask a_mask\.png is 8×4 pixels"):
        scan_pairs([pair], bad_files=BadFiles("error"))


def test_bad_pairs_are_left_out_and_counted_on_request(tmp_path: Path) -> None:
    good = write_pair(tmp_path, "good", GRAY, GRAY * 0)
    mismatch = write_pair(tmp_path, "mismatch", GRAY, GRAY[:4])
    cut = write_pair(tmp_path, "cut", np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8), GRAY)
    save(cut.mask, np.zeros((64, 64), dtype=np.uint8))
    cut.image.write_bytes(cut.image.read_bytes()[:900])
    nan = write_pair(tmp_path, "nan", np.full((6, 8), np.nan, dtype=np.float32), GRAY * 0, ".npy")
    bad_files = BadFiles("skip")
    assert scan_pairs([good, mismatch, cut, nan], bad_files=bad_files).pairs == (good,)
    for error, name in zip(bad_files.skipped, ("mismatch.png", "cut.png", "nan.npy"), strict=True):
        assert name in error.what
    with pytest.raises(DataError, match="no usable file is left for training"):
        scan_pairs([mismatch], bad_files=BadFiles("skip"))


def test_images_and_masks_are_resized_together(tmp_path: Path) -> None:
    image = np.zeros((10, 20), dtype=np.uint8)
    image[:, 10:] = 200
    data = SegmentationData(
        [write_pair(tmp_path, "a", image, (image > 0) * np.uint8(255))],
        table=BINARY,
        image=ImageFormat(size=(40, 40), channels=3),
    )
    sample = data.sample(0, key=(0, 0, 0))
    assert sample["image"].shape == (3, 40, 40)
    assert torch.equal(sample["mask"], (sample["image"][0] > 100).byte())


def test_nearest_resizing_takes_pixel_centres() -> None:
    assert resize_mask(np.arange(4)[None], (1, 2)).tolist() == [[1, 3]]
    assert resize_mask(np.arange(2)[None], (2, 4)).tolist() == [[0, 0, 1, 1]] * 2


def test_a_cached_sample_is_the_same_and_outlives_its_file(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "a", GRAY, GRAY * 0)
    image = ImageFormat(size=(6, 8), channels=1)
    cached = SegmentationData([pair], table=BINARY, image=image)
    uncached = SegmentationData([pair], table=BINARY, image=image, cache_bytes=10)
    first = cached.sample(0, key=(0, 0, 0))
    pair.image.unlink()
    first["image"].zero_()
    assert np.array_equal(cached.sample(0, key=(0, 1, 0))["image"][0].numpy(), GRAY)
    with pytest.raises(DataError, match=r"a\.png"):
        uncached.sample(0, key=(0, 0, 0))
