"""The pages for custom loops are true: their code runs, block after block, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from doc_pages import blocks

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("page", ["own_loop.md", "loop_kinds.md", "resume.md", "from_plain_amp.md"])
def test_the_code_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), names)


def test_both_loops_of_the_page_on_plain_amp_train_the_same_weights() -> None:
    setup, before, after, *_ = (block.text for block in blocks(DOCS / "from_plain_amp.md", "python"))
    in_fp32 = {"torch.float16)": "torch.float16, enabled=False)", '"auto"': '"fp32"'}
    trained = []
    for loop in (before, after):
        names: dict[str, Any] = {}
        for code in (setup, loop):
            for old, new in in_fp32.items():
                code = code.replace(old, new)
            exec(compile(code, "docs/from_plain_amp.md", "exec"), names)
        trained.append(names["model"].state_dict())
    # Mean of means against one weighted mean: both round, six AdamW steps of 1e-3 each.
    torch.testing.assert_close(*trained, rtol=0, atol=1e-6)


def test_the_lines_for_nanogpt_train_a_model_with_its_signature() -> None:
    """Names are those of nanoGPT's train.py; its model takes (x, y) and returns (logits, loss)."""

    class Tiny(nn.Embedding):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = super().forward(x)
            return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    model = Tiny(8, 8)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    tokens = torch.arange(12).remainder(8).view(2, 6)
    names: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "ptdtype": torch.float32, "grad_clip": 1.0, "max_iters": 1,
        "gradient_accumulation_steps": 4, "get_batch": lambda split: (tokens[:, :-1], tokens[:, 1:]),
    }  # fmt: skip
    for block in blocks(DOCS / "from_nanogpt.md", "python"):
        exec(compile(block.text, block.where, "exec"), names)
    assert names["outcome"].committed
    assert not torch.equal(before, model.weight)
