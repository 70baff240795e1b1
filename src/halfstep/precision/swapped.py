"""Parts of a model that compute unlike the rest: their class is swapped for a subclass made on the fly.

The subclass's `forward` enters the right context around the original's (FSDP2 and torch's parametrizations swap classes
too). Hooks and a patched `module.forward` were refused: both bind the original object, so a deepcopied model (EMA,
snapshots) would run the original's forward; hooks cannot hold a `with` open, and torch.compile breaks its graph on
them. A subclass copies, pickles, compiles, keeps every state_dict name, and is seen in `print(model)`.

Only `forward` is covered: a part called through another method (`vae.encode`) is named by its children (`"vae.*"`).
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn

from halfstep.islands import fp32_island, to_fp32


class SwappedModule(nn.Module):
    """What swapped classes share: they know what they were made from, so that they can be pickled and undone."""

    made_from: ClassVar[MadeFrom]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # object's own answer, (how to make it, its class, state...), with a class that pickle can find again
        _, _, *state = tuple(super().__reduce_ex__(protocol))
        return (_make_empty, (self.made_from,), *state)


MadeFrom = tuple[type[nn.Module], type[SwappedModule], tuple[tuple[str, Any], ...]]
"""The original class, the kind of part, and the settings."""


class InFp32(SwappedModule):
    """Inputs upcast, autocast off."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with fp32_island():
            return super().forward(*to_fp32(args), **to_fp32(kwargs))


class InHalf(SwappedModule):
    """Autocast on in this part's own format; results return in fp32, which every neighbour can take."""

    device_type: ClassVar[str]
    dtype: ClassVar[torch.dtype]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            return to_fp32(super().forward(*args, **kwargs))


def swap_class(module: nn.Module, kind: type[SwappedModule], **settings: Any) -> None:
    """Make `module` a part of this kind, in place; weights, hooks and names stay as they are."""
    module.__class__ = _make_class((type(module), kind, tuple(sorted(settings.items()))))


def undo_swaps(model: nn.Module) -> None:
    for module in model.modules():
        module.__class__ = find_original_class(module)


def find_original_class(module: nn.Module) -> type[nn.Module]:
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
