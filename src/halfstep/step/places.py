"""Where modules hold buffers and parameters, looked up at every window: cheap while nothing new is registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

Owner = dict[str, Any]
Name = tuple[nn.Module, str]


class Place(NamedTuple):
    """An entry of a module's `_buffers` or `_parameters`: what it holds may be replaced."""

    module: nn.Module
    owner: Owner
    key: str

    @property
    def held(self) -> Tensor | None:
        return self.owner.get(self.key)

    @property
    def name(self) -> Name:
        """Stays the same when the tensor is replaced."""
        return self.module, self.key


class Places:
    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.roots = list(roots)
        self.modules: list[nn.Module] = []
        self.sizes: list[tuple[int, int, int]] = []
        self.buffers: list[Place] = []
        self.parameters: list[Place] = []

    def refresh(self) -> bool:
        """Find what was registered, removed or exchanged since the last call; whether there was anything."""
        modules = _modules_under(self.roots)
        sizes = _sizes(modules)
        if modules == self.modules and sizes == self.sizes:
            return False
        self.modules, self.sizes = modules, sizes
        self.buffers = [Place(m, m._buffers, key) for m in modules for key in m._buffers]
        self.parameters = [Place(m, m._parameters, key) for m in modules for key in m._parameters]
        return True

    @property
    def have_grown(self) -> bool:
        """Whether a module has registered something since `refresh`: in its forward pass."""
        return _sizes(self.modules) != self.sizes

    def take_back(self) -> None:
        """Remove what was registered since `refresh`: a dict keeps the order in which it was."""
        for module, sizes in zip(self.modules, self.sizes, strict=True):
            owners: tuple[dict[str, Any], ...] = (module._modules, module._parameters, module._buffers)
            for owner, size in zip(owners, sizes, strict=True):
                for key in list(owner)[size:]:
                    del owner[key]
                    module._non_persistent_buffers_set.discard(key)

    def full_name(self, place: Place) -> str:
        """As `named_parameters` calls it, under whichever root holds it."""
        for root in self.roots:
            for prefix, module in root.named_modules():
                if module is place.module:
                    return f"{prefix}.{place.key}".removeprefix(".").replace("_orig_mod.", "")
        return place.key


def _modules_under(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """As `nn.Module.modules`, in a third of the time: without its generators inside generators."""
    found: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = list(roots)
    while stack:
        module = stack.pop()
        if module is not None and module not in found:
            found[module] = None
            stack.extend(module._modules.values())
    return list(found)


def _sizes(modules: Sequence[nn.Module]) -> list[tuple[int, int, int]]:
    return [(len(m._modules), len(m._parameters), len(m._buffers)) for m in modules]
