"""Library bugs on a real GPU: those of cuDNN are found where they are known, and halfstep shields from all."""

from __future__ import annotations

import pytest
import torch

from halfstep.precision.contexts import has_cudnn_fault
from halfstep_train.use.library_bugs import find_bugs

pytestmark = pytest.mark.gpu


def test_every_bug_of_this_gpu_is_found_and_shielded_from() -> None:
    findings = {finding.bug.name: finding for finding in find_bugs("cuda")}
    assert [name for name, finding in findings.items() if not finding.is_shielded] == []
    # If this fails because cuDNN is fixed, has_cudnn_fault can ask for its version.
    assert findings["cudnn-attention"].is_here == has_cudnn_fault("cuda")
    assert findings["fused-sgd"].is_here
    assert findings["emulated-bf16"].is_here == (torch.cuda.get_device_capability()[0] < 8)
