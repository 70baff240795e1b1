"""Shards by pattern, read by offset."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from video_sets import clip, shards

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.workloads.slots.videos import Video, expand_braces, find_shards, open_shards


def test_braces_are_expanded_as_a_shell_does() -> None:
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{9..10}{x,y}") == ["9x", "9y", "10x", "10y"]
    assert expand_braces("plain.tar") == ["plain.tar"]
    assert len(expand_braces("movi_c/movi_c-train-{000000..000304}.tar")) == 305


def open_(folder: Path, patterns: str = "*.tar", *, skip: bool = False) -> list[Video]:
    return open_shards(folder, patterns, BadFiles("skip" if skip else "error"))


def test_any_sample_is_read_by_its_index_and_only_the_frames_asked_for(tmp_path: Path) -> None:
    shards(tmp_path, "v", (2, 3))
    videos = open_(tmp_path, "v-{000000..000001}.tar")
    places = ((0, 0), (0, 1), (1, 2), (1, 3), (1, 4))
    assert [video.name for video in videos] == [f"v-{s:06d}.tar/{k:06d}" for s, k in places]
    video, masks = clip(3)
    assert (videos[3].read_frames(2, 3) == video[2:5]).all()
    assert (videos[3].read_masks(0, 6) == masks).all()
    assert (videos[0].num_frames, videos[0].size) == (6, (8, 8))


def test_missing_shards_are_named_or_counted(tmp_path: Path) -> None:
    shards(tmp_path, "v", (1, 1))
    with pytest.raises(DataError, match="2 shards .*v-000002.tar, v-000003.tar"):
        find_shards(tmp_path, "v-{000000..000003}.tar", bad_files=BadFiles("error"))
    skipping = BadFiles("skip")
    assert len(find_shards(tmp_path, "v-{000000..000003}.tar", bad_files=skipping)) == 2
    assert len(skipping.skipped) == 1
    with pytest.raises(DataError, match="no shard in .* matches w"):
        find_shards(tmp_path, "w-{0..1}.tar", bad_files=skipping)


def test_wherever_a_tar_is_cut_what_is_left_can_be_read(tmp_path: Path) -> None:
    shards(tmp_path, "v", (3,))
    path = tmp_path / "v-000000.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as shard:
        second = shard.getmember("000001.segmentations.npy").offset
    for end in range(second + 100, len(whole), 400):
        path.write_bytes(whole[:end])
        for index, found in enumerate(open_(tmp_path, skip=True)):
            assert (found.read_frames(0, 6) == clip(index)[0]).all()


@pytest.mark.parametrize(("cut", "rest"), [(0, b""), (100, b""), (0, b"\xff" * 4096)])
def test_a_tar_cut_between_files_or_in_a_header_is_not_complete(tmp_path: Path, cut: int, rest: bytes) -> None:
    shards(tmp_path, "v", (3,))
    path = tmp_path / "v-000000.tar"
    with tarfile.open(path) as shard:
        end = shard.getmember("000001.segmentations.npy").offset
    path.write_bytes(path.read_bytes()[: end + cut] + rest)
    with pytest.raises(DataError, match=r"v-000000\.tar is not a complete tar file"):
        open_(tmp_path)
    left = open_(tmp_path, skip=True)
    assert [(video.name, video.has_masks) for video in left] == [("v-000000.tar/000000", True)], "without its masks"


def test_hidden_files_are_no_samples(tmp_path: Path) -> None:
    put(tmp_path / "v.tar", {"._a.video.npy": b"", "in/.DS_Store": b"", "a.video.npy": video})
    assert [found.name for found in open_(tmp_path)] == ["v.tar/a"]


def test_a_name_that_a_shard_holds_twice_is_an_error(tmp_path: Path) -> None:
    put(tmp_path / "w.tar", {"a.video.npy": video, "a.VIDEO.npy": video})
    with pytest.raises(DataError) as refused:
        open_(tmp_path)
    assert "it contains a.VIDEO.npy twice" in str(refused.value)


def test_a_packed_tar_is_refused_with_the_way_out(tmp_path: Path) -> None:
    shards(tmp_path, "v", (1,))
    plain = tmp_path / "v-000000.tar"
    plain.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(DataError) as raised:
        open_(tmp_path)
    assert "decompress" in raised.value.fix


def put(path: Path, parts: dict[str, np.ndarray | bytes]) -> None:
    with tarfile.open(path, "w") as shard:
        for name, content in parts.items():
            if isinstance(content, np.ndarray):
                buffer = io.BytesIO()
                np.save(buffer, content, allow_pickle=True)
                content = buffer.getvalue()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))


video, masks = clip(0)
BAD = {
    "masks but no video.npy": {"a.segmentations.npy": masks},
    "frames are float64": {"a.video.npy": video.astype(float)},
    r"frames are uint8 \(8, 8, 3\)": {"a.video.npy": video[0]},
    "is not a plain .npy array": {"a.video.npy": b"not an array at all"},
    "Python objects": {"a.video.npy": np.array([{"a": 1}], dtype=object)},
    r"masks are uint8 \(3, 8, 8\)": {"a.video.npy": video, "a.segmentations.npy": masks[:3]},
}


@pytest.mark.parametrize("said", BAD)
def test_a_bad_sample_is_named_with_its_shard_or_left_out(tmp_path: Path, said: str) -> None:
    put(tmp_path / "v.tar", BAD[said] | {"b.video.npy": video})
    with pytest.raises(DataError, match=said) as raised:
        open_(tmp_path)
    assert "v.tar" in raised.value.what
    assert "a" in raised.value.what
    assert [found.name for found in open_(tmp_path, skip=True)] == ["v.tar/b"]


def test_planes_of_objects_become_labels_and_overlaps_are_refused(tmp_path: Path) -> None:
    planes = np.stack([masks == 1, np.roll(masks == 1, 1, axis=1)], axis=-1).astype(np.uint8)
    put(tmp_path / "v.tar", {"a.video.npy": video, "a.segmentations.npy": planes})
    (found,) = open_(tmp_path)
    assert not found.labels_background
    assert np.unique(found.read_masks(0, 6)).tolist() == [0, 1, 2]
    put(tmp_path / "w.tar", {"a.video.npy": video, "a.segmentations.npy": np.repeat(planes[..., :1], 2, axis=-1)})
    with pytest.raises(DataError, match="overlap"):
        open_(tmp_path, "w.tar")[0].read_masks(0, 6)


def test_wide_labels_are_counted_anew(tmp_path: Path) -> None:
    put(tmp_path / "v.tar", {"a.video.npy": video, "a.segmentations.npy": masks.astype(np.int64) * 70_000})
    found = open_(tmp_path)[0].read_masks(0, 6)
    assert (found == (masks > 0)).all()
