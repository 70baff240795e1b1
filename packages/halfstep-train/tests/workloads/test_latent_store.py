"""Latents on disk: written whole, checked when opened, mirrored by the key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from halfstep.errors import DataError
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


def test_latents_that_are_stale_or_broken_are_made_again_and_other_files_stay(tmp_path: Path) -> None:
    kept = tmp_path / "any.name"
    assert [open_or_write(kept, made_from)[1] for made_from in ("one", "one", "two")] == [True, False, True]
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert open_or_write(kept, "two")[1]
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"weights")
    for path in (other, tmp_path):
        with pytest.raises(DataError, match=r"exists and is not a file of latents"):
            open_or_write(path, "two")
    assert other.read_bytes() == b"weights"


def test_processes_that_start_together_encode_once(tmp_path: Path) -> None:
    path, num_encoded = tmp_path / "latents.cache", []

    def rows() -> Iterator[torch.Tensor]:
        num_encoded.append(1)
        time.sleep(0.1)  # as long as both look for the file
        yield MOMENTS

    with ThreadPoolExecutor(3) as ranks:  # the lock is of an opened file: threads exclude each other as processes do
        found = list(ranks.map(lambda _: open_or_write_latents(path, "f", 6, rows), range(3)))
    assert len(num_encoded) == 1
    assert all(is_new and torch.equal(cache.moments, MOMENTS) for cache, is_new in found)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_on_the_way_leaves_no_file(tmp_path: Path) -> None:
    def rows() -> Iterator[torch.Tensor]:
        yield MOMENTS[:2]
        raise DataError("a bad picture")

    with pytest.raises(DataError, match="a bad picture"):
        open_or_write_latents(tmp_path / "latents.cache", "f", 6, rows)
    assert not list(tmp_path.iterdir())


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
