"""What the pages say about versions of torch is what `make torch` stored."""

from __future__ import annotations

import json
import re
from pathlib import Path

from halfstep.step.torch_version import NEWEST_TESTED

ROOT = Path(__file__).resolve().parent.parent


def test_pages_state_the_versions_with_which_all_tests_pass() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "torch_versions.json").read_text())
    passed = [tuple(map(int, version.split("."))) for version, found in stored.items() if not found["failed"]]
    assert max(passed)[:2] == NEWEST_TESTED
    oldest, newest = (f"{version[0]}.{version[1]}" for version in (min(passed), max(passed)))
    assert f'"torch>={oldest}"' in (ROOT / "packages" / "halfstep" / "pyproject.toml").read_text()
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/captured_steps.md"):
        ranges = set(re.findall(r"torch \(?(2\.\d+ to 2\.\d+)", (ROOT / page).read_text()))
        assert ranges == {f"{oldest} to {newest}"}, page
