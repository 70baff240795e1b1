"""What killed processes have not finished is removed by the next one that writes it, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from halfstep.disk import name_hidden, open_atomic_file, open_atomic_folder, write_atomically
from halfstep.errors import CheckpointError

WRITER = """
import sys, time
from pathlib import Path
from halfstep import disk
with getattr(disk, sys.argv[1])(Path(sys.argv[2])) as hidden:
    (hidden if sys.argv[1] == "open_atomic_file" else hidden / "part").write_text("half")
    print(hidden, flush=True)
    time.sleep(60)
"""
Whole = Callable[[Path], AbstractContextManager[Path]]


def writer(whole: Whole, path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process in the middle of writing, and what it writes."""
    words = [sys.executable, "-c", WRITER, whole.__name__, str(path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def write(whole: Whole, path: Path) -> None:
    with whole(path) as hidden:
        (hidden if whole is open_atomic_file else hidden / "part").write_text("all")


@pytest.mark.parametrize("whole", [open_atomic_file, open_atomic_folder])
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(whole: Whole, tmp_path: Path) -> None:
    path = tmp_path / "cache[1].bin"
    (killed, left), (alive, growing) = writer(whole, path), writer(whole, path)
    try:
        killed.kill()
        killed.communicate()
        assert left.exists()
        assert growing.exists()
        write(whole, path)
        assert sorted(tmp_path.iterdir()) == sorted([path, growing])
    finally:
        alive.kill()
        alive.communicate()


def test_a_pipe_is_not_replaced_by_a_file_but_a_link_to_one_is(tmp_path: Path) -> None:
    """A link in a run folder is replaced, whatever it points to; a path that the user gave means the link's target."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name, follows_links in (("pipe", False), ("pipe", True), ("link", True)):
        with pytest.raises(CheckpointError, match="pipe is a named pipe, not a file"):
            write_atomically(tmp_path / name, "text", follows_links=follows_links)
    assert (tmp_path / "pipe").is_fifo()
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").read_text() == "text"
    assert (tmp_path / "pipe").is_fifo()


def test_what_another_machine_writes_is_given_up_after_a_day_without_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    process_id = os.getpid()
    fresh, grown, old = (tmp_path / f".writing-cache-{name * 8}-{process_id}" for name in "abc")
    mine = tmp_path / ".writing-cache-notes"
    for place in (grown, old):
        place.mkdir()
    for place in (fresh, grown / "new", old / "part", mine):
        place.write_text("")
    long_ago = time.time() - 25 * 3600
    for place in (grown, old / "part", old, mine):
        os.utime(place, (long_ago, long_ago))
    write(open_atomic_file, path)
    assert sorted(tmp_path.iterdir()) == sorted([path, fresh, grown, mine])
    assert name_hidden(path).name.endswith(f"-{process_id}")
