"""Let torchvision import next to a CPU build of torch: define the operators that its library would.

torchvision's wheels are built against torch's CUDA builds. Next to a CPU build its library does not load, and the
import fails where it registers shape functions for operators that do not exist. No test calls them."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")


def define_missing_operators() -> None:
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
