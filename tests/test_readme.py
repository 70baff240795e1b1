"""Result tables are those of the stored results, the README stays at two screens, and every command has its line."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from doc_pages import PAGES, ROOT, shell_lines
from halfstep import __version__
from halfstep.errors import OPTIONAL, suggest_install, suggest_own_install
from halfstep.step.user_warnings import NEWEST_TESTED
from halfstep_train.cli.main import build_app
from rule_pages import pages

LIBRARY, APPLICATION, CHECK = (f"packages/{name}" for name in ("halfstep", "halfstep-train", "halfstep-check"))
PROJECTS = {
    folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for folder in (LIBRARY, APPLICATION)
}
EXTRAS = PROJECTS[LIBRARY]["optional-dependencies"]
INSTALLS = re.compile(r"pip install (.*)")
WITHOUT_A_CLONE = [
    [f"git+URL#subdirectory={LIBRARY}"],
    ["dist/halfstep-*.whl"],
    ["--find-links", "dist", "halfstep[cli]"],
]


def test_result_tables_are_generated_from_the_stored_results() -> None:
    from readme_tables import MADE, with_tables

    for page in MADE:
        assert with_tables(page) == page.read_text(), f"{page.name}: run python benchmarks/readme_tables.py --write"


def test_the_readme_stays_at_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 116


def test_every_command_is_on_the_page_of_commands_and_no_other_is() -> None:
    shown = set(re.findall(r"`halfstep ([\w-]+)", (ROOT / "docs" / "commands.md").read_text()))
    assert shown == set(get_command(build_app()).commands)  # type: ignore[attr-defined]


def test_every_install_command_of_the_pages_works_in_a_clone() -> None:
    """halfstep is on no package index: its extras are installed from the repository, with the tested versions."""
    found = [
        (shown, command) for page in PAGES for shown in shell_lines(page) for command in INSTALLS.findall(shown.text)
    ]
    assert found
    for shown, command in found:
        words = shlex.split(command, comments=True)
        if words in WITHOUT_A_CLONE:
            continue
        assert words[:2] == ["-c", "constraints.txt"], shown
        assert set(words[2::2]) == {"-e"}, shown
        for target in words[3::2]:
            extras = re.fullmatch(rf"{LIBRARY}\[([a-z,0-9]+)\]", target)
            assert extras or target in (APPLICATION, CHECK), shown
            assert extras is None or set(extras[1].split(",")) <= set(EXTRAS), shown


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suggest_own_install("halfstep-check") == f"pip install -e {ROOT / CHECK}"
    monkeypatch.setattr("halfstep.errors.__file__", "/usr/lib/site/halfstep/errors.py")
    said = suggest_own_install("halfstep-check")
    assert said.startswith(f"pip install --find-links DIR halfstep-check=={__version__}, ")
    assert 'pip install "git+URL#subdirectory=packages/halfstep-check"' in said


def test_errors_ask_for_the_packages_of_the_extras() -> None:
    # `integrations` has the trainers to test with: who uses one of them has it.
    others = ("cli", "dev", "docs", "integrations", "test")
    extras = {name: needed for name, needed in EXTRAS.items() if name not in others}
    own = PROJECTS[APPLICATION]["dependencies"][1:]
    assert sorted(name + version for name, version in OPTIONAL.items()) == sorted(sum(extras.values(), own))
    assert shlex.split(suggest_install("torchao")) == ["pip", "install", *extras["fp8"]]
    for path in (ROOT / "packages").glob("*/src/**/*.py"):
        assert "halfstep[" not in path.read_text(), f"{path}: halfstep is on no index; use suggest_install"


# --- versions of torch on the pages ---


def test_pages_state_the_versions_with_which_all_tests_pass() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "torch_versions.json").read_text())
    passed = [tuple(map(int, version.split("."))) for version, found in stored.items() if not found["failed"]]
    assert max(passed)[:2] == NEWEST_TESTED
    oldest, newest = (f"{version[0]}.{version[1]}" for version in (min(passed), max(passed)))
    assert f'"torch>={oldest}"' in (ROOT / "packages" / "halfstep" / "pyproject.toml").read_text()
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/captured_steps.md"):
        ranges = set(re.findall(r"torch \(?(2\.\d+ to 2\.\d+)", (ROOT / page).read_text()))
        assert ranges == {f"{oldest} to {newest}"}, page


# --- the pages of docs/rules are those of the catalogue ---


def test_the_pages_are_up_to_date() -> None:
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "rules").iterdir()}
    assert written == pages(), "run make rules"


# --- imports of benchmarks, demos and examples ---

SCRIPTS = [path for folder in ("benchmarks", "demos", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("halfstep.", "halfstep_check.")):
            yield from ((node.module or "", name.name) for name in node.names)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_of_halfstep_is_there(path: Path) -> None:
    for module, name in imported_names(path):
        has_name = hasattr(importlib.import_module(module), name)
        # A module of its own is not imported: Triton's are for GPUs only.
        assert has_name or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"
