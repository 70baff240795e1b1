from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.picture_folders import write_split
from halfstep.prefetching import prefetch
from halfstep_train.data.image_folder import FolderLayout, find_images
from halfstep_train.data.image_samples import PackSettings, TrainingFiles, TrainingImages, open_or_pack
from halfstep_train.data.loader import Loader, Samples
from halfstep_train.workloads.classification.augment import prepare_images
from halfstep_train.workloads.classification.config import ImageAugmentConfig
from no_waiting import no_host_wait

pytestmark = pytest.mark.gpu

EVERYTHING = ImageAugmentConfig(brightness=0.4, erase=0.5)


@pytest.fixture(params=["files", "packed"])
def samples(request: pytest.FixtureRequest, tmp_path: Path) -> Samples:
    folder = find_images(write_split(tmp_path / "data", train=16, size=(200, 150)), FolderLayout())
    if request.param == "files":
        return TrainingFiles(folder.train, size=64)
    return TrainingImages(open_or_pack(folder, tmp_path / "a.pack", PackSettings(size=96)).train)


def test_a_batch_becomes_the_same_images_on_the_gpu(samples: Samples) -> None:
    batch = next(Loader(samples, batch_size=16).iterate_epoch(0))
    on_gpu = {name: tensor.cuda() for name, tensor in batch.items()}
    here, there = (prepare_images(b, 64, changes=EVERYTHING, key=(0, 3)) for b in (batch, on_gpu))
    # In units of a channel's deviation, of which a level of 255 is 0.017; positions are rounded to fp32.
    assert (here - there.cpu()).abs().max() < 0.02
    assert (here - there.cpu()).abs().mean() < 1e-4


def test_preparing_a_batch_never_waits_for_the_gpu(samples: Samples) -> None:
    batches = [
        {name: t.cuda() for name, t in batch.items()} for batch in Loader(samples, batch_size=8).iterate_epoch(0)
    ]
    changes = EVERYTHING.model_copy(update={"trivial": True})
    for warm_up in range(4):  # each meets other kinds of change
        prepare_images(batches[0], 64, changes=changes, key=(0, warm_up))
    with no_host_wait():
        for step, batch in enumerate(batches):
            prepare_images(batch, 64, changes=changes, key=(0, step))


def test_batches_of_a_pack_arrive_pinned_and_whole(tmp_path: Path) -> None:
    folder = find_images(write_split(tmp_path / "data", train=16), FolderLayout())
    stored = TrainingImages(open_or_pack(folder, tmp_path / "a.pack", PackSettings(size=32)).train)
    torch.cuda.init()
    loader = Loader(stored, batch_size=4, num_workers=2)
    assert all(batch["image"].is_pinned() for batch in loader.iterate_epoch(0))
    for sent, kept in zip(prefetch(loader.iterate_epoch(0), "cuda"), loader_on_cpu(stored), strict=True):
        assert all(torch.equal(sent[name].cpu(), kept[name]) for name in kept)


def loader_on_cpu(samples: Samples) -> list[dict[str, torch.Tensor]]:
    return list(Loader(samples, batch_size=4).iterate_epoch(0))
