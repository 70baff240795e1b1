"""Things of the user's own by import path, `pkg.module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from halfstep.errors import ConfigError


def imported(path: str, *, what: str, form: str) -> Callable[..., Any]:
    """The callable at `path`; `what` says in an error what it was for, `form` how it is to be called."""
    module_name, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"{what} {path!r} is not an import path", fix=f"pkg.module:callable, called as {form}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} {path!r} cannot be imported",
            why=str(error),
            fix="run where the module is found, or set PYTHONPATH",
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{module_name} has no function {name!r}", fix=form)
    return found  # type: ignore[no-any-return]
