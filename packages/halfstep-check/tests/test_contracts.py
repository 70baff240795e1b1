"""Calls that torch.amp refuses: a device that is missing, or has another name."""

from __future__ import annotations

import ast

import pytest

from halfstep_check.lint import lint_tree

HEAD = "import torch\ndevice = torch.device('cuda')\ncfg = load()\n"
REFUSED = (
    "torch.amp.autocast(enabled=cfg.amp)",
    "torch.cuda.amp.autocast(device_type='cuda')",
)
TAKEN = (
    "torch.autocast(device.type)",
    "torch.autocast('cuda:0', dtype=cfg.amp)",
    "torch.autocast(device_type=cfg.device, dtype=torch.float16, enabled=cfg.use_amp)",
    "torch.cuda.amp.autocast(cfg.use_amp)",
)


def refused(call: str) -> bool:
    text = f"{HEAD}with {call}:\n    y = x @ x\n"
    return "launch-refused" in {finding.rule for finding in lint_tree(ast.parse(text), text, "train.py")}


@pytest.mark.parametrize("call", [*REFUSED, *TAKEN])
def test_calls_that_torch_refuses_are_found_and_no_others(call: str) -> None:
    assert refused(call) == (call in REFUSED)


def test_a_scaler_given_a_device_type_is_found() -> None:
    text = f"{HEAD}scaler = torch.amp.GradScaler(device_type='cuda')\n"
    assert "launch-refused" in {finding.rule for finding in lint_tree(ast.parse(text), text, "train.py")}


@pytest.mark.parametrize(
    ("made", "scale"),
    [
        ("torch.amp.GradScaler('cuda')", "65536"),
        ("torch.amp.GradScaler('cuda', init_scale=1024)", "1024"),
        ("torch.cuda.amp.GradScaler(2.0**14)", "16384"),
        ("torch.amp.GradScaler('cuda', cfg.scale)", "cfg.scale"),
    ],
)
def test_a_step_past_the_scaler_names_the_scale_it_starts_at(made: str, scale: str) -> None:
    text = f"{HEAD}scaler = {made}\nfor x in loader:\n    scaler.scale(net(x)).backward()\n    optimizer.step()\n"
    messages = [f.message for f in lint_tree(ast.parse(text), text, "train.py") if f.rule == "step-bypasses-scaler"]
    assert f"steps {scale} times too long" in messages[0]
