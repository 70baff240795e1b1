"""Codes in a file of numbers -> how bright the picture is that the decoder makes of each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from halfstep_train.report.results import Answer
from new_family.build import Networks, encoder_of


class Predictor:
    endings = (".csv",)

    def __init__(self, config: Any, store: Any) -> None:
        self.model = Networks(store["side"], config.model.width)
        self.frozen = {"encoder": encoder_of(store["side"])}

    def answer_all(self, inputs: list[Any], trained: Any, request: Any, bar: Any) -> Iterator[Answer]:
        for item in inputs:
            pixels = [float(word) for word in Path(item.path).read_text().split(",")]
            with trained.inference():
                code = self.frozen["encoder"](torch.tensor([pixels], device=trained.device))
                error = float((trained.model(code).float().cpu() - torch.tensor([pixels])).square().mean())
            cells = {"error": f"{error:.4f}"}
            yield Answer(file=str(item.path), found={"error": error}, cells=cells, brief=cells)
