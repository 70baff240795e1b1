"""Things of the user's own by import path, `pkg.module:name`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError, nearest


def imported(path: str, *, what: str, form: str) -> Callable[..., Any]:
    """The callable at `path`; `what` says in an error what it was for, `form` how it is to be called."""
    module_name, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"{what} {path!r} is not an import path", fix=f"pkg.module:callable, called as {form}")
    _look_here_too()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{what} {path!r} cannot be imported", why=str(error), fix=_where_to_look(module_name, error)
        ) from error
    found = getattr(module, name, None)
    if found is None or not (callable(found) or hasattr(found, "builder")):
        own = [
            key
            for key, value in vars(module).items()
            if (inspect.isfunction(value) and value.__module__ == module_name)
            or (hasattr(value, "builder") and not isinstance(value, type))
        ]
        near = f"; {nearest(name, own)}" if own else ""
        raise ConfigError(f"{module_name} has no function {name!r}", fix=f"it is called as {form}{near}")
    return found


def refuse_other_form(function: Callable[..., Any], path: str, *arguments: object, form: str) -> None:
    """A function that cannot be called so, such as `json:dumps`, is told apart from one that fails inside."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{path} cannot be called as {form}", why=str(error), fix=f"write {form}") from error
    except ValueError:
        return  # written in C, without a signature: calling it will tell


def _look_here_too() -> None:
    """The working folder, as `python -m` has it: the console script does not."""
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)


def _where_to_look(module_name: str, error: ImportError) -> str:
    if error.name != module_name.split(".")[0]:
        return "that is an import inside the module, or a part of the package: look there"
    beside = [path.stem for path in sorted(Path.cwd().glob("*.py"))]
    guess = nearest(module_name, beside)
    here = "Install it, run where the module is, or set PYTHONPATH"
    return f"{guess} {here}" if guess.startswith("did you mean") else here
