"""Files: atomic writes, sealed JSON, leftovers of killed processes, folder locks.

The environment is read in `cli`; the two variables that runs started from Python need are read here.
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
import stat
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError

# --- atomic writes ---


@contextmanager
def open_atomic_file(path: Path, *, follows_links: bool = False) -> Iterator[Path]:
    """Yield a hidden file next to `path` to write to; on success it is renamed to `path`, on error it is removed.

    A link is replaced: in a run folder from another person it may point to any file of the user. `follows_links` is for
    paths that the user gave: the link stays, and its target is written.
    """
    path = Path(os.path.realpath(path)) if follows_links else path
    if not path.is_symlink():
        refuse_special_file(path)
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


def refuse_special_file(path: Path) -> None:
    """Refuse a device, pipe or socket before it is opened or replaced by a file. A link counts as what it points to."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # it does not exist; any other fault is reported when it is opened
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        raise CheckpointError(
            f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file",
            why="writing would replace it with a file, and reading could block forever",
            fix="give the path of a regular file, or one that does not exist yet",
        )


def write_atomically(path: Path, text: str, *, follows_links: bool = False) -> None:
    """Write a small text file atomically."""
    try:
        with open_atomic_file(path, follows_links=follows_links) as hidden:
            hidden.write_text(text, encoding="utf-8")
    except OSError as error:
        raise explain_unwritten(path, error.strerror) from error


def explain_unwritten(path: Path, problem: str | None) -> CheckpointError:
    return CheckpointError(
        f"cannot write {path}: {problem}",
        why="nothing was overwritten, and nothing incomplete will be loaded",
        fix="free some space, or choose a folder that you can write to, for several ranks on a disk that all share",
    )


@contextmanager
def open_atomic_folder(path: Path, *, replaces: bool = False, flushes: bool = True) -> Iterator[Path]:
    """Yield a hidden folder to write into; on success it is renamed to `path`, on error it is removed.

    `replaces` removes an existing folder first; without `flushes` a power failure may lose the new one.
    """
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
    """Parse JSON; nesting too deep for Python's stack is a ValueError, like any other damage."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum of the content, which `read_sealed` compares."""
    return {**document, CHECKSUM: _compute_checksum(document)}


def read_sealed(text: str | bytes) -> dict[str, Any]:
    """Parse a document written with `seal` and drop its checksum; raise ValueError if the checksum does not match."""
    document = parse_json(text)
    if not isinstance(document, dict) or document.pop(CHECKSUM, None) != _compute_checksum(document):
        raise ValueError("its checksum does not match: it was edited or the disk damaged it")
    return document


def _compute_checksum(document: Mapping[str, Any]) -> int:
    # Of the content, not of the bytes: JSON keeps the order of keys and every bit of a float.
    return zlib.crc32(json.dumps(document).encode())


# --- leftovers of killed processes: .writing-NAME-MACHINE-PID ---

A_DAY_S = 24 * 3600


def name_hidden(path: Path) -> Path:
    """Return the path under which this process writes before the final rename."""
    return path.with_name(f".writing-{path.name}-{_identify_machine()}-{os.getpid()}")


def remove_leftovers(path: Path) -> None:
    """Remove unfinished files that ended processes left under this name; never those of a running process."""
    for left in path.parent.glob(f".writing-{glob.escape(path.name)}-*"):
        named = re.fullmatch(r"-([0-9a-f]{8})-(\d+)", left.name.removeprefix(f".writing-{path.name}"))
        if named and _is_given_up(left, named[1], int(named[2])):
            shutil.rmtree(left, ignore_errors=True)
            with suppress(OSError):  # a folder, which is gone now, or a file that belongs to another user
                left.unlink()


def _is_given_up(left: Path, machine: str, pid: int) -> bool:
    """True if the writer has ended; for other machines and containers, if nothing was written for a day."""
    if machine == _identify_machine() and sys.platform != "win32":  # where os.kill(pid, 0) is Ctrl-C
        return not is_alive(pid)
    try:
        return time.time() - max(one.stat().st_mtime for one in (left, *left.rglob("*"))) > A_DAY_S
    except OSError:  # it was renamed to its final name meanwhile
        return False


def is_alive(pid: int) -> bool:
    """True for a running process; False for a zombie, which has ended and waits to be reaped."""
    with suppress(OSError):  # no /proc here
        # As bytes: the kernel cuts the process name after 15 bytes, possibly in the middle of a character.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # then it belongs to another user
    return True


@functools.cache
def _identify_machine() -> str:
    """Return an id of this machine, boot and PID namespace: within it process ids are comparable."""
    identity = [platform.node()]
    with suppress(OSError):  # only on Linux
        identity += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return f"{zlib.crc32(' '.join(identity).encode()):08x}"


# --- names ---


def find_unused_path(path: Path, ending: str = "") -> Path:
    """Return `path`, or if it exists a name with a number before its ending: `NAME-2.png`."""
    numbered = (path.with_name(f"{path.name.removesuffix(ending)}-{k}{ending}") for k in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not one.exists())


DRY_PREFIX = "halfstep-dry-"
"""Prefix of the folders that --dry trains in and removes."""


def is_dry_run(run: Path) -> bool:
    """True if the run's folder is removed when its command ends."""
    return run.parent.name.startswith(DRY_PREFIX)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- closed pipes and terminals ---

GONE = (errno.EPIPE, errno.EIO)
"""The reader left (`| head`), or the terminal was closed."""


def redirect_to_null(file: int) -> None:
    """Redirect this file to /dev/null from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file)
    os.close(nowhere)


# --- names ---


def normalise_path(path: str) -> str:
    """Remove `.` and `name/..` from a path, unless `name` is a link to somewhere else. Links are not resolved."""
    short = os.path.normpath(path)
    return short if os.path.realpath(short) == os.path.realpath(path) else path


def make_absolute(path: str | Path) -> Path:
    """Return the path as it is found from any working folder; `~` is the home folder."""
    return Path(normalise_path(str(Path(path).expanduser().absolute())))


# --- locks ---


@contextmanager
def take_turn(path: Path) -> Iterator[None]:
    """Lock the file's folder, so that of several processes that would create the file the second finds it."""
    import fcntl

    with ExitStack() as ends:
        with suppress(OSError):  # on a file system without locks each process creates it under its own hidden name
            folder = os.open(path.parent, os.O_RDONLY)  # the folder itself is locked, so that no lock file is left
            ends.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
            ends.callback(fcntl.flock, folder, fcntl.LOCK_UN)
        yield


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run folder for this process; the OS releases the lock however the process ends."""
    import fcntl  # not on Windows, where a stored run can still be read

    with ExitStack() as open_files:
        try:
            file = open_files.enter_context((folder / ".lock").open("a"))
            # Unlike flock, not inherited by loader workers, which may outlive a killed run by seconds.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{folder} is being trained by another process",
                why="two processes would overwrite each other's checkpoints and metrics",
                fix="wait for it, or stop it first (Ctrl-C or SIGTERM: it saves everything)",
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot lock {folder}: {error.strerror}") from error
        yield


def is_folder_locked(folder: Path) -> bool | None:
    """True if another process holds the folder's lock; None if unknown. The lock itself is not changed."""
    try:
        import fcntl

        with (folder / ".lock").open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # Windows; or it was never locked
        return None
    return False


# --- the environment ---


def find_cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of cached measurements and choices: in XDG_CACHE_HOME, or the platform's default."""
    defaults = {"darwin": Path.home() / "Library" / "Caches", "win32": Path.home() / "AppData" / "Local"}
    default = defaults.get(sys.platform, Path.home() / ".cache")
    return Path(environment.get("XDG_CACHE_HOME") or default) / "halfstep"


def read_variable(name: str) -> str:
    """Return one of torch's environment variables; empty if it is not set."""
    return os.environ.get(name, "")
