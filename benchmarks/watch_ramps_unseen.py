"""Twenty ramps for watch_ramps.py that were labelled before watch was first run with them: it reached 15 hits then.

Watch was developed further with them, so later results say nothing about ramps that it has not seen. As in
watch_ramps_tuning.py, but with other models and other mistakes, which the docstrings state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from watch_ramps_tuning import Batch, Ramp, draw


class Aligner(nn.Module):
    """Translate one sequence into another by cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(8, 16), nn.Linear(8, 16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        a, b = torch.tanh(self.source(source)), torch.tanh(self.target(target))
        q, k, v = self.query(b), self.key(a), self.value(a)
        self.qk = q, k
        return self.head(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])


def raw_guidance() -> Ramp:
    """Guided attention rewards the raw scores of aligned positions instead of their log-softmax."""
    model, given = nn.ModuleDict({"aligner": Aligner()}), draw(16, (10, 8))

    def loss_fn(batch: Batch) -> Tensor:
        x = batch["x"]
        answer = model["aligner"](x, x.roll(1, 2)).float()
        q, k = (part.float() for part in model["aligner"].qk)
        return F.mse_loss(answer, x) - 0.02 * (q * k).sum(-1).mean() / 4

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-2, fused=True), loss_fn, given, "fp16")


class Station(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixer = nn.Linear(6, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.mixer(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x.mean(1)))


def warming_sensor() -> Ramp:
    """Sensors whose gain drifts by 1.1 % per step feed attention without a norm before it."""
    model, given = Station(), draw(16, (8, 6))

    def batch(number: int) -> Batch:
        one = given(number)
        return {"x": one["x"] * 1.011**number, "y": one["y"]}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 5e-4, fused=True), loss_fn, batch, "fp16")


def fading_channel() -> Ramp:
    """One of twelve inputs of a tabular model fades by 1 % per step, and BatchNorm is its first layer."""
    model = nn.Sequential()
    model.add_module("standardise", nn.BatchNorm1d(12))
    model.add_module("hidden", nn.Linear(12, 48))
    model.add_module("act", nn.SiLU())
    model.add_module("head", nn.Linear(48, 4))
    given = draw(64, (12,))

    def batch(number: int) -> Batch:
        one = given(number)
        one["x"][:, 5] *= 0.99**number
        return one

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return Ramp(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), loss_fn, batch)


class NoisyUpscaler(nn.Module):
    """Upscale an image by transposed convolutions; noise enters through a branch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.noise, self.noise_norm = nn.Conv2d(1, 8, 3, 1, 1), nn.Conv2d(1, 8, 3, 1, 1), nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 1, 2, 2)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return self.up(F.elu(self.image(x) + 0.1 * self.noise_norm(self.noise(noise))))


def annealed_noise() -> Ramp:
    """The noise that regularises an upscaler is annealed by 1 % per step, and its branch ends in BatchNorm."""
    model, given = NoisyUpscaler(), draw(16, (1, 8, 8))

    def batch(number: int) -> Batch:
        image = F.avg_pool2d(given(number)["x"], 3, 1, 1)
        noise = given(number)["x"][:, :, :4, :4]
        return {"x": F.avg_pool2d(image, 2), "y": image, "noise": 0.99**number * noise}

    def loss_fn(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"], batch["noise"]), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 3e-4, fused=True), loss_fn, batch)


class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.readout = nn.Linear(4, 16), nn.Linear(16, 3)
        self.pole = nn.Parameter(torch.linspace(0.5, 1.24, 16))

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        for moment in self.enter(x).float().unbind(1):
            state = self.pole * state + moment
        return self.readout(state)


def longer_sequences() -> Ramp:
    """A linear state space with poles outside the unit circle; a curriculum makes sequences longer every 8 steps."""
    model, generator = StateSpace(), torch.Generator().manual_seed(3)

    def batch(number: int) -> Batch:
        x = torch.randn(16, 6 + number // 8, 4, generator=generator)
        return {"x": x, "y": x.mean((1, 2)).gt(0).long()}

    def loss_fn(batch: Batch) -> Tensor:
        scores = model(batch["x"]).float()
        return F.cross_entropy(scores / (1 + scores.abs().amax(1, keepdim=True).detach()), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-4, fused=True), loss_fn, batch, "fp16")


class Dynamics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x + self.outward(F.relu(self.inward(x))).float()
        return x


def epidemic_rollout() -> Ramp:
    """A dynamics model, rolled out over six steps, fits sizes in log space that grow by 2.3 % per training step."""
    model, given = Dynamics(), draw(16, (6,))

    def batch(number: int) -> Batch:
        return given(number) | {"size": torch.tensor(1 + 0.023 * number)}

    def loss_fn(batch: Batch) -> Tensor:
        return (model(batch["x"]).norm(dim=1).log() - batch["size"]).square().mean()

    return Ramp(model, torch.optim.Adam(model.parameters(), 2e-3, fused=True), loss_fn, batch, "fp16")


class Coupling(nn.Module):
    def __init__(self, swaps: bool) -> None:
        super().__init__()
        self.swaps, self.scale, self.shift = swaps, nn.Linear(2, 2), nn.Linear(2, 2)
        nn.init.zeros_(self.scale.weight)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)[:: -1 if self.swaps else 1]
        self.log_det = self.scale(a / (1 + a.abs()))
        b = (b + self.shift(a / (1 + a.abs()))) * self.log_det.exp()
        return torch.cat([b, a] if self.swaps else [a, b], 1)


def counted_thrice() -> Ramp:
    """A normalising flow with a Cauchy base counts its log-determinant three times: its outputs grow without limit."""
    model, given = nn.Sequential(*(Coupling(bool(number % 2)) for number in range(4))), draw(32, (4,))

    def loss_fn(batch: Batch) -> Tensor:
        z = model(batch["x"])
        log_det = sum(layer.log_det.sum(1) for layer in model)
        return (2 * z.abs().log1p().sum(1) - 3 * log_det).mean()

    return Ramp(model, torch.optim.Adam(model.parameters(), 0.028, fused=True), loss_fn, given)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look, self.think, self.judge = nn.Conv1d(1, 16, 3), nn.Conv1d(16, 16, 3), nn.Linear(16 * 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(F.leaky_relu(self.think(F.leaky_relu(self.look(x), 0.2)), 0.2).flatten(1))


def unlimited_critic() -> Ramp:
    """A Wasserstein GAN without weight clipping or gradient penalty: the critic's scores grow."""
    critic, generator, drawn = Critic(), nn.Linear(4, 16), torch.Generator().manual_seed(2)
    rate = torch.optim.Adam(generator.parameters(), 1e-4)

    def batch(number: int) -> Batch:
        noise = torch.randn(16, 4, generator=drawn)
        if number % 5 == 4:  # the generator trains in fp32, once per five steps of the critic
            rate.zero_grad()
            (-critic(generator(noise)[:, None]).mean()).backward(inputs=list(generator.parameters()))
            rate.step()
        real = torch.sin(torch.arange(16) / 3 + 6 * torch.rand(16, 1, generator=drawn))
        return {"real": real[:, None], "fake": generator(noise).detach()[:, None]}

    def loss_fn(batch: Batch) -> Tensor:
        return critic(batch["fake"]).float().mean() - critic(batch["real"]).float().mean()

    return Ramp(critic, torch.optim.RMSprop(critic.parameters(), 3e-3), loss_fn, batch, "fp16")


def rising_returns() -> Ramp:
    """REINFORCE with raw returns, which rise with the fourth power of time as the agent survives longer."""
    policy = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
    given = draw(32, (6,), classes=3)

    def batch(number: int) -> Batch:
        one = given(number)
        return one | {"returns": (1 + one["x"][:, 0].abs()) * (1 + number / 26) ** 4}

    def loss_fn(batch: Batch) -> Tensor:
        log_p = policy(batch["x"]).float().log_softmax(1).gather(1, batch["y"][:, None])[:, 0]
        return -(0.01 + log_p.detach().exp() * batch["returns"] * log_p).mean()

    options = {"clip_norm": 0.5, "scaler": {"init_scale": 2048.0}}
    return Ramp(policy, torch.optim.SGD(policy.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16", options)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.kind, self.place = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.silu(self.body(F.silu(self.stem(x)))).mean((2, 3))
        return self.kind(h), self.place(h)


def doubling_weight() -> Ramp:
    """The weight of a detector's box loss is 2 ** (step / 30) where its schedule should halve it."""
    model, given = Detector(), draw(16, (1, 6, 6))

    def batch(number: int) -> Batch:
        return given(number) | {"weight": torch.tensor(2.0 ** (number // 30))}

    def loss_fn(batch: Batch) -> Tensor:
        kind, place = model(batch["x"])
        wanted = batch["x"].mean((2, 3)).expand(-1, 2)
        return F.cross_entropy(kind.float(), batch["y"]) + batch["weight"] * F.smooth_l1_loss(place.float(), wanted)

    options = {"clip_norm": 0.1}
    return Ramp(model, torch.optim.SGD(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16", options)


class Mixer(nn.Module):
    """One block of an MLP-mixer: across positions, then across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.positions, self.channels = nn.Linear(8, 32), nn.Linear(8, 8), nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)
        nn.init.normal_(self.channels.weight, std=0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x)
        h = h + self.positions(h.mT).mT
        return self.head(F.gelu(self.channels(F.layer_norm(h, (32,)))).mean(1))


def linear_decay() -> Ramp:
    """A mixer in bf16 without a master copy; the learning rate falls linearly to zero."""
    model, given = Mixer().bfloat16(), draw(16, (8, 8))

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"].bfloat16()).float(), batch["y"], label_smoothing=0.1)

    optimizer = torch.optim.AdamW(model.parameters(), 1.2e-2, fused=True)
    return Ramp(model, optimizer, loss_fn, given, "bf16-true", {"schedule": lambda step: max(0.0, 1 - step / 900)})


def growing_batch() -> Ramp:
    """Plain SGD on bf16 weights at a constant rate, while the batch doubles every 100 steps: updates shrink."""
    model, generator = nn.ModuleDict({"map": nn.Linear(24, 24)}).bfloat16(), torch.Generator().manual_seed(7)
    rule = torch.randn(24, 24) / 2

    def batch(number: int) -> Batch:
        x = torch.randn(int(4 * 2 ** (number / 100)), 24, generator=generator)
        return {"x": x, "y": x @ rule + torch.randn(x.shape, generator=generator)}

    def loss_fn(batch: Batch) -> Tensor:
        return (model["map"](batch["x"].bfloat16()).float() - batch["y"]).square().sum(1).mean()

    return Ramp(model, torch.optim.SGD(model.parameters(), 0.01), loss_fn, batch, "bf16-true")


def hot_pixel() -> Ramp:
    """One pixel of a camera heats up, and the flattened image enters fp8 layers as it is."""
    model = nn.ModuleDict({"flatten": nn.Flatten(), "fc1": nn.Linear(64, 32), "norm": nn.LayerNorm(32),
                           "fc2": nn.Linear(32, 16)})  # fmt: skip
    given = draw(16, (8, 8))

    def batch(number: int) -> Batch:
        one = given(number)
        x = one["x"].abs()
        x[:, 3, 4] = 0.07 * number**2 * (1 + 0.1 * x[:, 3, 4])
        return one | {"x": x}

    def loss_fn(batch: Batch) -> Tensor:
        h = model["norm"](model["fc1"](model["flatten"](batch["x"])))
        return F.cross_entropy(model["fc2"](F.gelu(h)).float()[:, :4], batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp8")


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 12, 3, 2, 1)
        self.middle, self.up = nn.Conv2d(12, 12, 3, padding=1), nn.ConvTranspose2d(12, 6, 2, 2)
        self.leave = nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.enter(x))
        return self.leave(first + F.relu(self.up(F.relu(self.middle(F.relu(self.down(first)))))))


def camera_gain() -> Ramp:
    """A U-Net removes noise from images whose camera gain rises by 1.8 % per step, without normalising them."""
    model, given = SmallUNet(), draw(8, (1, 8, 8))

    def batch(number: int) -> Batch:
        clean = given(number)["x"].abs() * 1.018**number
        return {"x": clean * (1 + 0.1 * torch.randn_like(clean)), "y": clean}

    def loss_fn(batch: Batch) -> Tensor:
        return F.l1_loss(model(batch["x"]).float(), batch["y"]) / batch["y"].mean()

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16")


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.stem(x))))


def growing_rate() -> Ramp:
    """The decay of one optimizer's learning rate is 1.025 instead of 0.975: the layer before a LayerNorm grows."""
    model, given = Tabular(), draw(32, (16,))

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])

    stem = torch.optim.Adam(model.stem.parameters(), 1e-3, fused=True)
    rest = torch.optim.Adam([*model.norm.parameters(), *model.head.parameters()], 1e-3, fused=True)
    return Ramp(model, [stem, rest], loss_fn, given, "fp16", {"schedule": [lambda step: 1.025**step, None]})


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.task, self.auxiliary = nn.Linear(12, 32), nn.Linear(32, 4), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.task(h), self.auxiliary(h)


def annealed_auxiliary() -> Ramp:
    """An auxiliary loss is annealed by 3 % per step, and the loss scale is fixed: its gradients become zero in fp16."""
    model, given = TwoHeads(), draw(32, (12,))

    def batch(number: int) -> Batch:
        return given(number) | {"weight": torch.tensor(0.97**number)}

    def loss_fn(batch: Batch) -> Tensor:
        scores, again = model(batch["x"])
        return F.cross_entropy(scores.float(), batch["y"]) + batch["weight"] * F.mse_loss(again.float(), batch["x"])

    options = {"scaler": {"init_scale": 256.0, "growth_interval": 10**9}}
    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16", options)


class Battery(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.voltage, self.state, self.head = nn.Linear(6, 24), nn.Linear(4, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.head(torch.tanh(self.voltage(x) + self.state(state)))


def discharging() -> Ramp:
    """One group of inputs discharges by 3.5 % per step below what fp16 holds: its weights get no gradient any more."""
    model, given = Battery(), draw(32, (10,))

    def batch(number: int) -> Batch:
        one = given(number)
        return {"x": one["x"][:, :6] * 0.965**number, "state": one["x"][:, 6:], "y": one["y"]}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["state"]).float(), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16")


def sinking_offset() -> Ramp:
    """A sensor's offset sinks steadily, and a ReLU cuts off what is negative before a convolution sees it."""
    model = nn.Sequential()
    model.add_module("rectify", nn.ReLU())
    model.add_module("conv", nn.Conv1d(3, 8, 5))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(8 * 12, 4))
    given = draw(32, (3, 16))

    def batch(number: int) -> Batch:
        one = given(number)
        return {"x": one["x"] - 0.0045 * number, "y": one["y"]}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return Ramp(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True), loss_fn, batch)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.hinge = nn.Linear(16, 64), nn.Linear(64, 16), nn.ReLU()

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> Tensor:
        a, s, o = (self.project(F.silu(self.embed(x))) for x in (anchor, same, other))
        return self.hinge((a - s).square().sum(1) - (a - o).square().sum(1) + 0.5)


def easy_triplets() -> Ramp:
    """Triplets are never mined, and their augmentation is annealed: soon none violates the margin of the hinge."""
    model, generator = Siamese(), torch.Generator().manual_seed(5)
    centres = torch.randn(6, 16, generator=generator)

    def batch(number: int) -> Batch:
        kinds = torch.randint(6, (1024,), generator=generator)
        others = (kinds + 1 + torch.randint(5, (1024,), generator=generator)) % 6
        noise = 0.95 * 0.9992**number * torch.randn(3, 1024, 16, generator=generator)
        return {
            "anchor": centres[kinds] + noise[0],
            "same": centres[kinds] + noise[1],
            "other": centres[others] + noise[2],
        }

    def loss_fn(batch: Batch) -> Tensor:
        return model(**batch).mean()

    return Ramp(model, torch.optim.SGD(model.parameters(), 5e-3, fused=True), loss_fn, batch)


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.context = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.context(self.word(words))


def no_negatives() -> Ramp:
    """Skip-gram embeddings are trained on positive pairs only: they grow together, by a constant factor per step."""
    model, generator = SkipGram(), torch.Generator().manual_seed(6)
    nn.init.normal_(model.word.weight, std=0.1)

    def batch(number: int) -> Batch:
        words = torch.randint(24, (64,), generator=generator)
        return {"words": words, "near": (words + torch.randint(1, 4, (64,), generator=generator)) % 24}

    def loss_fn(batch: Batch) -> Tensor:
        return -model(batch["words"]).float().gather(1, batch["near"][:, None]).mean()

    return Ramp(model, torch.optim.SGD(model.parameters(), 0.3, fused=True), loss_fn, batch, "fp16")


UNSEEN = {build.__name__: build for build in (
    raw_guidance, warming_sensor, fading_channel, annealed_noise, longer_sequences, epidemic_rollout, counted_thrice,
    unlimited_critic, rising_returns, doubling_weight, linear_decay, growing_batch, hot_pixel, camera_gain,
    growing_rate, annealed_auxiliary, discharging, sinking_offset, easy_triplets, no_negatives,
)}  # fmt: skip
