"""Prediction with stored runs: masks and classes of any files, bad ones named, nothing overwritten."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.errors import CheckpointError, ConfigError, DataError, Interrupted
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import Answer, Bar, Predictions
from halfstep_train.use.evaluate import choose_plan, load_weights, open_run, wrap_trained
from halfstep_train.use.predict import predict
from halfstep_train.workloads.base.using import Input, PredictRequest
from halfstep_train.workloads.segmentation.config import UNetConfig
from halfstep_train.workloads.segmentation.evaluate import MaskPredictor
from tiny_runs import Told, copied, press_ctrl_c, unet_run


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unet_run(tmp_path_factory.mktemp("unet") / "run", {"train.max_steps": 40, "ema.enabled": False})


@pytest.fixture(scope="module")
def resnet(trained_resnet: Path) -> Path:
    return trained_resnet


@pytest.fixture
def large(unet: Path, tmp_path: Path) -> Path:
    """A demo image enlarged, not square."""
    path = tmp_path / "large.png"
    with Image.open(unet / "data" / "imgs" / "000.png") as image:
        image.resize((402, 301)).save(path)
    return path


def predicted(run: Path, *inputs: Path, out: Path | None = None, **options: Any) -> Predictions:
    return predict(run, inputs, report=Told(run).report, request=PredictRequest(out=out, options=options))


def mask_of(answer: Answer) -> np.ndarray[Any, Any]:
    with Image.open(answer.found["mask"]) as mask:
        return np.asarray(mask)


def test_masks_have_the_original_values_and_size_and_overlays_lie_beside(
    unet: Path, large: Path, tmp_path: Path
) -> None:
    made = predicted(unet, large, unet / "data" / "imgs" / "001.png", out=tmp_path / "out")
    assert len(made.answers) == 2
    mask = mask_of(made.answers[0])
    assert mask.shape == (301, 402)
    assert set(np.unique(mask)) == {0, 255}
    assert made.answers[0].found["shares"]["255"] == pytest.approx((mask == 255).mean())
    with Image.open(tmp_path / "out" / "overlays" / "large_overlay.png") as overlay:
        assert overlay.size == (402, 301)
    assert len(json.loads((tmp_path / "out" / "predictions.json").read_text())["predictions"]) == 2


def test_tiles_within_the_receptive_field_are_refused(unet: Path, large: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too small for a U-Net of depth 2"):
        predicted(unet, large, tile=8, out=tmp_path / "8")


def test_tiles_are_halved_where_memory_runs_out(unet: Path, large: Path, tmp_path: Path) -> None:
    run = open_run(unet)
    assert isinstance(run.config, UNetConfig)
    predictor = MaskPredictor(run.config, run.store)
    plan = choose_plan(run, predictor.model, device=None, precision=None)
    model = load_weights(run, predictor.model, plan)

    def refuse_wide_images(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if inputs[0].shape[-1] > 128:
            raise torch.OutOfMemoryError("no room")

    model.register_forward_pre_hook(refuse_wide_images)
    told, item = Told(unet), Input(path=large, name=Path(large.name))
    bar = Bar("Predicting", 1)
    (answer,) = predictor.answer_all(
        [item],
        wrap_trained(model, plan, told.report),
        PredictRequest(out=tmp_path / "out", options={"tile": None}),
        bar,
    )
    shown = next(part for part in bar.format_parts() if part.startswith("tile "))
    assert shown.removeprefix("tile ").split("/")[0] == shown.split("/")[1]  # the last of several
    assert isinstance(answer, Answer)
    assert "continuing with tiles of 128 pixels" in told.text
    whole = mask_of(predicted(unet, large, out=tmp_path / "whole").answers[0])
    assert (mask_of(answer) != whole).mean() < 1e-3


def test_prediction_needs_neither_data_nor_masks(unet: Path, large: Path, tmp_path: Path) -> None:
    run = copied(unet, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(unet / "data"), str(tmp_path / "gone")))
    made = predicted(run, large)
    assert made.out == str(run / "predictions")
    assert predicted(run, large).out == str(run / "predictions-2")


def test_files_of_one_name_get_a_mask_each(unet: Path, large: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(large, tmp_path / folder / "same.png")
    made = predicted(unet, tmp_path / "a", tmp_path / "b", tmp_path / "a" / "same.png", out=tmp_path / "out")
    masks = sorted(path.name for path in (tmp_path / "out" / "masks").iterdir())
    assert (len(made.answers), masks) == (2, ["same_mask.png", "same_mask_2.png"])


def test_files_that_cannot_be_read_are_named_and_left_out(
    unet: Path, resnet: Path, large: Path, tmp_path: Path
) -> None:
    bad, cut, gone = tmp_path / "bad.png", tmp_path / "cut.png", tmp_path / "gone.png"
    bad.write_text("no picture")
    cut.write_bytes(large.read_bytes()[:2000])
    np.save(tmp_path / "nan.npy", np.full((40, 40, 3), np.nan, dtype=np.float32))
    for run, inputs in ((unet, [bad, large, cut, gone, tmp_path / "nan.npy"]), (resnet, [bad, large, cut, gone])):
        told = Told(run)
        made = predict(run, inputs, report=told.report, request=PredictRequest())
        assert [answer.file for answer in made.answers] == [str(large)]
        assert {failure.file for failure in made.failed} == {str(path) for path in inputs} - {str(large)}
        assert all(f"left out {failure.file}" in told.text for failure in made.failed)


def test_no_usable_file_is_an_error_and_leaves_no_folder(unet: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.png").write_text("no picture")
    for inputs in ([tmp_path / "empty"], [tmp_path / "gone"], [tmp_path / "bad.png"]):
        with pytest.raises(DataError, match="none of the inputs can be used"):
            predicted(unet, *inputs, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_picture_beyond_pillows_limit_is_predicted_and_the_limit_comes_back(
    unet: Path, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert len(predicted(unet, large, out=tmp_path / "out").answers) == 1
    assert Image.MAX_IMAGE_PIXELS == 1000


def test_a_header_that_claims_a_huge_picture_is_refused_at_once(unet: Path, large: Path, tmp_path: Path) -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT" + b"\0" * 4)
    (failure,) = predicted(unet, tmp_path / "huge.png", large, out=tmp_path / "out").failed
    assert failure.file == str(tmp_path / "huge.png")
    assert failure.why == (
        "has 40,000×40,000 = 1,600,000,000 pixels, and the limit is 1,000,000,000: cut it into smaller images"
    )


def test_classes_are_those_that_validation_found(resnet: Path) -> None:
    made = predicted(resnet, resnet / "data" / "val", top_k=10)
    hits = [answer.found["top"][0]["class"] == Path(answer.file).parent.name for answer in made.answers]
    assert np.mean(hits) == [record["top1"] for record in read(resnet / "metrics.jsonl") if record.get("best")][-1]
    for answer in made.answers:
        chances = [row["probability"] for row in answer.found["top"]]
        assert sum(chances) == pytest.approx(1, abs=1e-5)
        assert chances == sorted(chances, reverse=True)
    assert made.out is None


def test_the_paths_that_are_shown_are_those_of_files_that_exist(
    unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (answer,) = predicted(unet, unet / "data" / "imgs" / "000.png", out=Path("masks")).answers
    assert answer.brief["mask"] == str(answer.found["mask"]) == "masks/masks/000_mask.png"
    assert Path(answer.brief["mask"]).is_file()
    assert Path(str(answer.found["overlay"])).is_file()


# --- interrupted ---


def test_ctrl_c_ends_after_the_current_file_and_keeps_what_is_written(unet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with press_ctrl_c(after=3), pytest.raises(Interrupted) as stopped:
        predicted(unet, unet / "data" / "imgs", out=out)
    num = len(list((unet / "data" / "imgs").iterdir()))
    assert stopped.value.what == f"stopped by Ctrl-C: 3 of {num} predictions are written to {out}"
    assert stopped.value.exit_code == 130
    assert len(list((out / "masks").iterdir())) == len(list((out / "overlays").iterdir())) == 3
    assert len(json.loads((out / "predictions.json").read_text())["predictions"]) == 3
    with pytest.raises(CheckpointError, match="already exists"):
        predicted(unet, unet / "data" / "imgs", out=out)


def test_a_second_ctrl_c_names_the_folder_that_may_have_half_a_file(unet: Path, tmp_path: Path) -> None:
    said = "stopped by a second Ctrl-C after 2 predictions; .* incomplete"
    with press_ctrl_c(after=2), press_ctrl_c(after=2), pytest.raises(Interrupted, match=said) as stopped:
        predicted(unet, unet / "data" / "imgs", out=tmp_path / "out")
    assert stopped.value.fix == f"remove {tmp_path / 'out'}, or choose another folder with --out"
    with pytest.raises(CheckpointError, match="already exists"):
        predicted(unet, unet / "data" / "imgs", out=tmp_path / "out")
