"""Videos in folders and files, their split, and clips as samples."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from video_sets import clip, frame_folder, shards, steve_folder

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.workloads.slots.data import ClipForm, ClipSamples, compute_crop_box, split_by_length
from halfstep_train.workloads.slots.video_layouts import DECODERS, find_videos, read_frames, read_video_facts

ERROR = BadFiles("error")


def test_steves_folders_are_read_with_their_masks(tmp_path: Path) -> None:
    for number in range(3):
        steve_folder(tmp_path, number)
    found = find_videos(tmp_path, val_fraction=0.3, bad_files=ERROR)
    assert found.train.names == ("00000000", "00000001")
    assert found.val is not None
    assert found.val.names == ("00000002",)
    assert found.val.have_masks
    video, masks = clip(2, frames=4)
    assert (found.val.videos.read_frames(2, 1, 2) == video[1:3]).all()
    assert (found.val.videos.read_masks(2, 0, 4) == masks).all()


def test_frames_and_masks_side_by_side_are_read_and_videos_held_out_by_name(tmp_path: Path) -> None:
    for name, number in (("01", 1), ("02", 2)):
        frame_folder(tmp_path, name, number)
    found = find_videos(tmp_path, val_videos=["02"], bad_files=ERROR)
    assert found.train.names == ("01",)
    assert found.val is not None
    assert (found.val.videos.read_masks(1, 0, 4) == clip(2, frames=4)[1]).all()
    with pytest.raises(DataError, match="matches 0 of 2 videos"):
        find_videos(tmp_path, val_videos=["03"], bad_files=ERROR)
    next((tmp_path / "01" / "frames").iterdir()).write_bytes(b"")
    with pytest.raises(DataError, match="matches 1 of 1 video") as raised:
        find_videos(tmp_path, val_videos=["02"], bad_files=BadFiles("skip"))
    assert "1 left out: cannot read" in raised.value.why


def test_train_and_val_are_told_apart_by_shard_names_and_folders(tmp_path: Path) -> None:
    shards(tmp_path / "a" / "movi", "movi-train", (2,), with_masks=False)
    shards(tmp_path / "a" / "movi", "movi-validation", (1,))
    found = find_videos(tmp_path / "a", bad_files=ERROR)
    assert (len(found.train.members), found.val and len(found.val.members)) == (2, 1)
    assert not found.train.have_masks
    for part in ("train", "val"):
        frame_folder(tmp_path / "b" / part, f"of {part}", 1)
    found = find_videos(tmp_path / "b", bad_files=ERROR)
    assert found.train.names == ("of train",)
    assert found.val is not None
    assert found.val.names == ("of val",)


def test_a_gif_is_a_video(tmp_path: Path) -> None:
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    pictures = [Image.new("RGB", (10, 6), colour) for colour in colours]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:])
    assert read_video_facts(tmp_path / "a.gif") == (3, (6, 10))
    assert read_frames(tmp_path / "a.gif", 1, 2)[:, 0, 0].argmax(-1).tolist() == [1, 2]
    assert find_videos(tmp_path, bad_files=ERROR).train.names == ("a.gif",)


def test_a_gif_cut_short_is_named_or_shorter_wherever_it_is_cut(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (4, 9, 9, 3), dtype=np.uint8)
    pictures = [Image.fromarray(frame) for frame in noise]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:])
    whole = (tmp_path / "a.gif").read_bytes()
    for end in range(20, len(whole) - 1, 37):
        (tmp_path / "a.gif").write_bytes(whole[:end])
        with suppress(DataError):
            count, _ = read_video_facts(tmp_path / "a.gif")
            assert len(read_frames(tmp_path / "a.gif", 0, count)) == count


def test_a_video_file_without_a_decoder_says_what_to_install(tmp_path: Path) -> None:
    import importlib.util

    if any(importlib.util.find_spec(name) for name in DECODERS):
        pytest.skip("a video decoder is installed here")
    (tmp_path / "a.mp4").write_bytes(b"")
    with pytest.raises(DataError, match="a.mp4") as raised:
        read_video_facts(tmp_path / "a.mp4")
    assert "pip install av" in raised.value.fix


def test_an_mp4_is_a_video_where_a_decoder_is_installed(tmp_path: Path) -> None:
    """Red, green and blue frames; codecs blur colours, so only the strongest channel is asked for."""
    av = pytest.importorskip("av", reason="PyAV is not installed: mp4 files are not read here")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for channel in range(3):
            picture = np.zeros((16, 32, 3), np.uint8)
            picture[..., channel] = 250
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    assert read_video_facts(tmp_path / "a.mp4") == (3, (16, 32))
    assert read_frames(tmp_path / "a.mp4", 1, 2)[:, 8, 16].argmax(-1).tolist() == [1, 2]
    with av.open(str(tmp_path / "sound.mkv"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(DataError, match=r"sound\.mkv"):
        read_video_facts(tmp_path / "sound.mkv")


def test_frames_of_other_sizes_and_masks_without_frames_are_named(tmp_path: Path) -> None:
    frame_folder(tmp_path, "01", 1)
    Image.new("RGB", (4, 4)).save(tmp_path / "01" / "frames" / "002.png")
    found = find_videos(tmp_path, bad_files=ERROR)
    with pytest.raises(DataError, match="002.png 4×4"):
        found.train.videos.read_frames(0, 0, 4)
    skipping = BadFiles("skip")
    frame_folder(tmp_path, "02", 1)
    assert find_videos(tmp_path, bad_files=skipping, val_fraction=0).train.names == ("02",)
    assert len(skipping.skipped) == 1
    for file in (tmp_path / "02" / "frames").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="02 holds no frames"):
        find_videos(tmp_path, bad_files=BadFiles("error"))


def of_shards(tmp_path: Path, **form: object) -> ClipSamples:
    shards(tmp_path / "data", "v", (4,), frames=7)
    videos = find_videos(tmp_path / "data", val_fraction=0, bad_files=ERROR).train
    cut = form.pop("cut", "one")
    return ClipSamples(videos.videos, videos.members, ClipForm(**{"frames": 3, **form}), cut=cut)  # type: ignore[arg-type]


def test_a_clip_is_a_function_of_seed_epoch_and_index(tmp_path: Path) -> None:
    samples = of_shards(tmp_path, flip=0.5, with_masks=True)
    assert len(samples) == 4
    first = samples.sample(2, key=(0, 1, 2))
    again = samples.sample(2, key=(0, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in ("video", "masks"))
    assert first["video"].shape == (3, 3, 8, 8)
    starts = {int(samples.sample(2, key=(0, epoch, 2))["video"][0, 1, 0, 0]) for epoch in range(40)}
    assert starts == {0, 3}, "chunks are aligned, and every one comes up"


def test_all_chunks_of_a_video_are_samples_on_request(tmp_path: Path) -> None:
    samples = of_shards(tmp_path, cut="all")
    assert len(samples) == 8
    clip_ = samples.sample(3, key=(0, 0, 3))["video"]
    assert (int(clip_[0, 0, 0, 0]), clip_[:, 1, 0, 0].tolist()) == (1, [3, 4, 5])
    assert samples.name_of(3) == "v-000000.tar/000001, frames from 3"


def test_short_videos_are_filled_up_in_validation_and_said_to_be(tmp_path: Path) -> None:
    samples = of_shards(tmp_path, cut="whole", frames=9, with_masks=True)
    clip_ = samples.sample(0, key=(0, 0, 0))
    assert clip_["is_real"].tolist() == [True] * 7 + [False] * 2
    assert clip_["video"][:, 1, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]


def test_a_flip_turns_frames_and_masks_alike(tmp_path: Path) -> None:
    steve_folder(tmp_path, 0)
    picture = np.zeros((8, 8, 3), np.uint8)
    picture[:, :2] = 255
    Image.fromarray(picture).save(tmp_path / "00000000" / "00000000_image.png")
    Image.fromarray(picture[..., 0]).save(tmp_path / "00000000" / "00000000_mask_01.png")
    videos = find_videos(tmp_path, bad_files=ERROR).train
    form = ClipForm(frames=1, flip=1.0, with_masks=True)
    flipped = ClipSamples(videos.videos, (0,), form, cut="whole").sample(0, key=(0, 0, 0))
    assert flipped["video"][0, 0, 0].tolist() == [0] * 6 + [255] * 2
    assert (flipped["masks"][0] == (flipped["video"][0, 0] > 0)).all()


def test_a_crop_is_a_square_of_the_shorter_side() -> None:
    assert compute_crop_box((10, 20), "central", ()) == (slice(0, 10), slice(5, 15))
    assert compute_crop_box((10, 20), "random", (0.3, 1.0)) == (slice(0, 10), slice(10, 20))
    assert compute_crop_box((10, 20), "none", ()) == (slice(0, 10), slice(0, 20))


def test_frames_of_different_videos_are_brought_to_one_size(tmp_path: Path) -> None:
    samples = of_shards(tmp_path, size=16, with_masks=True)
    clip_ = samples.sample(1, key=(0, 0, 1))
    assert clip_["video"].shape == (3, 3, 16, 16)
    assert clip_["video"].dtype == torch.uint8
    assert set(clip_["masks"].unique().tolist()) <= {0, 2}


def test_a_video_shorter_than_the_chunk_is_named(tmp_path: Path) -> None:
    videos = of_shards(tmp_path).videos
    kept, errors = split_by_length(videos, (0, 1), 8)
    assert kept == []
    assert "000000 has 7 frames, a chunk 8" in errors[0].what
