"""Run the tests of the library core (own_loop, step, precision, evidence) with other versions of torch, on the CPU.

    make torch TORCH=2.15.0
    python benchmarks/torch_versions.py 2.14.1 2.15.0 [--wheels DIR]
    python benchmarks/torch_versions.py 2.15.0 --envs DIR                   keep the environment for the next time
    python benchmarks/torch_versions.py 2.15.0 --envs DIR --failed          only what failed before, after a fix
    python benchmarks/torch_versions.py 2.15.0 --envs DIR --report FILE     read a JUnit report of these tests

For each version: make an environment in DIR (an existing one is reused) or in a temporary folder, install that torch
with its own triton and what the tests need, run the tests, store what passed and failed in
benchmarks/results/torch_versions.json, and remove a temporary folder. Tests marked slow or ranks are left out. 10 to 20
minutes per version on two cores. A torch that brings CUDA packages takes 5 GB of disk meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = os.pathsep.join(map(str, sorted(ROOT.glob("packages/*/src"))))
RESULT = ROOT / "benchmarks" / "results" / "torch_versions.json"
TESTS = tuple(f"packages/halfstep/tests/{room}" for room in ("precision", "step", "fast", "own_loop", "evidence"))
NEEDED = (
    *("numpy", "safetensors", "pydantic", "pyyaml", "rich", "typer", "matplotlib", "pillow", "torchmetrics"),
    *("nvidia-ml-py", "pytest", "hypothesis", "setuptools", "triton"),
)
"""What halfstep[cli] and the tests import. Triton: the kernels run in its interpreter; builds for CUDA require one
version of it, with others the newest is installed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="versions of torch, such as 2.10.0")
    parser.add_argument("--envs", type=Path, help="folder that keeps one environment per version")
    parser.add_argument("--wheels", help="folder with wheels that pip shall also look at")
    parser.add_argument("--failed", action="store_true", help="run only the tests that the stored result lists")
    parser.add_argument("--report", type=Path, help="JUnit report of an earlier run, instead of running the tests")
    arguments = parser.parse_args()
    has_failed = False
    for version in arguments.versions:
        with tempfile.TemporaryDirectory(prefix="halfstep-torch-") as temporary:
            found = try_version(version, arguments.envs or Path(temporary), arguments)
        has_failed |= bool(found["failed"])
        # Read again: another process may have added a version in the meantime.
        stored = read_stored() | {version: found}
        RESULT.write_text(json.dumps(dict(sorted(stored.items(), key=by_version)), indent=1) + "\n")
        print(
            f"torch {version}: {found['passed']} passed, {len(found['failed'])} failed",
            *found["failed"],
            sep="\n  ",
            flush=True,
        )
    return int(has_failed)


def try_version(version: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the tests with one version, whose environment is in this folder, and return what to store."""
    python = prepare(version, folder / f"torch-{version}", arguments.wheels)
    before = read_stored().get(version, {})
    tests = drop_missing(python, before["failed"]) if arguments.failed else TESTS
    found = read_report(python, arguments.report or run_tests(python, tests, folder / f"torch-{version}.xml"))
    if arguments.failed:
        # The others passed on an earlier commit: say which ones this one adds.
        found |= {"passed": before["passed"] + found["passed"], "skipped": before["skipped"], "run_again": tests}
    return found


def read_stored() -> dict[str, Any]:
    """Return the stored results by version."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def prepare(version: str, folder: Path, wheels: str | None) -> Path:
    """Return the Python of an environment with this torch; make it if there is none."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # The pins of the tested set, less those that belong to another torch.
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith(("torch==", "triton=="))
    ]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins))
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir", *(["--find-links", wheels] if wheels else [])]
    subprocess.run([*install, f"torch=={version}"], check=True)
    subprocess.run([*install, "-c", constraints, f"torch=={version}", *NEEDED], check=True)
    return python


def run_tests(python: Path, tests: Iterable[str], report: Path) -> Path:
    """Run the tests and return the JUnit report; end the program if a test has ended Python."""
    report.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    called = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not ranks", *tests]
    log = report.with_suffix(".log")
    with log.open("w") as output:
        subprocess.run([*called, f"--junitxml={report}"], cwd=ROOT, env=environment, stdout=output, stderr=output)
    if not report.exists():
        sys.exit(f"{log.read_text()[-8000:]}\nthe tests ended without a report")
    return report


def drop_missing(python: Path, tests: list[str]) -> list[str]:
    """Return those of these tests that still exist: pytest runs none of a list if one of them is missing."""
    files = sorted({test.split("::")[0] for test in tests})
    called = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *files]
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    found = subprocess.run(called, cwd=ROOT, env=environment, capture_output=True, text=True).stdout.splitlines()
    return [test for test in tests if test in found]


def read_report(python: Path, report: Path) -> dict[str, Any]:
    """Return what passed, failed and was skipped, and with which torch."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    if not cases:
        sys.exit(f"no test ran: {report.with_suffix('.log').read_text()[-2000:]}")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    about = (
        "import platform, torch; from importlib.metadata import version; "
        "print(torch.__version__, version('triton'), platform.python_version(), platform.machine())"
    )
    torch, triton, version, machine = subprocess.check_output([python, "-c", about], text=True).split()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "packages", "tests"], cwd=ROOT).returncode:
        commit += "-dirty"
    return {
        "torch": torch,
        "triton": triton,
        "python": version,
        "machine": machine,
        "commit": commit,
        "date": date.today().isoformat(),
        "tests": list(TESTS),
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": sorted(f"{str(case.get('classname')).replace('.', '/')}.py::{case.get('name')}" for case in failed),
    }


def by_version(item: tuple[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in item[0].split("."))


if __name__ == "__main__":
    sys.exit(main())
