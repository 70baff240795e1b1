"""halfstep-check works without halfstep, so it copies what both need: the copies are equal, and so are the versions."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import halfstep
import halfstep_check
import halfstep_train
from doc_pages import ROOT
from halfstep.hardware import gpus
from halfstep_check.shared import gpus as copied_gpus

LIBRARY = ROOT / "packages/halfstep/src/halfstep"
TRAIN = ROOT / "packages/halfstep-train/src/halfstep_train"
SHARED = ROOT / "packages" / "halfstep-check" / "src" / "halfstep_check" / "shared"
ORIGINALS = {
    "config_text": (TRAIN / "config/yaml_source", TRAIN / "config/section", TRAIN / "config/schema", LIBRARY / "disk"),
    "errors": (LIBRARY / "errors",),
    "gpus": (LIBRARY / "hardware/gpus", LIBRARY / "hardware/support", LIBRARY / "hardware/device_facts"),
    "precision_names": (LIBRARY / "precision/names",),
    "terminal": (TRAIN / "cli/main", TRAIN / "cli/options", TRAIN / "report/console", LIBRARY / "disk"),
}
SHORTENED = {
    "gpus": {"KnownGPU", "_parse_model", "look_up_gpu"},  # without memory and rates; compared below
    "terminal": {"explain_usage_error", "show_error"},  # without settings and ranks
}
"""What the copy has in a form of its own."""


def definitions(path: Path) -> dict[str, str]:
    """The source of each name that a file defines, docstrings and all, but for comments and layout."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = ast.unparse(node)
    return found


def test_every_copied_definition_is_that_of_halfstep() -> None:
    assert {path.stem for path in SHARED.glob("*.py")} == {*ORIGINALS, "__init__"}
    for name, originals in ORIGINALS.items():
        ours: dict[str, str] = {}
        for original in originals:
            ours |= definitions(original.with_suffix(".py"))
        copies = definitions(SHARED / f"{name}.py")
        assert SHORTENED.get(name, set()) <= copies.keys()
        for what in copies.keys() - SHORTENED.get(name, set()):
            assert copies[what] == ours[what], f"shared/{name}.py has another {what} than halfstep: copy it again"


def test_both_know_the_same_gpus_with_the_same_formats() -> None:
    table = "hardware/known_gpus.txt"
    assert (SHARED / "known_gpus.txt").read_bytes() == (LIBRARY / table).read_bytes()
    assert [(gpu.name, gpu.vendor, gpu.support) for gpu in copied_gpus.KNOWN] == [
        (gpu.name, gpu.facts.vendor, gpu.facts.support) for gpu in gpus.KNOWN
    ]
    for name in ("v100", "rtx4090", "NVIDIA A100-SXM4-80GB", "Tesla T4", "M2 Max", "tpu v4"):
        ours, copy = gpus.look_up_gpu(name), copied_gpus.look_up_gpu(name)
        assert ours.name == f"{copy.vendor} {copy.name}"
        assert all(
            ours.get_support(one) == copy.has(one) for one in ("fp64", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8")
        )


def test_all_distributions_have_one_version_and_one_licence() -> None:
    folders = [ROOT / "packages" / name for name in ("halfstep", "halfstep-train", "halfstep-check")]
    library, train, check = (tomllib.loads((where / "pyproject.toml").read_text())["project"] for where in folders)
    for project in (library, train, check):
        assert project["dynamic"] == ["version"]  # each from its package's __version__
    version = halfstep.__version__
    assert version == halfstep_train.__version__ == halfstep_check.__version__
    assert train["dependencies"][0] == f"halfstep=={version}"
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert library["optional-dependencies"]["cli"] == [f"halfstep-train=={version}"]
    assert train["optional-dependencies"]["check"] == [f"halfstep-check=={version}"]
    assert {(where / "LICENSE").read_bytes() for where in folders} == {(ROOT / "LICENSE").read_bytes()}
    assert set(check["dependencies"]) <= set(train["dependencies"])
