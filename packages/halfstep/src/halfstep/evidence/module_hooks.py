"""Observe what modules compute in one step: inputs in fp32, outputs, their gradients, and attention logits.

Global module hooks see outputs, tensor hooks see their gradients, and a torch-function mode sees the calls of attention
and softmax and casts to fp8 inside a module. All of them only read, so an observed step computes the same bits. Unlike
`Observer`, no dispatch mode runs: a Python call for each kernel would take longer than the kernels of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from halfstep.evidence.observer import iterate_floating

Note = Callable[[str, str, Tensor, torch.dtype], None]
"""Take numbers of a module: its name, their kind, and the dtype in which the step holds them."""

INPUT, ACTIVATION, GRADIENT, LOGITS = "input", "activation", "activation gradient", "attention logits"
MOST_QUERIES = 64
"""Queries of a head whose logits are computed: those with the largest norms."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
CASTS = (Tensor.to, Tensor.type)


class ModuleHooks:
    """Pass what modules compute inside `observe()` to `note`."""

    def __init__(self, model: nn.Module, note: Note) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.note = note
        self.device = next((p.device.type for p in model.parameters()), "cpu")
        self._stack: list[str] = []

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Observe the forward passes that run inside, and later their backward passes."""
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            _Calls(self),
        ):
            yield
        self._stack.clear()

    @property
    def module(self) -> str:
        """Return the name of the running module; the whole model outside of any."""
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        # A module that is not in the model, such as one made inside a forward, counts as the enclosing one.
        self._stack.append(self.names.get(module, self.module))
        if module in self.names and args and isinstance(args[0], Tensor) and args[0].dtype == torch.float32:
            self.note(self.module, INPUT, args[0].detach(), torch.float32)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        if module not in self.names:
            return
        name = self.names[module]
        for tensor in iterate_floating(output):
            self.note(name, ACTIVATION, tensor.detach(), tensor.dtype)
            if tensor.requires_grad:
                # The hook returns nothing, so the gradient is passed on as it is.
                tensor.register_hook(lambda g, name=name: self.note(name, GRADIENT, g.detach(), g.dtype))

    def note_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], half: torch.dtype | None) -> None:
        """Note what enters attention, a softmax over keys, or a cast to fp8; `half` is autocast's dtype."""
        first = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if not isinstance(first, Tensor):
            return
        if func is torch._C._nn.scaled_dot_product_attention:
            key = args[1] if len(args) > 1 else kwargs["key"]
            self.note(self.module, LOGITS, find_largest_logit(first, key, kwargs.get("scale")), half or first.dtype)
        elif func is F.multi_head_attention_forward:
            query, key = project(*args, **kwargs)
            self.note(self.module, LOGITS, find_largest_logit(query, key), half or query.dtype)
        elif func in SOFTMAXES and first.ndim >= 3 and first.is_floating_point() and first.numel():
            # The largest logit, not the largest magnitude: masks are -inf or a very negative number.
            self.note(self.module, LOGITS, first.detach().amax().clamp(min=0), first.dtype)
        elif func in CASTS:
            target = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)), None)
            if target in FP8:
                self.note(self.module, ACTIVATION, first.detach(), target)


class _Calls(TorchFunctionMode):
    def __init__(self, hooks: ModuleHooks) -> None:
        super().__init__()
        self.hooks = hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WATCHED_CALLS:
            device = self.hooks.device
            # Without autocast, which would keep casts of weights made here, without gradients, for the step itself.
            half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            with torch.no_grad(), torch.autocast(device, enabled=False):
                self.hooks.note_call(func, args, kwargs or {}, half)
        return func(*args, **(kwargs or {}))


WATCHED_CALLS = {
    torch._C._nn.scaled_dot_product_attention, F.multi_head_attention_forward, *SOFTMAXES, *CASTS,
}  # fmt: skip


def find_largest_logit(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Return the largest magnitude of attention logits, of the queries with the largest norms: the largest one is
    nearly always among them. Masks are not applied."""
    query, key = query.detach(), key.detach()
    width = query.shape[-1]
    if query.shape[-2] > MOST_QUERIES:
        longest = torch.linalg.vector_norm(query, dim=-1).topk(MOST_QUERIES, dim=-1).indices
        query = query.gather(-2, longest.unsqueeze(-1).expand(*longest.shape, width))
    if query.ndim == 4 and key.ndim == 4 and key.shape[1] != query.shape[1]:  # grouped queries share their keys
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query.float() @ key.float().transpose(-2, -1)  # in fp16 the product would overflow unseen
    return torch.linalg.vector_norm(logits, float("inf")) * (width**-0.5 if scale is None else scale)


def project(
    query: Tensor, key: Tensor, value: Tensor, width: int, num_heads: int, weight: Tensor | None, bias: Tensor | None,
    *rest: Any, use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return queries and keys of nn.MultiheadAttention, split into heads; its inputs have the sequence first."""
    wq, wk = (q_proj_weight, k_proj_weight) if use_separate_proj_weight else (weight[:width], weight[width : 2 * width])  # type: ignore[index]
    bq, bk = (None, None) if bias is None else (bias[:width], bias[width : 2 * width])

    def split(inputs: Tensor, matrix: Any, offset: Any) -> Tensor:
        heads = F.linear(inputs.detach().to(matrix.dtype), matrix, offset)
        heads = heads.unflatten(-1, (num_heads, width // num_heads))
        return heads.transpose(0, -2)  # heads first, then whatever batch there is, then the sequence

    return split(query, wq, bq), split(key, wk, bk)


def list_batch_norms(model: nn.Module) -> list[tuple[str, _NormBase]]:
    """Return the norms that keep the variance of each channel in a buffer."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.running_var is not None
    ]
