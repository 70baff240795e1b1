"""The import table of the design: which room may import which. A new wall or door changes this dict first."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from halfstep.workloads import KINDS

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "halfstep"
CHECK = ROOT / "packages" / "halfstep-check" / "src" / "halfstep_check"

ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "formats": {"errors"},
    "islands": set(),
    "backend_flags": set(),
    "disk": {"errors"},
    "tensor_files": {"errors", "disk"},
    "kernels": {"errors"},
    "models": {"kernels", "islands", "errors"},
    "config": {"formats", "errors"},
    "hardware": {"backend_flags", "formats", "errors"},
    "distributed": {"config", "hardware", "errors"},
    "precision": {"config", "hardware", "backend_flags", "formats", "islands", "errors"},
    "data": {"errors"},
    "workloads": {"config", "models", "data", "report", "kernels", "islands", "errors"},
    "step": {"distributed", "precision", "formats", "errors"},
    "report": {"config", "formats", "errors"},
    "evidence": {"step", "precision", "backend_flags", "formats", "islands", "errors"},
}
ROOMS["tune"] = set(ROOMS) - {"evidence"}
ROOMS["run"] = set(ROOMS)
LEVERS = {"tune.modes", "tune.repeated_blocks", "tune.memory_low"}
"""Primitives of modes and memory: free of config and workloads, so that hs.Step can use them."""
ROOMS["own_loop"] = {"backend_flags", "data", "models", "hardware", "precision", "step", "evidence", "errors"} | LEVERS
ROOMS["own_loop"] |= {"distributed"}
ROOMS["integrations"] = {"own_loop", "step", "evidence", "precision", "hardware", "errors"}
for room in ("use", "guide", "bench"):
    ROOMS[room] = ROOMS["run"] | {"run"}
ROOMS["use"] = ROOMS["use"] | {"own_loop"}
ROOMS["exercises"] = ROOMS["use"] | {"use"}
ROOMS["cli"] = set(ROOMS)
ROOMS["api"] = set(ROOMS)
for room in set(ROOMS) - {"errors", "formats", "islands", "backend_flags", "disk", "tensor_files"}:
    ROOMS[room] = ROOMS[room] | {"disk", "tensor_files"}

FAMILIES = {path.parent.name for path in (SRC / "workloads").glob("*/__init__.py")} - {"base"}
TORCH_FREE = {"errors", "formats", "config", "hardware.gpus", "workloads.base.import_path"} | {
    f"workloads.{family}.config" for family in FAMILIES
}
"""Rooms and files that must work where torch is not installed."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Every absolute import in the file, in-function and TYPE_CHECKING ones included."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write `from halfstep.room import name`"
            module = node.module or ""
            # `from halfstep import __version__` is open to all: the package itself imports no room.
            names = {alias.name for alias in node.names} - {"__version__"}
            found |= {f"{module}.{name}" for name in names} if module == "halfstep" else {module}
    return found


def needed_to_run(tree: ast.Module) -> set[str]:
    """Modules, and names that may be modules, of all imports but those for types alone."""
    types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    left_out = {id(node) for block in types for node in ast.walk(block)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in left_out]
    return {name for node in nodes for name in (node.module or "", *(f"{node.module}.{a.name}" for a in node.names))}


def source_files() -> list[Path]:
    return [
        path for path in sorted(SRC.rglob("*.py")) if path.parent != SRC or path.stem not in ("__init__", "__main__")
    ]


def room_allows(room: str, target: str) -> bool:
    inner = target.removeprefix("halfstep.")
    return any(inner == allowed or inner.startswith(allowed + ".") for allowed in ROOMS[room] | {room})


def test_every_file_stands_in_a_room_of_the_table() -> None:
    unknown = {module_name(path).split(".")[0] for path in source_files()} - set(ROOMS)
    assert not unknown, f"rooms without a row in the import table: {sorted(unknown)}"


def test_no_room_imports_what_its_row_does_not_list() -> None:
    wrong = []
    for path in source_files():
        room = module_name(path).split(".")[0]
        ours = {name for name in imports_of(path) if name.startswith("halfstep.")}
        wrong += [f"{module_name(path)} imports {name}" for name in sorted(ours) if not room_allows(room, name)]
    assert not wrong, "\n".join(wrong)


def test_levers_need_neither_config_nor_workloads() -> None:
    for name in LEVERS:
        found = imports_of(SRC / f"{name.replace('.', '/')}.py")
        assert not [i for i in found if i.startswith(("halfstep.config", "halfstep.workloads"))], name


def test_the_table_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ROOMS):
        free = {room for room, needs in ROOMS.items() if room not in done and {n.split(".")[0] for n in needs} <= done}
        assert free, f"rooms that import each other: {sorted(set(ROOMS) - done)}"
        done |= free


def test_no_two_files_need_each_other_to_run() -> None:
    """In-function imports count; those for types alone do not: data may have a method that calls what works on it."""
    needs = {f"halfstep.{module_name(path)}": needed_to_run(tree_of(path)) for path in source_files()}
    while free := {name for name, its in needs.items() if not its & (needs.keys() - {name})}:
        needs = {name: its for name, its in needs.items() if name not in free}
    assert not needs, f"files that import each other, and who needs them: {sorted(needs)}"


def test_torch_free_rooms_do_not_import_torch() -> None:
    wrong = []
    for path in source_files():
        name = module_name(path)
        if name.split(".")[0] in TORCH_FREE or name in TORCH_FREE:
            wrong += [f"{name} imports {i}" for i in sorted(imports_of(path)) if i.split(".")[0] == "torch"]
    assert not wrong, "\n".join(wrong)


def test_the_package_of_the_check_is_imported_by_the_commands_alone_and_imports_nothing_of_ours() -> None:
    ours = {module_name(path) for path in source_files() if {i.split(".")[0] for i in imports_of(path)} & {CHECK.name}}
    assert ours == {"cli.check", "cli.verify"}
    for path in CHECK.rglob("*.py"):
        assert "halfstep" not in {name.split(".")[0] for name in imports_of(path)}, path


FAMILY_ROOMS = {"workloads", "data", "models", "kernels"}


def test_no_code_outside_a_familys_rooms_names_a_family() -> None:
    """Imports, identifiers and words that are a workload's or family's name; prose may give examples."""
    names = FAMILIES | set(KINDS)
    wrong = []
    for path in source_files():
        if module_name(path).split(".")[0] in FAMILY_ROOMS:
            continue
        tree = tree_of(path)
        ours = (name for name in imports_of(path) if name.startswith("halfstep."))
        imported = {part for name in ours for part in name.split(".")}
        spoken = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        identifiers = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        models = {name for name in identifiers if re.search("unet|resnet|vit_|classifier", name, re.IGNORECASE)}
        if found := (imported & FAMILIES) | (spoken & names) | models:
            wrong.append(f"{module_name(path)}: {sorted(found)}")
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_in_cli_and_disk_alone() -> None:
    """Setting a variable for a library that is loaded later is not a reading."""
    reads = re.compile(r"os\.environ\.get|(?<!del )os\.environ\[|getenv")
    files = [path for path in source_files() if module_name(path).split(".")[0] not in ("cli", "disk")]
    assert [module_name(path) for path in files if reads.search(path.read_text())] == []
