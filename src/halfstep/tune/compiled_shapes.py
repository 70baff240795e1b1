"""Which shapes of batches have compiled code: the first two that come.

Each further one would compile for as long as the first did, and a workload that resizes its images brings them without
end. The shapes are stored with the run, for compiled and eager kernels round differently: a resumed run that met its
shapes in another order would compile others.
"""

from __future__ import annotations

from typing import TypeAlias

from halfstep.tune.modes import Batch

MOST_SHAPES = 2
"""An image in portrait and in landscape format, or two sizes in turn."""

TensorShape: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], str]
"""Name, size, strides and dtype."""
BatchShape: TypeAlias = tuple[TensorShape, ...]


class CompiledShapes:
    """Shapes in the order they came."""

    def __init__(self) -> None:
        self.taken: list[BatchShape] = []
        """What is compiled for, now or when it comes."""
        self.ready: set[BatchShape] = set()
        """What went through compiled code of this process, there and back: later failures are not the compiler's."""
        self._has_said = False

    def take(self, batch: Batch) -> bool:
        """Whether batches of this shape have compiled code; a new shape gets it while there is room."""
        shape = batch_shape(batch)
        if shape not in self.taken and len(self.taken) < MOST_SHAPES:
            self.taken.append(shape)
        return shape in self.taken

    def why_eager(self, batch: Batch) -> str:
        """For the user, the first time a shape has no room."""
        if self._has_said:
            return ""
        self._has_said = True
        return (
            f"batches come in more than {MOST_SHAPES} shapes (now {self._new_in(batch_shape(batch))}): code is compiled"
            f" for the first {MOST_SHAPES}, others run eager; one size for all, or padding to it, makes every step fast"
        )

    def forget(self) -> None:
        """Batches will be cut into other pieces."""
        self.taken.clear()
        self.ready.clear()

    def _new_in(self, shape: BatchShape) -> str:
        known = {tensor for other in self.taken for tensor in other}
        new = [tensor for tensor in shape if tensor not in known] or shape
        sizes = {tensor[:2] for tensor in known}
        return ", ".join(
            f"{name} {'x'.join(map(str, size))}" + (f" of {dtype}, strides {strides}" if (name, size) in sizes else "")
            for name, size, strides, dtype in new
        )


def batch_shape(batch: Batch) -> BatchShape:
    """What must be equal for two batches to share compiled code."""
    return tuple(
        (name, tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))
        for name, value in sorted(batch.items())
    )
