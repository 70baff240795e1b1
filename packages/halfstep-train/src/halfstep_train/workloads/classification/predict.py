"""`halfstep predict` for classifiers: the most probable classes of each image, which is cropped as in validation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.errors import DataError
from halfstep_train.data.files import IMAGE_ENDINGS, run_in_threads
from halfstep_train.data.image_samples import crop_centre
from halfstep_train.data.images import open_image_file
from halfstep_train.report.run_report import Bar
from halfstep_train.report.results import Answer, Failure
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.using import Input, PredictRequest, TrainedModel, describe_failure
from halfstep_train.workloads.classification.build import PrepareImages, build_model
from halfstep_train.workloads.classification.config import ClassifierConfig
from halfstep_train.workloads.classification.data import get_evaluation_share, get_evaluation_size
from halfstep_train.workloads.classification.evaluate import get_class_names
from halfstep_train.workloads.classification.scores import compute_probabilities


class ClassPredictor:
    """Predictor of classes."""

    endings = IMAGE_ENDINGS

    def __init__(self, config: ClassifierConfig, store: Store) -> None:
        self.config, self.classes, self.names = config, store["classes"], get_class_names(store)
        self.model = build_model(config, store)
        self.prepare, self.eval_share = PrepareImages(config.data), get_evaluation_share(config.data, store)

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        """Yield answers in the order of the files, computed in batches of the training size."""
        top_k, size = request.options["top_k"], self.config.train.batch_size
        for start in range(0, len(inputs), size):
            chunk = inputs[start : start + size]
            read = run_in_threads(self._read, chunk)
            pictures = [pixels for pixels in read if isinstance(pixels, Tensor)]
            found = iter(())
            if pictures:
                batch = self.prepare({"image": torch.stack(pictures).to(trained.device)}, key=(), training=False)
                found = iter(compute_probabilities(trained(batch["image"])).tolist())
            for item, outcome in zip(chunk, read, strict=True):
                if isinstance(outcome, DataError):
                    yield describe_failure(item, outcome)
                else:
                    yield self._make_answer(item, next(found), top_k)

    def _read(self, item: Input) -> Tensor:
        with open_image_file(item.path) as picture:
            return torch.from_numpy(crop_centre(picture, get_evaluation_size(self.config.data), self.eval_share))

    def _make_answer(self, item: Input, probabilities: list[float], top_k: int) -> Answer:
        best = sorted(range(len(probabilities)), key=lambda k: (-probabilities[k], k))[:top_k]
        cells: dict[str, str | float] = {}
        for rank, k in enumerate(best, start=1):
            cells |= {f"class {rank}": self.names[k], f"probability {rank}": probabilities[k]}
        top = [{"class": self.classes[k], "title": self.names[k], "probability": probabilities[k]} for k in best]
        first, *others = [f"{self.names[k]} {probabilities[k]:.1%}" for k in best]
        return Answer(
            file=str(item.path), found={"top": top}, cells=cells, brief={"answer": first, "then": ", ".join(others)}
        )
