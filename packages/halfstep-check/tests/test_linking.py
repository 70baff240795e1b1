"""Helpers in files next to a script are followed, and what is wrong in them is reported for their own file only."""

from __future__ import annotations

from pathlib import Path

from halfstep_check.check import check
from halfstep_check.export import export_json

HELPER = """
import torch

class Precision:
    def __init__(self):
        self.gs = torch.amp.GradScaler("cuda")

    def go(self, loss):
        self.gs.scale(loss).backward()

    def unscale(self, opt):
        self.gs.unscale_(opt)

    def finish(self, opt):
        self.gs.step(opt)
        self.gs.update()
"""
SCRIPT = """
import torch
from training.amp import Precision

helper = Precision()
for x in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    helper.go(loss)
    {unscale}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    helper.finish(opt)
"""


def rules_found(folder: Path, unscale: str, helper: str = HELPER) -> list[tuple[str, int]]:
    (folder / "training").mkdir()
    (folder / "training" / "amp.py").write_text(helper)
    (folder / "train.py").write_text(SCRIPT.format(unscale=unscale))
    return [(f["rule"], f["line"]) for f in export_json(check([folder / "train.py"]))["findings"]]


def test_a_clip_on_gradients_that_a_helper_of_another_file_scaled_is_found(tmp_path: Path) -> None:
    assert rules_found(tmp_path, "pass") == [("clip-before-unscale", 12)]


def test_the_helpers_own_unscale_is_seen(tmp_path: Path) -> None:
    assert rules_found(tmp_path, "helper.unscale(opt)") == []


def test_what_is_wrong_in_the_helper_is_not_reported_for_the_script(tmp_path: Path) -> None:
    wrong = HELPER + "\n    def bad(self):\n        self.gs.clip_grad_norm_(1.0)\n"
    assert rules_found(tmp_path, "helper.unscale(opt)", wrong) == []
    assert [f["rule"] for f in export_json(check([tmp_path / "training" / "amp.py"]))["findings"]] == ["scaler-misused"]


def test_a_helper_that_is_not_python_is_left_alone(tmp_path: Path) -> None:
    assert rules_found(tmp_path, "pass", "GradScaler (") == []
