"""Models that torch's `fully_shard` (FSDP2) has sharded: what step, checkpoints and memory plan need to know of them.

Each rank holds a shard of every parameter, as the local tensor of a DTensor; gradients, optimizer state and averages
are sharded alike. Everything here works on those local tensors and communicates nothing: `full_tensor()` would gather a
model that does not fit. A shard may be empty, where a dimension is smaller than the number of ranks.

The ranks of a sharded model decide together in torch's default group, which the mesh must cover: with HSDP (a mesh of
replicas x shards) too, every rank must drop the same step.

Between forward and backward, and after an evaluation, FSDP registers whole parameters in the root module instead of
sharded ones: `reshard` them before looking at what modules hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def is_dtensor(tensor: object) -> bool:
    # Importing DTensor takes a second, and there is none where it was not imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_dtensor(tensors: Iterable[object]) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares its memory; any other tensor as it is."""
    # Not to_local(): that of a parameter is a new object at every call, tracked by autograd.
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def get_locals(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `get_local` of each: every step asks this of all parameters, so DTensor is looked up once."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return list(tensors)
    kind = module.DTensor
    return [t._local_tensor if isinstance(t, kind) else t for t in tensors]


def wrap_local(local: Tensor, like: Any) -> Tensor:
    """Return a local tensor as a DTensor sharded like another one, or as it is if that one is no DTensor."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    # With its shape: from_local would infer a wrong one from uneven shards.
    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **shape)


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Return a whole tensor, which every rank has, as a DTensor sharded like another one; any other as it is."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def find_sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules to which `fully_shard` was applied, the outermost first; empty if the model is not sharded."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [m for m in model.modules() if isinstance(m, module.FSDPModule)]


def is_sharded(model: nn.Module) -> bool:
    return bool(find_sharded_modules(model))


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Free whole parameters that are left from a forward pass, and register the sharded ones again."""
    for module in modules:
        module.reshard()


@dataclass(frozen=True, eq=False, slots=True)
class Sharding:
    """How a model is sharded: one mesh for all its parameters."""

    modules: Sequence[FSDPModule]
    mesh: DeviceMesh
    is_first_replica: bool
    """True on the ranks that together hold the model once; with HSDP, the other ranks hold copies."""
    is_first_shard: bool

    @property
    def num_shards(self) -> int:
        """Return the number of shards of a parameter: of HSDP's two mesh dimensions, the second."""
        return int(self.mesh.size(self.mesh.ndim - 1))

    def counts(self, tensor: Any) -> bool:
        """True on one rank for each element of a tensor of the model, so that a sum over ranks counts it once."""
        is_split = is_dtensor(tensor) and any(placement.is_shard() for placement in tensor.placements)
        return self.is_first_replica and (is_split or self.is_first_shard)

    def reshard(self) -> None:
        reshard(self.modules)

    def abandon_pass(self) -> None:
        """Let FSDP forget a pass that raised or was not followed by backward."""
        for module in self.modules:
            if hasattr(module, "reset_iter_state"):  # since torch 2.13
                with suppress(RuntimeError):  # of one that is not a root
                    module.reset_iter_state()
        self.reshard()

    def describe(self) -> str:
        names = f" {self.mesh.mesh_dim_names}" if self.mesh.mesh_dim_names else ""
        return f"{' x '.join(map(str, self.mesh.shape))}{names}"


def find_sharding(model: nn.Module) -> Sharding | None:
    """Return how a model is sharded; None if it is not. Its parameters are registered as shards afterwards."""
    modules = find_sharded_modules(model)
    reshard(modules)
    meshes = (p.device_mesh for p in model.parameters() if is_dtensor(p))  # type: ignore[attr-defined]
    mesh = next(meshes, None)
    if not modules or mesh is None:
        return None
    place = mesh.get_coordinate() or [0]  # None on a rank outside of the mesh, which is refused
    return Sharding(modules, mesh, is_first_replica=mesh.ndim == 1 or place[0] == 0, is_first_shard=place[-1] == 0)
