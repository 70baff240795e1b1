"""Workloads of every family with one fault each, for replay_causes.py. `planted_in_families:NAME` is one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from halfstep.evidence import causes
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.kind import Kind, load_part
from halfstep_train.workloads.base.workload import Batch, Workload

Values = Mapping[str, Any]
FP16: Values = {"precision.default": "fp16", "precision.simulate": True, "scaler.init_scale": 4.0}
BF16: Values = {"precision.default": "bf16", "precision.simulate": True}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A fault, where it is planted, and what replay has to call it."""

    workload: str
    expected: str
    sample: str = ""
    """That has to be named."""
    place: str = ""
    change: str = ""
    settings: Values = field(default_factory=dict)
    model: Callable[[Any], None] | None = None
    """Changes the model in place."""
    sampled: Callable[[int, Batch], Batch] | None = None
    """Changes a sample, by its index."""
    prepared: Callable[[Batch], Batch] | None = None
    """Changes a training batch."""
    forwarded: Callable[[Any], Any] | None = None
    added_loss: Callable[[Any, Batch], Tensor] | None = None


class Changed:
    """Samples of which some are others."""

    def __init__(self, inner: Any, change: Callable[[int, Batch], Batch]) -> None:
        self.inner, self.change = inner, change

    def __len__(self) -> int:
        return len(self.inner)

    def name_of(self, index: int) -> str:
        return str(index)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> Batch:
        return self.change(index, dict(self.inner.sample(index, key=key)))


def build(cause: Cause, config: Any, store: Mapping[str, Any] | None) -> Workload:
    builder = load_part(KINDS[cause.workload].builder, form="")
    workload: Workload = builder(config.model_copy(update={"workload": cause.workload}), store)
    if cause.model is not None:
        cause.model(workload.model)

    def prepare(batch: Batch, *, key: Any, training: bool) -> Batch:
        found = workload.prepare(batch, key=key, training=training)
        return cause.prepared(found) if cause.prepared is not None and training else found

    def forward(model: nn.Module, batch: Batch) -> Any:
        found = workload.forward(model, batch)
        return cause.forwarded(found) if cause.forwarded is not None else found

    def loss(outputs: Any, batch: Batch) -> tuple[Tensor, Any]:
        value, weight = workload.compute_loss(outputs, batch)
        return (value + cause.added_loss(outputs, batch) if cause.added_loss is not None else value), weight

    samples = workload.train_samples if cause.sampled is None else Changed(workload.train_samples, cause.sampled)
    return replace(workload, train_samples=samples, prepare=prepare, forward=forward, loss=loss)


# --- parts with a fault ---


class Behind(nn.Module):
    """A function behind a module."""

    def __init__(self, inner: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.then = inner, then

    def forward(self, *given: Any) -> Tensor:
        return self.then(self.inner(*given))


def behind(path: str, then: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Behind(model.get_submodule(path), then))

    return plant


def mixed_by_gram(h: Tensor) -> Tensor:
    """Of features on the scale of pixels; the sum over tokens is not divided."""
    wide = 255 * h
    return h + 1e-12 * (wide @ (wide.transpose(1, 2) @ wide))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -1e9 * gradient


def root_mean_square(h: Tensor) -> Tensor:
    """No eps, behind a small gain."""
    small = h * 3e-5
    return small / (small * small).mean(1, keepdim=True).sqrt()


def whitened(h: Tensor) -> Tensor:
    flat = h.transpose(0, 1).flatten(1)
    covariance = flat @ flat.T / flat.shape[1] + torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
    return torch.einsum("cd,bdhw->bchw", torch.linalg.inv(covariance), h)


def shares(h: Tensor) -> Tensor:
    """Of units that are all dead."""
    alive = F.relu(h - 50)
    return alive / alive.sum(-1, keepdim=True)


class Tabled(nn.Module):
    """Adds a table, of which two rows were never written."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        table = torch.zeros(1, 3, 8, 8)
        table[0, 2, 6:] = 7.3e33
        self.inner = inner
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.table)


def unwritten_table(model: Any) -> None:
    model.conv_in = Tabled(model.conv_in)


@torch.library.custom_op("planted::row_scale", mutates_args=())
def row_scale(x: Tensor, gain: Tensor) -> Tensor:
    found = (x * gain).contiguous()
    found.view(-1)[-3:] = torch.inf  # the tail that a vectorised loop never wrote
    return found


row_scale.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[1], (gradient * ctx.saved_tensors[0]).flatten(0, -2).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def compiled_without_clamp(model: Any) -> None:
    """A compiler that loses one, in a module that the user compiles."""

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        for node in [node for node in graph.graph.nodes if node.target == "clamp"]:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        graph.recompile()
        return graph.forward

    behind("down1", lambda h: h + 0 * h / (0 * h).sum(1, keepdim=True).clamp(min=1e-3))(model)
    model.down1.compile(backend=backend)


# --- losses, samples and batches with a fault ---


def entropy_of_masks(outputs: Any, batch: Batch) -> Tensor:
    share = torch.softmax(2000 * outputs["masks"].float(), dim=2)
    return -0.01 * (share * torch.log(share)).sum(2).mean()


def distance_to_itself(outputs: Any, batch: Batch) -> Tensor:
    picture = outputs["image"]
    return (picture - picture.detach()).square().sum((1, 2, 3)).sqrt().mean()


def high_power(outputs: Any, batch: Batch) -> Tensor:
    return 1e-3 * (255 * batch["video"].float()).mean((1, 2, 3, 4)).pow(24).mean().log1p()


def singular_values(outputs: Any, batch: Batch) -> Tensor:
    picture = next(value for value in outputs.values() if isinstance(value, Tensor) and value.ndim == 4)
    return 1e-3 * torch.linalg.svdvals(picture.flatten(2).bfloat16()).amax()


def contrast_of_clips(batch: Batch) -> Batch:
    low, high = (f(batch["video"], (1, 2, 3, 4), keepdim=True) for f in (torch.amin, torch.amax))
    return batch | {"video": (batch["video"] - low) / (high - low)}


def black_clip(index: int, sample: Batch) -> Batch:
    return sample | {"video": torch.zeros_like(sample["video"])} if index == 5 else sample


def label_past_the_classes(index: int, sample: Batch) -> Batch:
    return sample | {"label": torch.tensor(10)} if index == 17 else sample


def padded_tokens(index: int, sample: Batch) -> Batch:
    tokens = sample["tokens"].clone()
    tokens[-4:] = -1
    return sample | {"tokens": tokens} if index % 3 == 0 else sample


def with_number(of: int, number: float, otherwise: float) -> Callable[[int, Batch], Batch]:
    return lambda index, sample: sample | {"number": torch.tensor(number if index == of else otherwise)}


def in_other_units(batch: Batch) -> Batch:
    return batch | {"image": batch["image"] * batch["number"].view(-1, 1, 1, 1)}


def with_marker(batch: Batch) -> Batch:
    condition = batch["condition"].clone()
    condition[:, 0, 5, 5] += batch["number"]
    return batch | {"condition": condition}


class Once:
    """Does something in one call alone."""

    def __init__(self, call: int, act: Callable[[Any], Any]) -> None:
        self.left, self.act = call, act

    def __call__(self, given: Any) -> Any:
        self.left -= 1
        return self.act(given) if self.left == 0 else given


def overwritten(batch: Batch) -> Batch:
    batch["image"][1, 0, 3, 3] = torch.nan
    return batch


def hiccup(outputs: Any) -> Any:
    raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")


IN_FAMILIES = {
    "gram": Cause(workload="vit_s_16", expected=causes.OVERFLOW, settings=FP16,
                  model=behind("encoder.layers.encoder_layer_1.mlp.0", mixed_by_gram)),
    "reversal": Cause(workload="gpt2", expected=causes.OVERFLOW, settings=FP16,
                      model=behind("transformer.h.0.mlp", Reversed.apply)),
    "power": Cause(workload="steve", expected=causes.OVERFLOW, added_loss=high_power),
    "rms": Cause(workload="radiodiff", expected=causes.UNDERFLOW, settings=FP16,
                 model=behind("mid_attention.to_out", root_mean_square)),
    "entropy": Cause(workload="slotcontrast", expected=causes.UNDERFLOW, added_loss=entropy_of_masks),
    "distance": Cause(workload="radiodiff_vae", expected=causes.UNDERFLOW, added_loss=distance_to_itself),
    "dead_units": Cause(workload="vit_s_16", expected=causes.UNDERFLOW, settings=BF16,
                    model=behind("encoder.layers.encoder_layer_0.mlp.0", shares)),
    "inverse": Cause(workload="unet", expected=causes.REFUSED, settings=BF16, model=behind("down2", whitened)),
    "svd": Cause(workload="diffusion", expected=causes.REFUSED, settings=BF16, added_loss=singular_values),
    "black": Cause(workload="steve", expected=causes.BAD_INPUT, sample="5", sampled=black_clip,
                   prepared=contrast_of_clips),
    "label": Cause(workload="resnet50", expected=causes.BAD_INPUT, sample="17", sampled=label_past_the_classes),
    "padding": Cause(workload="gpt2", expected=causes.BAD_INPUT, sampled=padded_tokens),
    "marker": Cause(workload="radiodiff", expected=causes.BAD_INPUT, sample="3", sampled=with_number(3, -3.4e38, 0.0),
                    prepared=with_marker),
    "table": Cause(workload="diffusion", expected=causes.BAD_STATE, model=unwritten_table),
    "rate": Cause(workload="vae", expected=causes.DIVERGED,
                  settings={"optimizer.name": "sgd", "optimizer.lr": 3.0, "train.clip_norm": 0,
                            "schedule.warmup_steps": 0, "train.max_steps": 30}),
    "units": Cause(workload="radiodiff_vae", expected=causes.SPIKE, sample="7", sampled=with_number(7, 300.0, 1.0),
                   prepared=in_other_units,
                   settings={"guard.capture_spikes": True, "guard.spike_window": 16, "train.max_steps": 40}),
    "warmup": Cause(workload="gpt2", expected=causes.SPIKE,
                    settings={"optimizer.lr": 3.0, "schedule.warmup_steps": 200, "train.clip_norm": 0,
                              "guard.capture_spikes": True, "train.max_steps": 100}),
    "tail": Cause(workload="slotcontrast", expected=causes.KERNEL,
                  model=behind("encoder.output_transform.layers.3", lambda h: row_scale(h, torch.ones(h.shape[-1])))),
    "compiler": Cause(workload="unet", expected=causes.KERNEL, model=compiled_without_clamp),
    "nan_once": Cause(workload="unet", expected=causes.NOT_REPRODUCED, prepared=Once(6, overwritten)),
    "error_once": Cause(workload="resnet50", expected=causes.NOT_REPRODUCED, forwarded=Once(4, hiccup)),
}  # fmt: skip


def kind_of(cause: Cause) -> Kind:
    schema = KINDS[cause.workload].get_schema(cause.workload)
    return Kind(builder=lambda config, store=None: build(cause, config, store), config=schema, takes_channels_last=True)


def __getattr__(name: str) -> Kind:
    if name not in IN_FAMILIES:
        raise AttributeError(name)
    return kind_of(IN_FAMILIES[name])
