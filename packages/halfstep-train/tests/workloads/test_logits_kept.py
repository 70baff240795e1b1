"""What a loss keeps of the logits for its backward: compiled, nothing in fp32 that is as large as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfstep_train.workloads.classification.scores import classification_loss
from halfstep_train.workloads.segmentation.scores import segmentation_loss

PARTITIONED = "aot_eager_decomp_partition"
"""inductor's own choice of what is kept and what is computed again, without a C++ compiler."""

MASK = torch.arange(4 * 16 * 16).view(4, 16, 16) % 2
LABEL = {"label": torch.arange(32) % 10}
MIXED = {**LABEL, "label_b": LABEL["label"].roll(1), "lam": torch.full((32,), 0.3)}


def large_kept(loss: Callable[[Tensor], Tensor], logits: Tensor) -> list[torch.dtype]:
    """The formats of what is kept for backward and has as many values as the logits; booleans aside."""
    found: dict[int, Tensor] = {}

    def seen(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss(logits.clone().requires_grad_())
    return [t.dtype for t in found.values() if t.numel() >= logits.numel() and t.dtype.is_floating_point]


@pytest.mark.parametrize(
    ("loss", "shape", "num_eager"),
    [
        (lambda logits: segmentation_loss(logits, MASK), (4, 2, 16, 16), 3),
        (lambda logits: classification_loss(logits, LABEL), (32, 10), 1),
        (lambda logits: classification_loss(logits, MIXED, smoothing=0.1), (32, 10), 2),
    ],
)
def test_a_compiled_loss_keeps_the_logits_in_their_own_format_only(
    loss: Callable[[Tensor], Tensor], shape: tuple[int, ...], num_eager: int
) -> None:
    logits = torch.linspace(-3, 3, torch.Size(shape).numel()).view(shape).bfloat16()
    assert large_kept(loss, logits) == [torch.float32] * num_eager  # eager has nobody to fuse it
    torch.compiler.reset()
    compiled = torch.compile(loss, backend=PARTITIONED, dynamic=False)
    compiled(logits.clone().requires_grad_()).backward()
    assert large_kept(compiled, logits) == [torch.bfloat16]
