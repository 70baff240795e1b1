"""From a data folder to training and validation videos, whichever way they lie in it.

Patterns of shards are taken as given. Otherwise: tars whose names say `train` and `val`; folders `train/` and `val/`;
or one set of videos, of which the last ones in order are kept for validation, as STEVE splits. Videos of a set are
often cuts of one recording, so a random split would test on what was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from halfstep.data.files import BadFiles, some_of
from halfstep.data.frame_folders import FrameFolders
from halfstep.data.video_files import VideoFiles, video_files
from halfstep.data.videos import ShardVideos, Videos
from halfstep.errors import DataError, counted

VALIDATION = ("val", "valid", "validation", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoPart:
    """Some videos of a set."""

    videos: Videos
    members: tuple[int, ...]

    @property
    def have_masks(self) -> bool:
        return bool(self.members) and all(self.videos.videos[index].has_masks for index in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.videos.videos[index].name for index in self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundVideos:
    """Both parts of a data folder, and how they were told apart."""

    train: VideoPart
    val: VideoPart | None
    layout: str


def find_videos(
    root: Path,
    *,
    train_shards: str | Sequence[str] = "",
    val_shards: str | Sequence[str] = "",
    val_videos: Sequence[str] = (),
    val_fraction: float = 0.1,
    bad_files: BadFiles,
) -> FoundVideos:
    """The videos of a folder."""
    if train_shards:
        train = ShardVideos(root, train_shards, bad_files=bad_files)
        val = ShardVideos(root, val_shards, bad_files=bad_files) if val_shards else None
        if val is None:
            return _split(train, val_videos, val_fraction, "shards")
        return _two(train, val, "shards by pattern")
    if not root.is_dir():
        raise DataError(f"no folder {root}", why="it does not exist or is a file", fix="check data.dir")
    tars = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.tar"))]
    if tars:
        return _tars(root, tars, val_videos, val_fraction, bad_files)
    val_folder = next((root / name for name in VALIDATION if (root / name).is_dir()), None)
    if (root / "train").is_dir() and val_folder is not None:
        train_set, val_set = (open_videos(path, bad_files=bad_files) for path in (root / "train", val_folder))
        return _two(train_set, val_set, f"train/ and {val_folder.name}/")
    return _split(open_videos(root, bad_files=bad_files), val_videos, val_fraction, "one set of videos")


def open_videos(root: Path, *, bad_files: BadFiles) -> Videos:
    """Every video of one folder: tars, files, or folders of frames."""
    tars = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.tar"))]
    if tars:
        return ShardVideos(root, tars, bad_files=bad_files)
    if files := video_files(root):
        return VideoFiles(files, bad_files=bad_files)
    return FrameFolders(root, bad_files=bad_files)


def _tars(
    root: Path, tars: list[str], val_videos: Sequence[str], val_fraction: float, bad_files: BadFiles
) -> FoundVideos:
    train = [name for name in tars if "train" in Path(name).name.lower()]
    val = [name for name in tars if name not in train and any(word in Path(name).name.lower() for word in VALIDATION)]
    if train and val:
        train_set, val_set = (ShardVideos(root, names, bad_files=bad_files) for names in (train, val))
        return _two(train_set, val_set, "shards by name")
    return _split(ShardVideos(root, tars, bad_files=bad_files), val_videos, val_fraction, "shards")


def _two(train: Videos, val: Videos, layout: str) -> FoundVideos:
    return FoundVideos(train=_whole(train), val=_whole(val), layout=layout)


def _whole(videos: Videos) -> VideoPart:
    return VideoPart(videos=videos, members=tuple(range(len(videos.videos))))


def _split(videos: Videos, val_videos: Sequence[str], val_fraction: float, layout: str) -> FoundVideos:
    names = [video.name for video in videos.videos]
    if val_videos:
        held = [place for place, name in enumerate(names) if any(fnmatchcase(name, wish) for wish in val_videos)]
        if len(held) in (0, len(names)):
            raise DataError(
                f"data.val_videos {', '.join(val_videos)} fits {len(held)} of {counted(len(names), 'video')}",
                fix=f"the videos are {some_of(names)}",
            )
        how = "data.val_videos"
    else:
        count = min(len(names) - 1, max(1, round(val_fraction * len(names)))) if val_fraction else 0
        held, how = list(range(len(names) - count, len(names))), "the last videos in order"
    train = tuple(place for place in range(len(names)) if place not in set(held))
    val = VideoPart(videos=videos, members=tuple(held)) if held else None
    kept = f"; validation: {how}" if held else "; no validation"
    return FoundVideos(train=VideoPart(videos=videos, members=train), val=val, layout=layout + kept)
