"""The pages on integrations are true: their code runs, block after block, and shows what the text says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PAGES = Path(__file__).resolve().parents[4] / "docs" / "integrations"


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    state = pytest.importorskip("accelerate.state")
    yield
    for kind in (state.AcceleratorState, state.PartialState, state.GradientState):
        kind._reset_state()


@pytest.mark.parametrize(("page", "shown"), [
    ("accelerate", "sample 20: ['x'][0] is nan"), ("transformers", "sample 20: ['x'][3] is nan"), ("diffusers", ""),
])  # fmt: skip
def test_the_code_of_the_page_runs(
    page: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(page)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    text = (PAGES / f"{page}.md").read_text()
    names: dict[str, object] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dropped steps, and of capsules
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            exec(compile(block, f"docs/integrations/{page}.md", "exec"), names)
    assert shown in capsys.readouterr().out


def test_the_line_of_the_page_on_accelerate_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (PAGES / "accelerate.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(blocks[0], "docs/integrations/accelerate.md", "exec"), {"__name__": "page"})
    (line,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert " ".join(line.split()) in " ".join(capsys.readouterr().err.split())
