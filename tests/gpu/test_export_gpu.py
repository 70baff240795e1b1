"""torchvision, which is installed where GPUs are tested, loads what classifiers export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halfstep_train.use.evaluate import choose_plan, load_weights, open_run
from halfstep_train.use.export import export
from halfstep_train.workloads import build
from tiny_runs import Told, _run

pytestmark = pytest.mark.gpu
VIT = {"model.depth": 1, "model.dim": 32, "model.heads": 2, "model.patch": 16}
RESNET = {"model.width": 64, "model.stem": "imagenet", "model.blocks": [2, 2, 2, 2]}


@pytest.mark.parametrize(("workload", "settings"), [("resnet18", RESNET), ("vit_s_16", VIT)])
def test_torchvision_loads_what_classifiers_export(workload: str, settings: dict[str, Any], tmp_path: Path) -> None:
    models: Any = pytest.importorskip("torchvision.models")
    path = _run(workload, tmp_path / "run", {"train.max_steps": 2, "data.image_size": 32, **settings})
    report = Told(path).report
    export(path, to="safetensors", format="fp32", out=tmp_path / "out", report=report)
    run = open_run(path)
    trained = build(run.config, run.store).model
    trained = load_weights(run, trained, choose_plan(run, trained, device="cpu", precision="fp32"))
    if workload == "resnet18":
        public = models.resnet18(num_classes=10)
    else:
        public = models.VisionTransformer(
            image_size=32, patch_size=16, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=128, num_classes=10
        )
    public.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(public.eval()(x), trained(x), rtol=1e-4, atol=1e-5)
