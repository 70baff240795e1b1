"""The pages on integrations are true: their code runs, block after block, and shows what the text says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from doc_pages import ROOT, blocks
from host_pages import run_page


@pytest.mark.parametrize(("page", "shown"), [
    ("accelerate", "sample 20: ['x'][0] is nan"), ("transformers", "sample 20: ['x'][3] is nan"), ("diffusers", ""),
])  # fmt: skip
def test_the_code_of_the_page_runs(
    page: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(page)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    run_page(page)
    assert shown in capsys.readouterr().out


def test_the_line_of_the_page_on_accelerate_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "integrations" / "accelerate.md"
    first, *_ = blocks(page, "python")
    exec(compile(first.text, first.where, "exec"), {"__name__": "page"})
    (line,) = blocks(page, "text")
    assert " ".join(line.text.split()) in " ".join(capsys.readouterr().err.split())
