"""Evaluation of radio maps: scores for any number of steps and any split, and sheets of the best and worst maps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.files import BadFiles
from halfstep_train.data.loader import Loader
from halfstep_train.data.seeds import Key
from halfstep_train.workloads.base.sheets import pick_worst_to_best
from halfstep_train.workloads.base.using import EvaluateRequest, LookAt, PlainEvaluation
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.radio.build import Denoising, describe_steps
from halfstep_train.workloads.radio.maps import ROLE_NAMES, RadioTree, choose_split, open_split
from halfstep_train.workloads.radio.pictures import Row, draw_cells, draw_map_sheet
from halfstep_train.workloads.radio.scores import RadioMetrics
from halfstep_train.workloads.radio.unet import RadioUNet
from halfstep_train.workloads.radio.vae import RadioVAE

SHOWN_EACH = 2
"""Number of worst, of median and of best maps that are drawn."""


class RadioDetails(RadioMetrics):
    """Validation metrics that also keep the NMSE of each map."""

    def __init__(self) -> None:
        super().__init__()
        self._scored: list[Tensor] = []

    def add_maps(self, predicted: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = super().add_maps(predicted, batch)
        self._scored.append(torch.stack([batch["index"].double(), found["nmse"]]))
        return found

    def rank_maps(self) -> list[tuple[int, float]]:
        """Return (index, NMSE) of each map, worst first; waits for the device."""
        scored = torch.cat(self._scored, dim=1).T.tolist() if self._scored else []
        return sorted(((int(index), score) for index, score in scored), key=lambda found: (-found[1], found[0]))


class RadioEvaluation(PlainEvaluation):
    """Evaluation of either stage: a sheet of the worst, median and best maps."""

    metrics: RadioDetails

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.metrics = RadioDetails()

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        """Draw the worst, median and best validation maps."""
        rows = [self._make_row(*shown, look) for shown in pick_worst_to_best(self.metrics.rank_maps(), SHOWN_EACH)]
        if not rows:
            return []
        path = folder / "contact_sheet.png"
        draw_map_sheet(rows).save(path)
        return [path]

    def _make_row(self, kind: str, index: int, score: float, look: LookAt) -> Row:
        batch, outputs = look(index)
        condition = self.workload.val_samples.sample(index, key=(0, 0, index))["condition"].numpy()
        predicted, truth = (maps[0, 0].float().cpu().numpy() for maps in (outputs["map"], batch["truth"]))
        name = f"{kind}: {self.workload.val_names[index]}, NMSE {score:.4f}"
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
