"""The import tables of the design: which room may import which. A new wall or door changes these dicts first."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from halfstep_train.workloads import KINDS

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "packages" / "halfstep" / "src" / "halfstep"
TRAIN = ROOT / "packages" / "halfstep-train" / "src" / "halfstep_train"
CHECK = ROOT / "packages" / "halfstep-check" / "src" / "halfstep_check"

ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "our_code": set(),
    "formats": {"errors"},
    "islands": set(),
    "recompute": set(),
    "prefetching": set(),
    "backend_flags": set(),
    "disk": {"errors"},
    "tensor_files": {"errors", "disk"},
    "state_files": {"disk", "tensor_files"},
    "hardware": {"backend_flags", "formats", "errors", "disk"},
    "distributed": {"hardware", "errors", "disk", "tensor_files", "state_files"},
    "precision": {"hardware", "backend_flags", "formats", "islands", "errors", "disk"},
    "step": {"distributed", "precision", "formats", "our_code", "errors", "state_files"},
    "evidence": {
        "step", "precision", "backend_flags", "formats", "islands", "our_code", "errors", "disk", "state_files",
        "tensor_files",
    },
}  # fmt: skip
ROOMS["fast"] = {"step", "hardware", "distributed", "precision", "backend_flags", "our_code", "errors", "disk"}
ROOMS["own_loop"] = set(ROOMS) - {"formats"}
ROOMS["integrations"] = {"own_loop", "fast", "step", "evidence", "precision", "hardware", "errors"}
"""Of the library."""

TRAIN_ROOMS: dict[str, set[str]] = {
    "kernels": set(),
    "models": {"kernels"},
    "config": set(),
    "data": set(),
    "report": {"config"},
    "workloads": {"config", "models", "data", "report", "kernels"},
}
TRAIN_ROOMS["tune"] = set(TRAIN_ROOMS)
TRAIN_ROOMS["run"] = set(TRAIN_ROOMS)
for room in ("use", "guide", "bench"):
    TRAIN_ROOMS[room] = TRAIN_ROOMS["run"] | {"run"}
TRAIN_ROOMS["exercises"] = TRAIN_ROOMS["use"] | {"use"}
TRAIN_ROOMS["cli"] = set(TRAIN_ROOMS)
TRAIN_ROOMS["api"] = set(TRAIN_ROOMS)
"""Of the application."""

FROM_LIBRARY = {
    "backend_flags", "disk", "errors", "formats", "islands", "prefetching", "recompute", "state_files", "tensor_files",
    *(f"distributed.{name}" for name in ("sharded_files", "sharding", "world")),
    *(f"evidence.{name}" for name in (
        "attempts", "capsule", "capsule_folder", "compiled_code", "dry_run", "forecast",
        "module_hooks", "precision_ledger", "recorder", "replay", "updates", "watch",
    )),
    *(f"hardware.{name}" for name in (
        "cache", "clock", "describe", "device_facts", "driver", "fp8_layers", "gpus", "measure", "memory",
        "nvml", "probe",
    )),
    *(f"own_loop.{name}" for name in ("repeated_blocks", "schedule_argument", "step")),
    *(f"precision.{name}" for name in (
        "advice", "apply", "contexts", "decide", "fp8", "ladder", "names", "op_lists", "plan", "swapped",
    )),
    *(f"step.{name}" for name in (
        "batches", "clip", "ema", "facts", "graph", "guard", "norm_averages", "phases", "randomness", "ranks", "scaler",
        "schedule", "snapshots", "step", "tables", "verdicts",
    )),
    *(f"step.optim.{name}" for name in (
        "adamw8bit", "adamw_bf16", "by_name", "codes", "half_weights", "recut_shards",
    )),
}  # fmt: skip
"""What the application uses of the library. A change in one of these files may need one in the application."""
LIGHT = {"disk", "errors", "formats", "recompute", "tensor_files", "islands"}
SPARE = {"models": LIGHT, "kernels": {"errors", "islands"}, "config": {"errors", "formats", "precision.names", "disk"},
         "data": {"errors", "disk"}, "report": {"errors", "disk", "formats"}}  # fmt: skip
"""Rooms of the application that use only these files of the library."""

FAMILIES = {path.parent.name for path in (TRAIN / "workloads").glob("*/__init__.py")} - {"base"}
TORCH_FREE = {"errors", "formats", "config", "precision.names", "hardware.gpus", "workloads.base.import_path"} | {
    f"workloads.{family}.config" for family in FAMILIES
}
"""Rooms and files that must work where torch is not installed."""


def module_name(path: Path) -> str:
    """Return a module's name inside its package."""
    package = LIBRARY if path.is_relative_to(LIBRARY) else TRAIN
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


def full_name(path: Path) -> str:
    return f"{'halfstep' if path.is_relative_to(LIBRARY) else 'halfstep_train'}.{module_name(path)}"


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
            is_folder = any((package.parent / module.replace(".", "/")).is_dir() for package in (LIBRARY, TRAIN))
            found |= {f"{module}.{name}" for name in names} if is_folder else {module}
    return found


def needed_to_run(tree: ast.Module) -> set[str]:
    """Modules, and names that may be modules, of all imports but those for types alone."""
    types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    left_out = {id(node) for block in types for node in ast.walk(block)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in left_out]
    return {name for node in nodes for name in (node.module or "", *(f"{node.module}.{a.name}" for a in node.names))}


def source_files(*packages: Path) -> list[Path]:
    own = ("__init__", "__main__")
    files = [(path, one) for one in packages or (LIBRARY, TRAIN) for path in sorted(one.rglob("*.py"))]
    return [path for path, package in files if path.parent != package or path.stem not in own]


def list_inner(path: Path, package: str) -> list[str]:
    """Return what a file imports of a package, without its name."""
    return sorted(name.partition(".")[2] for name in imports_of(path) if name.split(".")[0] == package)


def is_in(name: str, allowed: set[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in allowed)


def test_every_file_stands_in_a_room_of_the_tables() -> None:
    for package, table in ((LIBRARY, ROOMS), (TRAIN, TRAIN_ROOMS)):
        unknown = {module_name(path).split(".")[0] for path in source_files(package)} - set(table)
        assert not unknown, f"rooms without a row in the import table: {sorted(unknown)}"


def test_no_room_imports_what_its_row_does_not_list() -> None:
    wrong = []
    for package, table in ((LIBRARY, ROOMS), (TRAIN, TRAIN_ROOMS)):
        for path in source_files(package):
            room = module_name(path).split(".")[0]
            ours = list_inner(path, package.name)
            wrong += [f"{full_name(path)} imports {name}" for name in ours if not is_in(name, table[room] | {room})]
    assert not wrong, "\n".join(wrong)


def test_the_library_never_imports_the_application() -> None:
    wrong = [full_name(path) for path in LIBRARY.rglob("*.py") if list_inner(path, "halfstep_train")]
    assert not wrong, "\n".join(wrong)


def test_what_the_application_imports_of_the_library_is_in_the_table() -> None:
    wrong, used = [], set()
    for path in source_files(TRAIN):
        allowed = SPARE.get(module_name(path).split(".")[0], FROM_LIBRARY)
        for name in list_inner(path, "halfstep"):
            wrong += [] if not name or is_in(name, allowed) else [f"{full_name(path)} imports {name}"]
            used |= {one for one in FROM_LIBRARY if is_in(name, {one})}
    assert not wrong, "\n".join(wrong)
    assert used == FROM_LIBRARY, f"no longer imported: {sorted(FROM_LIBRARY - used)}"


def test_the_application_imports_no_private_name_of_the_library() -> None:
    nodes = ((path, node) for path in source_files(TRAIN) for node in ast.walk(tree_of(path)))
    wrong = [
        f"{full_name(path)} imports {node.module}.{alias.name}"
        for path, node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "halfstep"
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_files_need_each_other_to_run() -> None:
    """In-function imports count; those for types alone do not: data may have a method that calls what works on it."""
    needs = {full_name(path): needed_to_run(tree_of(path)) for path in source_files()}
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
        ours = (name for name in imports_of(path) if name.startswith(("halfstep.", "halfstep_train.")))
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
