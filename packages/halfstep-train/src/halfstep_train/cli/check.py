"""`halfstep check`: the command of the package halfstep-check, which halfstep extends with its loader and device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import ConfigError, HalfstepError, suggest_own_install
from halfstep_train import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfstep_check.hardware_gap import Device


def _find_obstacle() -> str:
    """Return why halfstep-check cannot be used; empty if it can."""
    if importlib.util.find_spec("halfstep_check") is None:
        return "the package halfstep-check is not installed"
    version = importlib.import_module("halfstep_check").__version__
    same = f"halfstep-check has version {version}, and halfstep-train {__version__}: they need the same one"
    return "" if version == __version__ else same


OBSTACLE = _find_obstacle()


def _make_command() -> Callable[..., None]:
    """Return the package's own command, with its errors converted to halfstep's."""
    from halfstep_check.cli import Host, make_command
    from halfstep_check.shared.errors import HalfstepError as CheckError

    inner = make_command(Host(load_own=load_own, probe=_probe_device))

    @functools.wraps(inner)
    def command(**arguments: Any) -> None:
        try:
            inner(**arguments)
        except CheckError as error:
            raise ConfigError(error.what, why=error.why, fix=error.fix) from error

    command.__doc__ = (inner.__doc__ or "").replace("halfstep-check", "halfstep check")
    return command


def load_own(path: Path) -> object:
    """Load a halfstep config as training would; convert errors to those of the package."""
    from halfstep_check.shared.errors import ConfigError as CheckError
    from halfstep_train.workloads import load

    try:
        return load(str(path))
    except HalfstepError as error:
        raise CheckError(error.what, why=error.why, fix=error.fix) from error


def _probe_device() -> Device:
    from halfstep.hardware.probe import probe
    from halfstep_check.hardware_gap import Device

    found = probe()
    return Device(name=found.name, has=found.get_support)


def _refuse() -> None:
    """Check whether configs agree, and whether a training script uses AMP correctly. Needs the package halfstep-check.

    Example:

        halfstep check train.py
    """
    raise ConfigError("halfstep check cannot run", why=OBSTACLE, fix=suggest_own_install("halfstep-check"))


command = _refuse if OBSTACLE else _make_command()
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True} if OBSTACLE else {}
