"""The Swin pyramid."""

from __future__ import annotations

import re

import pytest
import torch

from golden import assert_golden, golden, group
from halfstep_train.workloads.radio.config import PyramidConfig
from halfstep_train.workloads.radio.names import rename_unet_weights
from halfstep_train.workloads.radio.swin import SwinPyramid, WindowAttention


def test_golden_features() -> None:
    tensors, facts = golden("radiodiff_blocks")
    sizes = facts["config"]["swin"]
    names = {"width": "embed_dim", "depths": "depths", "num_heads": "num_heads", "window": "window_size"}
    swin = SwinPyramid(PyramidConfig(**{ours: sizes[theirs] for ours, theirs in names.items()})).eval()
    state = {f"init_conv_mask.{name}": value for name, value in group(tensors, "swin/state/").items()}
    swin.load_state_dict({k.removeprefix("condition."): value for k, value in rename_unet_weights(state).items()})
    for place, found in enumerate(swin(tensors["swin/input"])):
        assert_golden(found, tensors[f"swin/features.{place}"], name=f"features.{place}")


def brute_force(attention: WindowAttention, x: torch.Tensor) -> torch.Tensor:
    """One window, one head and one query at a time, on the rolled map."""
    window, height, width = attention.window, -(-x.shape[1] // attention.window), -(-x.shape[2] // attention.window)
    padded = torch.zeros(len(x), height * window, width * window, x.shape[3])
    padded[:, : x.shape[1], : x.shape[2]] = x
    shift = [0 if window >= side else attention.shift for side in padded.shape[1:3]]
    dim = x.shape[3] // attention.num_heads
    qkv = attention.qkv(padded).detach()
    out = torch.zeros_like(padded)

    def window_of(row: int, column: int) -> tuple[int, ...]:
        """Where a place belongs after the roll, and whether it came round."""
        rolled = [(row - shift[0]) % padded.shape[1], (column - shift[1]) % padded.shape[2]]
        return (*(place // window for place in rolled), row < shift[0], column < shift[1])

    places = [(row, column) for row in range(padded.shape[1]) for column in range(padded.shape[2])]
    rolled_place = {p: tuple((p[a] - shift[a]) % padded.shape[a + 1] % window for a in (0, 1)) for p in places}
    table = attention.relative_position_bias_table.detach()
    for row, column in places:
        seen = [p for p in places if window_of(*p) == window_of(row, column)]
        for head in range(attention.num_heads):
            part = slice(head * dim, (head + 1) * dim)
            q = qkv[:, row, column, : x.shape[3]][:, part] * dim**-0.5
            ks = torch.stack([qkv[:, r, c, x.shape[3] : 2 * x.shape[3]][:, part] for r, c in seen], 1)
            vs = torch.stack([qkv[:, r, c, 2 * x.shape[3] :][:, part] for r, c in seen], 1)
            steps = [[rolled_place[row, column][a] - rolled_place[p][a] + window - 1 for a in (0, 1)] for p in seen]
            bias = torch.stack([table[down * (2 * window - 1) + right, head] for down, right in steps])
            weights = ((ks @ q[:, :, None])[..., 0] + bias).softmax(-1)
            out[:, row, column, part] = (weights[..., None] * vs).sum(1)
    return attention.proj(out).detach()[:, : x.shape[1], : x.shape[2]]


@pytest.mark.parametrize("size", [(6, 6), (5, 9), (3, 7), (2, 2)])
@pytest.mark.parametrize("shift", [0, 1])
def test_windows_are_those_of_a_loop_over_places(size: tuple[int, int], shift: int) -> None:
    torch.manual_seed(0)
    attention = WindowAttention(4, 2, window=3, shift=shift)
    torch.nn.init.normal_(attention.relative_position_bias_table)
    x = torch.randn(2, *size, 4)
    torch.testing.assert_close(attention(x).detach(), brute_force(attention, x), rtol=1e-5, atol=1e-5)


def test_any_size_gives_four_maps() -> None:
    swin = SwinPyramid(PyramidConfig(width=4, depths=(1, 2, 1, 1), num_heads=(1, 1, 2, 2))).eval()
    found = swin(torch.randn(1, 3, 68, 100))
    assert [tuple(feature.shape[1:]) for feature in found] == [(4, 17, 25), (8, 9, 13), (16, 5, 7), (32, 3, 4)]


def test_names_are_torchvisions() -> None:
    names = SwinPyramid(PyramidConfig(width=4, depths=(1, 1), num_heads=(1, 1))).state_dict()
    expected = {"features.0.0.weight", "features.1.0.attn.qkv.weight", "features.1.0.mlp.3.bias"}
    expected |= {"features.2.reduction.weight", "features.3.0.norm2.weight"}
    assert expected <= set(names)
    assert all(re.match(r"features\.\d+\.", name) for name in names)


def test_stochastic_depth_drops_whole_branches_of_samples_in_training_only() -> None:
    swin = SwinPyramid(PyramidConfig(width=4, depths=(2,), num_heads=(1,), stochastic_depth=0.5))
    drop = swin.features[1][1].stochastic_depth
    branch = torch.ones(64, 2, 2, 4)
    torch.manual_seed(0)
    kept = drop(branch).flatten(1)
    assert {float(row.min()) for row in kept} == {0.0, 2.0}
    assert torch.equal(kept.min(1).values, kept.max(1).values)
    assert torch.equal(drop.eval()(branch), branch)
