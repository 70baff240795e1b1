"""`make wheel`: build sdist and wheel of the three distributions, check them, and use them in fresh environments.

    python tests/try_wheels.py dist [--pythons 3.11 3.12 3.13] [--torch 2.10.0]

The wheel is built from the sdist, so both are complete. For each Python: an environment with `halfstep` alone trains,
drops a bad step and resumes; then halfstep-train (as `halfstep[cli]`) and halfstep-check are added, and their commands
run. A Python is found by name, or among pyenv's; one that is missing is an error. Without --torch the tested set of
constraints.txt is installed. Takes minutes, and gigabytes where torch brings CUDA packages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = [ROOT / "packages" / name for name in ("halfstep", "halfstep-train", "halfstep-check")]
CORE = """
import sys
import torch
from torch import nn
import halfstep as hs

torch.manual_seed(0)  # for 6 of 500 seeds AdamW starts so near the minimum that it overshoots, in plain torch too
model = nn.Linear(4, 1)
step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), "fp32")
loss_fn = lambda x: model(x).square().mean()
losses = [step(loss_fn, [torch.ones(8, 4)]).loss for _ in range(5)]
assert losses[-1] < losses[0]
assert not step(loss_fn, [torch.full((8, 4), float("nan"))]).committed
hs.save("checkpoint", step, model)
hs.load("checkpoint", step, model)
assert not {"pydantic", "yaml", "typer", "matplotlib"} & set(sys.modules)
print("core:", hs.__version__, "with torch", torch.__version__)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="new or empty folder for the sdists and wheels")
    parser.add_argument("--pythons", nargs="*", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--torch", help="version of torch instead of that in constraints.txt")
    arguments = parser.parse_args()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        sys.exit(f"{arguments.out} is not empty: remove it, or name another folder")
    pythons = {name: find_python(name) for name in arguments.pythons}
    with tempfile.TemporaryDirectory(prefix="halfstep-wheels-") as folder:
        scratch = Path(folder)
        wheels = build(arguments.out, scratch)
        constraints = scratch / "constraints.txt"
        constraints.write_text(read_constraints(arguments.torch))
        for name, python in pythons.items():
            print(f"== Python {name}", flush=True)
            use(python, wheels, constraints, scratch / f"venv-{name}")
            shutil.rmtree(scratch / f"venv-{name}")  # several gigabytes with CUDA
    print("\n".join(["built, checked and used:", *(f"  {path}" for path in sorted(arguments.out.iterdir()))]))


def find_python(version: str) -> Path:
    """Return the interpreter of a version, by name or among pyenv's."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    # pyenv's shims on the path may exist and refuse to run: its own folders come first.
    for found in (*pyenv[-1:], shutil.which(f"python{version}")):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return Path(found)
    sys.exit(f"there is no Python {version}: install it, or name those to try with --pythons")


def build(out: Path, scratch: Path) -> list[Path]:
    """Build the distributions into `out`, check what an index would show, and return the wheels."""
    run(sys.executable, "-m", "venv", scratch / "build")
    python = scratch / "build" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "build", "twine")
    for folder in DISTRIBUTIONS:
        run(python, "-m", "build", "--outdir", out, folder, quiet=True)
    run(python, "-m", "twine", "check", "--strict", *sorted(out.iterdir()))
    wheels = sorted(out.glob("*.whl"))
    assert len(wheels) == len(list(out.glob("*.tar.gz"))) == len(DISTRIBUTIONS)
    return wheels


def read_constraints(torch: str | None) -> str:
    """Return the pins of the tested set, with another torch if one is named."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if torch is None:
        return "\n".join(lines)
    # Another torch may bring its own triton.
    return "\n".join([line for line in lines if not line.startswith(("torch==", "triton=="))] + [f"torch=={torch}"])


def use(python: Path, wheels: list[Path], constraints: Path, venv: Path) -> None:
    """Install the wheels into a fresh environment and use the library, then the commands."""
    halfstep, train, check = (
        next(path for path in wheels if path.name.startswith(f"{name}-"))
        for name in ("halfstep", "halfstep_train", "halfstep_check")
    )
    run(python, "-m", "venv", venv)
    bin_folder, install = (
        venv / "bin",
        (venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", constraints),
    )
    version = read_version(halfstep)
    run(*install, halfstep)
    run(bin_folder / "python", "-c", CORE, cwd=venv)
    done = subprocess.run([bin_folder / "python", "-m", "halfstep"], cwd=venv, capture_output=True, text=True)
    assert done.returncode, "without halfstep-train, the command explains what to install"
    assert "pip install" in done.stderr, done.stderr
    run(*install, "--find-links", train.parent, f"{halfstep}[cli]", check)
    shown = subprocess.check_output([bin_folder / "halfstep", "--version"], cwd=venv, text=True)
    assert shown.strip() == f"halfstep {version}, halfstep-train {version}", shown
    small = ("train.max_steps=2", "train.epochs=1", "model.base_channels=8", "data.image_size=32", "data.num_workers=0")
    run(bin_folder / "halfstep", "train", "unet", "--out", "run", "--quiet", "--precision", "fp32", *small, cwd=venv)
    run(bin_folder / "halfstep", "evaluate", "run", "--json", cwd=venv, quiet=True)
    (venv / "train.py").write_text("import torch\n")
    run(bin_folder / "halfstep-check", "train.py", cwd=venv)


def read_version(wheel: Path) -> str:
    """Return the version in a wheel's name; it must be that of the package's source."""
    version = wheel.name.split("-")[1]
    assert f'__version__ = "{version}"' in (DISTRIBUTIONS[0] / "src" / "halfstep" / "__init__.py").read_text()
    return version


def run(*command: object, cwd: Path | None = None, quiet: bool = False) -> None:
    """Run a command outside this repository's PYTHONPATH; stop if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, stdout=subprocess.PIPE if quiet else None, text=True
    )
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout or ''}")


if __name__ == "__main__":
    main()
