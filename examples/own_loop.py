"""A custom training loop with hs.Step: about five changed lines.

    python examples/own_loop.py [bf16|fp16|fp32|auto] [--simulate]

The model learns which of two frequencies a noisy signal has. One batch contains a NaN, as real data sometimes do: the
step that gets it (step 15) is skipped.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import HalfstepError

STEPS, BATCH, LENGTH = 120, 64, 256


def make_batch(step: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    label = torch.randint(0, 2, (BATCH,), generator=generator)
    time = torch.linspace(0, 1, LENGTH)
    frequency = torch.where(label == 0, 5.0, 6.0).unsqueeze(1)
    signal = torch.sin(6.283 * frequency * time) + 0.8 * torch.randn(BATCH, LENGTH, generator=generator)
    if step == 30:
        signal[0, 0] = float("nan")
    return {"signal": signal.to(device), "label": label.to(device), "index": torch.arange(BATCH) + step * BATCH}


def main() -> None:
    precision = next((word for word in sys.argv[1:] if not word.startswith("-")), "auto")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(LENGTH, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    # Replaces autocast, GradScaler, unscale_, clip_grad_norm_, optimizer.step, scaler.update and scheduler.step.
    step = hs.Step(
        model,
        optimizer,
        hs.Precision(precision, simulate="--simulate" in sys.argv),
        clip_norm=1.0,
        accumulate=2,
        schedule=hs.per_step(scheduler),  # or hs.per_epoch(scheduler), with step.epoch_ended(),
    )
    print(step.plan)

    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(b["signal"]), b["label"])

    for k, window in enumerate(step.windows(make_batch(i, device) for i in range(2 * STEPS))):
        outcome = step(loss_fn, window)
        if k % 20 == 0 or k == 15:
            print(outcome)  # reading an outcome waits for the device, so do not read it in every step


if __name__ == "__main__":
    try:
        main()
    except HalfstepError as error:  # its message says what is wrong, why, and how to fix it: no traceback needed
        sys.exit(f"error: {error}")
