"""A workload's tensors without content, which can be cast, laid out and trained on as on a GPU that is not here.

They are torch's fake tensors on the CPU: autograd on fake CUDA tensors ends the process where torch was built without
CUDA. What a GPU does otherwise is entered here: CUDA's lists of autocast, attention that keeps no scores whatever its
dropout, and our own kernels, which take their memory and are not launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from halfstep.kernels.fast_forms import forced, pretended
from halfstep.precision.op_lists import cuda_op_lists


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stood in a module, and what it was like."""

    slots: dict[str, Tensor | None]
    name: str
    tensor: Tensor


class Pretence:
    """Modules whose tensors have no content inside `entered`, again each time, as they were built."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [place for module in modules for place in _places(module)]

    @contextlib.contextmanager
    def entered(self, *, chains: bool = False) -> Iterator[list[str]]:
        """Tensors made within have no content either; `chains` runs models as they run in a captured step. Gives the
        kernels of our own that a GPU would have run."""
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            pretended() as kernels,
            _AttentionWithoutScores(),
            forced(chains, "chain"),
            cuda_op_lists("cpu"),
        ):
            self._put()
            try:
                yield kernels
            finally:
                self._put_back()

    def _put(self) -> None:
        made: dict[int, Tensor] = {}
        for place in self._places:
            own = place.tensor
            if id(own) not in made:
                made[id(own)] = _without_content(own)
            place.slots[place.name] = made[id(own)]

    def _put_back(self) -> None:
        for place in self._places:
            place.slots[place.name] = place.tensor


def _places(module: nn.Module) -> Iterator[_Place]:
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    yield _Place(slots, name, tensor)  # type: ignore[arg-type]


def _without_content(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _AttentionWithoutScores(TorchFunctionMode):
    """A GPU's kernels draw dropout themselves; the CPU's would write all scores to memory for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            args = args[:4] + ((0.0,) + args[5:] if len(args) > 4 else ())
        return func(*args, **kwargs)


def run_backward(loss: Tensor) -> None:
    """`loss.backward()` that stays inside function modes: what is recomputed has attention without scores, too."""
    seed = (torch.ones_like(loss),)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), seed, False, False, (), allow_unreachable=True, accumulate_grad=True)
