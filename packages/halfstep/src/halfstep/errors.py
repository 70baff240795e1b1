"""Every error a user can meet, with what happened, why, and how to fix it.

    HalfstepError                exit code 2: the user's mistake, nothing was lost
    ├── ConfigError              a config file, flag or override
    ├── FormatError              an unknown number format
    ├── HardwareError            the device cannot do what was asked
    ├── PrecisionError           a precision request or plan that cannot hold
    ├── DataError                files, folders, images, masks
    ├── ModelError               weights that do not fit, a model that cannot be built
    ├── CheckpointError          a run or checkpoint that cannot be read, written or resumed
    ├── MemoryLimitError         the device ran out of memory
    ├── TrainingStopped          exit code 1: the guard ended the run, with its reason
    ├── RankLost                 exit code 1: another rank is gone or stuck
    └── Interrupted              exit code 128 + signal: Ctrl-C or SIGTERM, everything saved

`assert` is for mistakes in halfstep itself; these are for everything a user can cause or meet.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from halfstep import __version__


class HalfstepError(Exception):
    """A mistake that can be explained: `what` (with the value), `why`, and the `fix`."""

    exit_code = 2
    is_agreed = False
    """True if every rank raises the same error."""
    is_shown_elsewhere: bool | None = None
    """True if another rank prints the error; None if the ranks have not agreed on that."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = make_printable(what), make_printable(why), make_printable(fix)
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  why: {self.why}"] if self.why else []
        lines += [f"  fix: {self.fix}"] if self.fix else []
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Loader workers pickle data errors to the main process; keyword arguments must survive that.
        return _rebuild, (type(self), self.what, self.why, self.fix)


UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def make_printable(text: str) -> str:
    """Return text that any terminal, file or JSON accepts: bytes of a file name that are not UTF-8 become `\\xe9`, and
    control characters of a file's contents `\\x1b`, so that they do not steer the terminal."""
    return UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    # Python decodes bytes that are not UTF-8 as lone surrogates, which cannot be encoded again except in a file name.
    code = ord(found.group())
    code = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _rebuild(kind: type[HalfstepError], what: str, why: str, fix: str) -> HalfstepError:
    return kind(what, why=why, fix=fix)


class ConfigError(HalfstepError):
    """A config file, flag or override that cannot be used."""


class FormatError(HalfstepError):
    """An unknown number format, or a value that is not a number."""


class HardwareError(HalfstepError):
    """The device cannot do what was asked of it."""


class PrecisionError(HalfstepError):
    """A precision request or plan that cannot hold."""


class DataError(HalfstepError):
    """Files, folders, images or masks that cannot be used."""


class ModelError(HalfstepError):
    """Weights that do not fit, or a model that cannot be built."""


class CheckpointError(HalfstepError):
    """A run or checkpoint that cannot be read, written or resumed."""


class MemoryLimitError(HalfstepError):
    """The device ran out of memory."""


class TrainingStopped(HalfstepError):
    """The guard ended the run: further steps would have trained on garbage."""

    exit_code = 1


class RankLost(HalfstepError):
    """Another rank is gone or does not answer: the others cannot continue without it."""

    exit_code = 1


class Interrupted(HalfstepError):
    """The user or a scheduler ended the run; it can be continued."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", exit_code: int = 130) -> None:
        super().__init__(what, why=why, fix=fix)
        self.exit_code = exit_code


def summarise_error(error: BaseException) -> str:
    """Return the first line of another library's error, or its class name if it has no message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def explain_refused_pickle(error: BaseException | None) -> str:
    """Return which Python object torch, loading tensors only, refused to make from a file; empty for other errors.

    torch raises the same class for objects and for damaged files, and its text advises to switch the check off.
    """
    refusal = re.compile(r"GLOBAL (\S+) w|unrecognized function (<.*?>)|add_safe_globals`,? but got (<.*?>)")
    while error is not None:
        if found := refusal.search(str(error)):
            name = next(filter(None, found.groups()))
            return f"it contains Python objects ({name}), and halfstep does not execute code from a file"
        error = error.__cause__ or error.__context__  # diffusers raises its own over torch's
    return ""


def suggest_nearest(name: str, valid: Iterable[str], *, count: int = 3) -> str:
    """Return `did you mean 'a' or 'b'?` for a mistyped name, or list the valid ones if none is similar."""
    names = list(valid)
    lowered = {one.lower(): one for one in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(lowered[one]) for one in close) + "?"
    return "one of " + ", ".join(names)


def suggest_command(*words: object) -> str:
    """Return a command line, quoted for the shell: `halfstep evaluate 'runs/my unet'`."""
    return make_printable(shlex.join(["halfstep", *map(str, words)]))


OPTIONAL = {
    "pydantic": ">=2.9",
    "pyyaml": ">=6.0.2",
    "rich": ">=13.9",
    "typer": ">=0.19",
    "matplotlib": ">=3.9",
    "pillow": ">=10.3",
    "torchmetrics": ">=1.5",
    "nvidia-ml-py": ">=12.560",
    "diffusers": ">=0.32",
    "transformers": ">=4.48",
    "tokenizers": ">=0.21",
    "torchao": ">=0.17",
    "onnx": ">=1.19",
    "onnxscript": ">=0.5",
    "onnxruntime": ">=1.22",
    "tensorboard": ">=2.18",
    "wandb": ">=0.28",
    "mlflow": ">=3.17",
}
"""Packages that some features need, with their versions: those of halfstep-train and of the extras."""
CLI_PACKAGES = {"pydantic": "pydantic", "yaml": "pyyaml", "rich": "rich", "typer": "typer", "PIL": "pillow",
                   "matplotlib": "matplotlib", "torchmetrics": "torchmetrics", "pynvml": "nvidia-ml-py"}  # fmt: skip
"""What halfstep-train needs and the library does not: modules, and the packages that hold them."""


def suggest_install(*packages: str) -> str:
    """Return the command that installs optional packages, from a clone or anywhere else.

    halfstep is on no package index, and installing an extra with constraints.txt could replace the user's torch.
    """
    return shlex.join(["pip", "install", *(name + OPTIONAL[name] for name in packages)])


def suggest_own_install(name: str) -> str:
    """Return the command that installs another package of halfstep: from the clone that this one is in, or from
    elsewhere."""
    folder = Path(__file__).resolve().parents[3] / name
    if (folder / "pyproject.toml").exists():
        return shlex.join(["pip", "install", "-e", str(folder)])
    wheels, repository = f"pip install --find-links DIR {name}=={__version__}", f"git+URL#subdirectory=packages/{name}"
    return f'{wheels}, where DIR has the wheels of halfstep; or pip install "{repository}" with its URL'


class InstallError(ImportError):
    """A package is missing, or has another version than this one; the message has the command that installs it."""


@contextmanager
def explain_missing(what: str, packages: Mapping[str, str], command: str) -> Iterator[None]:
    """Turn a failed import of one of these modules, given with their packages, into an InstallError."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = packages.get(str(error.name))
        if package is None:
            raise
        raise InstallError(f"{what} needs {package}, which is not installed: {command}") from error


def import_application(module: str, what: str) -> ModuleType:
    """Import a module of halfstep-train; raise InstallError if it, or a package that it needs, is not installed, or
    if its version is another one than the library's."""
    has_any = importlib.util.find_spec("halfstep_train") is not None
    version = importlib.import_module("halfstep_train").__version__ if has_any else ""
    if version != __version__:
        why = f" of halfstep's version {__version__}, not {version}" if has_any else ", which is not installed"
        raise InstallError(f"{what} needs halfstep-train{why}: {suggest_own_install('halfstep-train')}")
    with explain_missing(what, CLI_PACKAGES, suggest_install(*CLI_PACKAGES.values())):
        return importlib.import_module(f"halfstep_train.{module}")


def format_count(number: int, thing: str, things: str = "") -> str:
    """Return a count with its noun: `1 file`, `2,000 files`, `3 classes`."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def format_duration(seconds: float) -> str:
    """Return `8 s`, `12 min`, `1 h 10 min` or `2 d 3 h`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"


BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
"""Decimal, as vendors and papers print them."""


def choose_byte_unit(num_bytes: float) -> tuple[str, float]:
    """Return the unit for this many bytes, and its size in bytes; 999.5 MB is shown in GB, since it rounds to 1000."""
    return next((one for one in BYTE_UNITS if abs(num_bytes) >= 0.9995 * one[1]), BYTE_UNITS[-1])


def format_bytes(num_bytes: float, *, digits: int = 0) -> str:
    """Return `4.8 GB` or `12 MB`; `digits` significant digits where sizes are compared: `4.81 GB`."""
    unit, size = choose_byte_unit(num_bytes)
    value = num_bytes / size
    if digits and unit != "B":
        shown = max(digits - len(f"{abs(value):.0f}"), 0)
    else:
        shown = int(abs(value) < 99.95 and unit in ("GB", "TB"))  # 99.95 would round to "100.0"
    return f"{value:.{shown}f} {unit}"
