"""A tiny loop that is stopped after some steps and continued by new objects, as a new process would."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import halfstep as hs
from halfstep.prefetching import Prefetcher

NUM_SAMPLES = 22


def seed_all() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


class Plain(Dataset[Tensor]):
    """Samples that are functions of their index."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, list):  # as batch_size=None with a sampler of lists asks for
            return torch.stack([self[one] for one in index])
        self.loaded.append(index)
        return self.make(index)

    def make(self, index: int) -> Tensor:
        return torch.full((4,), float(index)) / NUM_SAMPLES


class Drawing(Plain):
    """Samples with noise of the three global generators."""

    def make(self, index: int) -> Tensor:
        noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return super().make(index) + torch.tensor([0.0, *noise])


MakeLoader = Callable[[], Any]


@dataclass
class Loop:
    """What one process did: the batches it trained on, its weights, its warnings."""

    make_loader: MakeLoader
    settings: dict[str, Any] = field(default_factory=dict)
    epochs: int = 3
    before_pass: Callable[[Any, int], None] = lambda loader, epoch: None
    prefetch_depth: int = 0

    def run(self, path: Path | None = None, *, stop: int = -1, resumes: bool = False) -> Loop:
        """Train; store the state in `path` after `stop` steps and end, as if the process were killed then."""
        seed_all()
        self.batches: list[Any] = []
        self.loader = self.make_loader()
        self.model = model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.step = step = make_step(model, **self.settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if resumes and path is not None:
                hs.load(path, step, model)
            self._train(path, stop)
        close(self.loader)
        texts = [str(one.message) for one in caught]
        foreign = ("fork", "worker processes", "set_vital")  # of Python, torch and torchdata
        self.warnings = [text for text in texts if not any(word in text for word in foreign)]
        return self

    def _train(self, path: Path | None, stop: int) -> None:
        for epoch in range(self.step.epoch, self.epochs):
            self.before_pass(self.loader, epoch)
            batches = self.loader
            if self.prefetch_depth:
                batches = Prefetcher(batches, torch.device("cpu"), self.prefetch_depth)
            for window in self.step.windows(batches):
                self.step(lambda batch: self.model(batch).square().mean(), window)
                self.batches += window
                if self.step.attempted == stop:
                    assert path is not None
                    hs.save(path, self.step, self.model)
                    return


def close(loader: Any) -> None:
    """End persistent workers now: left to the garbage collector, torch takes five seconds for each."""
    running = getattr(loader, "_iterator", None)
    if running is not None and hasattr(running, "_shutdown_workers"):
        running._shutdown_workers()


def make_step(model: nn.Module, **settings: Any) -> hs.Step:
    return hs.Step(
        model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), settings.pop("precision", "fp32"), **settings
    )


def assert_continues(make_loader: MakeLoader, path: Path, *stops: int, **more: Any) -> Loop:
    """Compare loops that are resumed after so many steps with one that never stopped; return the last resumed one."""
    whole = Loop(make_loader, **more).run()
    for stop in stops:
        first = Loop(make_loader, **more).run(path, stop=stop)
        second = Loop(make_loader, **more).run(path, resumes=True)
        seen = [*first.batches, *second.batches]
        assert len(seen) == len(whole.batches)
        for number, (one, other) in enumerate(zip(whole.batches, seen, strict=True)):
            assert torch.equal(one, other), f"batch {number} differs"
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, second.model.state_dict()[name]), name
        assert whole.step.epoch == second.step.epoch
    return second
