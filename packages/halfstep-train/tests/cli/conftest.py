"""What several tests of commands share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from halfstep.hardware.cache import measure_once
from halfstep.hardware.measure import Sizes, measure
from halfstep.hardware.probe import probe


@pytest.fixture(scope="module")
def known_rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured matmuls of small size in a cache of the file's own, so that no test takes ten seconds for them."""
    cache, image = tmp_path_factory.mktemp("cache"), (1, 4, 8)
    sizes = Sizes(matmul=16, image=image, copy_bytes=2**16, budget_s=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        measure_once(probe("cpu"), cache / "halfstep", functools.partial(measure, sizes=sizes))
        yield
