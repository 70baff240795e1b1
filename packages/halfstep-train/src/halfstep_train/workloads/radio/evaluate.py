"""Evaluation and prediction of radio maps: scores for any number of steps and any split, and sheets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from halfstep.errors import ConfigError, DataError
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.files import BadFiles
from halfstep_train.data.loader import Key, Loader, name_sample
from halfstep_train.report.run_report import Answer, Bar, Failure
from halfstep_train.workloads.base.frozen_vae import VaeNet
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.sheets import Array, pick_worst_to_best
from halfstep_train.workloads.base.using import (
    EvaluateRequest,
    FilePredictor,
    Input,
    LookAt,
    PlainEvaluation,
    PredictRequest,
    TrainedModel,
    save_picture,
)
from halfstep_train.workloads.base.workload import FrozenPart, Workload
from halfstep_train.workloads.radio.build import Denoising, build_unet, describe_steps
from halfstep_train.workloads.radio.config import RadioDiffConfig, RadioVaeConfig
from halfstep_train.workloads.radio.first_stage import build_vae_model, open_first_stage
from halfstep_train.workloads.radio.maps import (
    GAIN_NAME,
    ROLE_NAMES,
    RadioFiles,
    RadioTree,
    Row,
    choose_split,
    draw_cells,
    draw_map_sheet,
    open_split,
    read_condition,
    read_gray,
    scale_gain,
    to_signed,
    to_unsigned,
)
from halfstep_train.workloads.radio.scores import RadioMetrics, score_maps
from halfstep_train.workloads.radio.unet import RadioUNet
from halfstep_train.workloads.radio.vae import RadioVAE

SHOWN_EACH = 2
"""Number of worst, of median and of best maps that are drawn."""


class RadioDetails(RadioMetrics):
    """Validation metrics that also keep the NMSE of each map."""

    def add_maps(self, predicted: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = super().add_maps(predicted, batch)
        self.add_ranked(batch["index"], found["nmse"])
        return found


class RadioEvaluation(PlainEvaluation):
    """Evaluation of either stage: a sheet of the worst, median and best maps."""

    metrics: RadioDetails

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.metrics = RadioDetails()

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        """Draw the worst, median and best validation maps."""
        ranked = self.metrics.rank_samples(largest_first=True)
        rows = [self._make_row(*shown, look) for shown in pick_worst_to_best(ranked, SHOWN_EACH)]
        if not rows:
            return []
        path = folder / "contact_sheet.png"
        draw_map_sheet(rows).save(path)
        return [path]

    def _make_row(self, kind: str, index: int, score: float, look: LookAt) -> Row:
        batch, outputs = look(index)
        condition = self.workload.val_samples.sample(index, key=(0, 0, index))["condition"].numpy()
        predicted, truth = (maps[0, 0].float().cpu().numpy() for maps in (outputs["map"], batch["truth"]))
        name = f"{kind}: {name_sample(self.workload.val_samples, index)}, NMSE {score:.4f}"
        return name, draw_cells(predicted, truth, condition)


class SamplingEvaluation(RadioEvaluation):
    """Evaluation of stage 2, with any number of sampling steps and any split."""

    @staticmethod
    def drop_training_settings(config: RunConfig) -> RunConfig:
        """Disable the latent cache. It holds only training maps: rebuilding it would waste hours, and evaluating
        another folder would overwrite the run's cache."""
        return config.replace(data={"cache": "off"})

    def score_with_options(self, request: EvaluateRequest) -> dict[str, float] | None:
        """Score with another number of steps, or on another split, than validation."""
        config, options = request.config, request.options
        if options["part"] not in ROLE_NAMES:
            raise ConfigError(f"unknown --part {options['part']}", fix=f"use one of {', '.join(ROLE_NAMES)}")
        steps = int(options["steps"] or config.model.sampling_steps)
        self.scored_at = f"{describe_steps(steps, config.model)}, {ROLE_NAMES[options['part']]} maps"
        if options["steps"] is None and options["part"] == "val":
            return None
        tree = RadioTree.open(config.data)
        maps = open_split(tree, choose_split(tree), options["part"], BadFiles(config.data.on_bad_file))
        self.num_scored = len(maps)
        denoising = Denoising(
            config, self.workload.store, cast(RadioVAE, self.workload.frozen["vae"].module), steps=steps
        )
        metrics, size = RadioMetrics(), request.batch_size or config.train.batch_size
        loader = Loader(maps, batch_size=size, seed=config.train.seed, shuffle=False)
        with request.phase("Sampling", len(loader)) as bar:
            for loaded in loader.iterate_epoch(0):
                placed = {name: value.to(request.trained.device) for name, value in loaded.items()}
                key = Key.for_validation(int(loaded["index"][0]))
                batch = denoising.prepare(placed, key=key, training=False)
                with request.trained.inference():
                    unet = cast(RadioUNet, request.trained.model)
                    metrics.update({"map": denoising.sample(unet, unet.condition(batch["condition"]), batch)}, batch)
                bar.advance()
        return metrics.compute()


# --- halfstep predict ---
#
# halfstep predict RUN RadioMapSeer/png/antennas    stage 2: predict the gain map of each transmitter halfstep predict
# RUN RadioMapSeer/gain/DPM        stage 1: reconstruct each gain map from the mean of its latent


MOST_TRANSMITTERS = 1000
"""Upper limit of transmitters per map. The noise of a sample is keyed by map * limit + transmitter, so it does not
depend on the other input files."""


class MapPredictor(FilePredictor):
    """Predict and draw a gain map for each antenna file; buildings, cars and truth are found from its path."""

    endings = (".png",)

    def __init__(self, config: RadioDiffConfig, store: Store) -> None:
        self.config, self.store = config, store
        self.model = build_unet(config, store)
        stage = open_first_stage(config)
        self.vae = stage.vae
        self.frozen = {"vae": FrozenPart(module=stage.vae, source=stage.source)}

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        """Yield one answer per antenna file; ignore the other images of a RadioMapSeer folder."""
        antennas = [item for item in inputs if item.path.parent.name == "antennas"] or inputs
        bar.total = len(antennas)
        return super().answer_all(antennas, trained, request, bar)

    def answer_file(self, item: Input, trained: TrainedModel, request: PredictRequest) -> Answer:
        steps = int(request.options["steps"] or self.config.model.sampling_steps)
        denoising = Denoising(self.config, self.store, self.vae, steps=steps)
        size = (self.store["image_size"], self.store["image_size"])
        files = self._find_files(item.path)
        key = Key.for_sampling(int(request.options["seed"]), files.number * MOST_TRANSMITTERS + files.transmitter)
        condition = read_condition(files, size)
        batch = {"condition": to_signed(torch.from_numpy(condition)[None].to(trained.device).float() / 255)}
        batch |= denoising.draw_sampling_noise(key, 1, trained.device)
        with trained.inference():
            unet = cast(RadioUNet, trained.model)
            found = denoising.sample(unet, unet.condition(batch["condition"]), batch)[0, 0].float().cpu()
        truth = None if files.gain is None else _read_gain(files.gain, size, self.config.data.threshold)
        return _write_answer(item, request, found.numpy(), truth, condition)

    def _find_files(self, antenna: Path) -> RadioFiles:
        """Return the files that belong to an antenna file; the true gain is optional."""
        match = GAIN_NAME.match(antenna.name)
        root = antenna.parent.parent.parent
        if match is None or antenna.parent.name != "antennas" or not (root / "png").is_dir():
            raise DataError(
                f"{antenna} is not an antenna of a RadioMapSeer folder",
                why="the buildings are expected next to it",
                fix="give RadioMapSeer/png/antennas, or <map>_<transmitter>.png in it",
            )
        found = RadioTree(root=root, settings=self.config.data).get_sample(int(match[1]), int(match[2]))
        lacking = [path for path in found.list_paths() if path != found.gain and not path.is_file()]
        if lacking:
            raise DataError(
                f"{antenna} lacks {lacking[0]}", why="it is an input of the model", fix="unpack the whole folder png/"
            )
        has_truth = found.gain is not None and found.gain.is_file()
        return found if has_truth else replace(found, gain=None)


class GainPredictor(FilePredictor):
    """Reconstruct and draw each gain file with the first stage."""

    endings = (".png",)

    def __init__(self, config: RadioVaeConfig, store: Store) -> None:
        self.config, self.size = config, (store["image_size"], store["image_size"])
        self.model = build_vae_model(config)

    def answer_file(self, item: Input, trained: TrainedModel, request: PredictRequest) -> Answer:
        truth = _read_gain(item.path, self.size, self.config.data.threshold)
        with trained.inference():
            image = to_signed(torch.from_numpy(truth)[None, None].to(trained.device))
            found = to_unsigned(cast(VaeNet, trained.model).decode_means(image))[0, 0].cpu().numpy()
        return _write_answer(item, request, found, truth, None)


def _read_gain(path: Path, size: tuple[int, int], threshold: float) -> Array:
    """Read a gain (H, W) in 0..1, thresholded as in training."""
    return scale_gain(torch.from_numpy(read_gray(path, size)), threshold).numpy()


def _write_answer(
    item: Input, request: PredictRequest, predicted: Array, truth: Array | None, condition: Array | None
) -> Answer:
    """Write the map as an image file, and a picture of it with inputs and truth; score it if the truth is known."""
    out = request.out
    assert out is not None
    sheet = draw_map_sheet([(item.path.name, draw_cells(predicted, truth, condition))])
    pixels = (predicted * 255).round().astype(np.uint8)
    written = {
        "map": str(save_picture(Image.fromarray(pixels), out / "maps" / item.path.name)),
        "picture": str(save_picture(sheet, out / "pictures" / item.path.name)),
    }
    scores = {} if truth is None else _score(predicted, truth)
    return Answer(
        file=str(item.path),
        found={**written, **scores},
        brief={"picture": written["picture"], **({"NMSE": f"{scores['nmse']:.4f}"} if scores else {})},
    )


def _score(predicted: Array, truth: Array) -> dict[str, float]:
    one, other = (torch.from_numpy(np.ascontiguousarray(values))[None, None] for values in (predicted, truth))
    return {name: float(value) for name, value in score_maps(one, other).items()}
