"""AdamW, also on bf16 weights, and Adam without decay, by our kernel inside a CUDA graph (adamw_triton.py).

The kernel is bit-identical to torch's and does not write gradients back.

It runs only inside a graph: torch's kernel leaves gradients scaled and clipped for code that reads them after a step,
and a replayed step has none to read. Both kernels give the same bits, so a run may mix them.

A graph replays fixed addresses, and the gradients' addresses are known only during the capture. So the table of
addresses is allocated empty before the capture, outside the graph's memory pool (which gives one block to several
tensors in turn). The capture records the addresses, and `fill` writes them afterwards, before the first replay.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.step.flat import is_dense
from halfstep.step.optim.adamw_bf16 import LOW, AdamWBf16
from halfstep.step.optim.half_weights import NUMBERS, STEPS, hash_numbers, is_kept_in_half

ALIGNMENT = 16  # bytes of one access


def can_run_single_pass(optimizer: Optimizer, device: torch.device) -> bool:
    # Exact classes without hooks only: their own step() does not run.
    is_plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, AdamWBf16) and not (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return is_plain and has_triton and all(_takes_group(optimizer, group, device) for group in optimizer.param_groups)


def _takes_group(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    is_other = any(group.get(name) for name in ("amsgrad", "maximize", "differentiable")) or not group["fused"]
    # Adam adds the decay to the gradient, where torch 2.11's kernel rounds differently from ours (seen on an H200).
    is_other |= bool(group["weight_decay"]) and not group.get("decoupled_weight_decay", True)
    if isinstance(optimizer, AdamWBf16):
        kinds = {parameter.dtype for parameter in group["params"]}
        # A launch takes weights of one type, and counts no lost updates.
        is_other |= len(kinds) > 1 or torch.bfloat16 in kinds and optimizer.rounding == "nearest"
    rate = group["lr"]
    has_numbers = not any(isinstance(beta, Tensor) for beta in group["betas"])
    has_rate = not isinstance(rate, Tensor) or (rate.device == device and rate.dtype == torch.float32)
    return not is_other and has_numbers and has_rate and all(_takes_one(optimizer, p, device) for p in group["params"])


def _takes_one(optimizer: Optimizer, parameter: Tensor, device: torch.device) -> bool:
    is_ours = _is_known(optimizer, parameter) and _is_like(parameter, parameter, device, parameter.dtype)
    return is_ours and _fits(optimizer.state.get(parameter), parameter, device)


def _is_known(optimizer: Optimizer, parameter: Tensor) -> bool:
    """True for optimizers that the kernel reproduces; torch's keep moments of bf16 weights in bf16, which it does
    not."""
    return parameter.dtype == torch.float32 or isinstance(optimizer, AdamWBf16) and is_kept_in_half(parameter)


def _fits(state: dict[str, Tensor] | None, parameter: Tensor, device: torch.device) -> bool:
    """True if the kernel can update this parameter. One that never had a gradient has no state and is skipped."""
    if not state:
        return True
    moments = (state["exp_avg"], state["exp_avg_sq"])
    is_whole = LOW not in state or _is_like(state[LOW], parameter, device, torch.int16)
    return is_whole and state["step"].device == device and all(_is_like(m, parameter, device) for m in moments)


def _is_like(tensor: Tensor, parameter: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """True if the tensor has the parameter's memory layout, so that the kernel can read both as vectors."""
    strides = zip(tensor.stride(), parameter.stride(), parameter.shape, strict=True)
    return (
        tensor.device == device
        and tensor.dtype == dtype
        and tensor.numel() > 0
        and is_dense(tensor)
        # The stride of a dimension of size 1 is irrelevant.
        and all(one == other for one, other, size in strides if size > 1)
        and tensor.data_ptr() % ALIGNMENT == 0
    )


class GroupPass:
    def __init__(self, optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
        from halfstep.step.optim import adamw_triton

        self.optimizer, self.group, self.device = optimizer, group, device
        parameters: list[Tensor] = group["params"]
        self.table = torch.zeros(adamw_triton.FIELDS, len(parameters), dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(parameters), dtype=torch.float32, device=device)
        self.betas = torch.tensor([float(beta) for beta in group["betas"]], dtype=torch.float32, device=device)
        self.chunks = make_chunks([p.numel() for p in parameters], adamw_triton.BLOCK * adamw_triton.TILES).to(device)
        self.noted: Tensor | None = None
        self.weight_type, self.gradient_type = parameters[0].dtype, torch.float32
        self.rounding = optimizer.rounding if isinstance(optimizer, AdamWBf16) else "nearest"
        self.is_half = is_kept_in_half(parameters[0])
        self.names = torch.tensor([self._name_of(p) for p in parameters], device=device)

    def _name_of(self, parameter: Tensor) -> int:
        """Return the number that makes this parameter's random bits distinct, as in `half_weights.make_key`."""
        if not isinstance(self.optimizer, AdamWBf16):
            return 0
        return hash_numbers(self.optimizer.seed * NUMBERS + self.optimizer.numbers[parameter])

    @property
    def fits_gradients(self) -> bool:
        trained = [p for p in self.group["params"] if p.grad is not None]
        kinds = {p.grad.dtype for p in trained} or {torch.float32}
        if len(kinds) > 1 or not kinds <= ({torch.float32, torch.bfloat16} if self.is_half else {torch.float32}):
            return False
        (self.gradient_type,) = kinds
        return all(_is_like(p.grad, p, self.device, self.gradient_type) for p in trained)

    def run(self, bad: Tensor, factor: Tensor | None) -> None:
        """Launch the kernels, which do nothing as long as the table is empty."""
        from halfstep.step.optim import adamw_triton
        from halfstep.step.optim import half_weights_triton as ways

        group = self.group
        adamw_triton.count(self.table, self.counts, bad)
        hows = {"split": ways.SPLIT, "stochastic": ways.STOCHASTIC, "nearest": ways.NEAREST}
        how = hows[self.rounding] if self.is_half else ways.NEAREST
        keys = hash_numbers(self.counts.long() * STEPS + self.names) if how == ways.STOCHASTIC else None
        adamw_triton.update(
            self.table, self.chunks, self.betas[:, None].pow(self.counts),
            _to_device(group["lr"], self.device), _to_device(1.0 if factor is None else factor, self.device), bad,
            betas=(float(group["betas"][0]), float(group["betas"][1])), eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]), how=how, keys=keys,
            weight_type=self.weight_type, gradient_type=self.gradient_type,
        )  # fmt: skip

    def load(self, good: Tensor) -> None:
        """Load the kernel by a first launch, which may not be allowed inside a capture."""
        for kind in (torch.bfloat16, torch.float32) if self.is_half else (torch.float32,):
            self.gradient_type = kind
            self.run(good, None)

    def note(self) -> None:
        self.noted = torch.tensor([self._entry(p) for p in self.group["params"]], dtype=torch.int64).T.contiguous()

    def fill(self) -> None:
        if self.noted is not None:
            self.table.copy_(self.noted)

    def _entry(self, parameter: Tensor) -> list[int]:
        if parameter.grad is None:
            return [0] * len(self.table)
        state = self.optimizer.state[parameter]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
        low = state[LOW].data_ptr() if LOW in state else 0
        return [*(tensor.data_ptr() for tensor in tensors), parameter.numel(), low]


class SinglePass:
    """An optimizer's part of one captured step; keep it as long as the graph."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.groups = [GroupPass(optimizer, group, device) for group in optimizer.param_groups if group["params"]]
        for group in self.groups:
            group.load(torch.zeros((), dtype=torch.bool, device=device))

    @property
    def fits_gradients(self) -> bool:
        return all(group.fits_gradients for group in self.groups)

    def record(self, bad: Tensor, factor: Tensor | None) -> None:
        for group in self.groups:
            group.run(bad, factor)
            group.note()

    def fill(self) -> None:
        """Fill in the addresses after the capture."""
        for group in self.groups:
            group.fill()


def _to_device(value: Tensor | float, device: torch.device) -> Tensor:
    return value.float() if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float32, device=device)


def make_chunks(lengths: list[int], size: int) -> Tensor:
    """Return which slice of which parameter each kernel program works on."""
    counts = torch.tensor([-(-length // size) for length in lengths], dtype=torch.int64)
    column = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    part = torch.arange(len(column)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack([column, part], dim=1).int()
