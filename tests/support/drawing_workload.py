"""A family of a test's own that draws: predicts without input, has options, exports, and counts pixels."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiny_workload
from halfstep_train.data import noise
from halfstep_train.report.run_report import Answer
from halfstep_train.workloads.base.kind import EvaluateCommand, Kind, Option, PredictCommand, SampleUnit
from halfstep_train.workloads.base.using import PlainEvaluation


class Drawer:
    endings = ()

    def __init__(self, config: Any, store: Mapping[str, Any]) -> None:
        self.model = tiny_workload.Net()

    def answer_all(self, inputs: list[Any], trained: Any, request: Any, bar: Any) -> Iterator[Answer]:
        bar.total = request.options["num"]
        for k in range(request.options["num"]):
            scores = trained(torch.full((1, 2, 8, 8), float(k))).flatten().tolist()
            path = request.out / f"{k}.json"
            path.write_text(json.dumps([request.options["style"], *scores]))
            yield Answer(file=str(path), found={"scores": scores}, brief={"k": str(k)})


class Evaluation(PlainEvaluation):
    def score_with_options(self, request: Any) -> Any:
        draws = request.options["draws"]
        if not draws:
            return None
        with request.phase("Drawing", draws) as bar:
            for _ in range(draws):
                bar.advance()
        return {"drawn": float(draws)}


def export(
    weights: Mapping[str, torch.Tensor], config: Any, store: Mapping[str, Any], folder: Path, device: torch.device
) -> None:
    torch.save(dict(weights), folder / "weights.pt")
    (folder / "about.json").write_text(json.dumps({"device": str(device), **store}))


KIND = Kind(
    builder=tiny_workload.build,
    task="drawing",
    export=export,
    sample=SampleUnit(name="pixel", per_sample=lambda config, store: 64),
    evaluate=EvaluateCommand(Evaluation, (Option("draws", int, 0, "How many to draw", least=0),)),
    predict=PredictCommand(
        Drawer,
        options=(
            Option("num", int, 2, "How many to draw", least=1),
            Option("style", str, "plain", "In which style"),
            Option("loud", bool, False, "Louder"),
        ),
        needs_input=False,
        writes_files=True,
    ),
)


def build_sampling(config: Any, store: Any = None) -> Any:
    """The tiny workload with samples that draw from every generator they should leave alone."""
    workload = tiny_workload.build(config, store)

    def sample(model: torch.nn.Module, key: Any) -> dict[str, Any]:
        assert not model.training
        assert not torch.is_grad_enabled()
        random.random(), np.random.rand(), torch.rand(3)
        device = next(model.parameters()).device
        scores = model(noise.normal(key, 1, (2, 8, 8), device, stream="sample"))
        picture = (scores.float().softmax(1) * 255).to(torch.uint8).cpu().numpy()
        return {"grey": picture, "colour": np.stack([picture] * 3, axis=-1), "words": f"{scores.tolist()}"}

    return dataclasses.replace(workload, sample=sample)


def build_bad_sampling(config: Any, store: Any = None) -> Any:
    return dataclasses.replace(tiny_workload.build(config, store), sample=lambda model, key: {"a": np.zeros((2, 2))})
