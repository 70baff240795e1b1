"""A frozen encoder, a decoder that learns to invert it, and a critic whose say grows with the steps."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep_train.data import noise
from halfstep_train.workloads.base.scheduled import Scheduled
from halfstep_train.workloads.base.workload import Batch, Phase, Workload
from new_family.demo import FILE


class Pictures:
    def __init__(self, pictures: Any) -> None:
        self.pictures = torch.from_numpy(pictures)

    def __len__(self) -> int:
        return len(self.pictures)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return {"picture": self.pictures[index]}


class Networks(nn.Module):
    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side, pixels = side, side * side
        self.decoder = nn.Sequential(nn.Linear(CODE, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, pixels))
        self.critic = nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1))

    def forward(self, code: Tensor) -> Tensor:
        return self.decoder(code)


CODE = 4


def encoder_of(side: int) -> nn.Module:
    return nn.Sequential(nn.Linear(side * side, CODE), nn.Tanh())


class SquaredError:
    def __init__(self) -> None:
        self.sums = torch.zeros(2)

    def update(self, outputs: Batch, batch: Any) -> None:
        errors = F.mse_loss(outputs["picture"].float(), batch["picture"], reduction="none").mean(1)
        self.sums = self.sums.to(errors.device) + torch.stack([errors.sum(), errors.new_tensor(len(errors))])

    def compute(self) -> dict[str, float]:
        return {"squared_error": float(self.sums[0] / self.sums[1])}

    def state_dict(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def load_state_dict(self, state: Any) -> None:
        self.sums = state["sums"]


def build(config: Any, store: Any = None) -> Workload:
    pictures = np.load(Path(config.data.dir) / FILE)
    return over(config, store or {"side": pictures.shape[1]}, Pictures(pictures[:16]), Pictures(pictures[16:]))


def over(config: Any, store: Any, samples: Any, val_samples: Any = None) -> Workload:
    side = store["side"]
    encoder = encoder_of(side)
    say = Scheduled(lambda step: 0.01 * min(step, 16))

    def prepare(batch: Batch, *, key: Any, training: bool) -> Batch:
        picture = batch["picture"].flatten(1) / 127.5 - 1
        noisy = picture + 0.1 * noise.normal(key, len(picture), (side * side,), picture.device, stream="eps")
        return {"picture": picture, "noisy": noisy, "index": batch["index"]}

    def forward(model: nn.Module, batch: Batch) -> Batch:
        with torch.no_grad():
            code = encoder(batch["noisy"])
        return {"picture": model(code)}

    def judged(model: Any, batch: Batch) -> Batch:
        outputs = forward(model, batch)
        return {**outputs, "fake": model.critic(outputs["picture"]), "real": model.critic(batch["picture"])}

    def reconstruction(outputs: Batch, batch: Batch) -> Tensor:
        return F.mse_loss(outputs["picture"].float(), batch["picture"])

    def decoders_loss(outputs: Batch, batch: Batch) -> Tensor:
        return reconstruction(outputs, batch) + say.value * F.softplus(-outputs["fake"].float()).mean()

    def critics_loss(outputs: Batch, batch: Batch) -> Tensor:
        return (F.softplus(outputs["fake"].float()) + F.softplus(-outputs["real"].float())).mean()

    def sample(model: Any, key: Any) -> dict[str, Any]:
        device = next(model.parameters()).device
        drawn = model(noise.uniform(key, 1, (CODE,), device)).float().view(side, side)
        pixels = ((drawn.clamp(-1, 1) + 1) * 127.5).byte().cpu().numpy()
        return {"drawn": pixels, "say": f"{float(say.value):.2f}"}

    return Workload(
        name="autoencoder",
        model=Networks(side, config.model.width),
        frozen={"encoder": encoder},
        train_samples=samples,
        val_samples=samples if val_samples is None else val_samples,
        prepare=prepare,
        forward=forward,
        loss=reconstruction,
        phases=(
            Phase(name="decoder", parameters=("decoder",), forward=judged, loss=decoders_loss, counted=True),
            Phase(name="critic", parameters=("critic",), forward=judged, loss=critics_loss, every=2, from_step=1),
        ),
        values={"say": say},
        ema_parts=("decoder",),
        sample=sample,
        metrics=SquaredError,
        metric="squared_error",
        mode="min",
        store=store,
    )
