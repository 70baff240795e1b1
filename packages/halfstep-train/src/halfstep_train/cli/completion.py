"""Shell completion of workloads, settings, run folders and capsules: `halfstep --install-completion`. No torch.

A shell calls the command again at every press of the Tab key, with the words so far in environment variables (bash:
COMP_WORDS; zsh and fish: _TYPER_COMPLETE_ARGS). typer finds the parameter that is being typed and calls its completer.
An empty answer makes the shell offer files.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import typer

from halfstep.errors import HalfstepError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

VARIABLE = "_HALFSTEP_COMPLETE"
"""Set by the shell while it asks for completions."""
WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")


def read_typed_words(variables: Mapping[str, str]) -> list[str]:
    """Return what follows `halfstep` on the line that is being completed."""
    return next((variables[name].split()[1:] for name in WORDS if name in variables), [])


def complete_target(context: typer.Context, incomplete: str) -> list[str]:
    """Complete `WORKLOAD|CONFIG.yaml KEY=VALUE`."""
    return _complete_arguments(context, incomplete, with_runs=False)


def complete_target_or_run(context: typer.Context, incomplete: str) -> list[str]:
    """Complete `WORKLOAD|CONFIG.yaml|RUN KEY=VALUE`."""
    return _complete_arguments(context, incomplete, with_runs=True)


def complete_run(incomplete: str) -> list[str]:
    """Complete the folder of a run: one that begins as typed, or one inside a folder that does."""
    return _find_folders(incomplete, ("*/config.yaml", "*/*/config.yaml"))


def complete_capsule(incomplete: str) -> list[str]:
    """Complete `RUN/capsules/STEP`."""
    return _find_folders(incomplete, ("*/capsule.json", "*/capsules/*/capsule.json", "*/*/capsules/*/capsule.json"))


def complete_precision(incomplete: str) -> list[str]:
    """Complete the name of a precision."""
    from halfstep.precision.names import PRECISIONS

    return _keep_begun(PRECISIONS, incomplete)


def _complete_arguments(context: typer.Context, incomplete: str, *, with_runs: bool) -> list[str]:
    given = [str(argument) for argument in context.params.get("arguments") or ()]
    # `train --resume RUN KEY=VALUE` needs no workload.
    if not given and "=" not in incomplete and not context.params.get("resume"):
        from halfstep_train.workloads import KINDS

        files = sorted(glob.glob(f"{glob.escape(incomplete)}*.yaml"))
        return [*_keep_begun(KINDS, incomplete), *files, *(complete_run(incomplete) if with_runs else ())]
    with suppress(HalfstepError, OSError):  # a config that is being edited must not print errors into the prompt
        return list(_complete_setting(given, incomplete, str(context.params.get("resume") or "")))
    return []


def _complete_setting(given: Sequence[str], incomplete: str, resume: str) -> Iterator[str]:
    """Yield `KEY=`, or `KEY=VALUE` once the key is known."""
    from halfstep_train.config.statements import list_fields
    from halfstep_train.workloads import KINDS

    workload = _find_workload(resume or given[0])
    fields = list_fields(KINDS.of(workload).get_schema(workload))
    # bash splits words at `=`: after `train.fast=` it completes the value alone.
    split = [word for word in given if word != "="]
    if (given and given[-1] == "=") or (not incomplete and split[-1:] and split[-1] in fields):
        yield from _keep_begun(_list_values(fields[split[-1]]), incomplete)
        return
    key, equals, _ = incomplete.partition("=")
    found = [key] if equals and key in fields else _keep_begun(fields, key)
    if len(found) == 1:
        # Several candidates: after a single one, the shell would add a space behind `=`.
        found = [f"{found[0]}={one}" for one in ("", *_list_values(fields[found[0]]))]
    yield from _keep_begun(found, incomplete)


def _find_workload(target: str) -> str:
    """Return the workload of a name, a config file or a run folder."""
    from halfstep_train.config.yaml_source import read_yaml
    from halfstep_train.workloads import DEMO_WORKLOAD, KINDS

    path = Path(target) / "config.yaml" if Path(target).is_dir() else Path(target)
    name = str(read_yaml(path).values.get("workload")) if path.is_file() else target
    # A custom workload would be imported for its schema: complete the settings that all workloads have instead.
    return name if name in KINDS.paths else DEMO_WORKLOAD


def _list_values(field: FieldInfo) -> list[str]:
    """Return the choices of a setting, or its default."""
    choices = [str(choice) for choice in _list_choices(field.annotation)]
    default = [] if field.is_required() or field.default in (None, "", ()) else [str(field.default)]
    return list(dict.fromkeys(choices or [one for one in default if " " not in one]))


def _list_choices(annotation: Any) -> Iterator[object]:
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for inner in get_args(annotation):
            yield from _list_choices(inner)


def _find_folders(incomplete: str, patterns: Iterable[str]) -> list[str]:
    found = (path for pattern in patterns for path in glob.glob(glob.escape(incomplete) + pattern))
    return sorted(str(Path(path).parent) for path in found)


def _keep_begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
