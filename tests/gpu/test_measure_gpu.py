from __future__ import annotations

import pytest
import torch

from halfstep.hardware.memory import describe_memory, get_peak_memory_bytes, reset_peak
from halfstep.hardware.nvml import EnergyMeter

pytestmark = pytest.mark.gpu


def test_the_peak_is_what_was_allocated_at_once() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    reset_peak(device)
    base = torch.cuda.memory_allocated(device)
    in_graphs = get_peak_memory_bytes(device)
    assert in_graphs is not None
    size = in_graphs - base + 2**28  # more than graphs of earlier tests in this process keep
    block = torch.empty(size, dtype=torch.uint8, device=device)
    del block
    peak = get_peak_memory_bytes(device)
    assert peak is not None
    assert size <= peak - base < size + 2**21


def test_the_peak_counts_what_a_captured_graph_holds() -> None:
    device = torch.device("cuda")
    source = torch.ones(2**26, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total = (source * 2).sum()
    reset_peak(device)
    graph.replay()
    peak = get_peak_memory_bytes(device)
    assert float(total) == 2**27
    assert peak is not None
    assert peak >= source.nbytes * 2


def test_a_busy_gpu_uses_energy() -> None:
    device = torch.device("cuda")
    meter = EnergyMeter(device)
    if meter.read_joules() is None:
        pytest.skip("this GPU's energy counter cannot be read: this was NOT tested")
    a = torch.randn(8192, 8192, device=device)
    for _ in range(50):
        a = (a @ a).clamp(-1, 1)
    torch.cuda.synchronize()
    joules = meter.read_joules()
    assert joules is not None
    assert joules > 1.0


def test_the_picture_names_the_device_and_what_torch_holds() -> None:
    picture = describe_memory(torch.device("cuda"))
    assert torch.cuda.get_device_name() in picture
    assert "in torch's tensors" in picture
