"""docs/own_loop.md is true: its code runs, block after block, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import halfstep as hs

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "own_loop.md").read_text()


def test_the_code_of_the_page_runs() -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) >= 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/own_loop.md", "exec"), names)


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
