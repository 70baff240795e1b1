"""AdamW whose two moments take a byte per value (Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization).

A moment is a code (codes.py) times one scale for each block of 256. A step decodes, updates in fp32 and encodes again,
so weights see exact arithmetic on rounded moments: on CUDA in one kernel per parameter (adamw8bit_triton.py), elsewhere
in its twin, `update`. Parameters below MIN_VALUES keep fp32 moments, since norms and biases are few and sensitive, and
are updated together by torch's fused AdamW. half_weights.py describes how bf16 weights are read and stored.

torchao has the same optimizer, and ours gives the same numbers. torchao's was not used because its state is a tensor
subclass that safetensors cannot store, its step counter is on the host, so a captured step would never count, and it
does not support found_inf. Here the kernel itself drops a bad step, as in torch's fused optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.step.flat import is_dense, view_flat, view_like
from halfstep.step.optim.adamw_bf16 import LOW, MOMENTS, JudgedAdamW, Setting, lay_out_like
from halfstep.step.optim.codes import (
    BLOCK,
    SMALLEST_SCALE,
    encode_signed,
    encode_unsigned,
    make_signed_table,
    make_unsigned_table,
)
from halfstep.step.optim.half_weights import is_kept_in_half, make_key

MIN_VALUES = 4096  # the bound of bitsandbytes and torchao


class AdamW8bit(JudgedAdamW):
    def _update_on(self, device: torch.device, parameters: list[Tensor], group: dict[str, Any]) -> None:
        self._update_all(parameters, self._setting(group, device))

    def _setting(self, group: dict[str, Any], device: torch.device) -> Setting:
        scale = getattr(self, "grad_scale", None)
        return Setting(
            lr=_to_device(group["lr"], device),
            found_inf=_to_device(getattr(self, "found_inf", 0.0), device),
            grad_scale=scale if scale is None else _to_device(scale, device),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def make_low_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: flatten(value) for name, value in super().make_low_state(parameter).items()}

    def _update_all(self, parameters: list[Tensor], setting: Setting) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(make_state(parameter) | self.make_low_state(parameter))
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, [(setting.found_inf == 0).float()] * len(steps))
        pieces = [StatePiece.of(parameter, state) for parameter, state in zip(parameters, states, strict=True)]
        self._update_exact([piece for piece in pieces if not piece.is_coded], setting)
        self._update_coded([piece for piece in pieces if piece.is_coded], setting)
        for piece in pieces:
            piece.put_back(scaled=setting.grad_scale is not None)

    def _update_exact(self, pieces: Sequence[StatePiece], setting: Setting) -> None:
        """Update all parameters at once, half-precision ones as fp32 copies: torch's kernel needs one dtype."""
        if not pieces:
            return
        weights = [self.read(piece.parameter, piece.weights, piece.state) for piece in pieces]
        gradients = [piece.gradients.float() for piece in pieces]
        first, second = ([piece.state[name] for piece in pieces] for name in MOMENTS)
        torch._fused_adamw_(
            weights, gradients, first, second, [], [piece.state["step"] for piece in pieces],
            lr=setting.lr, beta1=setting.betas[0], beta2=setting.betas[1], weight_decay=setting.weight_decay,
            eps=setting.eps, amsgrad=False, maximize=False, grad_scale=setting.grad_scale, found_inf=setting.found_inf,
        )  # fmt: skip
        for piece, weight, gradient in zip(pieces, weights, gradients, strict=True):
            self.write(piece.parameter, piece.weights, weight, piece.state)
            if gradient is not piece.gradients and setting.grad_scale is not None:
                piece.gradients.copy_(gradient)

    def _update_coded(self, pieces: Sequence[StatePiece], setting: Setting) -> None:
        if not pieces:
            return
        steps = [piece.state["step"] for piece in pieces]
        corrections = zip(*(_compute_corrections(steps, beta) for beta in setting.betas), strict=True)
        for piece, corrected in zip(pieces, corrections, strict=True):
            if self._has_kernel(piece.parameter):
                self._run_kernel(piece, corrected, setting)
            else:
                theta = self.read(piece.parameter, piece.weights, piece.state)
                update(theta, piece.gradients, piece.state, corrected, setting)
                self.write(piece.parameter, piece.weights, theta, piece.state)

    def _has_kernel(self, parameter: Tensor) -> bool:
        """True if the Triton kernel can run; it counts no lost updates, so `nearest` rounding uses the torch twin."""
        return parameter.is_cuda and not (is_kept_in_half(parameter) and self.rounding == "nearest")

    def _run_kernel(self, piece: StatePiece, corrections: Sequence[Tensor], setting: Setting) -> None:
        from halfstep.step.optim import adamw8bit_triton

        is_random = is_kept_in_half(piece.parameter) and LOW not in piece.state
        key = make_key(self.seed, self.numbers[piece.parameter], piece.state["step"]) if is_random else None
        adamw8bit_triton.update(piece.weights, piece.gradients, piece.state, corrections, setting, key)


def flatten(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector, in the order of its memory if that has no gaps."""
    return view_flat(tensor) if is_dense(tensor) else tensor.reshape(-1)


def make_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return a zero step count and zero moments: flat, in the order of the parameter's memory."""
    count, device = parameter.numel(), parameter.device
    state = {"step": torch.zeros((), device=device)}
    if count < MIN_VALUES or count % BLOCK:
        return state | {name: torch.zeros(count, device=device) for name in MOMENTS}
    for name, table in zip(MOMENTS, (make_signed_table(), make_unsigned_table()), strict=True):
        zero = table.index(0.0)
        state[f"{name}_codes"] = torch.full((count,), zero, dtype=torch.uint8, device=device)
        state[f"{name}_scale"] = torch.zeros(count // BLOCK, device=device)
        state[f"{name}_table"] = torch.tensor(table, device=device)
    return state


class StatePiece(NamedTuple):
    """A parameter and its gradient as vectors in the same order: the parameter's memory order if it has no gaps."""

    parameter: Tensor
    weights: Tensor
    gradients: Tensor
    state: dict[str, Tensor]

    @classmethod
    def of(cls, parameter: Tensor, state: dict[str, Tensor]) -> StatePiece:
        assert parameter.grad is not None
        grad = lay_out_like(parameter, parameter.grad)
        gradients = view_flat(grad) if is_dense(parameter) else grad.reshape(-1)
        return cls(parameter, flatten(parameter), gradients, state)

    @property
    def is_coded(self) -> bool:
        return MOMENTS[0] not in self.state

    def put_back(self, *, scaled: bool) -> None:
        """Write the vectors back to the parameter if they are copies."""
        grad = self.parameter.grad
        assert grad is not None
        if scaled and self.gradients.data_ptr() != grad.data_ptr():
            grad.copy_(view_like(self.gradients, self.parameter))
        if not is_dense(self.parameter):
            self.parameter.copy_(self.weights.view_as(self.parameter))


def _to_device(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a value as a device tensor. A number is filled in on the device: a copy would wait and break a capture."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32)
    return torch.full((), value, device=device)


def _compute_corrections(steps: list[Tensor], beta: float) -> tuple[Tensor, ...]:
    """Return the bias corrections 1 - beta**step of both moments, which start at zero."""
    found = torch._foreach_pow(beta, steps)
    torch._foreach_neg_(found)
    torch._foreach_add_(found, 1.0)
    return found


def update(
    weights: Tensor, gradients: Tensor, state: dict[str, Tensor], corrections: Sequence[Tensor], setting: Setting
) -> None:
    """Update one vector by AdamW (Loshchilov & Hutter 2019), unless the step is bad."""
    keep = setting.found_inf != 0
    theta, grad = weights.float(), gradients.float()
    if setting.grad_scale is not None:
        grad = grad / setting.grad_scale
        gradients.copy_(torch.where(keep, gradients, grad.to(gradients.dtype)))
    first, second = (_decode(state, name) for name in MOMENTS)
    first = first + (grad - first) * (1 - setting.betas[0])
    second = second + (grad * grad - second) * (1 - setting.betas[1])
    theta = theta - setting.lr * setting.weight_decay * theta
    denominator = compute_root(second) * compute_root(corrections[1]).reciprocal() + setting.eps
    theta = theta - setting.lr / corrections[0] * first / denominator
    weights.copy_(torch.where(keep, weights, theta.to(weights.dtype)))
    for name, moment, codes in zip(MOMENTS, (first, second), (encode_signed, encode_unsigned), strict=True):
        _store(state, name, moment, codes, keep)


def compute_root(values: Tensor) -> Tensor:
    """Return the correctly rounded square root, as the kernel's is: on some CPUs torch's (MKL) is off by one bit."""
    return values.sqrt() if values.is_cuda else values.double().sqrt().float()


def _decode(state: dict[str, Tensor], name: str) -> Tensor:
    values = state[f"{name}_table"][state[f"{name}_codes"].int()]
    return (values.view(-1, BLOCK) * state[f"{name}_scale"][:, None]).view(-1)


def _store(
    state: dict[str, Tensor], name: str, moment: Tensor, codes_of: Callable[[Tensor], Tensor], keep: Tensor
) -> None:
    codes, scale = state[f"{name}_codes"], state[f"{name}_scale"]
    blocks = moment.view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1).clamp(min=SMALLEST_SCALE)
    nearest = codes_of(blocks * largest.reciprocal()[:, None]).view(-1)
    codes.copy_(torch.where(keep, codes, nearest))
    scale.copy_(torch.where(keep, scale, largest))


def recut_state(
    shape: Sequence[int], dim: int, start: int, pieces: Iterable[tuple[dict[str, Tensor], Sequence[int], int]]
) -> dict[str, Tensor]:
    """Return the state of a shard that is cut differently from the stored shards: moments are quantised again.

    The new shard has `shape` and begins at `start` of the parameter's dimension `dim`. `pieces` are the stored shards:
    state, shape and begin.
    """
    made, values, end = make_state(torch.empty(shape)), dict[str, Tensor](), start + shape[dim]
    for state, stored_shape, first in pieces:
        low, high = max(first, start), min(first + stored_shape[dim], end)
        if low >= high:
            continue
        made["step"] = state["step"]
        for name in (*MOMENTS, LOW):
            if name in state or f"{name}_codes" in state:
                flat = state[name] if name in state else _decode(state, name)
                whole = values.setdefault(name, torch.zeros(shape, dtype=flat.dtype))
                whole.narrow(dim, low - start, high - low).copy_(
                    flat.view(*stored_shape).narrow(dim, low - first, high - low)
                )
    for name, codes in zip(MOMENTS, (encode_signed, encode_unsigned), strict=True):
        if name in made and name in values:
            made[name] = values[name].reshape(-1)
        elif name in values:
            _store(made, name, values[name].reshape(-1), codes, torch.tensor(False))
    return made | ({LOW: values[LOW].reshape(-1)} if LOW in values else {})
