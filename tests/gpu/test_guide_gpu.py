"""The guide's memory estimate against what a GPU really takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.tune.step_cost import step_cost
from halfstep.workloads import from_dict
from halfstep.workloads.classification import build as image_classification
from halfstep.workloads.segmentation import build as unet


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("workload", "builder", "store", "batch_size"),
    [
        ("resnet50", image_classification, {"classes": ["a", "b"]}, 64),
        ("unet", unet, {"num_classes": 2, "channels": 3, "image_size": 512}, 4),
    ],
)
def test_the_memory_estimate_is_near_the_peak_of_real_steps(
    workload: str, builder: Any, store: dict[str, Any], batch_size: int, precision: str
) -> None:
    config = from_dict(workload, {"data.dir": "/data"}).config
    estimate = step_cost(config, store, precision).bytes_at(batch_size)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = builder.model_from_store(config, store).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9) if workload == "resnet50" else None
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    side = config.data.image_size
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            model(torch.zeros(batch_size, 3, side, side, device="cuda")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    taken = torch.cuda.max_memory_allocated() - before
    # Kernels' workspaces come on top, gradients are not alive at the peak of the activations: a third either way.
    assert 0.67 * taken < estimate < 1.5 * taken
