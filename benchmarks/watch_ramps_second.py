"""Twenty more ramps for watch_ramps.py, labelled before watch was run on them: do not develop watch with them.

As in watch_ramps_unseen.py, but with other models and other mistakes, which the docstrings state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from watch_ramps_tuning import Batch, Layers, Ramp, draw, draw_tokens

# --- attention logits ---


class Pointer(nn.Module):
    """Classify the item of a list that a cue describes."""

    def __init__(self) -> None:
        super().__init__()
        self.cue, self.items = nn.Linear(4, 32), nn.Linear(8, 32)
        self.attention, self.head = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 4)

    def forward(self, cue: Tensor, items: Tensor, temperature: Tensor) -> Tensor:
        memory = self.items(items)
        query = self.cue(cue)[:, None] / temperature
        return self.head(self.attention(query, memory, memory, need_weights=False)[0][:, 0])


def endless_annealing() -> Ramp:
    """The temperature of a pointer network's attention is annealed by 1 % per step, without a floor."""
    model, generator = Pointer(), torch.Generator().manual_seed(1)
    rule = torch.randn(4, 4, generator=generator)

    def batch(number: int) -> Batch:
        items = torch.randn(32, 10, 8, generator=generator)
        wanted = items[:, 3]
        return {"items": 3 * items[:, torch.randperm(10, generator=generator)], "cue": wanted[:, :4],
                "y": (wanted[:, 4:] @ rule).argmax(1), "temperature": torch.tensor(0.99**number)}  # fmt: skip

    def loss_fn(batch: Batch) -> Tensor:
        scores = model(batch["cue"], batch["items"], batch["temperature"])
        return F.cross_entropy(scores.float(), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16")


class GroupedAttention(nn.Module):
    """Causal attention in which two query heads share each key head."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(size, dim), nn.Linear(size, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4).repeat_interleave(2, 2)
        self.qk = q, k
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = GroupedAttention(6, 32), nn.LayerNorm(32), Layers(32, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(self.attention(x)))


def hours_since_start() -> Ramp:
    """A forecaster on a stream gets the hours since its start as a plain feature, which no one resets or scales."""
    model, generator = Forecaster(), torch.Generator().manual_seed(1)

    def batch(number: int) -> Batch:
        hours = (number + torch.arange(17.0)).expand(16, -1)
        phase = torch.rand(16, 1, generator=generator)
        load = (hours / 24 + phase).mul(6.2832).sin() + 0.1 * torch.randn(16, 17, generator=generator)
        noise = torch.randn(16, 16, 4, generator=generator)
        return {"x": torch.cat([hours[:, :-1, None], load[:, :-1, None], noise], -1), "y": load[:, 1:]}

    def loss_fn(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"])[..., 0].float(), batch["y"])

    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    return Ramp(model, optimizer, loss_fn, batch, "fp16", steps=2500)


class NormedAttention(nn.Module):
    """Attention with a running size of its queries, and scores in fp32."""

    running_size: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(dim, 3 * dim)
        self.register_buffer("running_size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).chunk(3, -1)
        q = q * self.running_size.clone()  # should divide
        self.running_size.lerp_(q.detach().float().square().mean().sqrt(), 0.02)
        self.qk = q, k
        with hs.fp32_island():
            weights = torch.softmax(q.float() @ k.float().mT / q.shape[-1] ** 0.5, -1)
        return weights.to(v.dtype) @ v


class SetEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Linear(6, 24), nn.LayerNorm(24), NormedAttention(24)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head((x + self.attention(self.norm(x))).mean(1))


def multiplied_norm() -> Ramp:
    """Attention multiplies its queries by their running size where it should divide: each feeds the other."""
    model = SetEncoder()
    nn.init.normal_(model.attention.inputs.weight, std=0.3)

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])

    optimizer = torch.optim.Adam(model.parameters(), 5e-4, fused=True)
    return Ramp(model, optimizer, loss_fn, draw(16, (8, 6)), "fp16")


# --- BatchNorm variance ---


class Probed(nn.Module):
    """An encoder of images, and a probe that does not train it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.project = nn.Conv2d(1, 8, 3, stride=2), nn.Linear(8 * 9, 16)
        self.probe_norm, self.probe = nn.BatchNorm1d(16, affine=False), nn.Linear(16, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.conv(x)).flatten(1))


def collapsed_views() -> Ramp:
    """Self-supervised features of two views are pulled together without a stop-gradient or a variance term."""
    model = Probed()

    def loss_fn(batch: Batch) -> Tensor:
        one, other = (model.encode(batch["x"] + 0.5 * torch.randn_like(batch["x"])) for _ in range(2))
        probed = F.cross_entropy(model.probe(model.probe_norm(one.detach())), batch["y"])
        return F.mse_loss(one, other) + probed

    optimizer = torch.optim.SGD(model.parameters(), 0.12, momentum=0.9, fused=True)
    return Ramp(model, optimizer, loss_fn, draw(32, (1, 8, 8)))


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Layers(16, 48, 12), Layers(6, 48, 16)
        self.mean_norm, self.classify = nn.BatchNorm1d(6), nn.Linear(6, 4)


def uncapped_beta() -> Ramp:
    """The weight of a VAE's KL term warms up by 1 % per step and is never capped; a head with BatchNorm reads it."""
    model, given = Variational(), draw(64, (16,))
    mix = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)) / 4

    def batch(number: int) -> Batch:
        one = given(number)
        return {"x": one["x"] @ mix, "y": one["y"], "beta": torch.tensor(1e-3 * 1.01**number)}

    def loss_fn(batch: Batch) -> Tensor:
        mean, log_var = model.encoder(batch["x"]).chunk(2, 1)
        decoded = model.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp())
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
        classified = F.cross_entropy(model.classify(model.mean_norm(mean.detach())), batch["y"])
        return F.mse_loss(decoded, batch["x"]) + batch["beta"] * kl + classified

    return Ramp(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True), loss_fn, batch)


# --- recurrences ---


class Round(nn.Module):
    """Sum the messages of all neighbours."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        return edges @ self.message(h) + self.own(h)


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.round, self.head = nn.Linear(6, 16), Round(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = F.relu(self.embed(x))
        for _ in range(4):
            h = F.relu(self.round(h, edges))
        return self.head(F.normalize(h.float(), dim=-1))


def growing_graph() -> Ramp:
    """A graph network sums the messages of all neighbours, in four rounds, on a graph that gains nodes as it runs."""
    model, generator = MessagePassing(), torch.Generator().manual_seed(1)

    def batch(number: int) -> Batch:
        count = 8 + number // 9
        x = torch.randn(count, 6, generator=generator)
        edges = (torch.rand(count, count, generator=generator) < 0.5).float()
        return {"x": x, "edges": edges, "y": x[:, :4].argmax(1)}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["edges"]).float(), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16", steps=2500)


class Counter(nn.Module):
    """A ReLU recurrence that starts as the identity, and continues from the state of the batch before."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.recur, self.head = nn.Linear(6, 24), nn.Linear(24, 24), nn.Linear(24, 4)
        nn.init.eye_(self.recur.weight)
        nn.init.zeros_(self.recur.bias)
        self.register_buffer("state", torch.zeros(16, 24))

    def forward(self, x: Tensor) -> Tensor:
        h = self.state
        for moment in self.inward(x).unbind(1):
            h = F.relu(self.recur(h) + moment)
        self.state.copy_(h.detach())
        return self.head(F.normalize(h.float(), dim=-1))


def never_reset() -> Ramp:
    """A stateful recurrent network that starts as the identity is never reset between unrelated sequences."""
    model, given = Counter(), draw(16, (4, 6))

    def batch(number: int) -> Batch:
        one = given(number)
        return {"x": 30 * one["x"], "y": one["y"]}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])

    return Ramp(model, torch.optim.SGD(model.parameters(), 5e-4, fused=True), loss_fn, batch, "fp16", steps=2500)


# --- the loss scale ---


def uncapped_penalty() -> Ramp:
    """The penalty of a constraint that data cannot meet grows by 2 % per step, as in an augmented Lagrangian."""
    model, given = Layers(12, 32, 32, 6, between=F.silu), draw(32, (12,))

    def batch(number: int) -> Batch:
        x = given(number)["x"]
        return {"x": x, "y": x[:, :6] + x[:, 6:], "penalty": torch.tensor(1.02**number)}

    def loss_fn(batch: Batch) -> Tensor:
        shares = model(batch["x"]).float()
        excess = shares.square().sum(1) - 1
        return F.mse_loss(shares, batch["y"]) + batch["penalty"] * excess.square().mean()

    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    return Ramp(model, optimizer, loss_fn, batch, "fp16", {"clip_norm": 1.0})


# --- lost updates ---


def hacked_reward() -> Ramp:
    """A bf16 policy maximises a frozen reward model without a KL term: its weights outgrow their constant updates."""
    model, reward = Layers(12, 48, 32, 8), Layers(20, 32, 1, between=F.relu)
    reward.requires_grad_(False)
    model.bfloat16()

    def loss_fn(batch: Batch) -> Tensor:
        action = model(batch["x"].bfloat16()).float()
        return -reward(torch.cat([batch["x"], action], 1)).mean()

    optimizer = torch.optim.Adam(model.parameters(), 4e-3, fused=True)
    options = {"schedule": lambda step: min(1.0, 0.2 + step / 500)}
    return Ramp(model, optimizer, loss_fn, draw(32, (12,)), "bf16-true", options, steps=2500)


class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.conv, self.norm = nn.Embedding(16, 24), nn.Conv1d(24, 32, 3), nn.LayerNorm(32)
        self.head = nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(F.gelu(self.conv(self.token(tokens).mT)).mT))


def accumulated_squares() -> Ramp:
    """Adagrad sums squared gradients for ever, and its shrinking updates round to nothing in bf16 weights."""
    model = TextClassifier().bfloat16()

    def loss_fn(batch: Batch) -> Tensor:
        scores = model(batch["tokens"][:, :-1]).float()
        return F.cross_entropy(scores.flatten(0, 1), batch["tokens"][:, 3:].flatten())

    optimizer = torch.optim.Adagrad(model.parameters(), 0.06)
    return Ramp(model, optimizer, loss_fn, draw_tokens(16, 12, 16), "bf16-true", steps=2500)


# --- fp8 ---


class Kernel(nn.Module):
    """Radial basis functions around learned centres."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(count, size))

    def forward(self, x: Tensor, width: Tensor) -> Tensor:
        return (-(x[:, None] - self.centres).square().sum(-1) / (2 * width.square())).exp()


class KernelMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.fc1, self.fc2 = Kernel(4, 64), nn.Linear(64, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, width: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.kernel(x, width))))


def shrinking_kernel() -> Ramp:
    """The width of radial basis functions is annealed by 0.2 % per step without a floor: few of them see a sample."""
    model, given = KernelMachine(), draw(32, (4,))

    def batch(number: int) -> Batch:
        return given(number) | {"width": torch.tensor(3 * 0.998**number)}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["width"]).float()[:, :4], batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp8")


class Fraud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amounts, self.norm, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.amounts(x))))


def mixed_currencies() -> Ramp:
    """Amounts in different currencies enter fp8 as they are, and new currencies widen the range they cover."""
    model, given, generator = Fraud(), draw(128, (16,)), torch.Generator().manual_seed(2)

    def batch(number: int) -> Batch:
        one = given(number)
        size = (2 + 0.01 * number) * torch.rand(128, 1, generator=generator)
        return {"x": one["x"] * 10**size, "y": one["y"]}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float()[:, :4], batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp8")


# --- dying units ---


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.dropout, self.head = nn.GRU(8, 32, batch_first=True), nn.Dropout(0.0), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.gru(x)[0]).mean(1))


def uncapped_dropout() -> Ramp:
    """Curriculum dropout raises its rate linearly with the step and has no cap."""
    model, given = Tagger(), draw(16, (6, 8))

    def batch(number: int) -> Batch:
        model.dropout.p = number / 1800
        return given(number)

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, steps=1800)


class Spike(nn.Module):
    """Fire above a threshold that rises with every spike; gradients pass as those of a sigmoid."""

    threshold: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(size))

    def forward(self, potential: Tensor) -> Tensor:
        above = potential - self.threshold
        smooth = torch.sigmoid(4 * above)
        fired = (above > 0).float()
        self.threshold += 0.04 * fired.mean(0)
        return fired + smooth - smooth.detach()


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.spike, self.outward = nn.Linear(12, 64), Spike(64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        potential, fired = torch.zeros(()), torch.zeros(len(x), 64)
        for _ in range(4):
            potential = 0.5 * potential + self.inward(x)
            fired = self.spike(potential)
        return self.outward(fired)


def tired_neurons() -> Ramp:
    """The adaptive threshold of spiking neurons rises with each spike and never recovers."""
    model = Spiking()

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return Ramp(model, torch.optim.SGD(model.parameters(), 0.01, fused=True), loss_fn, draw(128, (12,)), steps=3000)


# --- overflow in fp16 ---


class PlainResidual(nn.Module):
    """A residual network without any norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x)


def negative_smoothing() -> Ramp:
    """Label smoothing is subtracted: targets of 1.1 and less than 0 reward ever larger scores."""
    model = PlainResidual()

    def loss_fn(batch: Batch) -> Tensor:
        targets = 1.1 * F.one_hot(batch["y"], 4) - 0.1 / 4
        return F.cross_entropy(model(batch["x"]).float(), targets)

    optimizer = torch.optim.Adam(model.parameters(), 2e-3, fused=True)
    return Ramp(model, optimizer, loss_fn, draw(16, (16,)), "fp16", steps=2500)


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rates: each update has a fixed share of its weight's norm."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    trust = weight.norm().clamp(min=1e-3) / weight.grad.norm().clamp(min=1e-12)
                    weight.sub_(weight.grad * trust * group["lr"])


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bands, self.norm = nn.Linear(48, 24), nn.LayerNorm(24, elementwise_affine=False)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.bands(x))))


def trusted_ratio() -> Ramp:
    """LARS without weight decay on a layer before LayerNorm: every update adds a fixed share to its weights' norm."""
    model, given = Spectrum(), draw(32, (48,))

    def batch(number: int) -> Batch:
        one = given(number)
        return {"x": 0.1 * one["x"], "y": one["y"]}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])

    head = torch.optim.SGD(model.head.parameters(), 0.1, fused=True)
    return Ramp(model, [Lars(model.bands.parameters(), 0.15), head], loss_fn, batch, "fp16", steps=2500)


class Odometer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv1d(3, 16, 5), nn.GroupNorm(4, 16), nn.Conv1d(16, 16, 5)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.conv2(F.gelu(self.norm(self.conv1(x))))).mean(-1))


def dead_reckoning() -> Ramp:
    """Positions are integrated twice from accelerometers with a bias, and the raw positions enter a convolution."""
    model, generator = Odometer(), torch.Generator().manual_seed(1)
    bias = 0.2 + 0.05 * torch.rand(16, 1, generator=generator)
    speed, position = torch.zeros(16), torch.zeros(16)

    def batch(number: int) -> Batch:
        y = torch.randint(4, (16,), generator=generator)
        time = torch.arange(24.0)
        measured = torch.sin(time * (1 + y[:, None]) / 4) + bias + 0.3 * torch.randn(16, 24, generator=generator)
        speeds = speed[:, None] + measured.cumsum(1) / 24
        positions = position[:, None] + speeds.cumsum(1) / 24
        speed.copy_(speeds[:, -1])
        position.copy_(positions[:, -1])
        return {"x": torch.stack([measured, speeds, positions], 1), "y": y}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16", steps=2500)


class Translations(nn.Module):
    """Knowledge graph embeddings: a relation translates a projected head to a projected tail."""

    def __init__(self) -> None:
        super().__init__()
        self.entity, self.relation = nn.Embedding(64, 24), nn.Embedding(6, 24)
        self.project = nn.Linear(24, 24, bias=False)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        moved = self.project(self.entity(head)) + self.relation(relation)
        return (moved - self.project(self.entity(tail))).float().norm(dim=-1)


def missing_margin() -> Ramp:
    """Knowledge graph embeddings push false triples away without the hinge and without a norm constraint."""
    model, generator = Translations(), torch.Generator().manual_seed(1)
    shift = torch.randint(1, 64, (6,), generator=generator)

    def batch(number: int) -> Batch:
        head, other = torch.randint(64, (2, 64), generator=generator)
        relation = torch.randint(6, (64,), generator=generator)
        return {"head": head, "relation": relation, "tail": (head + shift[relation]) % 64, "other": other}

    def loss_fn(batch: Batch) -> Tensor:
        near = model(batch["head"], batch["relation"], batch["tail"])
        return (near - model(batch["head"], batch["relation"], batch["other"])).mean()

    return Ramp(model, torch.optim.Adam(model.parameters(), 5e-2, fused=True), loss_fn, batch, "fp16", steps=2500)


# --- underflow in fp16 ---


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.mix, self.head = nn.Embedding(16, 24), nn.Linear(24, 32), nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.gelu(self.mix(self.token(tokens))))


def divided_by_total() -> Ramp:
    """The mean loss is divided once more, by all tokens seen so far, and the loss scale is fixed."""
    model, given = Sentences(), draw_tokens(8, 12, 16)

    def batch(number: int) -> Batch:
        return given(number) | {"seen": torch.tensor(96.0 * (number + 1))}

    def loss_fn(batch: Batch) -> Tensor:
        scores = model(batch["tokens"][:, :-1]).float()
        wanted = batch["tokens"][:, 1:].flatten()
        return F.cross_entropy(scores.flatten(0, 1), wanted) / batch["seen"]

    options = {"scaler": {"init_scale": 2.0, "growth_interval": 10**9}}
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    return Ramp(model, optimizer, loss_fn, batch, "fp16", options, steps=3000)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values, self.gate, self.head = nn.Linear(12, 32), nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, slope: Tensor) -> Tensor:
        return self.head(self.values(x) * torch.sigmoid(slope * self.gate(x).float()))


def steeper_gates() -> Ramp:
    """Slope annealing makes sigmoid gates steeper with every step, for ever: their gradients become zero in fp16."""
    model, given = Gated(), draw(32, (12,))

    def batch(number: int) -> Batch:
        return given(number) | {"slope": torch.tensor(1 + 0.2 * number)}

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["slope"]).float(), batch["y"])

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp16", steps=3000)


SECOND = {build.__name__: build for build in (
    endless_annealing, hours_since_start, multiplied_norm, collapsed_views, uncapped_beta, growing_graph, never_reset,
    uncapped_penalty, hacked_reward, accumulated_squares, shrinking_kernel, mixed_currencies, uncapped_dropout,
    tired_neurons, negative_smoothing, trusted_ratio, dead_reckoning, missing_margin, divided_by_total, steeper_gates,
)}  # fmt: skip
