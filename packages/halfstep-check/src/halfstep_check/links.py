"""Which files of a project belong to one run: what a launcher starts, a script imports, and a config or script loads.

A project folder holds many runs, and most of its configs have nothing to do with each other. Only files that a link
joins are compared: a command names its script and its configs, a script names configs and imports modules, a Hydra
config names its groups. Links are read from the text, so that a project of thousands of scripts takes seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from halfstep_check.document import Node

MAX_LINKS = 40
"""Names of one file that are looked at; a list of hundreds of configs is a catalogue, not a run."""
MAX_HOPS = 6
CONFIG_NAME = re.compile(r"""["']([\w./-]{1,200}\.(?:ya?ml|json|toml))["']""")
FROM_IMPORT = re.compile(
    r"^[ \t]{0,40}from[ \t]+(\.{0,3}[\w.]{0,200})[ \t]+import[ \t]+(\(?[\w ,\t]{1,400})", re.MULTILINE
)
IMPORT = re.compile(r"^[ \t]{0,40}import[ \t]+([\w.]{1,200})", re.MULTILINE)
HYDRA = re.compile(r"""config_path\s{0,3}=\s{0,3}["']([\w./-]{0,200})["']""")
HYDRA_NAME = re.compile(r"""config_name\s{0,3}=\s{0,3}["']([\w./-]{1,200})["']""")


def list_names_in_script(text: str) -> list[str]:
    """Return configs that a script names, and modules it imports, as relative paths to look for."""
    names = CONFIG_NAME.findall(text)
    folder = next(iter(HYDRA.findall(text)), "")
    names += [f"{folder}/{name.removesuffix('.yaml')}.yaml".lstrip("/") for name in HYDRA_NAME.findall(text)]
    for module, imported in FROM_IMPORT.findall(text):
        here = get_module_path(module)
        names += [f"{here}.py", *(f"{here}/{name}.py" for name in re.findall(r"\w+", imported)[:10])]
    names += [f"{get_module_path(module)}.py" for module in IMPORT.findall(text)]
    return list(dict.fromkeys(names))[: 5 * MAX_LINKS]


def get_module_path(module: str) -> str:
    """Return `..models.unet` as `../models/unet`, from the folder of the file that imports it."""
    dots = len(module) - len(module.lstrip("."))
    return "../" * max(dots - 1, 0) + module.lstrip(".").replace(".", "/")


def list_names_in_config(root: Node) -> list[str]:
    """Return what a config names: Hydra's groups (`defaults: [{trainer: gpu}]`), and values that are config files."""
    defaults = root.get("defaults")
    entries = defaults.value if defaults is not None and isinstance(defaults.value, list) else []
    groups = [(key, node.scalar) for e in entries if isinstance(e.value, dict) for key, node in e.value.items()]
    names = [f"{key.removeprefix('override ').strip('/')}/{value}.yaml" for key, value in groups if value]
    names += [f"{entry.value}.yaml" for entry in entries if isinstance(entry.value, str)]
    values = (node.value for _, node in root.walk())
    names += [value for value in values if isinstance(value, str) and value.endswith((".json", ".yaml", ".yml"))]
    return names[:MAX_LINKS]


def list_names_in_command(words: list[str]) -> list[str]:
    """Return the script a command starts and the configs it names."""
    modules = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-m", "--module")]
    values = [word.rpartition("=")[2] for word in words]
    files = [value for value in values if value.endswith((".py", ".yaml", ".yml", ".json", ".toml"))]
    return [*files, *(f"{module.replace('.', '/')}.py" for module in modules)][:MAX_LINKS]


def resolve(name: str, start: Path, root: Path, known: Collection[Path]) -> Path | None:
    """Return the project file that a name means: from the folder of the file that says it, or from a folder above
    it."""
    if PurePosixPath(name).is_absolute():
        return None
    folder = start.parent
    while True:
        path = normalise_path(folder / name)
        if path in known:
            return path
        if folder == root or folder == folder.parent:
            return None
        folder = folder.parent


def normalise_path(path: Path) -> Path:
    return Path(os.path.normpath(path))


def list_reached(start: Path, links: Mapping[Path, Collection[Path]]) -> list[Path]:
    """Return files joined to `start` by links, itself first, nearest first."""
    found = {start: None}
    frontier = [start]
    for _ in range(MAX_HOPS):
        frontier = [path for here in frontier for path in links.get(here, ()) if path not in found]
        found |= dict.fromkeys(frontier)
    return list(found)
