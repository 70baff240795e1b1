"""Accelerate keeps its state in class attributes for the life of a process: each test begins without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from host_faults import reset_accelerate


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    yield
    reset_accelerate()
