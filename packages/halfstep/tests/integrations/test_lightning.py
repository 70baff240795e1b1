"""Lightning, under both of its package names, with the real package on the CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep as hs
from doc_pages import ROOT, blocks
from halfstep.errors import ConfigError, HalfstepError
from halfstep.integrations import lightning
from halfstep.integrations.lightning import HalfstepPrecision, find_package, make_plugin_class
from host_faults import same_bits
from host_pages import run_page
from ranks_together import be_rank, together
from replay_stand_in import replays_on_cpu
from tiny_lightning import ALL_FAULTS, PACKAGES, fit, list_state, make_module, make_trainer, make_watcher

pytest.importorskip("lightning")

BOTH = pytest.mark.parametrize("package", PACKAGES)


def make_plugin(package: str = PACKAGES[0], precision: str = "fp32", **more: Any) -> Any:
    asked = hs.Precision(precision, simulate=precision in ("bf16", "fp16"))
    return make_plugin_class(package)(asked, **more)


# --- the guard ---


@BOTH
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_guarded_run_without_faults_equals_lightnings_own(package: str, accumulate: int) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    own = fit(make_module(package), make_trainer(package, **settings))
    guarded = fit(make_module(package), make_trainer(package, make_plugin(package), **settings))
    own_state, guarded_state = list_states(own, guarded)
    assert same_bits(own_state, guarded_state)
    assert same_bits(dict(own.callback_metrics), dict(guarded.callback_metrics))


def list_states(own: Any, guarded: Any) -> list[Any]:
    own.precision_plugin.scaler = None  # Lightning's plain plugin has no such attribute
    return [list_state(own), list_state(guarded)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_step_leaves_everything_as_it_was(precision: str, accumulate: int) -> None:
    watcher = make_watcher(PACKAGES[0], ALL_FAULTS, accumulate)
    average = importlib.import_module("lightning.pytorch.callbacks").EMAWeightAveraging()
    trainer = make_trainer(
        plugin=make_plugin(precision=precision, max_consecutive=9), callbacks=[average, watcher],
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    fit(make_module(), trainer, 20)
    bad = {batch // accumulate: fault for batch, fault in ALL_FAULTS.items()}
    for number, (before, after) in enumerate(zip(watcher.states[:-1], watcher.states[1:], strict=True)):
        if precision == "fp16" and bad.get(number) == "gradient":
            # An overflow of gradients lowers the scale, as it must.
            assert after[3]["scale"] < before[3]["scale"]
            before[3] = after[3]
        last = number == len(watcher.states) - 2  # at the end the callback copies the average into the model
        if not last:
            assert same_bits(before, after) == (number in bad), (number, bad.get(number))


def test_a_second_fit_guards_its_own_average() -> None:
    average = importlib.import_module("lightning.pytorch.callbacks").EMAWeightAveraging()
    for _ in range(2):
        watcher = make_watcher(PACKAGES[0], {3: "loss"})
        fit(make_module(), make_trainer(plugin=make_plugin(), callbacks=[average, watcher]), 6)
        assert "on_train_batch_end" not in vars(average)
        average._latest_update_step = 0
        assert same_bits(watcher.states[3], watcher.states[4])


def test_dropped_steps_do_not_move_an_exact_schedule() -> None:
    watcher = make_watcher(PACKAGES[0], ALL_FAULTS)
    fit(make_module(), make_trainer(plugin=make_plugin(schedule="exact", max_consecutive=9), callbacks=[watcher]), 20)
    lrs = [state[2]["_last_lr"] for state in watcher.states]
    assert [number for number in range(20) if lrs[number] == lrs[number + 1]] == sorted(ALL_FAULTS)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_does_not_hide_a_bad_gradient(algorithm: str) -> None:
    watcher = make_watcher(PACKAGES[0], {3: "gradient"})
    trainer = make_trainer(
        plugin=make_plugin(), callbacks=[watcher], gradient_clip_val=0.1, gradient_clip_algorithm=algorithm
    )
    fit(make_module(), trainer, 6)
    assert same_bits(watcher.states[3], watcher.states[4])


def test_fused_optimizers_are_clipped_in_fp16() -> None:
    """Lightning's own plugin refuses that."""
    own = make_plugin(precision="fp16")
    fit(make_module(), make_trainer(plugin=own, gradient_clip_val=0.1), 4)


def test_manual_optimization_is_guarded() -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(*batch)["loss"])
        optimizer.step()
        self.lr_schedulers().step()

    module = make_module(training_step=training_step)
    module.automatic_optimization = False
    watcher = make_watcher(PACKAGES[0], ALL_FAULTS)
    fit(module, make_trainer(plugin=make_plugin(max_consecutive=9), callbacks=[watcher]), 20)
    same = [n for n in range(20) if same_bits(watcher.states[n], watcher.states[n + 1])]
    assert same == sorted(ALL_FAULTS)


def test_a_step_without_a_loss_is_skipped_as_lightning_does() -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 0 else self.net(*batch)["loss"]

    own = fit(make_module(training_step=training_step), make_trainer(), 10)
    guarded = fit(make_module(training_step=training_step), make_trainer(plugin=make_plugin()), 10)
    assert same_bits(own.lightning_module.state_dict(), guarded.lightning_module.state_dict())


@pytest.mark.parametrize("level", ["guard", "captured"])
def test_the_end_says_how_many_steps_were_dropped(level: str, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = make_plugin(level=level)
    with replays_on_cpu():
        fit(make_module(), make_trainer(plugin=plugin, callbacks=[make_watcher(PACKAGES[0], {2: "loss"})]), 6)
    assert "halfstep: 1 of 6 steps of Lightning dropped\n" in capfd.readouterr().err
    assert plugin.num_dropped == 1


def test_a_capsule_names_the_sample(tmp_path: Path) -> None:
    module = make_module()
    trainer = make_trainer(plugin=make_plugin(capsules=tmp_path))
    fit(module, trainer, 8, spoil=27)
    (capsule,) = tmp_path.iterdir()
    found = str(hs.replay(capsule, module, lambda kept: module.net(*kept["batch"])["loss"]))
    assert "sample row 3 of batch 0: ['batch'][0][0] is nan" in found


# --- captured steps ---


def fit_captured(module: Any = None, num: int = 30, *, faults: Any = None, **more: Any) -> tuple[Any, Any, set[str]]:
    """Train with the stand-in for CUDA graphs; return trainer, watcher, and the modes that steps ran in."""
    modes: set[str] = set()
    plugin = make_plugin(level="captured", max_consecutive=9, on_outcome=lambda o: modes.add(plugin.step.mode))
    watcher = make_watcher(PACKAGES[0], faults or {})
    more.setdefault("callbacks", []).append(watcher)
    with replays_on_cpu():
        trainer = fit(module or make_module(), make_trainer(plugin=plugin, **more), num)
    return trainer, watcher, modes


@pytest.mark.parametrize("schedule", ["step", "epoch", "none"])
def test_a_captured_run_equals_lightnings_own_with_its_logs(schedule: str) -> None:
    own = fit(make_module(schedule=schedule), make_trainer(gradient_clip_val=0.5))
    captured, _, modes = fit_captured(make_module(schedule=schedule), gradient_clip_val=0.5)
    assert "graph" in modes
    assert same_bits(*list_states(own, captured))
    assert same_bits(dict(own.callback_metrics), dict(captured.callback_metrics))
    assert own.global_step == captured.global_step


def test_a_bad_captured_step_leaves_everything_as_it_was() -> None:
    average = importlib.import_module("lightning.pytorch.callbacks").EMAWeightAveraging()
    faults = {number + 8: fault for number, fault in ALL_FAULTS.items()}
    _, watcher, modes = fit_captured(faults=faults, callbacks=[average])
    assert "graph" in modes
    same = [n for n in range(29) if same_bits(watcher.states[n], watcher.states[n + 1])]
    assert same == sorted(faults)


def test_a_training_step_that_cannot_be_traced_runs_eagerly(capfd: pytest.CaptureFixture[str]) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.net(*batch)["loss"]
        self.log("largest", float(loss))  # reads a number
        return loss

    own = fit(make_module(training_step=training_step), make_trainer(), 12)
    captured, _, modes = fit_captured(make_module(training_step=training_step), 12)
    assert modes == {"eager"}
    assert same_bits(*list_states(own, captured))
    assert "runs eagerly" in capfd.readouterr().err


def test_a_captured_training_step_needs_a_loss() -> None:
    module = make_module(training_step=lambda self, batch, batch_idx: None)
    with pytest.raises(ConfigError, match="training_step returned None"):
        fit_captured(module, 2)


def override(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(type(self), self), name)(*args, **kwargs)

    return make_module(**{name: hook})


@pytest.mark.parametrize("name", ["on_before_zero_grad", "on_after_backward", "optimizer_step", "backward"])
def test_overridden_hooks_run_at_the_level_of_the_guard(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with replays_on_cpu():
        trainer = fit(override(name), make_trainer(plugin=make_plugin()), 4)
    own = fit(override(name), make_trainer(), 4)
    assert f"overrides {name}" in capfd.readouterr().err
    assert same_bits(*list_states(own, trainer))


def test_other_obstacles_are_named() -> None:
    class Callback(importlib.import_module("lightning.pytorch").Callback):  # type: ignore[misc]
        def on_before_optimizer_step(self, *args: Any) -> None: ...

    def one_cycle(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module = make_module(configure_optimizers=one_cycle)
    with replays_on_cpu():
        with pytest.raises(ConfigError, match="OneCycleLR changes momentum"):
            fit(module, make_trainer(plugin=make_plugin(level="captured")), 2)
        for settings, words in (
            ({"accumulate_grad_batches": 2}, "accumulated"),
            ({"callbacks": [Callback()]}, "the callback Callback overrides on_before_optimizer_step"),
        ):
            with pytest.raises(ConfigError, match=words):
                fit(make_module(), make_trainer(plugin=make_plugin(level="captured"), **settings), 2)


# --- checkpoints ---


@pytest.mark.parametrize(
    ("level", "first", "second"),
    [("guard", "own", "ours"), ("guard", "ours", "own"), ("captured", "own", "ours"), ("captured", "ours", "ours")],
)
def test_checkpoints_load_in_both_directions(tmp_path: Path, level: str, first: str, second: str) -> None:
    def make(kind: str, epochs: int) -> Any:
        return make_trainer(plugin=make_plugin(level=level) if kind == "ours" else None, max_epochs=epochs)

    with replays_on_cpu():
        whole = fit(make_module(), make("own", 2), 8)
        begun = fit(make_module(), make(first, 1), 8)
        begun.save_checkpoint(tmp_path / "one.ckpt")
        resumed = fit(make_module(), make(second, 2), 8, ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    for trainer in (whole, resumed):
        trainer.precision_plugin.scaler = None
    assert same_bits(list_state(whole), list_state(resumed))


def test_the_loss_scale_is_stored_where_lightning_stores_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(plugin=make_plugin(precision="fp16"), callbacks=[make_watcher(PACKAGES[0], {2: "gradient"})])

    class Saver(importlib.import_module("lightning.pytorch").Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "one.ckpt")

    trainer.callbacks.append(Saver())
    fit(make_module(), trainer, 5)
    stored = torch.load(tmp_path / "one.ckpt", weights_only=False)["MixedPrecision"]
    assert stored["scale"] == 32768.0
    amp = importlib.import_module("lightning.pytorch.plugins").MixedPrecision("16-mixed", "cpu")
    amp.load_state_dict(stored)
    assert amp.scaler.get_scale() == 32768.0


# --- bad input ---


def test_several_optimizers_are_refused() -> None:
    def configure_optimizers(self: Any) -> Any:
        return [torch.optim.SGD(self.net.body[number].parameters()) for number in (0, 3)]

    module = make_module(configure_optimizers=configure_optimizers)
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="returned 2"):
        fit(module, make_trainer(plugin=make_plugin()), 2)


def test_an_argument_of_a_group_is_refused_at_both_levels() -> None:
    for level in ("guard", "captured"):
        with pytest.raises(ConfigError, match="hs.Step has no argument 'simulate'") as error:
            make_plugin(level=level, simulate=True)
        assert "hs.Precision(" in error.value.fix


def test_an_optimizer_that_needs_its_closure_is_refused() -> None:
    def configure_optimizers(self: Any) -> Any:
        return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match="LBFGS"):
        fit(make_module(configure_optimizers=configure_optimizers), make_trainer(plugin=make_plugin()), 2)


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "ModelParallelStrategy"])
def test_strategies_that_shard_are_refused(name: str) -> None:
    kind = getattr(importlib.import_module("lightning.pytorch.strategies"), name, None) or type(name, (), {})
    with pytest.raises(ConfigError, match=f"{name} cannot be guarded"):
        lightning._refuse_strategy(object.__new__(kind), lightning.GUARDABLE)


def test_two_packages_in_one_process_need_a_choice() -> None:
    for package in PACKAGES:
        importlib.import_module(package)
    with pytest.raises(ConfigError, match="both lightning and pytorch_lightning"):
        HalfstepPrecision("fp32")


def test_the_imported_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("lightning.pytorch")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("pytorch_lightning")
    assert find_package() == "pytorch_lightning"
    kind = importlib.import_module("pytorch_lightning.plugins").Precision
    assert isinstance(HalfstepPrecision("fp32"), kind)


@pytest.mark.parametrize("wrong", [{"level": "fast"}, {"schedule": "never"}, {"precision": "fp12"}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(HalfstepError, match="level=|schedule=|fp12"):
        fit(make_module(), make_trainer(plugin=make_plugin(**wrong)), 2)


# --- the page ---


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lightning, "find_package", lambda: PACKAGES[0])  # other tests have imported both
    run_page("lightning")
    printed = capfd.readouterr()
    (line,) = blocks(ROOT / "docs" / "integrations" / "lightning.md", "text")
    assert " ".join(line.text.split()) in " ".join(printed.err.split())
    assert "sample row 4 of batch 0: ['batch'][0][0] is nan" in printed.out


# --- two ranks ---


def train_on_a_rank(rank: int, size: int, port: int) -> list[int]:
    """Train with DDP while one rank alone is at fault; return the steps that changed nothing on this rank."""
    be_rank(rank, size, port)
    watcher = make_watcher(PACKAGES[0], ALL_FAULTS if rank == 1 else {}, 1)
    trainer = make_trainer(
        plugin=make_plugin(max_consecutive=9), callbacks=[watcher], devices=size, strategy="ddp",
        use_distributed_sampler=False,
    )  # fmt: skip
    fit(make_module(), trainer, 18)
    return [number for number in range(18) if same_bits(watcher.states[number], watcher.states[number + 1])]


@pytest.mark.ranks
def test_two_ranks_drop_the_same_steps(tmp_path: Path) -> None:
    assert together(2, train_on_a_rank, tmp_path) == [sorted(ALL_FAULTS)] * 2
