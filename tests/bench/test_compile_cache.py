"""Runs compile_cache_alone.py in a process without Triton's interpreter, which other tests leave behind in theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from warm_processes import process

pytest.importorskip("triton")


def run_alone(path: str) -> None:
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", path]))


def test_our_own_kernels_count_as_compiled_code(tmp_path: Path) -> None:
    alone, said = Path(__file__).with_name("compile_cache_alone.py"), tmp_path / "said"
    with process(run_alone, str(alone), output=said) as apart:
        apart.join(timeout=300)
        assert apart.exitcode == 0, said.read_text()[-2000:]
    assert "6 passed" in said.read_text()
