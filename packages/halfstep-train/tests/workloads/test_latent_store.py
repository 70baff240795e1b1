"""Latents on disk: written whole, checked when opened, mirrored by the key."""

from __future__ import annotations

from pathlib import Path

import torch

from halfstep_train.workloads.base.latent_store import CachedLatents, LatentCache, open_or_write_latents

MOMENTS = torch.arange(6 * 2 * 4 * 2 * 2, dtype=torch.float32).view(6, 2, 4, 2, 2)


def open_or_write(path: Path, made_from: str, moments: torch.Tensor = MOMENTS) -> tuple[LatentCache, bool]:
    return open_or_write_latents(path, made_from, 6, lambda: iter(moments.split(4)))


def test_what_was_written_is_read_and_its_checksum_depends_on_the_numbers_only(tmp_path: Path) -> None:
    first, same, other = (
        open_or_write(tmp_path / name, made_from, moments)[0]
        for name, moments, made_from in (("a", MOMENTS, "f"), ("b", MOMENTS, "g"), ("c", MOMENTS + 1, "f"))
    )
    assert torch.equal(first.moments, MOMENTS)
    assert first.checksum == same.checksum != other.checksum


def test_a_batch_is_its_samples_and_mirror_images_come_by_the_key() -> None:
    samples = CachedLatents(MOMENTS, flip=0.5, extra={"label": torch.arange(6)})
    indices = torch.tensor([4, 0, 3])
    batch = samples.make_batch(indices, seed=1, epoch=2)
    for row, index in enumerate(indices.tolist()):
        alone = samples.sample(index, key=(1, 2, index))
        assert torch.equal(batch["moments"][row], alone["moments"])
        assert int(alone["label"]) == index
    views = {int((s["moments"] == MOMENTS[0, 1]).all()) for e in range(8) for s in [samples.sample(0, key=(1, e, 0))]}
    assert views == {0, 1}
    plain = CachedLatents(MOMENTS)
    assert all(
        torch.equal(plain.sample(k, key=(1, e, k))["moments"], MOMENTS[k, 0]) for k in range(6) for e in range(4)
    )
