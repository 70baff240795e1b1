"""The tile of the row convolution, for its kernel and for who decides where that runs."""

CHANNELS, PIXELS = 64, 128
"""Of a tile: 128 bytes of channels, the widest that are swizzled, and the fewest rows of two warpgroups' matrices."""
