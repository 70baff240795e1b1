"""`pip install halfstep` alone, with torch, numpy and safetensors: hs.Step trains, drops NaN, resumes and replays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).resolve().parents[1]
CORE = ("torch", "numpy", "safetensors")
TRAINING = """
import copy, warnings
import torch
from torch import nn
import halfstep as hs

warnings.simplefilter("ignore")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), "auto", capsules="capsules")
loss_fn = lambda x: model(x).square().mean()
first = step(loss_fn, [torch.ones(8, 4)]).loss
before = copy.deepcopy(model.state_dict())
assert not step(loss_fn, [torch.full((8, 4), float("nan"))]).committed
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
stored = copy.deepcopy((model.state_dict(), step.state_dict()))
after = [step(loss_fn, [torch.ones(8, 4)]).loss for _ in range(3)]
step.finish()
model.load_state_dict(stored[0])
step.load_state_dict(stored[1])
assert [step(loss_fn, [torch.ones(8, 4)]).loss for _ in range(3)] == after, "resumed"
assert after[-1] < first
print(hs.replay("capsules/00000001", model, loss_fn))
with hs.simulate("bf16"):
    model(torch.ones(2, 4))
"""
NAMES = """
import inspect, pydoc
import halfstep as hs
from halfstep import *

assert Step is hs.Step and "train" not in dir(hs)
inspect.getmembers(hs)
pydoc.render_doc(hs)
try:
    from halfstep import train
except ImportError as error:
    print(error)
"""


def packages_of(roots: tuple[str, ...]) -> set[str]:
    """The distributions that these need, themselves included."""
    found: set[str] = set()
    names = list(roots)
    while names:
        name = names.pop()
        if name.lower() in found:
            continue
        try:
            needed = requires(name) or []
        except ModuleNotFoundError:  # of another platform
            continue
        found.add(name.lower())
        names += [match[0] for need in needed if "extra" not in need and (match := re.match(r"[\w.-]+", need))]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and links to what its three dependencies installed; `make wheel` installs wheels."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(PACKAGE / "src" / "halfstep", folder / "halfstep")  # a link would lead back to this checkout
    for name in packages_of(CORE):
        for file in distribution(name).files or ():
            top = folder / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to(Path(str(distribution(name).locate_file(file.parts[0]))))
    return folder


def run(bare: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python without its site-packages."""
    variables = {**os.environ, "PYTHONPATH": str(bare)}
    return subprocess.run([sys.executable, "-S", *words], cwd=bare, env=variables, capture_output=True, text=True)


def test_a_loop_trains_drops_nan_resumes_and_replays_without_the_packages_of_the_commands(bare: Path) -> None:
    done = run(bare, "-c", TRAINING + NAMES)
    assert done.returncode == 0, done.stderr
    assert "cause: bad input" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "hs.train needs halfstep-train, which is not installed: pip install --find-links DIR halfstep-train=="
    )


def test_the_command_says_what_to_install(bare: Path) -> None:
    done = run(bare, "-m", "halfstep", "--help")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: the halfstep command needs halfstep-train, which is not installed: pip install"
    )
    assert "Traceback" not in done.stderr
