from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfstep.errors import DataError
from halfstep_train.data.image_folder import FolderLayout, Listing, find_images
from halfstep_train.workloads.classification.demo import CLASSES, draw_image, write_demo


def pixels_of(listing: Listing, side: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    images = [Image.open(path).resize((side, side), Image.Resampling.BOX) for path in listing.paths]
    return np.stack([np.asarray(image, dtype=np.float64).ravel() / 255 for image in images])


@pytest.mark.slow
def test_a_linear_model_on_its_pixels_stays_under_sixty_percent(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo")
    folder = find_images(tmp_path / "demo", FolderLayout())
    assert folder.classes == CLASSES
    train, val = pixels_of(folder.train, 32), pixels_of(folder.val, 32)
    train, val = train - train.mean(axis=0), val - train.mean(axis=0)
    targets = np.eye(len(CLASSES))[list(folder.train.labels)] - 1 / len(CLASSES)
    similar, eye = train @ train.T, np.eye(len(train))
    scores = []
    for ridge in (1, 10, 100, 1000):  # the best of them on the validation set, so if anything too high
        predicted = (val @ train.T @ np.linalg.solve(similar + ridge * eye, targets)).argmax(axis=1)
        scores.append((predicted == np.array(folder.val.labels)).mean())
    assert 0.1 < max(scores) < 0.6


def test_the_same_seed_draws_the_same_images_and_another_one_others() -> None:
    first, again, other = (draw_image("rings_fine", np.random.default_rng([seed, 1]), 32) for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()


def test_nothing_is_overwritten_and_nothing_half_made_is_left(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    with pytest.raises(DataError, match="exists already"):
        write_demo(tmp_path / "demo")
    with pytest.raises(ValueError, match="side|dimension|width"):
        write_demo(tmp_path / "other", side=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
