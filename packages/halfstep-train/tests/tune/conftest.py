from __future__ import annotations

from pathlib import Path

import pytest

from halfstep_train.workloads.segmentation.demo import write_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs that tests read and leave as they are."""
    folder = tmp_path_factory.mktemp("data") / "demo"
    write_demo(folder, num_images=7, side=16)
    return folder
