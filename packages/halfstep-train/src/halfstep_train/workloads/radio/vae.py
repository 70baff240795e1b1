"""RadioDiff's first stage: the latent-diffusion autoencoder (Rombach et al. 2022) on one-channel maps.

Levels halve the map, GroupNorm and SiLU precede each convolution, and one head attends over all positions in the
middle. Modules have LDM's names, so weights of that family load unchanged. Left out: attention inside levels
(`attn_resolutions`, empty in every public radio config).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.recompute import Recomputing, choose_block_runner
from halfstep_train.kernels.group_norm import apply_group_norm_silu, can_fuse_group_norm
from halfstep_train.models.posterior import Codec, draw_and_decode, split_moments
from halfstep_train.workloads.radio.config import FirstStageConfig

GROUPS = 32


def make_group_norm(channels: int) -> nn.GroupNorm:
    """Return a GroupNorm with LDM's 32 groups, or with fewer if there are too few channels."""
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels, eps=1e-6)


def apply_norm_silu(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    return apply_group_norm_silu(norm, x) if can_fuse_group_norm(x, norm) else F.silu(norm(x))


def make_conv3(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class ResidualBlock(nn.Module):
    """Norm, SiLU, convolution, twice, with a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = make_group_norm(inputs), make_conv3(inputs, outputs)
        self.norm2, self.conv2 = make_group_norm(outputs), make_conv3(outputs, outputs)
        self.nin_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(apply_norm_silu(self.norm1, x))
        h = self.conv2(apply_norm_silu(self.norm2, h))
        return self.nin_shortcut(x) + h


def make_blocks(inputs: int, outputs: int, count: int) -> nn.Sequential:
    widths = [inputs, *[outputs] * count]
    return nn.Sequential(*(ResidualBlock(a, b) for a, b in zip(widths, widths[1:], strict=False)))


class PositionAttention(nn.Module):
    """Self-attention over all positions, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = make_group_norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        # (B, 1, H·W, C): a single head over all positions.
        q, k, v = (part(normed).flatten(2).transpose(1, 2).unsqueeze(1) for part in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + self.proj_out(found.reshape(x.shape))


class Middle(nn.Module):
    """The bottleneck of encoder and decoder: block, attention, block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(channels, channels)
        self.attn_1 = PositionAttention(channels)
        self.block_2 = ResidualBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Halve(nn.Module):
    """Halve the map by a convolution with stride 2, padded on the right and at the bottom only, as in LDM."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Double(nn.Module):
    """Double the map by nearest-neighbour upsampling and a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = make_conv3(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class VaeLevel(nn.Sequential):
    """Residual blocks, and under LDM's name the layer that changes the size of the map (`Halve` or `Double`)."""

    def __init__(
        self, inputs: int, outputs: int, num_blocks: int, name: str, resize: type[Halve | Double | nn.Identity]
    ) -> None:
        super().__init__()
        self.block = make_blocks(inputs, outputs, num_blocks)
        self.add_module(name, resize(outputs))


class Encoder(Recomputing):
    """Encode maps (B, 1, H, W) to 2 * latent_channels: mean and log variance before `quant_conv`."""

    def __init__(self, latent_channels: int, widths: Sequence[int], num_blocks: int) -> None:
        super().__init__()
        first, *levels = widths
        self.conv_in = make_conv3(1, first)
        # (input, output) channels of each level.
        pairs = list(zip([first, *levels], levels, strict=False))
        self.down = nn.ModuleList(
            VaeLevel(a, b, num_blocks, "downsample", Halve if index < len(pairs) - 1 else nn.Identity)
            for index, (a, b) in enumerate(pairs)
        )
        self.mid = Middle(levels[-1])
        self.norm_out, self.conv_out = make_group_norm(levels[-1]), make_conv3(levels[-1], 2 * latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        x, run = self.conv_in(x), choose_block_runner(self.recompute)
        for level in self.down:
            x = run(level, x)
        return self.conv_out(apply_norm_silu(self.norm_out, self.mid(x)))


class Decoder(Recomputing):
    """Decode latents to maps. Levels are numbered from the finest, as in the encoder, but run from the coarsest."""

    def __init__(self, latent_channels: int, widths: Sequence[int], num_blocks: int) -> None:
        super().__init__()
        levels = list(widths[1:])
        self.conv_in = make_conv3(latent_channels, levels[-1])
        self.mid = Middle(levels[-1])
        # Each level has one block more than in the encoder, as in LDM.
        self.up = nn.ModuleList(
            VaeLevel(a, b, num_blocks + 1, "upsample", Double if index else nn.Identity)
            for index, (a, b) in enumerate(zip([*levels[1:], levels[-1]], levels, strict=True))
        )
        self.norm_out, self.conv_out = make_group_norm(levels[0]), make_conv3(levels[0], 1)

    def forward(self, z: Tensor) -> Tensor:
        x, run = self.mid(self.conv_in(z)), choose_block_runner(self.recompute)
        for level in reversed(self.up):
            x = run(level, x)
        return self.conv_out(apply_norm_silu(self.norm_out, x))


class RadioVAE(nn.Module):
    """A variational autoencoder of maps (B, 1, H, W) in -1..1."""

    def __init__(self, sizes: FirstStageConfig) -> None:
        super().__init__()
        latent_channels, num_blocks = sizes.latent_channels, sizes.num_blocks
        widths = [sizes.width, *(sizes.width * factor for factor in sizes.multipliers)]
        self.encoder = Encoder(latent_channels, widths, num_blocks)
        self.decoder = Decoder(latent_channels, widths, num_blocks)
        self.quant_conv = nn.Conv2d(2 * latent_channels, 2 * latent_channels, 1)
        self.post_quant_conv = nn.Conv2d(latent_channels, latent_channels, 1)

    def encode(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the latents, in fp32."""
        return split_moments(self.quant_conv(self.encoder(maps)))

    def decode(self, latents: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(latents))

    def forward(self, maps: Tensor, noise: Tensor) -> dict[str, Tensor]:
        return draw_and_decode(*self.encode(maps), noise, self.decode)


class RadioCodec(Codec):
    """Encoding and decoding with a RadioVAE."""

    def reconstruct(self, vae: RadioVAE, images: Tensor, noise: Tensor) -> dict[str, Tensor]:
        # Call the module itself: precision.modules={vae: ...} wraps its forward.
        found: dict[str, Tensor] = vae(images, noise)
        return found


CODEC = RadioCodec()
