"""SlotContrast trained on generated shards: it learns, resumes exactly, is evaluated and used."""

from __future__ import annotations

import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.errors import ConfigError
from halfstep_train.config.load import Loaded
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.use.predict import predict
from halfstep_train.workloads import build, load
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.slots.backbones import build_dinov2
from halfstep_train.workloads.slots.data import colour_slots, tint, write_gif
from halfstep_train.workloads.slots.demo import add_array, write_demo
from tiny_training import assert_same_bits
from whole_runs import final_state, resume

TINY: dict[str, Any] = {
    "data.image_size": 32, "data.num_workers": 0, "data.chunk_size": 2, "model.backbone": "filters", "model.patch": 8,
    "model.slots": 3, "model.slot_dim": 8, "model.decoder_hidden": [16], "train.batch_size": 4, "train.clip_norm": 1,
    "optimizer.lr": 1e-2, "schedule.warmup_steps": 2, "train.val_batch_size": 2, "train.validate_every_steps": 0,
    "train.validate_every": 100, "device": "cpu", "log.quiet": True, "train.fast": "off",
}  # fmt: skip
VIT = {
    "model.backbone": "vit_small_patch14_dinov2", "model.backbone_size": (1, 2, 24),
    "data.image_size": 28,
}  # fmt: skip


def settings(data: Path, more: dict[str, Any] | None = None) -> Loaded:
    values = {**TINY, "data.dir": str(data), **(more or {})}
    return load("slotcontrast", overrides=[f"{key}={json.dumps(value)}" for key, value in values.items()])


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots") / "data"
    write_demo(folder, num_train=8, num_val=2, frames=5, side=32, per_shard=4)
    return folder


def trained(out: Path, data: Path, **more: Any) -> Path:
    return train(settings(data, {f"train.{name}": value for name, value in more.items()}), out=out)


def test_the_loss_falls_in_simulated_fp16(tmp_path: Path, clips: Path) -> None:
    asked = {"precision.default": "fp16", "precision.simulate": True, "train.max_steps": 40, "train.report_every": 1}
    run = train(settings(clips, asked), out=tmp_path / "run")
    losses = [row["loss"] for row in read(run / "metrics.jsonl") if "grad_norm" in row]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_resume_is_exact(tmp_path: Path, clips: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(whole, clips, max_steps=4)
    trained(parts, clips, max_steps=3)
    resume(parts, "train.max_steps=4")
    assert_same_bits(final_state(whole)[0], final_state(parts)[0])


def test_a_run_is_evaluated_and_used(tmp_path: Path, clips: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    trained(run, clips, max_steps=2)
    found = evaluate(run, report=RunReport(run, quiet=True))
    assert {"fg_ari", "mbo", "fg_ari_image", "ari", "empty"} <= set(found.metrics)
    assert sum(row["share of pixels"] for row in found.classes) == pytest.approx(1)  # type: ignore[misc]
    pictures = [Path(file) for file in found.files if not file.endswith(".json")]
    assert {path.suffix for path in pictures} == {".png", ".gif"}
    with Image.open(next(path for path in pictures if path.suffix == ".gif")) as moving:
        assert moving.n_frames == 5  # type: ignore[attr-defined]
    told = RunReport(run, quiet=False)
    alone = evaluate(run, report=told, out=tmp_path / "alone", batch_size=1)
    assert alone.metrics["fg_ari"] == found.metrics["fg_ari"]
    assert "--batch-size 1 gives different scores from training: validation loss" in capsys.readouterr().err
    video = np.random.default_rng(0).integers(0, 255, (3, 32, 48, 3), dtype=np.uint8)
    (tmp_path / "frames").mkdir()
    for t in range(2):
        Image.fromarray(video[t]).save(tmp_path / "frames" / f"{t:08d}_image.png")
        Image.fromarray(video[t, ..., 0]).save(tmp_path / "frames" / f"{t:08d}_mask_00.png")
    for t, part in itertools.product(range(2), ("frames", "masks")):
        (tmp_path / "cut 1" / part).mkdir(parents=True, exist_ok=True)
        Image.fromarray(video[t]).save(tmp_path / "cut 1" / part / f"{t}.png")
    shard = next(clips.glob("*validation*.tar"))
    asked = [tmp_path / "frames", tmp_path / "cut 1", shard]
    made = predict(run, asked, report=RunReport(run, quiet=True), request=PredictRequest(out=tmp_path / "out"))
    assert not made.failed
    assert [answer.file for answer in made.answers] == [str(tmp_path / "frames"), str(tmp_path / "cut 1" / "frames"),
                                                        str(shard)]  # fmt: skip
    assert np.load(tmp_path / "out" / "frames_slots.npy").shape == (2, 32, 48)
    assert (tmp_path / "out" / "frames.gif").exists()
    assert len(np.load(tmp_path / "out" / "frames_slots.npy")) == 2, "masks are no frames"
    assert len(np.load(tmp_path / "out" / "cut 1_slots.npy")) == 2
    assert not list((tmp_path / "out").glob("*masks*"))
    assert (tmp_path / "out" / shard.stem / "000001.gif").exists()


def test_other_videos_are_evaluated_whole(tmp_path: Path, clips: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    trained(run, clips, max_steps=1)
    write_demo(other, num_train=3, num_val=0, frames=4, side=32, seed=7)
    found = evaluate(run, data=other, report=RunReport(run, quiet=True))
    assert found.samples == 3
    assert "fg_ari" in found.metrics
    assert "slot masks at 32×32" in found.scoring


def test_videos_without_masks_are_trained_on_and_watched_by_loss(tmp_path: Path) -> None:
    for number in range(5):
        pictures = [Image.fromarray(np.full((32, 32, 3), 40 * number + t, np.uint8)) for t in range(3)]
        (tmp_path / "gifs").mkdir(exist_ok=True)
        pictures[0].save(tmp_path / "gifs" / f"{number}.gif", save_all=True, append_images=pictures[1:])
    built = build(settings(tmp_path / "gifs").config)
    assert (built.metric, built.mode) == ("loss", "min")
    assert any("no FG-ARI" in note for note in built.notes)


def test_clips_without_a_labelled_object_do_not_count_where_nobody_labelled_background(tmp_path: Path) -> None:
    """As in YTVIS: a plane for each object, and pixels that belong to none."""
    videos = np.random.default_rng(0).integers(0, 255, (4, 5, 32, 32, 3), dtype=np.uint8)
    planes = np.zeros((2, 5, 32, 32, 2), np.uint8)
    planes[0, :, :9, :, 0] = planes[0, :, 20:, :, 1] = 7  # a category's number, the same for both; clip 1 has none
    with (
        tarfile.open(tmp_path / "a-train-0.tar", "w") as seen,
        tarfile.open(tmp_path / "a-val-0.tar", "w") as val,
    ):
        for number in range(2):
            add_array(seen, f"{number}.video.npy", videos[number])
            add_array(val, f"{number}.video.npy", videos[2 + number])
            add_array(val, f"{number}.segmentations.npy", planes[number])
    built = build(settings(tmp_path, {"model.ignore_background": False}).config)
    assert built.metric == "fg_ari"
    assert "without foreground are left out" in built.scoring
    metrics = built.metrics()
    true = torch.stack([built.val_samples.sample(index, key=(0, 0, index))["masks"] for index in range(2)])
    halves = (torch.arange(16) // 8).expand(2, 5, 16)  # slots: the upper and the lower half, patch by patch
    metrics.update({"masks": torch.nn.functional.one_hot(halves, 2).movedim(-1, 2).float()}, {"masks": true})
    found = metrics.compute()
    assert (found["fg_ari"], found["empty"]) == (1.0, 1.0)


def test_a_backbone_without_weights_is_an_error_and_random_ones_are_said_aloud(clips: Path) -> None:
    with pytest.raises(ConfigError, match="must be a multiple of 8"):
        build(settings(clips, {"data.image_size": 30}).config)
    with pytest.raises(ConfigError, match="vit_small_patch14_dinov2 needs its weights") as raised:
        build(settings(clips, VIT).config)
    assert "model.backbone_weights" in raised.value.fix
    built = build(settings(clips, {**VIT, "model.backbone_weights": "random"}).config)
    assert any("RANDOM weights" in note for note in built.notes)
    assert not any(weight.requires_grad for weight in built.frozen["backbone"].module.parameters())


def test_a_backbone_file_is_loaded_and_named_as_the_frozen_parts_source(tmp_path: Path, clips: Path) -> None:
    torch.manual_seed(1)
    saved = build_dinov2("vit_small_patch14_dinov2", depth=1, heads=6, dim=24)
    torch.save(saved.state_dict(), tmp_path / "vit.pth")
    asked = {**VIT, "model.backbone_weights": str(tmp_path / "vit.pth")}
    part = build(settings(clips, asked).config).frozen["backbone"]
    assert part.source == str(tmp_path / "vit.pth")
    assert torch.equal(part.module.class_token, saved.class_token)


def test_one_frame_has_nothing_to_be_contrasted_with(clips: Path) -> None:
    with pytest.raises(ConfigError, match="chunk_size=1"):
        settings(clips, {"data.chunk_size": 1})
    settings(clips, {"data.chunk_size": 1, "model.contrast_weight": 0})


def test_accumulation_changes_the_negatives_and_says_so(clips: Path) -> None:
    built = build(settings(clips, {"train.accumulate": 2}).config)
    assert any("11 others of their micro-batch of 4 clips" in note for note in built.notes)


def test_large_frames_are_small_in_a_gif_and_keep_their_slots_colours(tmp_path: Path) -> None:
    frames, slots = np.zeros((2, 300, 600, 3), np.uint8), np.zeros((2, 300, 600), np.int64)
    slots[:, :, 300:] = 1
    write_gif(tmp_path / "a.gif", frames, slots)
    with Image.open(tmp_path / "a.gif") as moving:
        assert (moving.size, moving.n_frames) == ((1024, 256), 1), "equal frames are one page"
        seen = np.asarray(moving.convert("RGB"))
    expected = tint(np.zeros((2, 3), np.uint8), colour_slots(np.arange(2)))
    assert np.abs(seen[128, [600, 900]].astype(int) - expected).max() <= 2
