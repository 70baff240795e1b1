"""Helpers in files next to a script are followed, and what is wrong in them is reported for their own file only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halfstep_check.check import check
from halfstep_check.export import export_json
from halfstep_check.fix import BACKUP_SUFFIX, collect_changes, write

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


# --- files that a config names: read once, shown with the file that names them, never written ---

ACCELERATE = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: %s}\nnum_processes: 4\n"
WRONG_BATCH = '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}'


def accelerate_file(folder: Path, names: str) -> Path:
    path = folder / "accelerate.yaml"
    path.write_text(ACCELERATE % names)
    return path


def test_the_file_is_a_source_that_knows_who_names_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    path = accelerate_file(tmp_path, "ds.json")
    opened = check([path]).sources[1]
    assert opened.dialect == "deepspeed"
    assert str(opened.named_by) == f"{path}:2"


def test_a_path_from_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds.json").write_text('{"bf16": {"enabled": true}}')
    path = accelerate_file(tmp_path / "configs", "configs/ds.json")
    monkeypatch.chdir(tmp_path)
    assert len(check([path]).sources) == 2


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text('{"bf16": {"enabled": true}}')
    report = check([accelerate_file(tmp_path, "./ds.json"), ds])
    assert [source.named_by for source in report.sources] == [None, None]


def test_a_config_that_names_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"output_dir": "out", "bf16": true, "deepspeed": "args.json"}')
    assert len(check([path]).sources) == 1


def test_a_broken_file_is_unreadable_input(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": ')
    report = check([accelerate_file(tmp_path, "ds.json")])
    assert report.exit_code == 2
    assert "ds.json:1: not JSON" in report.unreadable[0].what


@pytest.mark.parametrize("name", ["gone.json", "/nowhere/gone.json", "x" * 5000 + ".json", "pipe.json", "folder.json"])
def test_what_is_no_file_is_said_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    report = check([accelerate_file(tmp_path, name)])
    assert [finding.rule for finding in report.findings] == ["missing-file"]
    assert report.exit_code == 0


def test_writing_leaves_a_file_alone_that_only_a_config_names(tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text(WRONG_BATCH)
    path = accelerate_file(tmp_path, "ds.json")
    report = check([path])
    assert [finding.rule for finding in report.findings if finding.edits] == ["batch-arithmetic"]
    assert write(collect_changes(report.findings, [str(path)]).edits) == []
    assert ds.read_text() == WRONG_BATCH
    assert not ds.with_name(ds.name + BACKUP_SUFFIX).exists()
    assert write(collect_changes(report.findings, [str(path), str(ds)]).edits) == [str(ds)]
