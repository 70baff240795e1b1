from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.errors import DataError
from halfstep_train.data.binary_sets import find_idx_folder, read_idx
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.classification.data import ImageData, open_image_data


def idx_bytes(values: np.ndarray) -> bytes:  # type: ignore[type-arg]
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    return header + values.astype(np.uint8).tobytes()


def write_idx(folder: Path, *, mark: str = "-", packed: bool = False) -> np.ndarray:  # type: ignore[type-arg]
    """Ten training and four test images; gives the training pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    made = {}
    for part, count in (("train", 10), ("t10k", 4)):
        pixels = generator.integers(0, 256, (count, 28, 28))
        made[part] = pixels
        for kind, values in (("images", pixels), ("labels", np.arange(count) % 10)):
            path = folder / f"{part}-{kind}{mark}idx{values.ndim}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(idx_bytes(values)) if packed else idx_bytes(values))
    return made["train"]


def opened(folder: Path) -> ImageData:
    config = from_dict("resnet18", {"data": {"dir": str(folder), "image_size": 28}}).config
    return open_image_data(config.data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("below", "mark", "packed"), [("", "-", False), ("", ".", False), ("MNIST/raw", "-", False), ("raw", "-", True)]
)
def test_idx_files_are_a_classifiers_data_with_the_test_part_as_validation(
    tmp_path: Path, below: str, mark: str, packed: bool
) -> None:
    pixels = write_idx(tmp_path / below, mark=mark, packed=packed)
    data = opened(tmp_path)
    assert data.classes == tuple("0123456789")
    assert (len(data.train), len(data.val)) == (10, 4)
    sample = data.train.sample(3, key=(0, 0, 3))
    assert int(sample["label"]) == 3
    assert torch.equal(sample["image"], torch.from_numpy(pixels[3].astype(np.uint8))[..., None].expand(-1, -1, 3))
    assert data.val.sample(1, key=(0, 0, 1))["image"].shape == (28, 28, 3)
    assert "idx" in data.about[0][1]


def test_a_folder_without_idx_files_is_none(tmp_path: Path) -> None:
    assert find_idx_folder(tmp_path) is None


def test_a_missing_a_cut_and_a_strange_file_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte is not an idx file"):
        read_idx(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"0 bytes|no idx file"):
        read_idx(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "t10k-labels-idx1-ubyte").rename(tmp_path / "t10k-labels-idx1-ubyte.gz")
    with pytest.raises(DataError, match=r"cannot read .*t10k-labels"):
        read_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="no t10k-labels-idx1-ubyte"):
        read_idx(tmp_path)
