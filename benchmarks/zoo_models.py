"""The models of zoo.py: small, and as their libraries build them. Nothing is downloaded.

`MODELS` holds one builder per name. It returns the model, a loss function of one batch, and a function that makes the
batch of a step, on the CPU; what a loop changes between two steps is changed there. Values that a loss function keeps
from step to step are in `model.kept`."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

Built = tuple[Any, Callable[[Any], Any], Callable[[int], Any]]


@dataclass(frozen=True)
class Case:
    package: str
    build: Callable[[], Built]


MODELS: dict[str, Case] = {}


def load(package: str, path: str) -> Any:
    """Return a class or function of a package that may be missing."""
    module, _, name = f"{package}.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


def randint(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def classify(model: Any, size: int = 64, num: int = 4, *, frames: int = 0, is_main_only: bool = False) -> Built:
    """Train a classifier of images, or of clips."""
    shape = (num, 3, *([frames] if frames else []), size, size)

    def loss_fn(batch: Any) -> Tensor:
        out = model(batch[0])
        if is_main_only:
            return F.cross_entropy(out[0], batch[1])
        if isinstance(out, (tuple, list)):  # with auxiliary heads
            return sum(F.cross_entropy(one, batch[1]) for one in out if one is not None)
        return F.cross_entropy(out, batch[1])

    return model, loss_fn, lambda _: (torch.randn(shape), randint(10, num))


# --- torchvision ---


def add_vision(name: str, path: str, finish: Callable[..., Built] = classify, size: int = 64, **options: Any) -> None:
    keywords = options.pop("finish_options", {})

    def build() -> Built:
        return finish(load("torchvision.models", path)(**options), size, **keywords)

    MODELS[f"tv_{name}"] = Case("torchvision", build)


for _name, _size in {
    "alexnet": 64, "vgg11_bn": 32, "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64, "wide_resnet50_2": 64,
    "mobilenet_v2": 64, "mobilenet_v3_small": 64, "mobilenet_v3_large": 64, "shufflenet_v2_x0_5": 64,
    "squeezenet1_1": 64, "mnasnet0_5": 64, "efficientnet_b0": 64, "regnet_y_400mf": 64, "regnet_x_400mf": 64,
}.items():  # fmt: skip
    add_vision(_name, _name, size=_size, num_classes=10)
add_vision("vgg11", "vgg11", size=32, num_classes=10)
add_vision("googlenet", "googlenet", size=96, num_classes=10, init_weights=False)
add_vision(
    "googlenet_main", "googlenet", size=96, num_classes=10, init_weights=False, finish_options={"is_main_only": True}
)
add_vision("inception_v3", "inception_v3", size=96, num_classes=10, aux_logits=False, init_weights=False)
add_vision("densenet", "densenet.DenseNet", num_classes=10, growth_rate=12, block_config=(3, 3, 3, 3))
add_vision(
    "vit", "vision_transformer.VisionTransformer", image_size=64, patch_size=8, num_layers=3, num_heads=4,
    hidden_dim=64, mlp_dim=128, num_classes=10, dropout=0.1,
)  # fmt: skip
_SWIN = {
    "patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4],
    "num_classes": 10,
}  # fmt: skip
add_vision("swin", "swin_transformer.SwinTransformer", **_SWIN)
add_vision(
    "maxvit", "maxvit.MaxVit", input_size=(64, 64), stem_channels=16, partition_size=4, block_channels=[16, 32],
    block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.1, num_classes=10,
)  # fmt: skip


def build_convnext() -> Built:
    block = load("torchvision.models", "convnext.CNBlockConfig")
    settings = [block(24, 48, 2), block(48, 96, 2), block(96, None, 2)]
    return classify(
        load("torchvision.models", "convnext.ConvNeXt")(settings, stochastic_depth_prob=0.1, num_classes=10)
    )


def build_swin_v2() -> Built:
    module = importlib.import_module("torchvision.models.swin_transformer")
    merging = {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    return classify(module.SwinTransformer(**_SWIN, **merging))


MODELS["tv_convnext"] = Case("torchvision", build_convnext)
MODELS["tv_swin_v2"] = Case("torchvision", build_swin_v2)


def segment(model: Any, size: int) -> Built:
    def loss_fn(batch: Any) -> Tensor:
        return sum(F.cross_entropy(out, batch[1]) for out in model(batch[0]).values())

    return model, loss_fn, lambda _: (torch.randn(2, 3, size, size), randint(5, 2, size, size))


_NO_WEIGHTS = {"weights": None, "weights_backbone": None}
for _name in ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
    _options = {} if _name.startswith("lraspp") else {"aux_loss": True}
    add_vision(
        _name.replace("_v3_large", ""), f"segmentation.{_name}", segment, 64, num_classes=5, **_NO_WEIGHTS, **_options
    )


def detect(model: Any, size: int, *, masks: bool = False, keypoints: bool = False) -> Built:
    def loss_fn(batch: Any) -> Tensor:
        images, boxes, labels = batch
        targets: list[dict[str, Tensor]] = []
        for own, label in zip(boxes, labels, strict=True):
            targets.append({"boxes": own, "labels": label})
            if masks:
                targets[-1]["masks"] = torch.ones(len(own), size, size, dtype=torch.uint8, device=own.device)
            if keypoints:
                centre = torch.cat([(own[:, :2] + own[:, 2:]) / 2, torch.ones_like(own[:, :1])], 1)
                targets[-1]["keypoints"] = centre[:, None].expand(-1, 17, -1)
        return sum(model(list(images), targets).values())

    def make_batch(_: int) -> Any:
        corner = torch.rand(2, 2, 2) * size / 2
        return torch.rand(2, 3, size, size), torch.cat([corner, corner + size / 3], -1), 1 + randint(2, 2, 2)

    return model, loss_fn, make_batch


_SMALL = {"min_size": 128, "max_size": 128, "num_classes": 3, **_NO_WEIGHTS}
for _name, _path in {
    "retinanet": "retinanet_resnet50_fpn", "fcos": "fcos_resnet50_fpn", "faster_rcnn": "fasterrcnn_resnet50_fpn",
    "faster_rcnn_mobilenet": "fasterrcnn_mobilenet_v3_large_320_fpn",
}.items():  # fmt: skip
    add_vision(_name, f"detection.{_path}", detect, 128, **_SMALL)
add_vision("mask_rcnn", "detection.maskrcnn_resnet50_fpn", detect, 128, **_SMALL, finish_options={"masks": True})
add_vision(
    "keypoint_rcnn", "detection.keypointrcnn_resnet50_fpn", detect, 128, **{**_SMALL, "num_classes": 2},
    finish_options={"keypoints": True},
)  # fmt: skip
add_vision("ssdlite", "detection.ssdlite320_mobilenet_v3_large", detect, 320, num_classes=3, **_NO_WEIGHTS)
add_vision("ssd300", "detection.ssd300_vgg16", detect, 300, num_classes=3, **_NO_WEIGHTS)
for _name in ("r3d_18", "mc3_18", "r2plus1d_18"):
    add_vision(_name, f"video.{_name}", size=32, num_classes=10, finish_options={"frames": 8, "num": 2})
add_vision("s3d", "video.s3d", size=224, num_classes=10, finish_options={"frames": 16, "num": 2})
add_vision(
    "swin3d", "video.swin_transformer.SwinTransformer3d", size=32, patch_size=[2, 4, 4], embed_dim=24, depths=[1, 1],
    num_heads=[2, 4], window_size=[4, 4, 4], num_classes=10, finish_options={"frames": 8, "num": 2},
)  # fmt: skip


def estimate_flow(model: Any, size: int) -> Built:
    def loss_fn(batch: Any) -> Tensor:
        flows = model(batch[0], batch[1], num_flow_updates=3)
        return sum(0.8 ** (2 - i) * (flow - batch[2]).abs().mean() for i, flow in enumerate(flows))

    return (
        model,
        loss_fn,
        lambda _: (torch.rand(1, 3, size, size), torch.rand(1, 3, size, size), torch.randn(1, 2, size, size)),
    )


add_vision("raft_small", "optical_flow.raft_small", estimate_flow, 128)


# --- transformers ---

_SIZES = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2}
_SPEC = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TWO_STACKS = {
    "vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 128,
    **_SPEC, "decoder_start_token_id": 2,
}  # fmt: skip


def tokens(num: int = 4, length: int = 32, *, is_causal: bool = False) -> Callable[[int], Any]:
    """Return input_ids and labels; of a causal model the labels are the inputs."""

    def make(_: int) -> Any:
        ids = 3 + randint(253, num, length)
        labels = ids if is_causal else torch.where(torch.rand(num, length) < 0.3, ids, -100)
        return {"input_ids": ids, "labels": labels}

    return make


def pairs(_: int) -> Any:
    return {"input_ids": 3 + randint(253, 4, 32), "labels": 3 + randint(253, 4, 16)}


def pixels(size: int = 32, **labels: Any) -> Callable[[int], Any]:
    return lambda _: {"pixel_values": torch.randn(4, 3, size, size), "labels": randint(2, 4)}


def waves(key: str, shape: tuple[int, ...], labels: tuple[int, ...] = ()) -> Callable[[int], Any]:
    """Return sounds or spectra, with one class each, or with a sequence of tokens."""
    return lambda _: {key: torch.randn(shape), "labels": 3 + randint(20, *labels) if labels else randint(2, shape[0])}


def add_transformer(name: str, config: str, head: str, make_batch: Callable[[int], Any], **options: Any) -> None:
    def build() -> Built:
        model = load("transformers", head)(load("transformers", config)(**options))
        return model, lambda batch: model(**batch).loss, make_batch

    MODELS[f"hf_{name}"] = Case("transformers", build)


def add_causal(name: str, prefix: str, *, head: str = "ForCausalLM", sizes: Any = _SIZES, **options: Any) -> None:
    add_transformer(name, f"{prefix}Config", prefix + head, tokens(is_causal=True), **{**sizes, **options})


def add_masked(name: str, prefix: str, *, head: str = "ForMaskedLM", sizes: Any = _SIZES, **options: Any) -> None:
    add_transformer(name, f"{prefix}Config", prefix + head, tokens(), **{**sizes, **options})


_GPT = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, **_SPEC}
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": True}
add_causal("gpt2", "GPT2", head="LMHeadModel", sizes=_GPT)
add_causal(
    "gpt_neo", "GPTNeo",
    sizes={**_SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
)  # fmt: skip
add_causal("gptj", "GPTJ", sizes=_GPT, rotary_dim=8)
add_causal("opt", "OPT", ffn_dim=128, word_embed_proj_dim=64)
add_causal("bloom", "Bloom", sizes={"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4, **_SPEC})
add_causal("codegen", "CodeGen", sizes=_GPT, rotary_dim=8)
for _name, _prefix in {
    "llama": "Llama", "qwen2": "Qwen2", "phi3": "Phi3", "stablelm": "StableLm", "starcoder2": "Starcoder2", "cohere":
    "Cohere", "olmo": "Olmo", "olmo2": "Olmo2", "granite": "Granite", "nemotron": "Nemotron", "smollm3": "SmolLM3",
}.items():  # fmt: skip
    add_causal(_name, _prefix, **_GROUPED)
for _name, _prefix in {
    "gpt_neox": "GPTNeoX", "phi": "Phi", "falcon": "Falcon", "persimmon": "Persimmon", "biogpt": "BioGpt",
}.items():  # fmt: skip
    add_causal(_name, _prefix)
add_causal("mistral", "Mistral", sliding_window=16, **_GROUPED)
add_causal("mixtral", "Mixtral", **_GROUPED, **_MOE)
add_causal("qwen3", "Qwen3", head_dim=16, **_GROUPED)
add_causal(
    "qwen2_moe", "Qwen2Moe", **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
    shared_expert_intermediate_size=64, output_router_logits=True,
)  # fmt: skip
add_causal("gemma", "Gemma", head_dim=16, **_GROUPED)
add_causal("gemma2", "Gemma2", head_dim=16, sliding_window=16, **_GROUPED)
add_causal("mpt", "Mpt", sizes={"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128})
add_causal("glm", "Glm", head_dim=16, **_GROUPED)
add_causal(
    "mamba", "Mamba", sizes={"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, **_SPEC},
)  # fmt: skip
add_causal(
    "xglm", "XGLM",
    sizes={"vocab_size": 256, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 128, **_SPEC},
)  # fmt: skip
add_causal(
    "ctrl", "CTRL", head="LMHeadModel",
    sizes={"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 128, "n_positions": 128},
)  # fmt: skip
add_masked("bert", "Bert")
add_masked("roberta", "Roberta", max_position_embeddings=130)
add_masked("xlm_roberta", "XLMRoberta", max_position_embeddings=130)
add_masked(
    "distilbert", "DistilBert",
    sizes={"vocab_size": 256, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, **_SPEC},
)  # fmt: skip
add_masked("albert", "Albert", embedding_size=32)
add_masked("electra", "Electra", embedding_size=32)
add_masked("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"])
add_masked("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16)
add_masked("mobilebert", "MobileBert", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32)
add_masked(
    "funnel", "Funnel",
    sizes={"vocab_size": 256, "block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, **_SPEC},
)  # fmt: skip
add_masked("longformer", "Longformer", attention_window=8, max_position_embeddings=130)
add_masked("big_bird", "BigBird", attention_type="original_full")
add_masked("fnet", "FNet")
add_masked("nystromformer", "Nystromformer", num_landmarks=8, segment_means_seq_len=32)
add_masked("roformer", "RoFormer", embedding_size=64)
add_masked("convbert", "ConvBert", embedding_size=32, head_ratio=2)
add_masked("modernbert", "ModernBert", global_attn_every_n_layers=2, local_attention=16)
add_masked("mpnet", "MPNet", max_position_embeddings=130)
add_masked("layoutlm", "LayoutLM")
add_masked("esm", "Esm", max_position_embeddings=130, mask_token_id=3, position_embedding_type="rotary")
add_masked("ernie", "Ernie", use_task_id=True, task_type_vocab_size=3)
add_masked(
    "xlm", "XLM", head="WithLMHeadModel",
    sizes={"vocab_size": 256, "emb_dim": 64, "n_layers": 2, "n_heads": 4, **_SPEC},
)  # fmt: skip
add_masked(
    "xlnet", "XLNet", head="LMHeadModel",
    sizes={"vocab_size": 256, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, **_SPEC},
)  # fmt: skip
add_masked(
    "perceiver", "Perceiver", max_position_embeddings=32, num_latents=16, d_latents=64, d_model=64, num_blocks=1,
    num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4,
)  # fmt: skip

_T5 = {
    "vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
_COND = "ForConditionalGeneration"
for _name, _prefix in {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "longt5": "LongT5"}.items():
    add_transformer(_name, f"{_prefix}Config", _prefix + _COND, pairs, **_T5)
add_transformer(
    "switch", "SwitchTransformersConfig", "SwitchTransformers" + _COND, pairs, **_T5, num_experts=4,
    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_decoder_layers=2,
)  # fmt: skip
for _name, _prefix in {
    "bart": "Bart", "mbart": "MBart", "pegasus": "Pegasus", "blenderbot": "Blenderbot", "m2m_100": "M2M100", "plbart":
    "PLBart",
}.items():  # fmt: skip
    add_transformer(_name, f"{_prefix}Config", _prefix + _COND, pairs, **_TWO_STACKS)
add_transformer("marian", "MarianConfig", "MarianMTModel", pairs, **_TWO_STACKS)
add_transformer(
    "led", "LEDConfig", "LED" + _COND, pairs, **_TWO_STACKS, attention_window=8, max_encoder_position_embeddings=64,
    max_decoder_position_embeddings=64,
)  # fmt: skip
add_transformer(
    "prophetnet", "ProphetNetConfig", "ProphetNet" + _COND, pairs, vocab_size=256, hidden_size=64,
    num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
    encoder_ffn_dim=128, decoder_ffn_dim=128, ngram=2, **_SPEC, decoder_start_token_id=2,
)  # fmt: skip

_IMAGE = {
    "image_size": 32, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128,
}  # fmt: skip
_STAGES = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 2}
_LARGE = ("segformer", "pvt", "poolformer", "mobilevit", "hiera", "mobilenet_v1", "mobilenet_v2")  # images of 64 pixels
for _name, _prefix, _options in (
    ("vit", "ViT", _IMAGE), ("deit", "DeiT", _IMAGE), ("beit", "Beit", {**_IMAGE, "use_relative_position_bias": True}),
    ("dinov2", "Dinov2", _IMAGE), ("data2vec_vision", "Data2VecVision", _IMAGE), ("vit_msn", "ViTMSN", _IMAGE),
    ("ijepa", "IJepa", _IMAGE), ("swin", "Swin", _STAGES), ("swinv2", "Swinv2", _STAGES),
    ("convnext", "ConvNext", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
    ("convnextv2", "ConvNextV2", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
    ("resnet", "ResNet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    ("regnet", "RegNet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8}),
    ("bit", "Bit", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4}),
    ("mobilenet_v1", "MobileNetV1", {"depth_multiplier": 0.25}), ("mobilenet_v2", "MobileNetV2", {"depth_multiplier":
        0.25}),
    ("segformer", "Segformer", {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16}),
    ("pvt", "Pvt", {"image_size": 64, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads":
        [1, 2, 2, 4]}),
    ("poolformer", "PoolFormer", {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}),
    ("mobilevit", "MobileViT", {"image_size": 64, "hidden_sizes": [16, 16, 32], "neck_hidden_sizes": [8, 8, 8, 16, 16,
        16, 32]}),
    ("focalnet", "FocalNet", {"embed_dim": 16, "depths": [1, 1], "image_size": 32, "patch_size": 2, "focal_levels":
        [1, 1], "focal_windows": [3, 3]}),
    ("hiera", "Hiera", {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 2, 4],
        "patch_kernel": [7, 7], "patch_stride": [4, 4], "masked_unit_size": [4, 4], "num_query_pool": 2}),
):  # fmt: skip
    _size = 64 if _name in _LARGE else 32
    add_transformer(
        _name, f"{_prefix}Config", f"{_prefix}ForImageClassification", pixels(_size), **_options, num_labels=2
    )
add_transformer(
    "vit_mae", "ViTMAEConfig", "ViTMAEForPreTraining", lambda _: {"pixel_values": torch.randn(4, 3, 32, 32)}, **_IMAGE,
    decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=64,
)  # fmt: skip
add_transformer(
    "videomae", "VideoMAEConfig", "VideoMAEForVideoClassification",
    lambda _: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": randint(2, 2)}, **_IMAGE, num_frames=4,
    num_labels=2,
)  # fmt: skip
add_transformer(
    "timesformer", "TimesformerConfig", "TimesformerForVideoClassification",
    lambda _: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": randint(2, 2)}, **_IMAGE, num_frames=4,
    num_labels=2,
)  # fmt: skip

_SOUND = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "pad_token_id": 0,
    "classifier_proj_size": 32, "ctc_zero_infinity": True,
}  # fmt: skip
_LONG = waves("input_values", (2, 4000))
for _name, _prefix in {"wav2vec2": "Wav2Vec2", "hubert": "Hubert", "wavlm": "WavLM", "unispeech": "UniSpeech"}.items():
    add_transformer(_name, f"{_prefix}Config", f"{_prefix}ForSequenceClassification", _LONG, **_SOUND)
add_transformer("wav2vec2_ctc", "Wav2Vec2Config", "Wav2Vec2ForCTC", waves("input_values", (2, 4000), (2, 8)), **_SOUND)
add_transformer("sew", "SEWConfig", "SEWForSequenceClassification", _LONG, **{**_SOUND, "squeeze_factor": 2})
add_transformer(
    "data2vec_audio", "Data2VecAudioConfig", "Data2VecAudioForSequenceClassification", _LONG,
    **{**_SOUND, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 7},
)  # fmt: skip
add_transformer(
    "ast", "ASTConfig", "ASTForAudioClassification", waves("input_values", (2, 64, 32)), hidden_size=64,
    num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, patch_size=8, max_length=64, num_mel_bins=32,
    frequency_stride=8, time_stride=8,
)  # fmt: skip
add_transformer(
    "whisper", "WhisperConfig", "WhisperForConditionalGeneration", waves("input_features", (2, 16, 64), (2, 12)),
    **{**_TWO_STACKS, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
)  # fmt: skip
add_transformer(
    "speech_to_text", "Speech2TextConfig", "Speech2TextForConditionalGeneration",
    waves("input_features", (2, 64, 16), (2, 12)),
    **{
        **_TWO_STACKS, "input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64,
        "max_target_positions": 64,
    },
)  # fmt: skip


def matched(_: int) -> Any:
    return {"input_ids": 3 + randint(250, 4, 16), "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


_BOTH = {
    "text_config": {**_SIZES, "projection_dim": 32}, "vision_config": {**_IMAGE, "projection_dim": 32},
    "projection_dim": 32,
}  # fmt: skip
add_transformer("clip", "CLIPConfig", "CLIPModel", matched, **_BOTH)
add_transformer("siglip", "SiglipConfig", "SiglipModel", matched, text_config=_SIZES, vision_config=_IMAGE)
add_transformer("chinese_clip", "ChineseCLIPConfig", "ChineseCLIPModel", matched, **_BOTH)
add_transformer(
    "altclip", "AltCLIPConfig", "AltCLIPModel", matched,
    **{**_BOTH, "text_config": {**_SIZES, "max_position_embeddings": 130, "project_dim": 32}},
)  # fmt: skip
add_transformer(
    "git", "GitConfig", "GitForCausalLM",
    lambda _: {**tokens(4, 16, is_causal=True)(0), "pixel_values": torch.randn(4, 3, 32, 32)}, **_SIZES,
    vision_config=_IMAGE,
)  # fmt: skip
add_transformer(
    "vilt", "ViltConfig", "ViltForImagesAndTextClassification",
    lambda _: {"input_ids": randint(250, 4, 16), "pixel_values": torch.randn(4, 1, 3, 32, 32), "labels": randint(2, 4)},
    **{**_SIZES, **_IMAGE}, num_images=1, max_image_length=-1, num_labels=2, modality_type_vocab_size=2,
)  # fmt: skip
add_transformer(
    "visual_bert", "VisualBertConfig", "VisualBertForPreTraining",
    lambda _: {
        "input_ids": randint(250, 4, 16), "visual_embeds": torch.randn(4, 4, 32), "attention_mask": torch.ones(4, 16),
        "visual_attention_mask": torch.ones(4, 4), "labels": randint(250, 4, 20),
    },
    **_SIZES, visual_embedding_dim=32,
)  # fmt: skip
add_transformer(
    "lxmert", "LxmertConfig", "LxmertForQuestionAnswering",
    lambda _: {
        "input_ids": randint(250, 4, 16), "visual_feats": torch.randn(4, 4, 32), "visual_pos": torch.rand(4, 4, 4),
        "labels": randint(5, 4),
    },
    **_SIZES, visual_feat_dim=32, l_layers=1, x_layers=1, r_layers=1, num_qa_labels=5,
)  # fmt: skip
add_transformer(
    "time_series", "TimeSeriesTransformerConfig", "TimeSeriesTransformerForPrediction",
    lambda _: {
        "past_values": torch.randn(4, 24), "past_time_features": torch.randn(4, 24, 2),
        "past_observed_mask": torch.ones(4, 24), "future_values": torch.randn(4, 8),
        "future_time_features": torch.randn(4, 8, 2),
    },
    prediction_length=8, context_length=16, lags_sequence=[1, 2, 8], num_time_features=2, d_model=16, encoder_layers=1,
    decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
)  # fmt: skip
add_transformer(
    "patchtst", "PatchTSTConfig", "PatchTSTForPrediction",
    lambda _: {"past_values": torch.randn(4, 32, 3), "future_values": torch.randn(4, 8, 3)}, num_input_channels=3,
    context_length=32, prediction_length=8, patch_length=8, patch_stride=8, d_model=32, num_hidden_layers=2,
    num_attention_heads=4, ffn_dim=64,
)  # fmt: skip


# --- diffusers ---


def add_diffuser(
    name: str, head: str, shape: tuple[int, ...], extra: Callable[[int], Any] = lambda num: {}, **options: Any
) -> None:
    """Train a network to find the noise in a sample."""

    def build() -> Built:
        model = load("diffusers", head)(**options)

        def loss_fn(batch: Any) -> Tensor:
            weight = batch["timestep"].view(-1, *[1] * (len(shape) - 1)) / 1000
            noisy = (1 - weight) * batch["sample"] + weight * batch["noise"]
            out = model(noisy, timestep=batch["timestep"], **batch["extra"]).sample
            out = out[:, : shape[1]] if out.shape[1] != shape[1] else out  # without the learned variance
            return F.mse_loss(out.float(), batch["noise"])

        def make_batch(_: int) -> Any:
            sample = {"sample": torch.randn(shape), "noise": torch.randn(shape), "timestep": randint(1000, shape[0])}
            return {**sample, "extra": extra(shape[0])}

        return model, loss_fn, make_batch

    MODELS[f"df_{name}"] = Case("diffusers", build)


_TWO_BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
_COND_UNET = {
    **_TWO_BLOCKS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "attention_head_dim": 8,
    "sample_size": 16, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip


def add_words(num: int) -> Any:
    return {"encoder_hidden_states": torch.randn(num, 8, 32)}


add_diffuser(
    "unet2d", "UNet2DModel", (4, 3, 32, 32), **_TWO_BLOCKS, sample_size=32, attention_head_dim=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
add_diffuser("unet2d_condition", "UNet2DConditionModel", (2, 4, 16, 16), add_words, **_COND_UNET)
add_diffuser(
    "unet3d_condition", "UNet3DConditionModel", (1, 4, 4, 16, 16), add_words,
    **{
        **_COND_UNET, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    },
)  # fmt: skip
add_diffuser(
    "unet1d", "UNet1DModel", (4, 14, 16), in_channels=14, out_channels=14, block_out_channels=(16, 32),
    norm_num_groups=8, down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
    up_block_types=("UpResnetBlock1D",), mid_block_type="MidResTemporalBlock1D", out_block_type="OutConv1DBlock",
    use_timestep_embedding=True, time_embedding_type="positional", act_fn="swish", layers_per_block=1,
    flip_sin_to_cos=False, freq_shift=1,
)  # fmt: skip
_DIT = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
add_diffuser(
    "dit", "DiTTransformer2DModel", (4, 4, 8, 8), lambda num: {"class_labels": randint(10, num)}, **_DIT,
    in_channels=4, out_channels=8, num_embeds_ada_norm=10,
)  # fmt: skip
add_diffuser(
    "pixart", "PixArtTransformer2DModel", (2, 4, 8, 8),
    lambda num: {**add_words(num), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}, **_DIT,
    in_channels=4, out_channels=8, cross_attention_dim=32, caption_channels=32,
)  # fmt: skip
add_diffuser(
    "sd3", "SD3Transformer2DModel", (2, 4, 8, 8),
    lambda num: {**add_words(num), "pooled_projections": torch.randn(num, 64)}, **_DIT, in_channels=4, out_channels=4,
    joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, pos_embed_max_size=8,
)  # fmt: skip
add_diffuser(
    "flux", "FluxTransformer2DModel", (2, 16, 16),
    lambda num: {
        "encoder_hidden_states": torch.randn(num, 8, 32), "pooled_projections": torch.randn(num, 32),
        "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(8, 3),
    },
    patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
    joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
)  # fmt: skip
add_diffuser(
    "sana", "SanaTransformer2DModel", (2, 4, 8, 8), add_words, in_channels=4, out_channels=4, num_layers=1,
    num_attention_heads=2, attention_head_dim=16, num_cross_attention_heads=2, cross_attention_head_dim=16,
    cross_attention_dim=32, caption_channels=32, sample_size=8,
)  # fmt: skip
add_diffuser(
    "aura_flow", "AuraFlowTransformer2DModel", (2, 4, 8, 8), add_words, sample_size=8, patch_size=2, in_channels=4,
    out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=4,
    caption_projection_dim=32, joint_attention_dim=32, pos_embed_max_size=16,
)  # fmt: skip
add_diffuser(
    "latte", "LatteTransformer3DModel", (1, 4, 2, 8, 8), add_words, sample_size=8, num_layers=1, patch_size=2,
    attention_head_dim=8, num_attention_heads=4, caption_channels=32, in_channels=4, out_channels=8,
    cross_attention_dim=32, num_embeds_ada_norm=1000, norm_type="ada_norm_single", attention_bias=True,
    norm_elementwise_affine=False, norm_eps=1e-06, video_length=2,
)  # fmt: skip
add_diffuser(
    "cogvideox", "CogVideoXTransformer3DModel", (1, 2, 4, 8, 8), add_words, num_attention_heads=2,
    attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, num_layers=2,
    sample_width=8, sample_height=8, sample_frames=5, patch_size=2, temporal_compression_ratio=4,
    max_text_seq_length=8,
)  # fmt: skip


def add_autoencoder(name: str, head: str, **options: Any) -> None:
    def build() -> Built:
        model = load("diffusers", head)(**options)

        def loss_fn(image: Tensor) -> Tensor:
            if name == "kl":
                posterior = model.encode(image).latent_dist
                return F.mse_loss(model.decode(posterior.sample()).sample, image) + 1e-4 * posterior.kl().mean()
            out = model(image)
            return F.mse_loss(out.sample, image) + (out.commit_loss if name == "vq_model" else 0)

        return model, loss_fn, lambda _: torch.rand(2, 3, 32, 32)

    MODELS[f"df_{name}"] = Case("diffusers", build)


_CODED = {**_TWO_BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
add_autoencoder("kl", "AutoencoderKL", **_CODED, latent_channels=4)
add_autoencoder("vq_model", "VQModel", **_CODED, num_vq_embeddings=32, latent_channels=3)
add_autoencoder(
    "tiny", "AutoencoderTiny", encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
    num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1),
)  # fmt: skip


def build_controlnet() -> Built:
    keywords = {
        key: value for key, value in _COND_UNET.items() if key not in ("up_block_types", "out_channels", "sample_size")
    }
    unet = load("diffusers", "UNet2DConditionModel")(**_COND_UNET).requires_grad_(False)
    control = load("diffusers", "ControlNetModel")(**keywords, conditioning_embedding_out_channels=(8, 16))
    model = nn.ModuleDict({"unet": unet, "control": control})

    def loss_fn(batch: Any) -> Tensor:
        noisy, noise, words, hint, timestep = batch
        down, middle = control(noisy, timestep, words, hint, return_dict=False)
        out = unet(noisy, timestep, words, down_block_additional_residuals=down, mid_block_additional_residual=middle)
        return F.mse_loss(out.sample, noise)

    def make_batch(_: int) -> Any:
        sample = torch.randn(2, 4, 16, 16), torch.randn(2, 4, 16, 16)
        return *sample, torch.randn(2, 8, 32), torch.rand(2, 3, 32, 32), randint(1000, 2)

    return model, loss_fn, make_batch


MODELS["df_controlnet"] = Case("diffusers", build_controlnet)


# --- timm ---


def add_timm(name: str, size: int = 64, **options: Any) -> None:
    title, _, path = name.rpartition("=")

    def build() -> Built:
        return classify(load("timm", "create_model")(path, pretrained=False, num_classes=10, **options), size)

    MODELS[f"timm_{title or path}"] = Case("timm", build)


for _name in (
    "resnet=resnet10t", "resnet26d", "resnest=resnest14d", "skresnet18", "seresnext=legacy_seresnext26_32x4d",
    "nfnet=test_nfnet",
    "convnext=convnext_atto", "convnextv2=test_convnext2", "efficientnet=test_efficientnet",
    "mobilenetv4=mobilenetv4_conv_small_035", "efficientvit=efficientvit_b0", "repvgg=repvgg_a0",
    "ghostnet=ghostnet_050",
    "lcnet=lcnet_035", "tinynet=tinynet_e", "mobileone=mobileone_s0", "mobilevit=mobilevit_xxs",
    "mobilevitv2=mobilevitv2_050",
    "edgenext=edgenext_xx_small", "dla=dla46x_c", "selecsls=selecsls42", "vovnet=ese_vovnet19b_slim_dw",
    "starnet=starnet_s1",
    "hgnet=hgnetv2_b0", "fastvit=fastvit_t8", "repvit=repvit_m0_9", "mambaout=test_mambaout", "byobnet=test_byobnet",
    "inception_next=inception_next_atto", "pvt=pvt_v2_b0",
):  # fmt: skip
    add_timm(_name)
add_timm("vit=vit_tiny_patch16_224", img_size=64, depth=2)
add_timm("deit3=deit3_small_patch16_224", img_size=64, depth=2, embed_dim=96, num_heads=3, drop_path_rate=0.1)
add_timm("eva02=eva02_tiny_patch14_224", 56, img_size=56, depth=2)
add_timm("beit=beit_base_patch16_224", img_size=64, depth=2, embed_dim=96, num_heads=3)
add_timm("cait=cait_xxs24_224", img_size=64, depth=2)
add_timm("xcit=xcit_nano_12_p16_224", img_size=64, depth=2)
add_timm("levit=levit_128s", img_size=224, size=224)
add_timm("swin=swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 4))
add_timm("twins=twins_svt_small", embed_dims=(16, 32, 32, 64), num_heads=(1, 2, 2, 4), depths=(1, 1, 1, 1), img_size=64)


def build_mixer(kind: str) -> Built:
    module = importlib.import_module("timm.models.mlp_mixer")
    options = {
        "mixer": {}, "gmlp": {"mlp_ratio": 4, "block_layer": module.SpatialGatingBlock, "mlp_layer": module.GatedMlp},
        "resmlp": {"mlp_ratio": 4, "block_layer": module.ResBlock, "norm_layer": module.Affine},
    }[kind]  # fmt: skip
    return classify(module.MlpMixer(10, img_size=64, patch_size=16, num_blocks=2, embed_dim=96, **options))


for _kind in ("mixer", "gmlp", "resmlp"):
    MODELS[f"timm_{_kind}"] = Case("timm", functools.partial(build_mixer, _kind))
MODELS["timm_convmixer"] = Case(
    "timm", lambda: classify(load("timm", "models.convmixer.ConvMixer")(64, 2, num_classes=10))
)


# --- written here: what people do in their own loops ---


def classic(build: Callable[[], Built]) -> Callable[[], Built]:
    MODELS[f"own_{build.__name__}"] = Case("own", build)
    return build


def dense(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


def vectors(num: int = 32, size: int = 16, num_classes: int = 10) -> Callable[[int], Any]:
    return lambda _: (torch.randn(num, size), randint(num_classes, num))


def train_classes(model: Any, make_batch: Callable[[int], Any]) -> Built:
    return model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), make_batch


class Parts(nn.Module):
    """Modules of one step under their names; a loss function uses them one by one."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}
        for name, part in parts.items():
            self.add_module(name, part)

    def __getattr__(self, name: str) -> Any:  # types: every part is one of the given modules
        return super().__getattr__(name)


@classic
def mlp() -> Built:
    return train_classes(
        nn.Sequential(dense(16, 64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 10)), vectors()
    )


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cells: Any = getattr(nn, kind)(16, 32, 2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0].mean(1))


def build_recurrent(kind: str) -> Built:
    return train_classes(Recurrent(kind), lambda _: (torch.randn(8, 12, 16), randint(10, 8)))


for _kind in ("RNN", "LSTM", "GRU"):
    MODELS[f"own_{_kind.lower()}"] = Case("own", functools.partial(build_recurrent, _kind))


@classic
def lstm_cell() -> Built:
    model = Parts(cell=nn.LSTMCell(16, 32), head=nn.Linear(32, 10))

    def loss_fn(batch: Any) -> Tensor:
        h, c = torch.zeros(2, 8, 32, device=batch[0].device)
        for x in batch[0].unbind(1):
            h, c = model.cell(x, (h, c))
        return F.cross_entropy(model.head(h), batch[1])

    return model, loss_fn, lambda _: (torch.randn(8, 6, 16), randint(10, 8))


@classic
def char_transformer() -> Built:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    model = Parts(
        embed=nn.Embedding(64, 32),
        layers=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(32, 64),
    )

    def loss_fn(ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1] - 1, device=ids.device)
        out = model.head(model.layers(model.embed(ids[:, :-1]), mask, is_causal=True))
        return F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())

    return model, loss_fn, lambda _: randint(64, 8, 33)


def aggregate(x: Tensor, edges: Tensor, *, way: str) -> Tensor:
    source, target = edges
    if way == "index_add":
        return torch.zeros_like(x).index_add(0, target, x[source])
    if way == "scatter":
        return x.new_zeros(x.shape).scatter_reduce(
            0, target[:, None].expand(-1, x.shape[1]), x[source], "mean", include_self=False
        )
    return torch.segment_reduce(x[source], "sum", lengths=torch.bincount(target, minlength=len(x)))


def build_graph_net(way: str) -> Built:
    model = Parts(one=nn.Linear(16, 32), two=nn.Linear(32, 5))

    def loss_fn(batch: Any) -> Tensor:
        x, edges, labels = batch
        h = F.relu(aggregate(model.one(x), edges, way=way))
        return F.cross_entropy(aggregate(model.two(h), edges, way=way), labels)

    return model, loss_fn, lambda _: (torch.randn(40, 16), randint(40, 2, 160), randint(5, 40))


MODELS["own_gnn"] = Case("own", functools.partial(build_graph_net, "index_add"))
MODELS["own_gnn_scatter"] = Case("own", functools.partial(build_graph_net, "scatter"))


@classic
def gat() -> Built:
    """Attention over the edges of a graph, normalised per target."""
    model = Parts(value=nn.Linear(16, 16), score=nn.Linear(32, 1), head=nn.Linear(16, 5))

    def loss_fn(batch: Any) -> Tensor:
        x, (source, target), labels = batch
        h = model.value(x)
        weight = F.leaky_relu(model.score(torch.cat([h[source], h[target]], 1)), 0.2).exp()
        total = torch.zeros(40, 1, device=x.device, dtype=weight.dtype).index_add_(0, target, weight)
        out = torch.zeros(40, 16, device=x.device, dtype=weight.dtype).index_add_(0, target, weight * h[source])
        return F.cross_entropy(model.head(out / (total + 1e-6)), labels)

    return model, loss_fn, lambda _: (torch.randn(40, 16), randint(40, 2, 160), randint(5, 40))


@classic
def gan_generator() -> Built:
    """The generator's step, against a critic that is fixed."""
    maker = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    critic = dense(16, 32, 1, act=nn.SiLU).requires_grad_(False)
    model = Parts(maker=maker, critic=critic)
    return (
        model,
        lambda z: F.softplus(-critic(maker(z + 0.1 * torch.randn_like(z)))).mean(),
        lambda _: torch.randn(32, 8),
    )


@classic
def gan_together() -> Built:
    """Generator and critic in one loss, with a reversed gradient."""
    model = Parts(maker=dense(8, 64, 16), critic=dense(16, 32, 1))

    def loss_fn(batch: Any) -> Tensor:
        fake = model.maker(batch[1])
        critic = F.softplus(-model.critic(batch[0])).mean() + F.softplus(model.critic(fake.detach())).mean()
        fixed = {name: weight.detach() for name, weight in model.critic.named_parameters()}
        return critic + F.softplus(-torch.func.functional_call(model.critic, fixed, (fake,))).mean()

    return model, loss_fn, lambda _: (torch.randn(32, 16), torch.randn(32, 8))


@classic
def gradient_penalty() -> Built:
    model = dense(16, 32, 1, act=nn.SiLU)

    def loss_fn(batch: Any) -> Tensor:
        mix = (0.3 * batch[0] + 0.7 * batch[1]).requires_grad_()
        (slope,) = torch.autograd.grad(model(mix).sum(), mix, create_graph=True)
        return model(batch[1]).mean() - model(batch[0]).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return model, loss_fn, lambda _: (torch.randn(32, 16), torch.randn(32, 16))


@classic
def vae() -> Built:
    model = Parts(encode=dense(64, 64, 16), decode=dense(8, 64, 64))

    def loss_fn(x: Tensor) -> Tensor:
        mean, log_variance = model.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(model.decode(z), x, reduction="sum") / len(x) + kl

    return model, loss_fn, lambda _: torch.rand(32, 64)


@classic
def realnvp() -> Built:
    model = nn.ModuleList(dense(4, 32, 8, act=nn.Tanh) for _ in range(4))

    def loss_fn(x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for layer in model:
            fixed, moved = x.chunk(2, -1)
            log_scale, shift = layer(fixed).chunk(2, -1)
            log_scale = log_scale.tanh()
            x, total = torch.cat([moved * log_scale.exp() + shift, fixed], -1), total + log_scale.sum(-1)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1) + total).mean()

    return model, loss_fn, lambda _: torch.randn(64, 8)


@classic
def pinn() -> Built:
    """Poisson's equation, with second derivatives from torch.autograd.grad."""
    model = dense(2, 32, 32, 1, act=nn.Tanh)

    def loss_fn(points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        u = model(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        second = [torch.autograd.grad(first[:, i].sum(), points, create_graph=True)[0][:, i] for i in range(2)]
        return (second[0] + second[1] + 1).square().mean() + model(points.round()).square().mean()

    return model, loss_fn, lambda _: torch.rand(64, 2)


@classic
def pinn_func() -> Built:
    """The same with torch.func."""
    model = dense(2, 32, 32, 1, act=nn.Tanh)

    def loss_fn(points: Tensor) -> Tensor:
        def read(point: Tensor) -> Tensor:
            return model(point).squeeze(-1)

        curvature = torch.func.vmap(torch.func.hessian(read))(points)
        return (curvature.diagonal(dim1=-2, dim2=-1).sum(-1) + 1).square().mean()

    return model, loss_fn, lambda _: torch.rand(32, 2)


@classic
def nerf() -> Built:
    model = dense(3 * 9, 64, 64, 4)

    def loss_fn(batch: Any) -> Tensor:
        origin, direction, colour = batch
        depth = torch.linspace(0.1, 2.0, 24, device=origin.device) + 0.05 * torch.rand(
            len(origin), 24, device=origin.device
        )
        points = origin[:, None] + depth[..., None] * direction[:, None]
        waves = [f(points * 2**i) for i in range(4) for f in (torch.sin, torch.cos)]
        out = model(torch.cat([points, *waves], -1)).float()
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]) * depth.diff(dim=1, append=depth[:, -1:] + 0.1))
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], 1), 1)[:, :-1]
        return F.mse_loss(((alpha * through)[..., None] * out[..., :3].sigmoid()).sum(1), colour)

    return model, loss_fn, lambda _: (torch.randn(32, 3), F.normalize(torch.randn(32, 3), dim=1), torch.rand(32, 3))


@classic
def siren() -> Built:
    model = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 3)])

    def loss_fn(batch: Any) -> Tensor:
        x = batch[0]
        for layer in model[:-1]:
            x = torch.sin(30 * layer(x))
        return F.mse_loss(model[-1](x), batch[1])

    return model, loss_fn, lambda _: (torch.rand(128, 2), torch.rand(128, 3))


@classic
def ppo() -> Built:
    model = Parts(body=dense(8, 32, 32, act=nn.Tanh), policy=nn.Linear(32, 4), value=nn.Linear(32, 1))

    def loss_fn(batch: Any) -> Tensor:
        seen, action, before, advantage, reward = batch
        h = model.body(seen)
        chosen = torch.distributions.Categorical(logits=model.policy(h), validate_args=False)
        ratio = (chosen.log_prob(action) - before).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return 0.5 * F.mse_loss(model.value(h).squeeze(-1), reward) - clipped - 0.01 * chosen.entropy().mean()

    return (
        model,
        loss_fn,
        lambda _: (torch.randn(64, 8), randint(4, 64), -torch.rand(64) - 1, torch.randn(64), torch.randn(64)),
    )


@classic
def dqn() -> Built:
    """Q-learning; the target network is copied at every fifth step, in the loop."""
    online = dense(8, 32, 4)
    model = Parts(online=online, target=copy.deepcopy(online).requires_grad_(False))

    def loss_fn(batch: Any) -> Tensor:
        seen, action, reward, after, is_last = batch
        with torch.no_grad():
            goal = reward + 0.99 * (1 - is_last) * model.target(after).max(1).values
        return F.smooth_l1_loss(model.online(seen).gather(1, action[:, None]).squeeze(1), goal.float())

    def make_batch(number: int) -> Any:
        if number % 5 == 4:
            model.target.load_state_dict(model.online.state_dict())
        return torch.randn(32, 8), randint(4, 32), torch.randn(32), torch.randn(32, 8), (torch.rand(32) < 0.1).float()

    return model, loss_fn, make_batch


@classic
def sac_actor() -> Built:
    model = Parts(actor=dense(8, 32, 4), critic=dense(10, 32, 1).requires_grad_(False))
    model.register_parameter("log_alpha", nn.Parameter(torch.zeros(())))

    def loss_fn(seen: Tensor) -> Tensor:
        mean, log_std = model.actor(seen).float().chunk(2, -1)
        drawn = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
        raw = drawn.rsample()
        log_prob = (drawn.log_prob(raw) - 2 * (0.693 - raw - F.softplus(-2 * raw))).sum(-1)
        value = model.critic(torch.cat([seen, raw.tanh()], -1)).squeeze(-1)
        temperature = -(model.log_alpha * (log_prob - 2).detach()).mean()
        return (model.log_alpha.detach().exp() * log_prob - value).mean() + temperature

    return model, loss_fn, lambda _: torch.randn(64, 8)


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    for own, other in zip(slow.parameters(), fast.parameters(), strict=True):
        own.lerp_(other, rate)


@classic
def moco() -> Built:
    """Momentum contrast: a slow encoder and a queue of keys, both written in the loss function."""
    query = dense(16, 32, 16)
    model = Parts(query=query, key=copy.deepcopy(query).requires_grad_(False))
    model.register_buffer("queue", F.normalize(torch.randn(64, 16), dim=1))

    def loss_fn(batch: Any) -> Tensor:
        q = F.normalize(model.query(batch[0]), dim=1)
        with torch.no_grad():
            follow(model.key, model.query, 0.01)
            k = F.normalize(model.key(batch[1]), dim=1).float()
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ model.queue.T.clone()], 1) / 0.2
        model.queue.copy_(torch.cat([k, model.queue[: -len(k)]]))
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))

    return model, loss_fn, lambda _: (torch.randn(16, 16), torch.randn(16, 16))


@classic
def dino() -> Built:
    """A teacher that follows the student after each step, and a centre that is replaced in the loss function."""
    student = dense(16, 32, 24)
    model = Parts(student=student, teacher=copy.deepcopy(student).requires_grad_(False))
    model.register_buffer("centre", torch.zeros(24))

    def loss_fn(batch: Any) -> Tensor:
        with torch.no_grad():
            seen = model.teacher(batch[0]).float()
            goal = ((seen - model.centre) / 0.04).softmax(-1)
        loss = -(goal * (model.student(batch[1]) / 0.1).log_softmax(-1)).sum(-1).mean()
        model.centre = 0.9 * model.centre + 0.1 * seen.mean(0)
        return loss

    def make_batch(_: int) -> Any:
        follow(model.teacher, model.student, 0.05)
        x = torch.randn(32, 16)
        return x + 0.1 * torch.randn(32, 16), x + 0.1 * torch.randn(32, 16)

    return model, loss_fn, make_batch


@classic
def byol_teacher_in_loss() -> Built:
    online = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    model = Parts(online=online, target=copy.deepcopy(online).requires_grad_(False), predict=dense(16, 32, 16))

    def loss_fn(batch: Any) -> Tensor:
        follow(model.target, model.online, 0.01)
        with torch.no_grad():
            goal = model.target(batch[1])
        return 2 - 2 * F.cosine_similarity(model.predict(model.online(batch[0])), goal).mean()

    return model, loss_fn, lambda _: (torch.randn(32, 16), torch.randn(32, 16))


@classic
def simclr() -> Built:
    model = dense(16, 64, 32)

    def loss_fn(batch: Any) -> Tensor:
        z = F.normalize(model(torch.cat(batch)), dim=1)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(64, dtype=torch.bool, device=z.device), float("-inf"))
        return F.cross_entropy(logits, (torch.arange(64, device=z.device) + 32) % 64)

    return model, loss_fn, lambda _: (torch.randn(32, 16), torch.randn(32, 16))


@classic
def maml() -> Built:
    """One inner step with torch.func, and the outer loss through it."""
    model = dense(1, 32, 32, 1)

    def loss_fn(batch: Any) -> Tensor:
        def measure(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

        total = batch[0].new_zeros(())
        for x, y in zip(*batch, strict=True):
            weights = dict(model.named_parameters())
            slopes = torch.func.grad(measure)(weights, x[:5], y[:5])
            adapted = {name: weight - 0.01 * slopes[name] for name, weight in weights.items()}
            total = total + measure(adapted, x[5:], y[5:])
        return total / len(batch[0])

    return model, loss_fn, lambda _: (torch.rand(3, 10, 1), torch.rand(3, 10, 1))


@classic
def maml_autograd() -> Built:
    model = dense(1, 16, 1)

    def loss_fn(batch: Any) -> Tensor:
        weights = dict(model.named_parameters())
        inner = F.mse_loss(model(batch[0]), batch[1])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {name: weight - 0.01 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, adapted, (batch[0],)), batch[1])

    return model, loss_fn, lambda _: (torch.rand(10, 1), torch.rand(10, 1))


@classic
def ctc() -> Built:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))

    def loss_fn(batch: Any) -> Tensor:
        sounds, labels, lengths, label_lengths = batch
        return F.ctc_loss(model(sounds).float().log_softmax(-1).transpose(0, 1), labels, lengths, label_lengths)

    return (
        model,
        loss_fn,
        lambda _: (torch.randn(4, 30, 16), 1 + randint(11, 4, 6), torch.full((4,), 30), torch.full((4,), 6)),
    )


@classic
def embedding_bag() -> Built:
    model = Parts(bag=nn.EmbeddingBag(200, 16, mode="mean"), head=nn.Linear(16, 10))
    return (
        model,
        lambda batch: F.cross_entropy(model.head(model.bag(batch[0], batch[1])), batch[2]),
        lambda _: (randint(200, 64), torch.arange(0, 64, 4), randint(10, 16)),
    )


@classic
def embedding_noise() -> Built:
    """Many equal indices: an embedding whose gradient is summed with atomics where the kernels allow it."""
    model = Parts(embed=nn.Embedding(8, 64), head=nn.Linear(64, 10))
    return (
        model,
        lambda batch: F.cross_entropy(model.head(model.embed(batch[0]).mean(1)), batch[1]),
        lambda _: (randint(8, 64, 128), randint(10, 64)),
    )


@classic
def moe() -> Built:
    """A dense mixture: every expert sees every token, weighted by the gate's top two."""
    model = Parts(gate=nn.Linear(16, 4), experts=nn.ModuleList(dense(16, 32, 10) for _ in range(4)))

    def loss_fn(batch: Any) -> Tensor:
        top, index = model.gate(batch[0]).float().topk(2, -1)
        weight = torch.zeros(len(batch[0]), 4, device=top.device, dtype=top.dtype).scatter(1, index, top.softmax(-1))
        out = torch.stack([expert(batch[0]) for expert in model.experts], 1)
        return F.cross_entropy((out * weight[..., None]).sum(1), batch[1]) + 0.01 * weight.mean(0).square().sum() * 4

    return model, loss_fn, vectors()


@classic
def moe_routed() -> Built:
    """Experts that see only their own tokens: sizes depend on the data."""
    model = Parts(gate=nn.Linear(16, 4), experts=nn.ModuleList(dense(16, 32, 10) for _ in range(4)))

    def loss_fn(batch: Any) -> Tensor:
        weight, chosen = model.gate(batch[0]).softmax(-1).max(-1)
        out = torch.zeros(len(batch[0]), 10, device=weight.device)
        for number, expert in enumerate(model.experts):
            (own,) = torch.where(chosen == number)
            out = out.index_add(0, own, (expert(batch[0][own]) * weight[own, None]).float())
        return F.cross_entropy(out, batch[1])

    return model, loss_fn, vectors()


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.codes = (
            nn.Conv2d(3, 32, 4, 4),
            nn.ConvTranspose2d(32, 3, 4, 4),
            nn.Embedding(64, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        flat = z.permute(0, 2, 3, 1).reshape(-1, 32).float()
        nearest = self.codes(torch.cdist(flat, self.codes.weight).argmin(1))
        q = nearest.view(*z.shape[:1], *z.shape[2:], 32).permute(0, 3, 1, 2)
        out = self.decode(z + (q - z).detach())
        return F.mse_loss(out, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


@classic
def vq_vae() -> Built:
    model = VqVae()
    return model, lambda x: model(x), lambda _: torch.rand(8, 3, 32, 32)


@classic
def pointnet() -> Built:
    sizes = (3, 64, 64, 128, 256)
    features = [
        m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())
    ]
    head = nn.Sequential(nn.Linear(256, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
    model = Parts(features=nn.Sequential(*features), head=head)
    return (
        model,
        lambda batch: F.cross_entropy(model.head(model.features(batch[0]).amax(-1)), batch[1]),
        lambda _: (torch.randn(8, 3, 256), randint(10, 8)),
    )


@classic
def dlrm() -> Built:
    model = Parts(
        tables=nn.ModuleList(nn.EmbeddingBag(100, 8, mode="sum") for _ in range(4)),
        low=dense(13, 32, 8),
        top=dense(18, 32, 1),
    )

    def loss_fn(batch: Any) -> Tensor:
        numbers, categories, clicked = batch
        parts = torch.stack([model.low(numbers), *(table(categories[:, i]) for i, table in enumerate(model.tables))], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        row, column = torch.tril_indices(5, 5, -1, device=numbers.device)
        out = model.top(torch.cat([parts[:, 0], products[:, row, column]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(out, clicked)

    return model, loss_fn, lambda _: (torch.randn(32, 13), randint(100, 32, 4, 3), randint(2, 32).float())


@classic
def triplet() -> Built:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return (
        model,
        lambda batch: F.triplet_margin_loss(*(F.normalize(model(x), dim=1) for x in batch), margin=0.5),
        lambda _: tuple(torch.randn(16, 1, 16, 16) for _ in range(3)),
    )


@classic
def weight_tying() -> Built:
    """One block applied again and again, and an output that uses the embedding's weight."""
    model = Parts(embed=nn.Embedding(64, 32), block=dense(32, 64, 32), norm=nn.LayerNorm(32))

    def loss_fn(ids: Tensor) -> Tensor:
        x = h = model.embed(ids[:, :-1])
        for _ in range(6):
            h = model.norm(x + model.block(h))
        return F.cross_entropy(F.linear(h, model.embed.weight).flatten(0, 1), ids[:, 1:].flatten())

    return model, loss_fn, lambda _: randint(64, 8, 17)


@classic
def spectral_norm() -> Built:
    norm = torch.nn.utils.parametrizations.spectral_norm
    return train_classes(nn.Sequential(norm(nn.Linear(16, 64)), nn.ReLU(), norm(nn.Linear(64, 10))), vectors())


@classic
def spectral_norm_hook() -> Built:
    norm = torch.nn.utils.spectral_norm
    return train_classes(nn.Sequential(norm(nn.Linear(16, 64)), nn.ReLU(), norm(nn.Linear(64, 10))), vectors())


@classic
def weight_norm() -> Built:
    norm = torch.nn.utils.parametrizations.weight_norm
    return train_classes(nn.Sequential(norm(nn.Linear(16, 64)), nn.ReLU(), norm(nn.Linear(64, 10))), vectors())


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(F.dropout(x, 0.05, self.training)))


@classic
def lora() -> Built:
    return train_classes(nn.Sequential(LoRA(nn.Linear(16, 64)), nn.GELU(), LoRA(nn.Linear(64, 10))), vectors())


@classic
def annealed_weight() -> Built:
    """A loss weight that the loop changes at every step."""
    model = Parts(encode=dense(64, 64, 16), decode=dense(8, 64, 64))
    settings = {"beta": 0.0}

    def loss_fn(x: Tensor) -> Tensor:
        mean, log_variance = model.encode(x).chunk(2, -1)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return (
            F.mse_loss(model.decode(mean + torch.randn_like(mean) * (log_variance / 2).exp()), x)
            + settings["beta"] * kl
        )

    def make_batch(number: int) -> Tensor:
        settings["beta"] = 0.01 * number
        return torch.rand(32, 64)

    return model, loss_fn, make_batch


@classic
def label_smoothing() -> Built:
    model, settings = dense(16, 64, 10), nn.CrossEntropyLoss()

    def make_batch(number: int) -> Any:
        settings.label_smoothing = 0.2 / (1 + number)
        return vectors()(number)

    return model, lambda batch: settings(model(batch[0]), batch[1]), make_batch


@classic
def numpy_temperature() -> Built:
    model, settings = dense(16, 64, 10), {"t": np.float64(1.0)}

    def make_batch(number: int) -> Any:
        settings["t"] = np.float64(1.0) + np.float64(0.05) * number
        return vectors()(number)

    return model, lambda batch: F.cross_entropy(model(batch[0]) * settings["t"], batch[1]), make_batch


@classic
def curriculum_dropout() -> Built:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.0), nn.Linear(64, 10))

    def make_batch(number: int) -> Any:
        model[1].p = 0.01 * number
        return vectors()(number)

    return train_classes(model, make_batch)


@classic
def division() -> Built:
    """Division by a float that changes."""
    model, settings = dense(16, 64, 10), {"t": 1.0}

    def make_batch(number: int) -> Any:
        settings["t"] = 1.0 + 0.1 * number
        return vectors()(number)

    return model, lambda batch: F.cross_entropy(model(batch[0]) / settings["t"], batch[1]), make_batch


@classic
def lambda_() -> Built:
    """A weight in a partial that is made anew at every step."""
    model, settings = dense(16, 64, 10), {}

    def make_batch(number: int) -> Any:
        settings["loss"] = functools.partial(lambda out, y, w: w * F.cross_entropy(out, y), w=1.0 + 0.1 * number)
        return vectors()(number)

    return model, lambda batch: settings["loss"](model(batch[0]), batch[1]), make_batch


MODELS["own_lambda"] = MODELS.pop("own_lambda_")


@classic
def epoch_switch() -> Built:
    """Another loss after some epochs, and a layer that is frozen then."""
    model, settings = dense(16, 64, 10), {"epoch": 0}

    def loss_fn(batch: Any) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) if settings["epoch"] < 3 else F.multi_margin_loss(out.float(), batch[1])

    def make_batch(number: int) -> Any:
        settings["epoch"] = number // 5
        model[0].weight.requires_grad_(number < 15)
        return vectors()(number)

    return model, loss_fn, make_batch


@classic
def running_averages() -> Built:
    """Averages kept in a dict, which the loss divides by."""
    model = Parts(body=dense(16, 32, 10))
    model.kept = {"mean": torch.ones(()), "num": 0}

    def loss_fn(batch: Any) -> Tensor:
        loss = F.cross_entropy(model.body(batch[0]), batch[1])
        model.kept["mean"] = 0.9 * model.kept["mean"] + 0.1 * loss.detach().float()
        model.kept["num"] += 1
        return loss / model.kept["mean"]

    return model, loss_fn, vectors()


@classic
def logged_values() -> Built:
    """Detached values kept for logging, and a float that a callback reads."""
    model = Parts(body=dense(16, 32, 10))

    def loss_fn(batch: Any) -> Tensor:
        out = model.body(batch[0])
        model.kept["accuracy"] = (out.argmax(-1) == batch[1]).float().mean()
        model.kept["last"] = out.detach().float()
        return F.cross_entropy(out, batch[1])

    return model, loss_fn, vectors()


@classic
def hidden_state() -> Built:
    """A recurrent state carried from batch to batch in a buffer that the loss function replaces."""
    model = Parts(cell=nn.GRUCell(8, 16), head=nn.Linear(16, 8))
    model.register_buffer("h", torch.zeros(4, 16))

    def loss_fn(x: Tensor) -> Tensor:
        h, loss = model.h, x.new_zeros(())
        for before, after in zip(x.unbind(1), x.unbind(1)[1:], strict=False):
            h = model.cell(before, h)
            loss = loss + F.mse_loss(model.head(h), after)
        model.h = h.detach().float()
        return loss

    return model, loss_fn, lambda _: torch.randn(4, 5, 8)


@classic
def memory_in_dict() -> Built:
    model = Parts(cell=nn.GRUCell(8, 16), head=nn.Linear(16, 8))
    model.kept["h"] = torch.zeros(4, 16)

    def loss_fn(batch: Any) -> Tensor:
        h = model.cell(batch[0], model.kept["h"])
        model.kept["h"] = h.detach().float()
        return F.mse_loss(model.head(h), batch[1])

    return model, loss_fn, lambda _: (torch.randn(4, 8), torch.randn(4, 8))


def build_checkpointed(*, use_reentrant: bool, norm: type[nn.Module]) -> Built:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), norm(16), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2))
    model = Parts(blocks=blocks, head=nn.Linear(16, 10))

    def loss_fn(batch: Any) -> Tensor:
        x = batch[0].requires_grad_() if use_reentrant else batch[0]
        for block in model.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)
        return F.cross_entropy(model.head(x), batch[1])

    return model, loss_fn, vectors()


for _name, _is_reentrant, _norm in (
    ("checkpointed", False, nn.LayerNorm), ("checkpointed_batchnorm", False, nn.BatchNorm1d),
        ("checkpointed_reentrant", True, nn.LayerNorm),
):  # fmt: skip
    MODELS[f"own_{_name}"] = Case("own", functools.partial(build_checkpointed, use_reentrant=_is_reentrant, norm=_norm))


@classic
def masked() -> Built:
    """A pruned weight, written in forward."""
    model = dense(16, 64, 10)
    mask = Parts()
    mask.register_buffer("kept_weights", (torch.rand(64, 16) < 0.5).float())
    model.append(mask)  # moves with the model; never called

    def loss_fn(batch: Any) -> Tensor:
        with torch.no_grad():
            model[0].weight.mul_(mask.kept_weights)
        return F.cross_entropy(model[:3](batch[0]), batch[1])

    return model, loss_fn, vectors()


@classic
def pruned_by_hook() -> Built:
    model = dense(16, 64, 10)
    prune.l1_unstructured(model[0], "weight", 0.5)
    return train_classes(model, vectors())


@classic
def clamped() -> Built:
    """Weights clamped through .data, as in the first Wasserstein GANs."""
    model = dense(16, 64, 1)

    def loss_fn(batch: Any) -> Tensor:
        for weight in model.parameters():
            weight.data.clamp_(-0.05, 0.05)
        return model(batch[0]).mean() - model(batch[1]).mean()

    return model, loss_fn, lambda _: (torch.randn(32, 16), torch.randn(32, 16))


@classic
def max_norm() -> Built:
    model = Parts(embed=nn.Embedding(50, 16, max_norm=1.0), head=nn.Linear(16, 10))
    return (
        model,
        lambda batch: F.cross_entropy(model.head(model.embed(batch[0]).mean(1)), batch[1]),
        lambda _: (randint(50, 16, 6), randint(10, 16)),
    )


@classic
def weights_by_hook() -> Built:
    """A forward hook that normalises the weight in place."""
    model = dense(16, 64, 10)

    def normalise(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.weight.div_(module.weight.norm(dim=1, keepdim=True).clamp(min=1.0))

    model[0].register_forward_pre_hook(normalise)
    return train_classes(model, vectors())


@classic
def several_lengths() -> Built:
    """Batches of five lengths in turn, as from a bucketing sampler."""
    model = Parts(embed=nn.Embedding(64, 32), head=nn.Linear(32, 10))
    return (
        model,
        lambda batch: F.cross_entropy(model.head(model.embed(batch[0]).mean(1)), batch[1]),
        lambda number: (randint(64, 8, 8 + 4 * (number % 5)), randint(10, 8)),
    )


@classic
def shorter_last_batch() -> Built:
    return train_classes(
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
        lambda number: vectors(7 if number % 5 == 4 else 32)(number),
    )


@classic
def mixup() -> Built:
    """Targets mixed with a weight that NumPy draws in the loss function."""
    model, generator = dense(16, 64, 10), np.random.default_rng(0)

    def loss_fn(batch: Any) -> Tensor:
        weight = float(generator.beta(0.2, 0.2))
        order = torch.randperm(len(batch[0]), device=batch[0].device)
        out = model(weight * batch[0] + (1 - weight) * batch[0][order])
        return weight * F.cross_entropy(out, batch[1]) + (1 - weight) * F.cross_entropy(out, batch[1][order])

    return model, loss_fn, vectors()


@classic
def loss_read_on_host() -> Built:
    """A branch on a value of the loss."""
    model = dense(16, 64, 10)

    def loss_fn(batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * 0.5 if loss.item() > 2.0 else loss

    return model, loss_fn, vectors()


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@classic
def binary_net() -> Built:
    """An autograd function with a gradient of its own."""
    model = Parts(one=nn.Linear(16, 64), two=nn.Linear(64, 10))
    return model, lambda batch: F.cross_entropy(model.two(Straight.apply(model.one(batch[0]))), batch[1]), vectors()


@classic
def unet() -> Built:
    down, middle = (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Conv2d(8, 8, 3, padding=1),
    )
    model = Parts(down=down, middle=middle, up=nn.Conv2d(16, 4, 3, padding=1))

    def loss_fn(batch: Any) -> Tensor:
        one = model.down(batch[0])
        two = F.interpolate(F.relu(model.middle(F.max_pool2d(one, 2))), scale_factor=2.0, mode="bilinear")
        return F.cross_entropy(model.up(torch.cat([one, two], 1)), batch[1])

    return model, loss_fn, lambda _: (torch.randn(4, 3, 32, 32), randint(4, 4, 32, 32))


@classic
def temporal_convolutions() -> Built:
    layers = [
        m for i in range(3) for m in (nn.ConstantPad1d((2**i, 0), 0.0), nn.Conv1d(16, 16, 2, dilation=2**i), nn.GELU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 10))
    return train_classes(model, lambda _: (torch.randn(8, 16, 24), randint(10, 8)))


@classic
def diffusion() -> Built:
    model = dense(17, 64, 16, act=nn.SiLU)

    def loss_fn(x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x), 1, device=x.device), torch.randn_like(x)
        return F.mse_loss(model(torch.cat([(1 - t) * x + t * noise, t], 1)), noise - x)

    return model, loss_fn, lambda _: torch.randn(64, 16)


@classic
def distillation() -> Built:
    model = Parts(student=dense(16, 32, 10), teacher=dense(16, 64, 10).requires_grad_(False).eval())

    def loss_fn(batch: Any) -> Tensor:
        with torch.inference_mode():
            goal = (model.teacher(batch[0]) / 2).softmax(-1)
        return F.kl_div((model.student(batch[0]) / 2).log_softmax(-1), goal.clone(), reduction="batchmean")

    return model, loss_fn, vectors()


@classic
def unused_branch() -> Built:
    """A branch with dropout whose output no loss uses: it draws random numbers before the next branch does."""
    model = Parts(
        unused=nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), used=nn.Sequential(nn.Dropout(0.5), dense(16, 32, 10))
    )

    def loss_fn(batch: Any) -> Tensor:
        model.unused(batch[0])
        return F.cross_entropy(model.used(batch[0]), batch[1])

    return model, loss_fn, vectors()
