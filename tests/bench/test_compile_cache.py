"""Runs compile_cache_alone.py in a process without Triton's interpreter, which other tests leave behind in theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_our_own_kernels_count_as_compiled_code() -> None:
    alone = Path(__file__).with_name("compile_cache_alone.py")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(alone)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "6 passed" in done.stdout
