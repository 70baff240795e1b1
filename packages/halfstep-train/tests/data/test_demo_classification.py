from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfstep.errors import DataError
from halfstep_train.workloads.classification.demo import draw_image, write_demo


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
