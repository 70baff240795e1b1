"""What is written is there whole or not at all, in places this process owns, where there is room.

The environment is read in `cli`; for those who call us from Python, the two things that runs need of it are read here.
"""

from __future__ import annotations

import errno
import functools
import glob
import itertools
import json
import os
import platform
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError

# --- whole or not at all ---


@contextmanager
def atomic_file(path: Path, *, follows_links: bool = False) -> Iterator[Path]:
    """A hidden file next to it to write; it becomes `path` in one rename, or vanishes, and what was there stays.

    A link is replaced: in a run folder of someone else it may name any file of the user. `follows_links` is for paths
    that the user gave: the link stays, and what it names is written."""
    path = Path(os.path.realpath(path)) if follows_links else path
    remove_leftovers(path)
    hidden = name_hidden(path)
    try:
        yield hidden
        flush(hidden)
        hidden.replace(path)
        flush(path.parent)
    finally:
        with suppress(OSError):
            hidden.unlink()


def write_atomically(path: Path, text: str, *, follows_links: bool = False) -> None:
    """The text of a small file."""
    try:
        with atomic_file(path, follows_links=follows_links) as hidden:
            hidden.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}",
            why="nothing was overwritten",
            fix="free some space or fix the folder's permissions, then run the same command again",
        ) from error


@contextmanager
def atomic_folder(path: Path, *, replaces: bool = False, flushes: bool = True) -> Iterator[Path]:
    """A hidden folder to write into; it becomes `path` in one rename, or vanishes with the error.

    `replaces` removes an earlier one first; without `flushes` a power cut may cost the new one."""
    remove_leftovers(path)
    hidden = name_hidden(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    try:
        yield hidden
        for written in [*hidden.rglob("*"), hidden] if flushes else ():
            flush(written)
        if replaces:
            shutil.rmtree(path, ignore_errors=True)
        hidden.rename(path)
        flush(path.parent)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


# --- JSON ---

CHECKSUM = "crc32"


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, where nesting that is too deep for Python's stack is a ValueError like any other damage."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum of the content, which `read_sealed` compares."""
    return {**document, CHECKSUM: _checksum(document)}


def read_sealed(text: str | bytes) -> dict[str, Any]:
    """Parse what `seal` made, without its checksum; a ValueError where the content is no longer the same."""
    document = parse_json(text)
    if not isinstance(document, dict) or document.pop(CHECKSUM, None) != _checksum(document):
        raise ValueError("its checksum does not match: it was edited or the disk damaged it")
    return document


def _checksum(document: Mapping[str, Any]) -> int:
    # Of the content, not of the bytes: JSON keeps the order of keys and every bit of a float.
    return zlib.crc32(json.dumps(document).encode())


# --- what killed processes leave behind: .writing-NAME-MACHINE-PID ---

A_DAY_S = 24 * 3600


def name_hidden(path: Path) -> Path:
    return path.with_name(f".writing-{path.name}-{_machine()}-{os.getpid()}")


def remove_leftovers(path: Path) -> None:
    """What processes that are gone have not finished under this name; never what a living one writes."""
    for left in path.parent.glob(f".writing-{glob.escape(path.name)}-*"):
        named = re.fullmatch(r"-([0-9a-f]{8})-(\d+)", left.name.removeprefix(f".writing-{path.name}"))
        if named and _is_given_up(left, named[1], int(named[2])):
            shutil.rmtree(left, ignore_errors=True)
            with suppress(OSError):  # a folder, which is gone, or a file that is not ours to remove
                left.unlink()


def _is_given_up(left: Path, machine: str, pid: int) -> bool:
    """Processes of other machines and containers cannot be asked for: theirs is given up a day after its last byte."""
    if machine == _machine() and sys.platform != "win32":  # where os.kill(pid, 0) is Ctrl-C
        return not is_alive(pid)
    try:
        return time.time() - max(one.stat().st_mtime for one in (left, *left.rglob("*"))) > A_DAY_S
    except OSError:  # it became what it was to be
        return False


def is_alive(pid: int) -> bool:
    """Not one that has ended and waits for somebody to ask how, as it may for ever."""
    with suppress(OSError):  # no /proc here
        # As bytes: the name in it is cut at the fifteenth, be it in the middle of a letter.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


@functools.cache
def _machine() -> str:
    """This machine since it was started, as far as processes see each other: a container is one of its own."""
    told = [platform.node()]
    with suppress(OSError):  # Linux alone tells these
        told += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return f"{zlib.crc32(' '.join(told).encode()):08x}"


# --- names ---


def find_unused_path(path: Path, ending: str = "") -> Path:
    """A name that nothing has: `path`, or with a number in front of its ending (`NAME-2.png`) where it is taken."""
    numbered = (path.with_name(f"{path.name.removesuffix(ending)}-{k}{ending}") for k in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not one.exists())


DRY_PREFIX = "halfstep-dry-"
"""Of the folders that --dry trains in and removes."""


def is_dry_run(run: Path) -> bool:
    """Whether a run's folder is gone when its command ends."""
    return run.parent.name.startswith(DRY_PREFIX)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- readers that leave ---

GONE = (errno.EPIPE, errno.EIO)
"""The reader left (`| head`), or the terminal was closed."""


def redirect_to_null(file: int) -> None:
    """From here on this file is /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file)
    os.close(nowhere)


# --- names ---


def normalise_path(path: str) -> str:
    """Remove `.` and `name/..` from a path, unless `name` is a link to somewhere else. Links are not resolved."""
    short = os.path.normpath(path)
    return short if os.path.realpath(short) == os.path.realpath(path) else path


def make_absolute(path: str | Path) -> Path:
    """The same place from any working folder; `~` is the home folder."""
    return Path(normalise_path(str(Path(path).expanduser().absolute())))


# --- room, ownership ---


def get_free_bytes(path: Path) -> int:
    """Of the disk on which `path` is, or will be."""
    place = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    return shutil.disk_usage(place).free


@contextmanager
def take_turn(path: Path) -> Iterator[None]:
    """Processes that would make the same file, as those of one run do, take turns: the second finds it made."""
    import fcntl

    with ExitStack() as ends:
        with suppress(OSError):  # on a file system without locks each makes it, under a name of its own
            folder = os.open(path.parent, os.O_RDONLY)  # locked itself, so that no file is left behind
            ends.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
            ends.callback(fcntl.flock, folder, fcntl.LOCK_UN)
        yield


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """This process alone writes here; the system gives the lock back however the process ends."""
    import fcntl  # not on Windows, where a stored run can still be read

    with ExitStack() as open_files:
        try:
            file = open_files.enter_context((folder / ".lock").open("a"))
            # Unlike flock, not inherited by loader workers, which may outlive a killed run by seconds.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{folder} is being trained by another process",
                why="two at once would write over each other's checkpoints and metrics",
                fix="wait for it, or stop it first (Ctrl-C or SIGTERM: it saves everything)",
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot lock {folder}: {error.strerror}") from error
        yield


def is_folder_owned(folder: Path) -> bool | None:
    """Whether another process holds it; None where that cannot be told. The lock itself stays as it is."""
    try:
        import fcntl

        with (folder / ".lock").open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # Windows; or nobody ever locked it
        return None
    return False


# --- the environment ---


def find_cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where measurements and choices are kept: XDG_CACHE_HOME, or what the platform uses."""
    defaults = {"darwin": Path.home() / "Library" / "Caches", "win32": Path.home() / "AppData" / "Local"}
    default = defaults.get(sys.platform, Path.home() / ".cache")
    return Path(environment.get("XDG_CACHE_HOME") or default) / "halfstep"


def read_variable(name: str) -> str:
    """One of torch's own; empty where it is not set."""
    return os.environ.get(name, "")
