"""AdamW on weights that are stored in bf16 (half_weights.py), with moments in fp32.

A step reassembles some fp32 weights at a time, lets torch's fused AdamW update them, and stores them again. Given the
same gradients, the update is bit-identical to that of fp32 weights. The kernel itself drops a bad step, and what it did
not change is stored unchanged. In a CUDA graph one of our kernels does all of this in one pass (adamw_triton.py).

Bytes per parameter: 2 + 2 for the weight and 8 for the moments. fp32 weights with autocast take 4, 2 for their half
copy, and 8. Gradients are bf16, or fp32 if several micro-batches are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.step.flat import is_dense, view_flat, view_like
from halfstep.step.optim.half_weights import Rounding, is_kept_in_half, join, make_key, round_stochastically, split

LOW = "low"  # key of a weight's low 16 bits in the optimizer's state
VALUES_AT_ONCE = 2**26  # values with fp32 copies of weight and gradient at a time: half a gigabyte


class JudgedAdamW(Optimizer):
    """AdamW with torch's arguments, a rounding mode for bf16 weights, and `found_inf`.

    A subclass defines the update and the form of its moments.
    """

    takes_fp32_gradients = True
    was_stored_without_low = False  # a run without low halves continues without: lost bits cannot be recovered

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        rounding: Rounding = "split",
        seed: int = 0,
    ) -> None:
        if not (float(lr) >= 0 and eps > 0 and all(0 <= beta < 1 for beta in betas)):
            raise ConfigError(
                f"AdamW does not support lr={float(lr)}, betas={betas}, eps={eps}", fix="lr=1e-3, betas=0.9, 0.999"
            )
        # `fused` means that step() reads found_inf on the device.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})
        self.rounding, self.seed = rounding, seed
        parameters = (p for group in self.param_groups for p in group["params"])
        self.numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self.lost: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update, unless the device tensor in the attribute `found_inf` is not 0.

        Gradients are divided by `grad_scale`, if set, and written back, as torch's fused optimizers do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for device in dict.fromkeys(parameter.device for parameter in trained):
                self._update_on(device, [p for p in trained if p.device == device], group)
        return loss

    def _update_on(self, device: torch.device, parameters: list[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def make_low_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if self.rounding != "split" or not is_kept_in_half(parameter):
            return {}
        return {LOW: torch.zeros_like(parameter, dtype=torch.int16)}

    def read(self, parameter: Tensor, weights: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the fp32 values of a parameter's `weights`, in its shape or flat: a copy, unless they are fp32."""
        return join(weights, state[LOW].view_as(weights)) if LOW in state else weights.float()

    def write(self, parameter: Tensor, weights: Tensor, values: Tensor, state: Mapping[str, Tensor]) -> None:
        if not is_kept_in_half(parameter):
            if values is not weights:  # `read` returned the fp32 weights themselves, which are updated already
                weights.copy_(values)
        elif LOW in state:
            high, low = split(values)
            weights.copy_(high)
            state[LOW].view_as(weights).copy_(low)
        elif self.rounding == "stochastic":
            key = make_key(self.seed, self.numbers[parameter], state["step"])
            # The hash takes positions in memory order, as in the kernel.
            in_order = view_flat(values) if is_dense(values) else values.reshape(-1)
            weights.copy_(view_like(round_stochastically(in_order, key), values))
        else:
            self._count_lost(weights, values)
            weights.copy_(values)

    def _count_lost(self, weights: Tensor, values: Tensor) -> None:
        """Count the values that an update should have changed and did not."""
        moved = values != weights.float()
        facts = torch.stack([(moved & (values.to(weights.dtype) == weights)).sum(), moved.sum()])
        counted = self.lost.get(weights.device)
        self.lost[weights.device] = facts if counted is None else counted.add_(facts)

    def compute_lost_share(self) -> float | None:
        """Return the share of lost updates since the start or resume; None if not counted. Waits for the device."""
        facts = [count.tolist() for count in self.lost.values()]
        moved = sum(count[1] for count in facts)
        return sum(count[0] for count in facts) / moved if moved else None

    def load_state_dict(self, state_dict: Any) -> None:
        """Load state without torch's cast to the parameter's dtype, which would ruin codes, scales, low halves and
        moments."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, stored in state_dict["state"].items():
            parameter = parameters[index]
            own = {name: value.to(parameter.device, copy=True) for name, value in stored.items()}
            if self.rounding != "split":
                own.pop(LOW, None)  # the run uses another rounding from now on
                self.state[parameter].pop(LOW, None)
            kept = {n: v.float() if v.dtype == torch.bfloat16 else v for n, v in own.items()}
            self.state[parameter].update(kept)
            if self.rounding == "split" and is_kept_in_half(parameter) and LOW not in stored:
                self.rounding, self.was_stored_without_low = "nearest", True

    def begin_low(self) -> None:
        """Start splitting after a state without low halves: low halves of zero represent a bf16 weight exactly."""
        self.rounding, self.was_stored_without_low = "split", False
        for parameter, state in self.state.items():
            state.update(self.make_low_state(parameter))


class AdamWBf16(JudgedAdamW):
    def _update_on(self, device: torch.device, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for some in split_for_memory(parameters):
            self._update(some, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(self._empty_state(parameter))
        states = [self.state[parameter] for parameter in parameters]
        weights = [self.read(p, p, state) for p, state in zip(parameters, states, strict=True)]
        gradients = [lay_out_like(p, p.grad).float() for p in parameters if p.grad is not None]
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            weights, gradients, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states],
            [], steps, lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
            grad_scale=scale, found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        for parameter, new, gradient, state in zip(parameters, weights, gradients, states, strict=True):
            self.write(parameter, parameter, new, state)
            assert parameter.grad is not None
            if scale is not None and gradient is not parameter.grad:
                parameter.grad.copy_(gradient)

    def _empty_state(self, parameter: Tensor) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=parameter.device)} | moments | self.make_low_state(parameter)


def split_for_memory(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split parameters into groups of at most VALUES_AT_ONCE values, or of one parameter."""
    some: list[Tensor] = []
    for parameter in parameters:
        if some and sum(p.numel() for p in some) + parameter.numel() > VALUES_AT_ONCE:
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some


def lay_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with the layout of its parameter: kernels read both as vectors."""
    if gradient.stride() != parameter.stride() and is_dense(parameter):
        return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return gradient


# --- what AdamW8bit and its kernel share ---

MOMENTS = ("exp_avg", "exp_avg_sq")


class Setting(NamedTuple):
    """The hyperparameters of a group in one step; tensors have one value, on the device."""

    lr: Tensor
    found_inf: Tensor
    grad_scale: Tensor | None
    betas: tuple[float, float]
    eps: float
    weight_decay: float
