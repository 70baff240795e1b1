"""A Swin transformer (Liu et al. 2021) as a pyramid: the feature maps after each stage, at 1/4, 1/8, 1/16 and 1/32.

Modules have torchvision's names and give the same results (weights of `swin_t`, `swin_s`, `swin_b` load; a pyramid has
no last norm and head). Any image size works: windows are padded, and maps that fit into one window are not shifted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep_train.workloads.radio.config import PyramidConfig

MASKED = -100.0
"""Added to the logits of two positions that share a window only because the map was rolled."""


class WindowAttention(nn.Module):
    """Attention inside windows of a map (B, H, W, C), shifted by half a window in every second block."""

    relative_position_index: Tensor

    def __init__(self, dim: int, num_heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.num_heads, self.window, self.shift = num_heads, window, shift
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.register_buffer("relative_position_index", index_relative_positions(window).flatten())

    def forward(self, x: Tensor) -> Tensor:
        _, height, width, _ = x.shape
        window = self.window
        # Pad to whole windows; padding takes part in attention, as in torchvision.
        x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
        shifts = tuple(0 if window >= side else self.shift for side in x.shape[1:3])
        if any(shifts):
            x = torch.roll(x, shifts=(-shifts[0], -shifts[1]), dims=(1, 2))
        windows = self._attend(self._split_windows(x), (x.shape[1], x.shape[2]), shifts)
        x = self._merge_windows(windows, x.shape)
        if any(shifts):
            x = torch.roll(x, shifts=shifts, dims=(1, 2))
        return x[:, :height, :width].contiguous()

    def _split_windows(self, x: Tensor) -> Tensor:
        """Return the map as windows (B, number of windows, positions, C)."""
        batch, height, width, channels = x.shape
        tiles = x.view(batch, height // self.window, self.window, width // self.window, self.window, channels)
        return tiles.transpose(2, 3).reshape(batch, -1, self.window**2, channels)

    def _merge_windows(self, windows: Tensor, shape: torch.Size) -> Tensor:
        batch, height, width, channels = shape
        tiles = windows.view(batch, height // self.window, width // self.window, self.window, self.window, channels)
        return tiles.transpose(2, 3).reshape(shape)

    def _attend(self, windows: Tensor, size: tuple[int, int], shifts: tuple[int, ...]) -> Tensor:
        # q, k, v: (B, windows, heads, positions, head dim)
        batch, number, positions, channels = windows.shape
        q, k, v = self.qkv(windows).view(batch, number, positions, 3, self.num_heads, -1).permute(3, 0, 1, 4, 2, 5)
        logits = (q * (channels // self.num_heads) ** -0.5) @ k.transpose(-2, -1) + self._get_bias()
        if any(shifts):
            logits = logits + make_shift_mask(size, self.window, shifts, windows.device).unsqueeze(1).to(logits.dtype)
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(v.dtype)
        return self.proj((weights @ v).transpose(2, 3).reshape(windows.shape))

    def _get_bias(self) -> Tensor:
        """Return the position bias (heads, positions, positions)."""
        bias = self.relative_position_bias_table[self.relative_position_index]
        return bias.view(self.window**2, self.window**2, self.num_heads).permute(2, 0, 1)


def index_relative_positions(window: int) -> Tensor:
    """Return, for each pair of positions in a window, the row of the bias table for their offset."""
    rows = torch.arange(window).repeat_interleave(window)
    columns = torch.arange(window).repeat(window)
    # Offsets are in -(window - 1) .. window - 1 on each axis; shifted to start at 0, they index a square table.
    down, right = rows[:, None] - rows[None, :], columns[:, None] - columns[None, :]
    return (down + window - 1) * (2 * window - 1) + right + window - 1


def make_shift_mask(size: tuple[int, int], window: int, shifts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return (windows, positions, positions): `MASKED` for pairs from different regions of the unrolled map, else 0."""
    # After the roll a window can hold regions that were far apart; only positions of the same region may attend.
    regions = [_number_regions(side, window, shift, device) for side, shift in zip(size, shifts, strict=True)]
    tiles = (3 * regions[0][:, None] + regions[1][None, :]).view(size[0] // window, window, size[1] // window, window)
    positions = tiles.transpose(1, 2).reshape(-1, window**2)
    return (positions[:, None, :] != positions[:, :, None]) * MASKED


def _number_regions(side: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Return a region number per row: 0 before the last window, 1 in it, 2 in rows rolled in from the other end."""
    index = torch.arange(side, device=device)
    # torchvision numbers regions with slices; without a shift its last slice [-0:] covers everything.
    return (index >= side - window).int() + (index >= side - shift).int() if shift else index.new_full((side,), 2)


class StochasticDepth(nn.Module):
    """In training, drop a residual branch per sample with this probability; scale up the kept ones to preserve the
    mean."""

    kept: Tensor

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.can_drop = probability > 0
        # A tensor, not a number: probabilities differ per block, and the compiler would specialise on each number.
        self.register_buffer("kept", torch.tensor(1 - probability), persistent=False)

    def forward(self, branch: Tensor) -> Tensor:
        if not (self.training and self.can_drop):
            return branch
        is_kept = torch.rand(len(branch), device=branch.device) < self.kept
        return branch * (is_kept / self.kept).view(-1, *[1] * (branch.ndim - 1)).to(branch.dtype)


class SwinBlock(nn.Module):
    """Window attention and an MLP, each with layer norm, stochastic depth and a shortcut."""

    def __init__(self, dim: int, num_heads: int, window: int, shift: int, depth_drop: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, num_heads, window, shift)
        self.norm2 = nn.LayerNorm(dim)
        # nn.Identity takes the place of torchvision's dropout (probability 0), so that the last layer has index 3.
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Identity(), nn.Linear(4 * dim, dim))
        self.stochastic_depth = StochasticDepth(depth_drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.stochastic_depth(self.attn(self.norm1(x)))
        return x + self.stochastic_depth(self.mlp(self.norm2(x)))


class PatchMerging(nn.Module):
    """Merge 2×2 neighbours into one position with twice the channels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        # The order of the corners is torchvision's: the reduction weights depend on it.
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.reduction(self.norm(torch.cat(corners, dim=-1)))


class ToLastDim(nn.Module):
    """Move channels to the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class SwinPyramid(nn.Module):
    """Feature maps (B, dim * 2^i, H / 2^(i+2), W / 2^(i+2)) of an image, finest first."""

    def __init__(self, settings: PyramidConfig, *, patch: int = 4) -> None:
        super().__init__()
        dim, depths, window = settings.width, settings.depths, settings.window
        self.widths = tuple(dim * 2**stage for stage in range(len(depths)))
        last = max(1, sum(depths) - 1)
        # The probability rises linearly with depth, as in torchvision.
        drops = iter([settings.stochastic_depth * index / last for index in range(sum(depths))])
        layers: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, dim, patch, stride=patch), ToLastDim(), nn.LayerNorm(dim))
        ]
        for stage, (width, depth, heads) in enumerate(zip(self.widths, depths, settings.num_heads, strict=True)):
            if stage:
                layers.append(PatchMerging(width // 2))
            shifts = [0 if index % 2 == 0 else window // 2 for index in range(depth)]
            layers.append(nn.Sequential(*(SwinBlock(width, heads, window, shift, next(drops)) for shift in shifts)))
        self.features = nn.ModuleList(layers)
        self.apply(_initialise)

    def forward(self, image: Tensor) -> list[Tensor]:
        x, found = self.features[0](image), []
        for index, layer in enumerate(self.features[1:], start=1):
            x = layer(x)
            if index % 2 == 1:  # odd layers are stages, even ones merge patches
                found.append(x.permute(0, 3, 1, 2))
        return found


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
