"""The pages for custom loops are true: their code runs, block after block, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import halfstep as hs

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "own_loop.md").read_text()


@pytest.mark.parametrize("page", ["own_loop.md", "loop_kinds.md", "resume.md"])
def test_the_code_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), names)


def test_every_method_of_a_step_is_on_the_page() -> None:
    told = {
        "state_dict",
        "load_state_dict",
        "windows",
        "grad",
        "epoch_ended",
        "validated",
        "finish",
        "averaged",
        "plan",
    }
    assert all(f"step.{name}" in PAGE for name in told)
    called = set(re.findall(r"\bstep\.(\w+)\(", PAGE)) - {"plan"}
    assert all(hasattr(hs.Step, name) for name in called), called
