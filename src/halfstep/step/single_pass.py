"""AdamW, and Adam without decay, in a CUDA graph by a kernel of our own (adamw_triton.py).

It gives torch's bits and does not write gradients back.

Only inside a graph: torch's kernel leaves gradients scaled and clipped for whoever reads them after a step, and a
replayed step has none to read. Both give the same weights to the bit, so a run may mix them.

A graph replays fixed addresses, and only during the capture is it known where gradients lie. So the table of addresses
is made before the capture, empty, from memory that is not the graph's (its own pool gives a block to several tensors in
turn); the capture notes the addresses, and `fill` writes them when it is over, before anything is replayed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.step.flat import is_dense

ALIGNMENT = 16
"""Bytes of one access."""


def takes(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the kernel can do the work of this optimizer on this device."""
    # The exact classes, and without hooks: it is not their step() that runs.
    is_plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return is_plain and has_triton and all(_takes_group(optimizer, group, device) for group in optimizer.param_groups)


def _takes_group(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    is_other = group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]
    # Adam adds the decay to the gradient, and there torch 2.11's kernel rounds as ours does not (seen on an H200).
    is_other |= bool(group["weight_decay"]) and not group["decoupled_weight_decay"]
    rate = group["lr"]
    has_numbers = not any(isinstance(beta, Tensor) for beta in group["betas"])
    has_rate = not isinstance(rate, Tensor) or (rate.device == device and rate.dtype == torch.float32)
    return not is_other and has_numbers and has_rate and all(
        _is_like(parameter, parameter, device) and _fits(optimizer.state.get(parameter), parameter, device)
        for parameter in group["params"]
    )  # fmt: skip


def _fits(state: dict[str, Tensor] | None, parameter: Tensor, device: torch.device) -> bool:
    """A parameter that never had a gradient has no state, and nothing is done to it."""
    if not state:
        return True
    moments = (state["exp_avg"], state["exp_avg_sq"])
    return state["step"].device == device and all(_is_like(moment, parameter, device) for moment in moments)


def _is_like(tensor: Tensor, parameter: Tensor, device: torch.device) -> bool:
    """Whether it lies in memory as the parameter does, so that the kernel can walk both as vectors."""
    strides = zip(tensor.stride(), parameter.stride(), parameter.shape, strict=True)
    return (
        tensor.device == device
        and tensor.dtype == torch.float32
        and tensor.numel() > 0
        and is_dense(tensor)
        and all(one == other for one, other, size in strides if size > 1)  # of a single entry it means nothing
        and tensor.data_ptr() % ALIGNMENT == 0
    )


class GroupPass:
    """The kernel's table for one parameter group."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
        from halfstep.step import adamw_triton

        self.optimizer, self.group, self.device = optimizer, group, device
        parameters: list[Tensor] = group["params"]
        self.table = torch.zeros(adamw_triton.FIELDS, len(parameters), dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(parameters), dtype=torch.float32, device=device)
        self.betas = torch.tensor([float(beta) for beta in group["betas"]], dtype=torch.float32, device=device)
        self.chunks = _chunks([p.numel() for p in parameters], adamw_triton.BLOCK * adamw_triton.TILES).to(device)
        self.noted: Tensor | None = None

    @property
    def fits_gradients(self) -> bool:
        trained = [p for p in self.group["params"] if p.grad is not None]
        return all(_is_like(p.grad, p, self.device) for p in trained)

    def run(self, bad: Tensor, factor: Tensor | None) -> None:
        """Launch the kernels, which do nothing as long as the table is empty."""
        from halfstep.step import adamw_triton

        group = self.group
        adamw_triton.count(self.table, self.counts, bad)
        adamw_triton.update(
            self.table, self.chunks, self.betas[:, None].pow(self.counts),
            _on_device(group["lr"], self.device), _on_device(1.0 if factor is None else factor, self.device), bad,
            betas=(float(group["betas"][0]), float(group["betas"][1])), eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )  # fmt: skip

    def note(self) -> None:
        """Remember where everything lies now."""
        self.noted = torch.tensor([self._entry(p) for p in self.group["params"]], dtype=torch.int64).T.contiguous()

    def fill(self) -> None:
        if self.noted is not None:
            self.table.copy_(self.noted)

    def _entry(self, parameter: Tensor) -> list[int]:
        if parameter.grad is None:
            return [0] * len(self.table)
        state = self.optimizer.state[parameter]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
        return [*(tensor.data_ptr() for tensor in tensors), parameter.numel()]


class SinglePass:
    """An optimizer's part of one captured step; to be kept as long as the graph is."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.groups = [GroupPass(optimizer, group, device) for group in optimizer.param_groups if group["params"]]
        for group in self.groups:  # a kernel is loaded by its first launch, which a capture may not allow
            group.run(torch.zeros((), dtype=torch.bool, device=device), None)

    @property
    def fits_gradients(self) -> bool:
        return all(group.fits_gradients for group in self.groups)

    def record(self, bad: Tensor, factor: Tensor | None) -> None:
        """The captured part of a commit."""
        for group in self.groups:
            group.run(bad, factor)
            group.note()

    def fill(self) -> None:
        """After the capture: let the kernel know the addresses."""
        for group in self.groups:
            group.fill()


def _on_device(value: Tensor | float, device: torch.device) -> Tensor:
    return value.float() if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float32, device=device)


def _chunks(lengths: list[int], size: int) -> Tensor:
    """Which parameter, and which part of it, each program works on."""
    counts = torch.tensor([-(-length // size) for length in lengths], dtype=torch.int64)
    column = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    part = torch.arange(len(column)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack([column, part], dim=1).int()
