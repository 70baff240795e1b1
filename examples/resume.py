"""A custom loop that can be killed at any moment and continues bit-exactly when it is started again.

    python examples/resume.py [STATE]

The images are random, and the augmentation draws random numbers in two workers. The state is stored in STATE
(resume_example.safetensors) after every fifth step. Kill the script with Ctrl-C or `kill -9` and start it again: it
ends with the same weights as without the kill. `hs.seeded` makes each sample a function of (seed, epoch, index), so
that no image has to be loaded again.
"""

from __future__ import annotations

import os
import sys
import zlib

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import halfstep as hs
from halfstep.errors import HalfstepError

EPOCHS, IMAGES, SIDE = 3, 160, 16


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.images = torch.rand(IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        padded = nn.functional.pad(self.images[index], (2, 2, 2, 2))
        top, left = torch.randint(0, 5, (2,)).tolist()
        image = padded[:, top : top + SIDE, left : left + SIDE]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), index % 10


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "resume_example.safetensors"
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(784, 10)
    )
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), "fp32", ema_decay=0.99)
    loader = DataLoader(hs.seeded(Images()), batch_size=8, shuffle=True, num_workers=2)

    if os.path.exists(path):
        hs.load(path, step, model)
        print(f"continuing after step {step.attempted}")
    for epoch in range(step.epoch, EPOCHS):
        for window in step.windows(loader):
            outcome = step(lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), window)
            if step.attempted % 5 == 0:
                hs.save(path, step, model)
                print(f"epoch {epoch}: {outcome}", flush=True)

    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(f"the checksum of the weights is {zlib.crc32(weights):08x}")


if __name__ == "__main__":
    try:
        main()
    except HalfstepError as error:  # what, why and how to fix it, without a traceback
        sys.exit(f"error: {error}")
