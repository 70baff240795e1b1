"""The transposed 2×2 convolution at stride 2 of a map z into its half of a concatenation, and its gradient: kernels
that write pixels where they belong and gather their gradient from there."""

from __future__ import annotations

from torch import Tensor


def doubled_into(half: Tensor, z: Tensor, taps: Tensor, bias: Tensor) -> None:
    """Fills `half`, a slice of a map's channels: z doubled in its middle, zeros around where it is larger."""
    from halfstep.kernels import upsample_triton as kernels

    if half.shape[2:] != (2 * z.shape[2], 2 * z.shape[3]):
        half.zero_()
    kernels.doubled(z, taps, bias, half)


def doubling_gradient(dhalf: Tensor, z: Tensor, taps: Tensor) -> Tensor:
    """From the gradient of `half`: that of z."""
    from halfstep.kernels import upsample_triton as kernels

    return kernels.doubled_gradient(dhalf, z, taps)


def tap_gradients(dhalf: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient of `half`: those of taps and bias."""
    from halfstep.kernels import upsample_triton as kernels

    return kernels.tap_gradients(dhalf, z)


def corner(half: Tensor, z: Tensor) -> tuple[int, int]:
    """Where z doubled begins: in the middle, half a pixel up and left of it where the difference is odd."""
    return (half.shape[2] - 2 * z.shape[2]) // 2, (half.shape[3] - 2 * z.shape[3]) // 2
