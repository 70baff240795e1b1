"""Twenty healthy runs for watch_ramps.py: public small models on real data that scikit-learn ships, 800 steps each.

The list was committed before the first of them was trained: each warning of watch is a false alarm. Needs
`pip install scikit-learn`. Settings are ordinary: AdamW, mostly with a cosine or constant rate, and clipping at 1 for
the transformers. Precisions other than fp32 are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from watch_ramps_tuning import Batch, Decoder, Ramp

STEPS = 800
COSINE = {"schedule": lambda step: 0.5 * (1 + math.cos(math.pi * min(step, STEPS) / STEPS)) + 1e-3}


def load_digits() -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    digits = datasets.load_digits()
    return torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None], torch.tensor(digits.target)


def load_table(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    table = getattr(datasets, f"load_{name}")()
    x, y = torch.tensor(table.data, dtype=torch.float32), torch.tensor(table.target)
    return (x - x.mean(0)) / x.std(0), y


def load_text() -> Tensor:
    """Return the characters of the descriptions of scikit-learn's datasets, as numbers below 128."""
    from sklearn import datasets

    names = ("breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine")
    text = "".join(getattr(datasets, f"load_{name}")().DESCR for name in names)
    return torch.tensor([min(ord(letter), 127) for letter in text])


def load_patches(size: int, count: int = 2000) -> Tensor:
    """Return patches of the photographs of a temple and a flower, in [-1, 1]."""
    from sklearn import datasets

    photos = torch.tensor(datasets.load_sample_images().images, dtype=torch.float32).permute(0, 3, 1, 2) / 127.5 - 1
    generator = torch.Generator().manual_seed(0)
    patches = []
    for number in range(count):
        top, left = (int(torch.randint(side - size, (), generator=generator)) for side in photos.shape[2:])
        patches.append(photos[number % 2, :, top : top + size, left : left + size])
    return torch.stack(patches)


def pick(size: int, **data: Tensor) -> Callable[[int], Batch]:
    """Draw random batches of the given tensors."""
    generator, count = torch.Generator().manual_seed(1), len(next(iter(data.values())))

    def batch(number: int) -> Batch:
        chosen = torch.randint(count, (size,), generator=generator)
        return {name: values[chosen] for name, values in data.items()}

    return batch


def pick_text(size: int, length: int) -> Callable[[int], Batch]:
    text, generator = load_text(), torch.Generator().manual_seed(1)

    def batch(number: int) -> Batch:
        starts = torch.randint(len(text) - length - 1, (size, 1), generator=generator)
        return {"tokens": text[starts + torch.arange(length + 1)]}

    return batch


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01, fused=True)


def classify(model: nn.Module, rate: float, precision: str, batch: Callable[[int], Batch], **options: object) -> Ramp:
    def loss_fn(batch: Batch) -> Tensor:
        answer = model(batch["x"])
        return F.cross_entropy(getattr(answer, "logits", answer).float(), batch["y"])

    return Ramp(model, adamw(model, rate), loss_fn, batch, precision, dict(options), STEPS)


def continue_text(model: nn.Module, rate: float, precision: str, **options: object) -> Ramp:
    def loss_fn(batch: Batch) -> Tensor:
        answer = model(batch["tokens"][:, :-1])
        scores = getattr(answer, "logits", answer).float()
        return F.cross_entropy(scores.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    return Ramp(model, adamw(model, rate), loss_fn, pick_text(8, 32), precision, dict(options), STEPS)


def pick_digits(size: int = 32) -> Callable[[int], Batch]:
    x, y = load_digits()
    return pick(size, x=x, y=y)


# --- transformers' models, made from a small config ---


def gpt2() -> Ramp:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    return continue_text(model, 3e-3, "fp16", clip_norm=1.0, **COSINE)


def llama() -> Ramp:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    )
    return continue_text(model, 3e-3, "fp32", clip_norm=1.0)


def bert() -> Ramp:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(
        BertConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    )

    def loss_fn(batch: Batch) -> Tensor:
        tokens = batch["tokens"]
        hidden = torch.rand(tokens.shape) < 0.15
        scores = model(tokens.masked_fill(hidden, 0)).logits.float()
        return F.cross_entropy(scores[hidden], tokens[hidden])

    return Ramp(model, adamw(model, 2e-3), loss_fn, pick_text(16, 31), "fp32", {"clip_norm": 1.0}, STEPS)


def vit() -> Ramp:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=2,
        num_channels=1, num_labels=10,
    )  # fmt: skip
    return classify(ViTForImageClassification(config), 2e-3, "bf16", pick_digits(), clip_norm=1.0, **COSINE)


def resnet() -> Ramp:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10
    )
    return classify(ResNetForImageClassification(config), 2e-3, "fp16", pick_digits(), **COSINE)


def convnext() -> Ramp:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_channels=1, patch_size=2, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10)
    config.num_stages = 2
    return classify(ConvNextForImageClassification(config), 2e-3, "fp32", pick_digits())


# --- written out ---


def small_gpt() -> Ramp:
    return continue_text(Decoder(128, 32, 48, 3, 2), 2e-3, "bf16", clip_norm=1.0)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(128, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def lstm() -> Ramp:
    return continue_text(Lstm(), 3e-3, "fp32", clip_norm=1.0)


class RowGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x[:, 0])[0][:, -1])


def gru() -> Ramp:
    return classify(RowGru(), 3e-3, "bf16", pick_digits())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.down, self.middle = nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.norm(self.enter(x)))
        deep = F.silu(self.up(F.silu(self.middle(F.silu(self.down(first))))))
        return self.leave(torch.cat([first, deep], 1))


def unet() -> Ramp:
    """Remove noise from patches of photographs."""
    model = UNet()

    def loss_fn(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"] + 0.3 * torch.randn_like(batch["x"])).float(), batch["x"])

    return Ramp(model, adamw(model, 2e-3), loss_fn, pick(8, x=load_patches(16)), "fp16", dict(COSINE), STEPS)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.latent, self.decode = nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(8, 64)
        self.image = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.latent(F.gelu(self.encode(x.flatten(1)))).float().chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.image(F.gelu(self.decode(z))), mean, log_var


def vae() -> Ramp:
    model = Vae()

    def loss_fn(batch: Batch) -> Tensor:
        image, mean, log_var = model(batch["x"])
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        return F.mse_loss(image.float(), batch["x"].flatten(1)) + 0.01 * kl

    return Ramp(model, adamw(model, 2e-3), loss_fn, pick_digits(64), "fp16", {}, STEPS)


def gan() -> Ramp:
    """The discriminator is watched; the generator trains next to it in fp32."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))
    generator = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    optimizer, given = torch.optim.Adam(generator.parameters(), 4e-4, betas=(0.5, 0.999)), pick_digits()

    def batch(number: int) -> Batch:
        fake = generator(torch.randn(32, 8))
        optimizer.zero_grad()
        F.softplus(-model(fake)).mean().backward(inputs=list(generator.parameters()))
        optimizer.step()
        return {"real": given(number)["x"].flatten(1), "fake": fake.detach()}

    def loss_fn(batch: Batch) -> Tensor:
        return F.softplus(-model(batch["real"])).mean() + F.softplus(model(batch["fake"])).mean()

    rates = torch.optim.Adam(model.parameters(), 2e-4, betas=(0.5, 0.999), fused=True)
    return Ramp(model, rates, loss_fn, batch, "fp32", {}, STEPS)


def autoencoder() -> Ramp:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 8, 3, 2, 1), nn.GELU(),
        nn.ConvTranspose2d(8, 16, 2, 2), nn.GELU(), nn.ConvTranspose2d(16, 3, 2, 2),
    )  # fmt: skip

    def loss_fn(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]).float(), batch["x"])

    return Ramp(model, adamw(model, 2e-3), loss_fn, pick(16, x=load_patches(16)), "bf16", {}, STEPS)


def super_resolution() -> Ramp:
    """SRCNN: three convolutions after bicubic upscaling."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, 1, 2), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 5, 1, 2)
    )

    def loss_fn(batch: Batch) -> Tensor:
        small = F.avg_pool2d(batch["x"], 2)
        return F.l1_loss(model(F.interpolate(small, scale_factor=2, mode="bicubic")).float(), batch["x"])

    return Ramp(model, adamw(model, 1e-3), loss_fn, pick(8, x=load_patches(16)), "fp16", {}, STEPS)


class Encoder(nn.Module):
    """torch's TransformerEncoder over the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(0.02 * torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x[:, 0]) + self.place).mean(1))


def transformer_encoder() -> Ramp:
    return classify(Encoder(), 2e-3, "bf16", pick_digits(), clip_norm=1.0)


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.across1, self.across2 = nn.LayerNorm(32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm2, self.within1, self.within2 = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across2(F.gelu(self.across1(self.norm1(x).mT))).mT
        return x + self.within2(F.gelu(self.within1(self.norm2(x))))


class MlpMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Conv2d(1, 32, 2, 2), nn.Sequential(MixerBlock(), MixerBlock())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).mT).mean(1))


def mlp_mixer() -> Ramp:
    return classify(MlpMixer(), 2e-3, "fp16", pick_digits(), **COSINE)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.enter = nn.Linear(1, 64), nn.Linear(64, 64)
        self.middle, self.leave = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.silu(self.enter(x) + self.time(t))
        return self.leave(h + F.silu(self.middle(h)))


def diffusion() -> Ramp:
    """A denoising diffusion model of digits with a cosine schedule."""
    model = Denoiser()

    def loss_fn(batch: Batch) -> Tensor:
        x = batch["x"].flatten(1)
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        angle = 0.5 * math.pi * (0.02 + 0.96 * t)
        return F.mse_loss(model(angle.cos() * x + angle.sin() * noise, t).float(), noise)

    return Ramp(model, adamw(model, 2e-3), loss_fn, pick_digits(64), "fp16", {"ema_decay": 0.99}, STEPS)


def contrastive() -> Ramp:
    """SimCLR on digits: two noisy views, temperature 0.2."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))

    def loss_fn(batch: Batch) -> Tensor:
        x = batch["x"].flatten(1)
        a, b = (F.normalize(model(x + 0.3 * torch.randn_like(x)).float(), dim=1) for _ in range(2))
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(x)))

    return Ramp(model, adamw(model, 1e-3), loss_fn, pick_digits(), "fp32", {}, STEPS)


def breast_cancer() -> Ramp:
    x, y = load_table("breast_cancer")
    model = nn.Sequential(nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    return classify(model, 1e-3, "fp16", pick(32, x=x, y=y))


def diabetes() -> Ramp:
    x, y = load_table("diabetes")
    y = ((y - y.mean()) / y.std()).float()
    model = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 1))

    def loss_fn(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"])[:, 0].float(), batch["y"])

    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, fused=True)
    return Ramp(model, optimizer, loss_fn, pick(32, x=x, y=y), "bf16", {}, STEPS)


HEALTHY = {build.__name__: build for build in (
    gpt2, llama, bert, vit, resnet, convnext, small_gpt, lstm, gru, unet, vae, gan, autoencoder, super_resolution,
    transformer_encoder, mlp_mixer, diffusion, contrastive, breast_cancer, diabetes,
)}  # fmt: skip
