"""nnU-Net v2's trainer, with the real package. `make integrations` runs this file."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("nnunetv2") is None:
    pytest.skip("nnU-Net is not installed, `make integrations` has it: this was NOT tested", allow_module_level=True)

from torchvision_shim import define_missing_operators  # noqa: E402

define_missing_operators()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

import halfstep as hs  # noqa: E402
from halfstep.errors import ConfigError  # noqa: E402
from halfstep.integrations import nnunet  # noqa: E402
from host_faults import FAULTS, PoisonGradient, copy_state, same_bits  # noqa: E402
from host_pages import run_page  # noqa: E402
from replay_stand_in import replays_on_cpu  # noqa: E402
from tiny_nnunet import make_trainer, write_dataset  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("raw", "preprocessed", "results"):
        monkeypatch.setenv(f"nnUNet_{name}", str(tmp_path / name))
    monkeypatch.setenv("nnUNet_n_proc_DA", "0")
    monkeypatch.setenv("nnUNet_extTrainer", str(nnunet.FOLDER))
    write_dataset(tmp_path / "preprocessed")
    return tmp_path / "preprocessed"


def find_trainer() -> Any:
    found = recursive_find_trainer_class_by_name("nnUNetTrainerHalfstep")
    found.precision = "fp32"  # "auto" is bf16 on CPUs that have it
    return found


def make_batches(num: int) -> list[dict[str, Any]]:
    """Make batches as nnU-Net's loader does: targets for two outputs of a deeply supervised network."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num, 2, 1, 32, 32, generator=generator)
    return [
        {"data": image, "target": [(image > 0.5).short(), (image[..., ::2, ::2] > 0.5).short()], "keys": ["a", f"b{n}"]}
        for n, image in enumerate(images)
    ]


def train(trainer: Any, batches: list[dict[str, Any]]) -> None:
    trainer.network.train()
    trainer.lr_scheduler.step(0)
    for batch in batches:
        trainer.train_step(batch)


def test_the_trainer_of_nnunet_is_as_expected(data: Path) -> None:
    names = {name: list(inspect.signature(getattr(nnUNetTrainer, name)).parameters) for name in (
        "train_step", "on_train_epoch_end", "validation_step", "perform_actual_validation", "save_checkpoint",
        "load_checkpoint", "_do_i_compile", "_build_loss",
    )}  # fmt: skip
    assert names["train_step"] == ["self", "batch"]
    assert names["on_train_epoch_end"] == ["self", "train_outputs"]
    assert names["validation_step"] == ["self", "batch"]
    assert names["perform_actual_validation"] == ["self", "save_probabilities"]
    assert names["save_checkpoint"] == ["self", "filename"]
    assert names["load_checkpoint"] == ["self", "filename_or_checkpoint"]
    trainer = make_trainer(data, nnUNetTrainer)
    attributes = ("network", "optimizer", "loss", "grad_scaler", "is_ddp", "output_folder", "enable_deep_supervision")
    assert set(attributes) <= set(vars(trainer))
    assert hasattr(trainer.loss, "weight_factors")


def test_the_folder_is_printed_and_holds_the_trainer_alone() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "halfstep.integrations.nnunet"], capture_output=True, text=True, check=True
    )
    folder = Path(printed.stdout.strip())
    assert [path.name for path in folder.glob("*.py")] == ["nnUNetTrainerHalfstep.py"]


def test_nnunet_finds_the_trainer_and_trains_with_it(data: Path) -> None:
    trainer = make_trainer(data, find_trainer())
    trainer.logger.plot_progress_png = lambda folder: None  # two seconds of matplotlib
    trainer.plot_network_architecture = lambda: None
    trainer.run_training()
    log = Path(trainer.log_file).read_text()
    assert "halfstep: nnU-Net trains in fp32" in log
    assert "train_loss" in log
    assert (Path(trainer.output_folder) / "checkpoint_final.pth").exists()


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_run_without_faults_equals_nnunets_own(data: Path, is_captured: bool) -> None:
    own, ours = make_trainer(data, nnUNetTrainer), make_trainer(data, find_trainer())
    batches = make_batches(30)
    train(own, batches)
    if is_captured:
        with replays_on_cpu():
            train(ours, batches)
        assert ours._step.mode == "graph"
    else:
        train(ours, batches)
    assert same_bits(copy_state(own.network, own.optimizer), copy_state(ours.network, ours.optimizer))


def ruin_statistics(module: Any, args: Any) -> None:
    module.running_var.fill_(float("inf"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_bad_step_leaves_everything_as_it_was(data: Path, precision: str) -> None:
    trainer = make_trainer(data, find_trainer())
    trainer.precision = hs.Precision(precision, simulate=precision != "fp32")
    trainer.step_options = {"guard": {"max_consecutive": 9}, "capsules": None}
    batches = iter(make_batches(20))
    train(trainer, [next(batches) for _ in range(3)])
    compute = trainer.loss.forward
    norm = next(module for module in trainer.network.modules() if isinstance(module, torch.nn.BatchNorm2d))
    for fault in FAULTS:
        before = copy_state(trainer.network, trainer.optimizer)
        batch = next(batches)
        if fault == "batch":
            batch["data"][0, 0, 3, 3] = float("nan")
        elif fault == "loss":
            trainer.loss.forward = lambda *args: compute(*args) * float("inf")
        elif fault == "gradient":
            trainer.loss.forward = lambda *args: compute(*args) + 0 * PoisonGradient.apply(norm.weight).sum()
        else:
            hook = norm.register_forward_pre_hook(ruin_statistics)
        train(trainer, [batch])
        assert same_bits(before, copy_state(trainer.network, trainer.optimizer)), fault
        trainer.loss.forward = compute
        if fault == "statistics":
            hook.remove()
        train(trainer, [next(batches)])
        assert not same_bits(before, copy_state(trainer.network, trainer.optimizer))


def test_a_dropped_step_is_logged_with_its_cases_and_replayed(data: Path) -> None:
    trainer = make_trainer(data, find_trainer())
    batches = make_batches(6)
    batches[3]["data"][1] = float("nan")
    trainer.network.train()
    outputs = [trainer.train_step(batch) for batch in batches]
    trainer.on_train_epoch_end(outputs)
    assert "step 3 was dropped: loss is nan; cases: a, b3" in Path(trainer.log_file).read_text()
    assert trainer.num_dropped == 1
    losses = [float(output["loss"].loss) for number, output in enumerate(outputs) if number != 3]
    assert trainer.logger.get_value("train_losses", step=-1) == pytest.approx(sum(losses) / 5, rel=1e-6)
    (capsule,) = (Path(trainer.output_folder) / "capsules").iterdir()
    found = str(hs.replay(capsule, trainer.network, trainer._compute_list_loss))
    assert "sample row 1 of batch 0: ['data'][0, 0, 0] is nan" in found


def test_checkpoints_load_in_both_directions(data: Path, tmp_path: Path) -> None:
    batches, path = make_batches(12), str(tmp_path / "checkpoint.pth")
    whole = make_trainer(data, nnUNetTrainer)
    train(whole, batches)
    for first, second in ((nnUNetTrainer, find_trainer()), (find_trainer(), nnUNetTrainer), (find_trainer(),) * 2):
        begun, resumed = make_trainer(data, first), make_trainer(data, second)
        train(begun, batches[:6])
        begun.save_checkpoint(path)
        resumed.load_checkpoint(path)
        train(resumed, batches[6:])
        assert same_bits(copy_state(whole.network, whole.optimizer), copy_state(resumed.network, resumed.optimizer))


def test_the_loss_scale_is_stored_where_nnunet_stores_its_own(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(data, find_trainer())
    trainer.precision, trainer.step_options = hs.Precision("fp16", simulate=True), {"capsules": None}
    trainer.grad_scaler = torch.amp.GradScaler("cpu", init_scale=512.0)  # on a GPU nnU-Net makes one
    train(trainer, make_batches(2))
    trainer._step.scaler.value.fill_(256.0)
    trainer.save_checkpoint(str(tmp_path / "checkpoint.pth"))
    stored = torch.load(tmp_path / "checkpoint.pth", weights_only=False)["grad_scaler_state"]
    assert stored["scale"] == 256.0
    torch.amp.GradScaler("cpu").load_state_dict(stored)


def test_several_gpus_are_refused(data: Path) -> None:
    trainer = make_trainer(data, find_trainer())
    trainer.is_ddp = True
    with pytest.raises(ConfigError, match="one GPU"):
        trainer.train_step(make_batches(1)[0])


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("nnunet")
