"""Videos in folders and files, their split, and clips as samples."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from video_sets import Array, clip, frame_folder, shards, steve_folder

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.workloads.slots.config import VideoDataConfig
from halfstep_train.workloads.slots.data import ClipSamples, compute_crop_box, open_clips
from halfstep_train.workloads.slots.videos import FoundVideos, Video, find_videos, open_video_file


def find(folder: Path, *, bad_files: BadFiles | None = None, **settings: Any) -> FoundVideos:
    return find_videos(VideoDataConfig(dir=str(folder), **settings), bad_files or BadFiles("error"))


def list_names(videos: list[Video]) -> list[str]:
    return [video.name for video in videos]


def test_steves_folders_are_read_with_their_masks(tmp_path: Path) -> None:
    for number in range(3):
        steve_folder(tmp_path, number)
    found = find(tmp_path, val_fraction=0.3)
    assert list_names(found.train) == ["00000000", "00000001"]
    assert list_names(found.val) == ["00000002"]
    video, masks = clip(2, frames=4)
    assert (found.val[0].read_frames(1, 2) == video[1:3]).all()
    assert (found.val[0].read_masks(0, 4) == masks).all()


def test_frames_and_masks_side_by_side_are_read_and_videos_held_out_by_name(tmp_path: Path) -> None:
    for name, number in (("01", 1), ("02", 2)):
        frame_folder(tmp_path, name, number)
    found = find(tmp_path, val_videos=["02"])
    assert list_names(found.train) == ["01"]
    assert (found.val[0].read_masks(0, 4) == clip(2, frames=4)[1]).all()
    with pytest.raises(DataError, match="matches 0 of 2 videos"):
        find(tmp_path, val_videos=["03"])
    next((tmp_path / "01" / "frames").iterdir()).write_bytes(b"")
    with pytest.raises(DataError, match="matches 1 of 1 video") as raised:
        find(tmp_path, val_videos=["02"], bad_files=BadFiles("skip"))
    assert "1 left out: cannot read" in raised.value.why


def test_train_and_val_are_told_apart_by_shard_names_and_folders(tmp_path: Path) -> None:
    shards(tmp_path / "a" / "movi", "movi-train", (2,), with_masks=False)
    shards(tmp_path / "a" / "movi", "movi-validation", (1,))
    found = find(tmp_path / "a")
    assert [video.has_masks for video in (*found.train, *found.val)] == [False, False, True]
    for part in ("train", "val"):
        frame_folder(tmp_path / "b" / part, f"of {part}", 1)
    found = find(tmp_path / "b")
    assert (list_names(found.train), list_names(found.val)) == (["of train"], ["of val"])


def save_gif(path: Path, frames: Iterable[Array]) -> None:
    pictures = [Image.fromarray(frame) for frame in frames]
    pictures[0].save(path, save_all=True, append_images=pictures[1:])


def show_primary_colours(height: int, width: int) -> list[Array]:
    """Return a red, a green and a blue frame."""
    return [np.full((height, width, 3), 250 * np.eye(3, dtype=np.uint8)[channel]) for channel in range(3)]


def check_primary_colours(path: Path) -> None:
    """Codecs blur colours, so only the strongest channel is compared."""
    video = open_video_file(path)
    assert (video.name, video.num_frames, video.size) == (path.name, 3, (16, 32))
    assert video.read_frames(1, 2)[:, 8, 16].argmax(-1).tolist() == [1, 2]


def test_a_gif_is_a_video(tmp_path: Path) -> None:
    save_gif(tmp_path / "a.gif", show_primary_colours(16, 32))
    check_primary_colours(tmp_path / "a.gif")
    assert list_names(find(tmp_path).train) == ["a.gif"]


def test_a_gif_cut_short_is_named_or_shorter_wherever_it_is_cut(tmp_path: Path) -> None:
    save_gif(tmp_path / "a.gif", np.random.default_rng(0).integers(0, 255, (4, 9, 9, 3), dtype=np.uint8))
    whole = (tmp_path / "a.gif").read_bytes()
    for end in range(20, len(whole) - 1, 37):
        (tmp_path / "a.gif").write_bytes(whole[:end])
        with suppress(DataError):
            video = open_video_file(tmp_path / "a.gif")
            assert len(video.read_frames(0, video.num_frames)) == video.num_frames


def test_a_video_file_without_a_decoder_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match="a.mp4") as raised:
        open_video_file(tmp_path / "a.mp4")
    assert "pip install av" in raised.value.fix


def test_an_mp4_is_a_video_where_a_decoder_is_installed(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed: mp4 files are not read here")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for picture in show_primary_colours(16, 32):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    check_primary_colours(tmp_path / "a.mp4")
    with av.open(str(tmp_path / "sound.mkv"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(DataError, match=r"sound\.mkv"):
        open_video_file(tmp_path / "sound.mkv")


def test_frames_of_other_sizes_and_masks_without_frames_are_named(tmp_path: Path) -> None:
    frame_folder(tmp_path, "01", 1)
    Image.new("RGB", (4, 4)).save(tmp_path / "01" / "frames" / "002.png")
    with pytest.raises(DataError, match=r"002\.png is 4×4"):
        find(tmp_path, val_fraction=0).train[0].read_frames(0, 4)
    skipping = BadFiles("skip")
    frame_folder(tmp_path, "02", 1)
    assert list_names(find(tmp_path, bad_files=skipping, val_fraction=0).train) == ["02"]
    assert len(skipping.skipped) == 1
    for file in (tmp_path / "02" / "frames").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="02 contains 0 frames and 4 masks"):
        find(tmp_path)


def of_shards(tmp_path: Path, *, cut: Any = "one", **form: Any) -> ClipSamples:
    shards(tmp_path / "data", "v", (4,), frames=7)
    return ClipSamples(find(tmp_path / "data", val_fraction=0).train, cut=cut, **{"frames": 3, **form})


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
    samples = ClipSamples(find(tmp_path).train, cut="whole", frames=1, flip=1.0, with_masks=True)
    flipped = samples.sample(0, key=(0, 0, 0))
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
    shards(tmp_path, "v", (4,), frames=7)
    with pytest.raises(DataError, match="000000 has 7 frames, but a chunk has 8"):
        open_clips(VideoDataConfig(dir=str(tmp_path), chunk_size=8))
