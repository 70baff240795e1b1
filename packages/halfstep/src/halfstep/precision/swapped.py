"""Modules that compute differently from the rest of the model: their class is swapped for a generated subclass.

The subclass's `forward` enters the right context around the original's (FSDP2 and torch's parametrizations swap classes
too). Hooks and a patched `module.forward` were rejected: both bind the original object, so a deepcopied model (EMA,
snapshots) would run the original's forward; hooks cannot keep a `with` open, and torch.compile breaks its graph on
them. A subclass copies, pickles, compiles, keeps every state_dict name, and is visible in `print(model)`.

Only `forward` is covered: for a module called through another method (`vae.encode`), name its children (`"vae.*"`).
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn

from halfstep.islands import fp32_island, to_fp32


class SwappedModule(nn.Module):
    """Base of all swapped classes: records what the class was made from, for pickling and for undoing the swap."""

    made_from: ClassVar[MadeFrom]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # object.__reduce_ex__ returns (constructor, its arguments, state...). pickle cannot import the generated
        # class, so the constructor is replaced by one that generates it again.
        _, _, *state = tuple(super().__reduce_ex__(protocol))
        return (_make_empty, (self.made_from,), *state)


MadeFrom = tuple[type[nn.Module], type[SwappedModule], tuple[tuple[str, Any], ...]]
"""The original class, the class that swaps its forward, and the settings."""


class InFp32(SwappedModule):
    """Upcast the inputs and run with autocast off."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with fp32_island():
            return super().forward(*to_fp32(args), **to_fp32(kwargs))


class InHalf(SwappedModule):
    """Run under autocast in this module's own format; return fp32, which every neighbour accepts."""

    device_type: ClassVar[str]
    dtype: ClassVar[torch.dtype]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            return to_fp32(super().forward(*args, **kwargs))


def swap_class(module: nn.Module, kind: type[SwappedModule], **settings: Any) -> None:
    """Swap the class of `module` in place; weights, hooks and names stay as they are."""
    module.__class__ = _make_class((type(module), kind, tuple(sorted(settings.items()))))


def undo_swaps(model: nn.Module) -> None:
    """Give every module its original class back."""
    for module in model.modules():
        module.__class__ = find_original_class(module)


def find_original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class the module had before any swap."""
    kind = type(module)
    while issubclass(kind, SwappedModule):
        kind = kind.made_from[0]
    return kind


@functools.cache
def _make_class(made_from: MadeFrom) -> type[nn.Module]:
    base, kind, settings = made_from
    return type(f"{base.__name__}{kind.__name__}", (kind, base), {**dict(settings), "made_from": made_from})


def _make_empty(made_from: MadeFrom) -> nn.Module:
    part = _make_class(made_from)
    return part.__new__(part)
