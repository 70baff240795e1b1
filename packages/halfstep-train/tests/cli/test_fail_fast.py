"""Commands refuse missing and existing paths, unknown GPUs and unknown workloads before torch is imported."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "train unet --data-dir nowhere": "nowhere does not exist",
    "train unet data.dir=nowhere": "nowhere does not exist",
    "train gpt2 --data-dir nowhere.txt": "nowhere.txt does not exist",
    "train unet --out used": "used already exists and is not empty",
    "train unet --out used/file": "used/file is a file",
    "train unet --log-dir used/file": "used/file is a file",
    "train --resume nowhere": "nowhere is not a run folder",
    "train --resume used": "used is not a run folder",
    "train unet model.weights=nowhere.pth": "model.weights=nowhere.pth: there is no such file",
    "train radiodiff model.vae=nowhere": "model.vae=nowhere: there is no such file",
    "train slotcontrast model.backbone_weights=nowhere": "model.backbone_weights=nowhere: there is no such file",
    "train unet data.val_list=nowhere.txt": "data.val_list=nowhere.txt: there is no such file",
    "plan unet --gpu nothing": "unknown GPU 'nothing'",
    "plan unet --memory --gpu nothing": "unknown GPU 'nothing'",
    "plan unet --memory --fit nothing": "--fit 'nothing' is not a memory size",
    "plan unet --data-dir nowhere": "nowhere does not exist",
    "plan nothing": "unknown workload 'nothing'",
    "plan unet --memory --mode nothing": "--mode nothing: 'nothing' is not one of 'eager'",
    "bench nothing": "unknown workload 'nothing'",
    "dry-run unet --target nothing": "--target nothing: 'nothing' is not one of 'fp16'",
    "dry-run nothing --target fp16": "unknown workload 'nothing'",
    "dry-run used --target fp16": "used is not a run",
    "dry-run unet --target fp16 --data-dir nowhere": "nowhere does not exist",
    "ledger used": "used is not a run",
    "ledger runs/nowhere": "runs/nowhere is not a run",
    "ledger unet --data-dir nowhere": "nowhere does not exist",
    "verify used": "used is not a run",
    "verify unet --data-dir nowhere": "nowhere does not exist",
    "evaluate nowhere": "nowhere is not a run folder",
    "evaluate used": "used is not a run folder",
    "evaluate run --data nowhere": "--data nowhere does not exist",
    "evaluate run --out used": "used already exists and is not empty",
    "predict nowhere": "nowhere is not a run folder",
    "predict run --out used": "used already exists and is not empty",
    "report nowhere": "nowhere is not a run",
    "top nowhere": "nowhere is not a run",
    "replay nowhere": "there is no capsule nowhere",
    "replay run": "the run run has no capsules",
    "compare unet --data-dir nowhere": "nowhere does not exist",
    "compare unet --out used": "used already exists and is not empty",
    "compare --resume nowhere": "nowhere is not a comparison",
    "compare nothing": "unknown workload 'nothing'",
    "compare unet --seeds 2": "--seeds 2: must be greater than or equal to 5",
    "compare unet --margin 0": "--margin 0 is not valid",
    "compare unet --budget soon": "--budget 'soon' is not a time",
    "compare unet --precisions fp32": "a comparison needs two rows, but there is only 'fp32'",
    "compare unet --precisions ,": "a comparison needs two rows, but there is none",
    "compare unet --precisions fp32,nothing": "nothing",
    "compare unet --rows a: b: train.nothing=1": "does not describe a row",
    "compare unet train.nothing=1": "train.nothing",
    "compare unet train.batch_size=2 train.batch_size=3": "train.batch_size",
    "train unet --device nothing": "--device nothing: there is no such kind of device",
    "train unet device=nothing": "device = 'nothing' (device=nothing): there is no such kind of device",
    "evaluate run --device nothing": "--device nothing: there is no such kind of device",
    "bench unet --device nothing": "--device nothing: there is no such kind of device",
    "guide --device nothing": "--device nothing: there is no such kind of device",
    "guide --answers nowhere": "there is no answers file nowhere",
    "detect nothing": "unknown GPU 'nothing'",
    "exercise 1 --data-dir nowhere": "there is no folder nowhere",
}
RUN_ALL = """
import contextlib, io, json, sys
from halfstep_train.cli.main import main

outcomes = {}
for call in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(call.split())
        except SystemExit as ended:
            outcomes[call] = (ended.code, " ".join(said.getvalue().split()), "torch" in sys.modules)
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calls")
    for name in ("used", "run"):
        (folder / name).mkdir()
    (folder / "used" / "file").touch()
    (folder / "run" / "config.yaml").write_text("workload: unet\n")
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, tuple[int, str, bool]]:
    """Make all calls in one process without torch: exit code, message, and whether torch is imported by then."""
    called = [sys.executable, "-c", RUN_ALL, json.dumps(list(CASES))]
    return json.loads(subprocess.run(called, cwd=folder, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize("call", CASES)
def test_a_wrong_path_or_name_is_refused_before_torch_is_imported(
    call: str, outcomes: dict[str, tuple[int, str, bool]]
) -> None:
    code, said, has_torch = outcomes[call]
    assert (code, has_torch) == (2, False), said
    assert CASES[call] in said


def test_a_refusal_takes_less_than_one_and_a_half_seconds(folder: Path) -> None:
    """CPU time, because the machine may be busy: it is an upper limit of the time on an idle one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    called = [sys.executable, "-m", "halfstep", "train", "unet", "--out", "used"]
    assert subprocess.run(called, cwd=folder, capture_output=True).returncode == 2
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_random_backbone_weights_and_new_cache_files_are_not_missing_files() -> None:
    from halfstep_train.run.folder import refuse_missing_paths
    from halfstep_train.workloads import load

    refuse_missing_paths(load("slotcontrast", overrides=["model.backbone_weights=random"]).config)
    refuse_missing_paths(load("resnet18", overrides=["data.cache_file=new.pack"]).config)
