"""SlotContrast with words: the joined model from a data folder to a trained, resumed and used run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep_train.data.loader import Key, Loader
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.use.predict import predict
from halfstep_train.workloads import load
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.slots.demo import write_demo
from halfstep_train.workloads.slots.slot_decoder import SlotContrastWords
from tiny_training import assert_same_bits
from whole_runs import final_state, resume

TINY = {
    "data.image_size": 28, "data.num_workers": 0, "device": "cpu", "log.quiet": True, "train.fast": "off",
    "model.backbone": "filters", "model.patch": 14, "model.slots": 3, "model.slot_dim": 16,
    "model.decoder_hidden": [16], "model.vocabulary": 12, "model.words_blocks": 1, "model.words_dim": 8,
    "model.tau": (1.0, 0.1, 20), "train.batch_size": 4, "train.max_steps": 0, "train.epochs": 2, "data.chunk_size": 2,
    "train.validate_every_steps": 0, "optimizer.lr": 3e-3, "schedule.warmup_steps": 2, "train.val_batch_size": 0,
    "precision.default": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words") / "demo"
    write_demo(folder, num_train=8, num_val=2, frames=4, side=28)
    return folder


def configured(demo: Path, more: dict[str, Any]) -> Any:
    values = {**TINY, "data.dir": str(demo), **more}
    return load("slotcontrast_steve", overrides=[f"{key}={json.dumps(value)}" for key, value in values.items()])


def built(demo: Path, **more: Any) -> Workload:
    return build_workload(configured(demo, more).config)


def first_outputs(workload: Workload) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    raw = next(Loader(workload.train_samples, batch_size=4).iterate_epoch(0))
    batch = workload.prepare_batch(raw, key=Key.for_training(0, attempted=0), training=True)
    return workload.forward(workload.model, batch), batch


def test_the_loss_has_all_four_parts_with_their_weights(demo: Path) -> None:
    weights = {"model.contrast_weight": 0.0, "model.words_dropout": 0.0}
    workload = built(demo, **weights, **{"model.dvae_weight": 0.25, "model.words_weight": 3.0})
    outputs, batch = first_outputs(workload)
    loss, weight = workload.compute_loss(outputs, batch)
    words = 4  # two rows of two
    expected = outputs["error"] + 0.25 * outputs["mse"] + 3 * outputs["cross_entropy"] / words
    torch.testing.assert_close(loss, expected)
    assert weight == 4
    loss.backward()
    unused = [name for name, value in workload.model.named_parameters() if value.grad is None]
    assert not unused


def test_words_depend_on_slots_and_on_nothing_that_comes_after_them(demo: Path) -> None:
    model = built(demo).model.eval()
    assert isinstance(model, SlotContrastWords)
    words, slots = torch.tensor([[3, 1, 4, 1]]), torch.randn(1, 3, 8)
    before = model.steve_decoder(words, slots)
    for position in range(4):
        changed = words.clone()
        changed[0, position] = 7
        after = model.steve_decoder(changed, slots)
        assert torch.equal(after[:, : position + 1], before[:, : position + 1])
        assert position == 3 or not torch.equal(after[:, position + 1 :], before[:, position + 1 :])
    assert not torch.equal(model.steve_decoder(words, slots + 1), before)


def test_frames_that_fill_up_a_clip_do_not_count(demo: Path) -> None:
    torch.manual_seed(0)
    workload = built(demo, **{"model.words_dropout": 0.0})
    model = workload.model.eval()
    assert isinstance(model, SlotContrastWords)
    outputs, batch = first_outputs(workload)

    def losses(frames: int, is_real: torch.Tensor | None) -> dict[str, torch.Tensor]:
        cut = {name: batch[name][:1, :frames] for name in ("video", "soft_keys", "word_keys")}
        return model.compute_word_losses(
            outputs["slots"][:1, :frames], cut["video"], 0.5, soft_noise=cut["soft_keys"].flatten(0, 1),
            word_noise=cut["word_keys"].flatten(0, 1), hard=True, is_real=is_real,
        )  # fmt: skip

    torch.testing.assert_close(losses(2, torch.tensor([[True, False]])), losses(1, None))


def test_it_trains_resumes_bit_by_bit_and_is_evaluated(demo: Path, tmp_path: Path) -> None:
    whole = train(configured(demo, {}), out=tmp_path / "whole")
    half = train(configured(demo, {"train.epochs": 1}), out=tmp_path / "half")
    assert_same_bits(final_state(whole)[0], final_state(resume(half, "train.epochs=2"))[0])
    scores = [record for record in read(whole / "metrics.jsonl") if record["kind"] == "val"]
    assert scores[-1]["loss"] < scores[0]["loss"]
    found = evaluate(whole, report=RunReport(whole, quiet=True))
    assert "fg_ari" in found.metrics
    video = demo / "demo-validation-000000.tar"
    made = predict(whole, [video], report=RunReport(whole, quiet=True), request=PredictRequest(out=tmp_path / "out"))
    assert not made.failed
    assert sorted(path.suffix for path in (tmp_path / "out").rglob("000000*")) == [".gif", ".npy", ".png"]


def test_without_blocks_there_is_a_vae_and_no_decoder(demo: Path) -> None:
    outputs, _ = first_outputs(built(demo, **{"model.words_blocks": 0}))
    assert "mse" in outputs
    assert "cross_entropy" not in outputs
