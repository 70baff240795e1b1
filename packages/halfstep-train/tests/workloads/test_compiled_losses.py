"""Losses compute in fp32, but compiled they keep no fp32 copy of the logits for their backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfstep_train.workloads.classification.scores import classification_loss
from halfstep_train.workloads.segmentation.scores import segmentation_loss


def of_masks(logits: Tensor) -> Tensor:
    return segmentation_loss(logits, torch.arange(len(logits) * 256, dtype=torch.uint8).view(-1, 16, 16) % 2)


def of_labels(logits: Tensor) -> Tensor:
    return classification_loss(logits, {"label": torch.arange(len(logits))}, smoothing=0.1)


@pytest.mark.parametrize(("loss", "shape"), [(of_masks, (2, 2, 16, 16)), (of_labels, (8, 100))])
def test_of_the_logits_only_their_own_format_is_kept(loss: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(loss, backend="aot_eager_decomp_partition", fullgraph=True)
    kept = compiled(logits).grad_fn.saved_tensors
    assert [tensor.dtype for tensor in kept if tensor.numel() >= logits.numel()] == [torch.bfloat16]
