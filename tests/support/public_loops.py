"""Six loops as public repositories write them, each with one `hs.save` per step, to be killed at any moment."""

from __future__ import annotations

import functools
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import halfstep as hs

EPOCHS = 3


def train(loop: Callable[[Path], list[nn.Module]], path: Path) -> int:
    """Run a loop from the state in `path`, or from the start, to its end; return a checksum of all weights."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = loop(path)
    checksum = 0
    for model in models:
        for value in model.state_dict().values():
            checksum = zlib.crc32(value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def train_and_note(loop: Callable[[Path], list[nn.Module]], path: Path, result: Path) -> None:
    """Write the checksum to a file, for a process that compares it with another's."""
    result.write_text(str(train(loop, path)))


def resume(path: Path, step: Any, model: Any) -> dict[str, Any]:
    return hs.load(path, step, model) if path.exists() else {}


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


# --- an image classifier: augmentation that draws, workers, label smoothing, cosine schedule ---


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, num: int = 44) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images, self.labels = torch.rand(num, 3, 8, 8, generator=generator), [k % 4 for k in range(num)]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = F.pad(self.images[index], (2, 2, 2, 2))
        top, left = random.randrange(5), int(np.random.randint(5))
        image = image[:, top : top + 8, left : left + 8]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), self.labels[index]


def train_classifier(path: Path, num_workers: int = 0) -> list[nn.Module]:
    seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
    loader = DataLoader(Images(), 4, shuffle=True, num_workers=num_workers, drop_last=True)
    schedule = hs.per_step(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * 6))
    step = hs.Step(model, optimizer, "fp32", accumulate=2, schedule=schedule, ema_decay=0.9, clip_norm=1.0)
    resume(path, step, model)
    for _ in range(step.epoch, EPOCHS):
        for window in step.windows(loader):
            step(lambda batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1), window)
            hs.save(path, step, model)
    return [model]


# --- a character language model: no data set, windows drawn from the text by the loop itself ---


class CharacterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(32, 16), nn.Dropout(0.1)
        self.rnn, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.rnn(self.embed(tokens))[0]))
        return out


def train_characters(path: Path) -> list[nn.Module]:
    seed(2)
    text = torch.randint(0, 32, (400,))
    model = CharacterModel()
    step = hs.Step(
        model,
        torch.optim.AdamW(model.parameters(), 3e-3, fused=True),
        hs.Precision("fp16", simulate=True),
        accumulate=2,
    )
    best = resume(path, step, model).get("best", 1e9)

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, 380, (4,)).tolist()
        return torch.stack([text[k : k + 12] for k in starts]), torch.stack([text[k + 1 : k + 13] for k in starts])

    while step.attempted < 16:
        window = [get_batch(), get_batch()]
        outcome = step(lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), window)
        best = min(best, outcome.loss)
        hs.save(path, step, model, best=best)
    return [model]


# --- a GAN: two steps, two models, one loader ---


def train_gan(path: Path) -> list[nn.Module]:
    seed(3)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(one.parameters(), 1e-3, betas=(0.5, 0.9), fused=True) for one in (critic, generator)]
    critic_step = hs.Step(critic, optimizers[0], "fp32", also=[generator])
    generator_step = hs.Step(generator, optimizers[1], "fp32", also=[critic])
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(4))  # type: ignore[arg-type]
    steps, models = [critic_step, generator_step], [critic, generator]
    resume(path, steps, models)

    def critic_loss(real: Tensor) -> Tensor:
        fake = generator(torch.randn(len(real), 4)).detach()
        return F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()

    for _ in range(critic_step.epoch, EPOCHS):
        for window in critic_step.windows(loader):
            critic_step(critic_loss, window)
            if critic_step.attempted % 2 == 0:
                generator_step(lambda noise: F.softplus(-critic(generator(noise))).mean(), [torch.randn(8, 4)])
            hs.save(path, steps, models)
    return list(models)


# --- an autoencoder: noise in the loop, plateau schedule, validation after each epoch ---


def train_autoencoder(path: Path) -> list[nn.Module]:
    seed(4)
    model = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 12))
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    step = hs.Step(model, optimizer, "fp32", schedule=plateau, ema_decay=0.8)
    data = torch.rand(30, 12, generator=torch.Generator().manual_seed(0))
    sampler = torch.utils.data.WeightedRandomSampler([1.0 + k % 2 for k in range(30)], 25)
    loader = DataLoader(data, 4, sampler=sampler)  # type: ignore[arg-type]
    resume(path, step, model)
    for _ in range(step.epoch, EPOCHS):
        for window in step.windows(loader):
            step(lambda x: F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x), window)
            hs.save(path, step, model)
        with torch.no_grad():
            step.validated(F.mse_loss(model(data), data))
        hs.save(path, step, model)
    return [model]


# --- a frozen encoder with low-rank adapters, in persistent workers, samples seeded ---


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(192, 24), nn.GELU()).requires_grad_(False)
        self.down, self.up = nn.Linear(24, 2, bias=False), nn.Linear(2, 24, bias=False)
        self.head = nn.Linear(24, 4)

    def forward(self, images: Tensor) -> Tensor:
        h = self.encoder(images.flatten(1))
        out: Tensor = self.head(h + self.up(F.dropout(self.down(h), 0.1, self.training)))
        return out


def train_adapters(path: Path, num_workers: int = 0) -> list[nn.Module]:
    seed(5)
    model = Adapted()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    step = hs.Step(model, torch.optim.AdamW(trained, 1e-2, fused=True), "fp32", accumulate=2)
    loader = DataLoader(
        hs.seeded(Images()), 4, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    resume(path, step, model)
    for _ in range(step.epoch, EPOCHS):
        for window in step.windows(loader):
            step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), window)
            hs.save(path, step, model)
    return [model]


# --- regression on an iterable data set with a shuffle buffer ---


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[float] = []
        for k in range(60):
            buffer.append(k / 60)
            if len(buffer) == 8:
                yield torch.tensor([buffer.pop(random.randrange(8)), float(np.random.rand())])
        for value in buffer:
            yield torch.tensor([value, 0.0])


def train_regression(path: Path) -> list[nn.Module]:
    seed(6)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    step = hs.Step(model, torch.optim.Adam(model.parameters(), 1e-2, fused=True), "fp32", skip_spikes=True)
    loader = DataLoader(Stream(), 6)
    resume(path, step, model)
    for _ in range(step.epoch, EPOCHS):
        for window in step.windows(loader):
            step(lambda x: F.mse_loss(model(x), (3 * x[:, :1]).sin()), window)
            hs.save(path, step, model)
    return [model]


LOOPS = {
    "classifier": train_classifier,
    "characters": train_characters,
    "gan": train_gan,
    "autoencoder": train_autoencoder,
    "adapters": train_adapters,
    "regression": train_regression,
}
IN_WORKERS = {
    "classifier": functools.partial(train_classifier, num_workers=2),
    "adapters": functools.partial(train_adapters, num_workers=2),
}
