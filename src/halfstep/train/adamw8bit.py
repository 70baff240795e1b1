"""AdamW whose two moments take a byte a value (Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization).

A moment is a code from a table of 256 values between -1 and 1 (the second moment: 0 and 1), denser towards zero, times
one scale for each block of 256. A step decodes, updates in fp32 and encodes again, so weights see exact arithmetic on
rounded moments. Parameters below MIN_VALUES keep fp32 moments: norms and biases are few and sensitive.

torchao has the same optimizer, and ours gives its numbers. It was not used because its state is a tensor subclass that
safetensors cannot store, its step counter lives on the host, so a captured step would never count, and it knows no
found_inf. Here a bad step is dropped in the very kernel, by selection, as in torch's fused optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.train.flat import flat_view, is_dense, shaped_like

BLOCK = 256
"""Values that share a scale."""
MIN_VALUES = 4096
"""The bound of bitsandbytes and torchao."""
SMALLEST_SCALE = 1e-12

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(Optimizer):
    """`torch.optim.AdamW` by its arguments and its arithmetic, with small moments."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if not (float(lr) >= 0 and eps > 0 and all(0 <= beta < 1 for beta in betas)):
            raise ConfigError(f"AdamW with lr={float(lr)}, betas={betas}, eps={eps}", fix="lr=1e-3, betas=0.9, 0.999")
        # `fused` says that step() reads found_inf on the device.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; nothing changes where the attribute `found_inf`, a device tensor, is not 0. Gradients are divided
        by `grad_scale`, where there is one, and written back: torch's fused optimizers do so."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for device in dict.fromkeys(parameter.device for parameter in trained):
                lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
                keep = torch.as_tensor(getattr(self, "found_inf", 0.0), device=device) != 0
                scale = getattr(self, "grad_scale", None)
                scale = scale.to(device) if scale is not None else None
                for parameter in (p for p in trained if p.device == device):
                    self._update(parameter, scale, lr, keep, group)
        return loss

    def _update(self, parameter: Tensor, scale: Tensor | None, lr: Tensor, keep: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if not state:
            state.update(empty_state(parameter))
        flat = flat_view(parameter) if is_dense(parameter) else parameter.reshape(-1)
        ordered = _in_order_of(parameter, grad)
        constants = (group["betas"], group["eps"], group["weight_decay"])
        _kernel(parameter.device.type)(flat, ordered, scale, state, lr, keep, *constants)
        if scale is not None and ordered.data_ptr() != grad.data_ptr():
            grad.copy_(shaped_like(ordered, parameter))
        if not is_dense(parameter):
            parameter.copy_(flat.view_as(parameter))

    def load_state_dict(self, state_dict: Any) -> None:
        """torch casts all state to the parameter's dtype, which codes and scales must not be."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, stored in state_dict["state"].items():
            own = self.state[parameters[index]]
            own.update({name: value.to(parameters[index].device, copy=True) for name, value in stored.items()})


def empty_state(parameter: Tensor) -> dict[str, Tensor]:
    """Moments lie flat, in the order of the parameter's memory."""
    count, device = parameter.numel(), parameter.device
    state = {"step": torch.zeros((), device=device)}
    if count < MIN_VALUES or count % BLOCK:
        return state | {name: torch.zeros(count, device=device) for name in MOMENTS}
    for name, table in zip(MOMENTS, (signed_table(), unsigned_table()), strict=True):
        zero = table.index(0.0)
        state[f"{name}_codes"] = torch.full((count,), zero, dtype=torch.uint8, device=device)
        state[f"{name}_scale"] = torch.zeros(count // BLOCK, device=device)
        state[f"{name}_table"] = torch.tensor(table, device=device)
    return state


def _in_order_of(parameter: Tensor, grad: Tensor) -> Tensor:
    """The gradient flat, in the order of the parameter's memory."""
    if grad.stride() == parameter.stride() and is_dense(parameter):
        return flat_view(grad)
    if not is_dense(parameter):
        return grad.reshape(-1)
    return flat_view(torch.empty_like(parameter, dtype=grad.dtype).copy_(grad))


@functools.cache
def _kernel(device_type: str) -> Callable[..., None]:
    """On a GPU one compiled kernel for all sizes: a dozen passes over each moment would cost more than the step."""
    return torch.compile(update, dynamic=True, fullgraph=True) if device_type == "cuda" else update


def update(
    flat: Tensor,
    grad: Tensor,
    scale: Tensor | None,
    state: dict[str, Tensor],
    lr: Tensor,
    keep: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW (Loshchilov & Hutter 2019) on one flat parameter, everything left as it was where `keep` is set."""
    theta, given, grad = flat.float(), grad, grad.float()
    if scale is not None:
        grad = grad / scale
        given.copy_(torch.where(keep, given, grad.to(given.dtype)))
    step = state["step"] + 1
    first = torch.lerp(_moment(state, "exp_avg"), grad, 1 - betas[0])
    second = torch.lerp(_moment(state, "exp_avg_sq"), grad.square(), 1 - betas[1])
    denominator = second.sqrt() / (1 - betas[1] ** step).sqrt() + eps
    theta = theta - lr * weight_decay * theta
    theta = theta - lr * (first / (1 - betas[0] ** step)) / denominator
    flat.copy_(torch.where(keep, flat, theta.to(flat.dtype)))
    state["step"].copy_(torch.where(keep, state["step"], step))
    for name, moment in zip(MOMENTS, (first, second), strict=True):
        _store(state, name, moment, keep)


def _moment(state: dict[str, Tensor], name: str) -> Tensor:
    if name in state:
        return state[name]
    values = state[f"{name}_table"][state[f"{name}_codes"].int()]
    return (values.view(-1, BLOCK) * state[f"{name}_scale"][:, None]).view(-1)


def _store(state: dict[str, Tensor], name: str, moment: Tensor, keep: Tensor) -> None:
    if name in state:
        state[name].copy_(torch.where(keep, state[name], moment))
        return
    codes, scale = state[f"{name}_codes"], state[f"{name}_scale"]
    blocks = moment.view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1).clamp(min=SMALLEST_SCALE)
    nearest = nearest_codes((blocks / largest[:, None]).view(-1), state[f"{name}_table"])
    codes.copy_(torch.where(keep, codes, nearest))
    scale.copy_(torch.where(keep, scale, largest))


def nearest_codes(values: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest table value, by bisection: eight comparisons, no branch."""
    below = torch.zeros_like(values, dtype=torch.int32)
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        below = below + torch.where(values >= table[below + bit], bit, 0)
    above = (below + 1).clamp(max=255)
    is_nearer_above = values - table[below] >= (table[above] - table[below]) * 0.5
    return torch.where(is_nearer_above, above, below).to(torch.uint8)


@functools.cache
def signed_table() -> tuple[float, ...]:
    """The dynamic tree of Dettmers 2015: an exponent of ten in unary, the bits that are left as fraction."""
    return tuple(sorted([0.0, 1.0, *(sign * value for value in _tree(0) for sign in (1, -1))]))


@functools.cache
def unsigned_table() -> tuple[float, ...]:
    """The same without a sign, its bit spent on the fraction."""
    return tuple(sorted([0.0, 1.0, *_tree(1)]))


def _tree(extra_bits: int) -> list[float]:
    """Midpoints of 2**(level + extra) equal parts of 0.1 to 1, for seven decades."""
    values: list[float] = []
    for level in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (level + extra_bits) + 1)
        values += (10.0 ** (level - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return values
