"""The floor of a step: its counted arithmetic at the rate that this device's matmuls were measured at."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from halfstep.bench.runner import Problem
from halfstep.hardware.facts import Hardware

MATMUL_FORMAT = {"fp8": "fp8_e4m3", "bf16-true": "bf16"}
"""A precision's format in the measurements, where it has another name."""


def step_flops(problem: Problem) -> int:
    """Matmuls, convolutions and attention of forward and backward, counted on tensors without content where nothing but
    the model computes; 0 for a workload of several phases, whose arithmetic is not that of its validation loss."""
    if problem.num_phases > 1:
        return 0
    place = problem.device if problem.holds_tensors else torch.device("meta")
    received = {name: tensor.to(problem.device) for name, tensor in problem.host_batch.items()}
    prepared = {name: tensor.to(place) for name, tensor in problem.prepare(received).items()}
    model = problem.make_model().to(place).train()
    with FlopCounterMode(display=False) as counter:
        problem.loss(model, prepared).backward()
    return int(counter.get_total_flops())


def floor_s(flops: int, hardware: Hardware, precision: str) -> float | None:
    """The shortest step this arithmetic allows; None where the format's rate was not measured at full size."""
    measured = hardware.measured("matmul", MATMUL_FORMAT.get(precision, precision))
    return flops / (measured.tflops * 1e12) if flops and measured and not measured.small else None
