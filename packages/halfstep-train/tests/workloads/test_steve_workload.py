"""STEVE from a data folder to a trained, resumed and used run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from golden import golden
from halfstep.hardware.probe import probe
from halfstep.precision.contexts import simulate
from halfstep.step.schedule import ScheduleOptions, build_schedule
from halfstep_train.data.loader import Batch, Key, Loader
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import apply_settled, assemble, build_workload, decide_plan
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.use.predict import predict
from halfstep_train.workloads import load
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.slots.config import SteveConfig
from halfstep_train.workloads.slots.demo import write_demo
from halfstep_train.workloads.slots.scores import choose_start_scale, compute_temperature
from tiny_training import assert_same_bits
from whole_runs import final_state, resume

TINY = {
    "data.image_size": 16, "data.num_workers": 0, "device": "cpu", "log.quiet": True, "train.fast": "off",
    "model.vocabulary": 16, "model.slots": 3, "model.slot_dim": 16, "model.cnn_channels": 8,
    "model.dim": 16, "model.decoder_blocks": 1, "model.tau": (1.0, 0.1, 20), "train.batch_size": 4, "train.epochs": 100,
    "optimizer.lr": 3e-3, "optimizer.encoder_lr": 1e-3, "optimizer.dvae_lr": 3e-3, "schedule.warmup_steps": 5,
    "precision.default": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steve") / "demo"
    write_demo(folder, num_train=4, num_val=2, frames=6, side=16)
    return folder


@dataclass
class Trainer:
    demo: Path

    def config(self, **more: Any) -> Any:
        values = {**TINY, "data.dir": str(self.demo), **more}
        return load("steve", overrides=[f"{key}={json.dumps(value)}" for key, value in values.items()])

    def run(self, out: Path, **more: Any) -> Path:
        return train(self.config(**more), out=out)

    def workload(self, **more: Any) -> Workload:
        return build_workload(self.config(**more).config)


@pytest.fixture
def steve(demo: Path) -> Trainer:
    return Trainer(demo)


def untrained(workload: Workload) -> dict[str, float]:
    """Scores of the first weights on the validation set."""
    metrics = workload.metrics()
    batch = next(Loader(workload.val_samples, batch_size=2).iterate_epoch(0))
    workload.model.eval()
    with torch.no_grad():
        prepared = workload.prepare_batch(batch, key=Key.for_validation(), training=False)
        metrics.update(workload.forward(workload.model, prepared), prepared)
    return metrics.compute()


def last_scores(run: Path) -> dict[str, float]:
    return [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"][-1]


@pytest.mark.parametrize(("format", "epochs"), [("fp32", 10), ("fp16", 5)])
def test_both_losses_fall_in_every_format_without_a_skipped_step(
    format: str, epochs: int, steve: Trainer, tmp_path: Path
) -> None:
    simulated = {} if format == "fp32" else {"precision.default": format, "precision.simulate": True}
    run = steve.run(
        tmp_path / format,
        **{"train.epochs": epochs, "train.validate_every": epochs, "train.sample_every": 20, **simulated},
    )
    before, after = untrained(steve.workload()), last_scores(run)
    assert after["mse"] < 0.5 * before["mse"]
    assert after["cross_entropy"] < 0.98 * before["cross_entropy"]
    assert -0.5 <= after["fg_ari"] <= 1
    assert not [record for record in read(run / "metrics.jsonl") if record.get("event")]
    if format == "fp32":
        assert_is_used(run, steve.demo, tmp_path / "out")


def assert_is_used(run: Path, demo: Path, out: Path) -> None:
    """Evaluation draws, prediction writes, and the samples of training are there."""
    found = evaluate(run, report=RunReport(run, quiet=True))
    scores = last_scores(run)
    assert found.metrics["mse"] == pytest.approx(scores["mse"])
    assert found.metrics["cross_entropy"] == pytest.approx(scores["cross_entropy"])
    assert found.metrics["fg_ari"] == pytest.approx(last_scores(run)["fg_ari"], abs=1e-9)
    video = demo / "demo-validation-000000.tar"
    predict(run, [video], report=RunReport(run, quiet=True), request=PredictRequest(out=out))
    assert sorted(path.suffix for path in out.rglob("000000*")) == [".gif", ".npy", ".png"]
    assert np.load(next(out.rglob("000000*.npy"))).shape == (6, 16, 16)
    other = out / "other"
    write_demo(other, num_train=2, num_val=0, frames=4, side=16, seed=7)
    assert evaluate(run, data=other, report=RunReport(run, quiet=True)).samples == 2
    samples = sorted(path.name for path in (run / "report" / "samples").rglob("*.png"))
    assert samples == ["clip_0.png", "clip_1.png", "frames_vae_slots.png"]


def test_a_resumed_run_is_the_same_to_the_last_bit(steve: Trainer, tmp_path: Path) -> None:
    """Temperature, all three learning rates, dropout and every draw go on where they were."""
    whole = steve.run(tmp_path / "whole", **{"train.epochs": 2})
    half = steve.run(tmp_path / "half", **{"train.epochs": 1})
    resumed = resume(half, "train.epochs=2")
    assert_same_bits(final_state(whole)[0], final_state(resumed)[0])


def test_summed_losses_start_in_fp16_with_a_scale_that_holds_them(steve: Trainer) -> None:
    """At 65536, GradScaler's start, the first gradients are infinite."""
    scale = apply_settled(steve.config().config, steve.workload()).scaler.init_scale
    assert scale == choose_start_scale(16) == 2.0**4
    assert (
        apply_settled(
            steve.config(**{"model.loss": "mean"}).config, steve.workload(**{"model.loss": "mean"})
        ).scaler.init_scale
        == 65536
    )
    named = {"scaler.init_scale": 2.0}
    assert apply_settled(steve.config(**named).config, steve.workload(**named)).scaler.init_scale == 2

    def is_finite(scale: float) -> bool:
        workload = steve.workload()
        batch = workload.prepare_batch(
            next(Loader(workload.train_samples, batch_size=4).iterate_epoch(0)), key=KEY, training=True
        )
        with simulate("fp16"):
            loss, _ = workload.compute_loss(workload.forward(workload.model, batch), batch)
            (loss * scale).backward()
        gradients = [weight.grad for weight in workload.model.parameters() if weight.grad is not None]
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    assert is_finite(scale)
    assert not is_finite(65536.0)


KEY = Key.for_training(0, attempted=3)


def prepared_draws(workload: Workload, num: int, key: Key) -> Batch:
    batch = next(Loader(workload.train_samples, batch_size=num).iterate_epoch(0))
    return workload.prepare_batch(batch, key=key, training=True)


def test_draws_belong_to_the_clip_and_the_step_and_to_nothing_else(steve: Trainer) -> None:
    workload = steve.workload()
    whole = prepared_draws(workload, 4, KEY)
    names = ("soft_keys", "word_keys", "slot_draw")
    again, next_step = prepared_draws(workload, 4, KEY), prepared_draws(workload, 4, Key.for_training(0, attempted=4))
    half = prepared_draws(workload, 2, KEY)
    for name in names:
        assert torch.equal(again[name], whole[name])
        assert torch.equal(half[name], whole[name][:2])
        assert not torch.equal(next_step[name], whole[name])
    assert not torch.equal(whole["soft_keys"], whole["word_keys"])
    assert whole["soft_keys"].unique().numel() == whole["soft_keys"].numel(), "two frames share noise"


def test_mean_losses_are_the_sums_by_pixel_and_word(steve: Trainer) -> None:
    losses = {}
    for reduction in ("sum", "mean"):
        workload = steve.workload(**{"model.loss": reduction, "model.dropout": 0.0})
        outputs = workload.forward(workload.model, prepared_draws(workload, 4, KEY))
        losses[reduction] = outputs["loss"].item()
    assert losses["sum"] == pytest.approx(outputs["mse"].item() + outputs["cross_entropy"].item())
    assert losses["mean"] == pytest.approx(outputs["mse"].item() / (3 * 16 * 16) + outputs["cross_entropy"].item() / 16)


def test_temperature_and_learning_rates_are_the_public_projects(steve: Trainer) -> None:
    _, facts = golden("steve_tiny")
    config = SteveConfig(workload="steve")
    expected = facts["schedules"]
    s = config.schedule
    schedule = build_schedule(
        ScheduleOptions(
            name=s.name,
            total_steps=200_000,
            warmup_steps=s.warmup_steps or 0,
            half_life_steps=s.half_life_steps,
            decay_from_start=s.decay_from_start,
        )
    )
    for step, tau, warmup, decay in zip(*(expected[k] for k in ("steps", "tau", "lr_warmup", "lr_decay")), strict=True):
        assert compute_temperature(config.model.tau, step) == pytest.approx(tau, rel=1e-12)
        assert schedule(step) == pytest.approx(warmup * decay, rel=1e-12)


def test_three_groups_follow_their_own_schedules_and_the_temperature_its_own(steve: Trainer) -> None:
    config = steve.config(**{"optimizer.dvae_lr": 5e-3, "optimizer.encoder_lr": 2e-3, "optimizer.lr": 1e-3}).config
    workload = build_workload(config)
    parts = assemble(config, workload, decide_plan(config, workload, probe("cpu")))
    assert parts.step.rates is not None
    names = {id(weight): name.split(".")[0] for name, weight in parts.model.named_parameters()}
    committed = torch.tensor(3)
    parts.step.rates.refresh(committed)
    found = {names[id(group["params"][0])]: float(group["lr"]) for group in parts.step.optimizers[0].param_groups}
    decay = 4 / 5 * 0.5 ** (3 / config.schedule.half_life_steps)
    assert found == pytest.approx({"dvae": 5e-3, "steve_encoder": 2e-3 * decay, "steve_decoder": 1e-3 * decay})
    assert workload.values["tau"](3) == pytest.approx(compute_temperature(config.model.tau, 3))


def test_weights_of_the_public_project_load_without_their_masks(steve: Trainer, tmp_path: Path) -> None:
    state = steve.workload().model.state_dict()
    theirs = {name: value + 1 if value.is_floating_point() else value for name, value in state.items()}
    theirs["steve_decoder.tf.blocks.0.self_attn_mask"] = torch.ones(16, 16).triu(1).bool()
    save_file(theirs, tmp_path / "steve.safetensors")
    loaded = steve.workload(**{"model.weights": str(tmp_path / "steve.safetensors")}).model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in loaded.items())
