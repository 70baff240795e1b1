"""Caches of any kind: kept while intact and made from the same, else written again; other files stay."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from halfstep.errors import DataError
from halfstep_train.data import cache_file
from halfstep_train.data.cache_file import DATA_AT, CacheFile, CacheWriter, open_cache, open_or_write
from whole_runs import small_disk

KIND, NUM_BYTES = "test cache", 3000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "BLOCK_BYTES", 1000)


def write(writer: CacheWriter) -> None:
    writer.index = {"count": NUM_BYTES}
    for start in range(0, NUM_BYTES, 700):
        writer.write(bytes(k % 251 for k in range(start, min(start + 700, NUM_BYTES))))


def opened(path: Path, made_from: str = "one") -> tuple[CacheFile, bool]:
    return open_or_write(path, KIND, made_from, write)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_cache_is_kept_while_it_was_made_from_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert [opened(path, source)[1] for source in ("one", "one", "two")] == [True, False, True]
    file, _ = opened(path, "two")
    assert file.index == {"count": NUM_BYTES}
    assert np.array_equal(file.map(np.uint8, (10,), start=500), np.arange(500, 510) % 251)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_with_the_name_of_a_cache_is_written_again_whatever_it_holds(tmp_path: Path) -> None:
    path = tmp_path / ".halfstep-32.pack"
    path.touch()
    assert opened(path)[1]
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(DataError, match="overwrites only its own caches"):
        opened(other)


@pytest.mark.parametrize("place", [DATA_AT, DATA_AT + NUM_BYTES - 1, DATA_AT + NUM_BYTES + 9, -1])
def test_a_flipped_bit_is_found_and_the_cache_written_again(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a"
    whole = opened(path)[0].path.read_bytes()
    flip(path, place)
    with pytest.raises(DataError, match="not a usable test cache"):
        open_cache(path, KIND)
    assert opened(path)[1]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("length", [0, 5, 4096, 5000, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a"
    opened(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match="not a usable test cache"):
        open_cache(path, KIND)


def test_a_large_cache_is_checked_at_blocks_spread_over_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    opened(path)
    flip(path, DATA_AT + 1500)
    with pytest.raises(DataError, match="checksum does not match|not a usable"):
        open_cache(path, KIND, verify_bytes=NUM_BYTES)
    open_cache(path, KIND, verify_bytes=NUM_BYTES // 2)  # every second block, which the broken one is not


def test_other_files_and_folders_are_never_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "mine.json"
    other.write_text("{}")
    for path in (other, tmp_path):
        with pytest.raises(DataError, match="exists and is not a test cache"):
            opened(path)
    assert other.read_text() == "{}"


def test_a_failure_on_the_way_leaves_no_file(tmp_path: Path) -> None:
    def fail(writer: CacheWriter) -> None:
        writer.write(b"some")
        raise DataError("a bad image")

    with pytest.raises(DataError, match="a bad image"):
        open_or_write(tmp_path / "a", KIND, "one", fail)
    with pytest.raises(DataError, match="cannot write the test cache"):
        opened(tmp_path / "gone" / "a")
    with small_disk(4096), pytest.raises(DataError, match="cannot write the test cache"):  # a quota
        opened(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_processes_that_start_together_write_once(tmp_path: Path) -> None:
    written = []

    def write_slowly(writer: CacheWriter) -> None:
        written.append(1)
        time.sleep(0.1)  # as long as all look for the file
        write(writer)

    with ThreadPoolExecutor(3) as ranks:  # the lock is of an opened file: threads exclude each other as processes do
        found = list(ranks.map(lambda _: open_or_write(tmp_path / "a", KIND, "one", write_slowly), range(3)))
    assert len(written) == 1
    assert all(is_new for _, is_new in found), "each rank learns that the cache is new"
