"""Custom code by import path, `pkg.module:name`: import it, and sign it when a run is trained with it.

The config of a run folder names code, and the folder may come from someone else. Commands that only read a run
therefore import only code that this account has trained with: `sign_code` signs the source files with a key of the
account, which the author of a folder cannot forge. A plain hash would not do: anyone can compute the hash of
`subprocess.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import importlib.util
import inspect
import secrets
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from halfstep.disk import find_cache_directory, open_atomic_file, take_turn
from halfstep.errors import ConfigError, suggest_nearest


def import_callable(path: str, *, what: str, form: str) -> Callable[..., Any]:
    """Import the callable at `path`. Error messages state its purpose (`what`) and how it is called (`form`)."""
    module_name, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"{what} {path!r} is not an import path", fix=f"pkg.module:callable, called as {form}")
    _add_working_folder()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{what} {path!r} cannot be imported", why=str(error), fix=_suggest_location(module_name, error)
        ) from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line, text = f"{last.filename}:{last.lineno}", str(error)
        # The traceback of a SyntaxError ends in importlib, not in the file that has it.
        if isinstance(error, SyntaxError):
            line, text = f"{error.filename}:{error.lineno}", error.msg
        raise ConfigError(
            f"{what} {path!r} cannot be imported: {module_name} raises {type(error).__name__}",
            why=f"{text} ({line})",
            fix=f"correct the module; `python -c 'import {module_name}'` raises the same error",
        ) from error
    found = getattr(module, name, None)
    if found is None or not (callable(found) or hasattr(found, "builder")):
        functions = [key for key, value in vars(module).items() if callable(value)]
        near = f"; {suggest_nearest(name, functions)}" if functions else ""
        raise ConfigError(f"{module_name} has no function {name!r}", fix=f"define it, called as {form}{near}")
    return found


def check_call_form(function: Callable[..., Any], path: str, *arguments: object, form: str) -> None:
    """Refuse a function that does not accept these arguments, such as `json:dumps`, before calling it."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{path} cannot be called as {form}", why=str(error), fix=f"write {form}") from error
    except ValueError:
        return  # C functions may have no signature: a wrong call then fails by itself


# --- which code a run was trained with ---


class UnknownCode(ConfigError):
    """Code that a run names but this account has not trained with."""


def sign_code(paths: Iterable[str]) -> dict[str, str]:
    """Return a signature for each import path, over the files that importing it runs."""
    try:
        key = _make_key()
    except OSError:  # no folder to keep a key in: such runs need --trust
        return {}
    return {path: _sign(path, key) for path in paths}


def refuse_unknown_code(paths: Iterable[str], signed: Mapping[str, str], named_by: Path) -> None:
    """Refuse import paths that this account has not signed, or whose files have changed since. Imports nothing."""
    for path in paths:
        try:
            is_known = _sign(path, _get_key_path().read_bytes()) == signed.get(path)
        except OSError:  # no key: this account has signed nothing
            is_known = False
        if not is_known:
            files = ", ".join(map(str, _find_source_files(path))) or "no file that can be found"
            raise UnknownCode(
                f"{named_by} names the code {path}, which differs from the code that trained this run",
                why=f"it may be someone else's, or may have changed since then; this command would run {files}",
                fix="read that code; if you trust it, add --trust",
            )


def _sign(path: str, key: bytes) -> str:
    found = hmac.new(key, path.encode(), hashlib.sha256)
    for file in _find_source_files(path):
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _find_source_files(path: str) -> list[Path]:
    """Return the files of the module and of the packages around it, without importing any of them."""
    _add_working_folder()
    first, *rest = path.partition(":")[0].split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # `__main__` has no spec
        return []
    files = []
    while spec is not None:
        files += [Path(spec.origin)] if spec.origin else []
        if not rest:
            break
        # Pass the last name only: for a dotted name PathFinder looks up the parent in sys.modules.
        spec = PathFinder.find_spec(rest.pop(0), list(spec.submodule_search_locations or ()))
    return [file for file in files if file.is_file()]


def _get_key_path() -> Path:
    return find_cache_directory() / "code.key"


def _make_key() -> bytes:
    """Return this account's key; create it on first use."""
    file = _get_key_path()
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with take_turn(file):
            if not file.is_file():
                with open_atomic_file(file) as hidden:
                    # Readable only for this account, so that no other can sign with the key.
                    hidden.touch(mode=0o600)
                    hidden.write_bytes(secrets.token_bytes(32))
    return file.read_bytes()


def _add_working_folder() -> None:
    """Allow imports from the working folder, as `python -m` does and a console script does not."""
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)


def _suggest_location(module_name: str, error: ImportError) -> str:
    if not f"{module_name}.".startswith(f"{error.name}."):
        return "an import inside that module or its package fails: fix it there"
    guess = suggest_nearest(module_name, [path.stem for path in sorted(Path.cwd().glob("[!_]*.py"))])
    here = "Install it, run where the module is, or set PYTHONPATH"
    return f"{guess} {here}" if guess.startswith("did you mean") else here
