"""Weights of other projects: how they nest, prefix and name them, and what is refused in which words."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from halfstep.errors import ModelError
from halfstep_train.models.vit import ViT, ViTSize
from halfstep_train.models.weights import load_weights_, read_weights
from halfstep_train.workloads.classification.build import load_classifier_
from halfstep_train.workloads.classification.resnet import BasicBlock, Bottleneck, ResNet

DIM, MLP, CLASSES = 8, 16, 3


def tiny_vit() -> ViT:
    size = ViTSize(depth=2, heads=2, dim=DIM, mlp_dim=MLP, patch=8)
    return ViT(size, num_classes=CLASSES, image_size=16)


def tiny_resnet(block: type[BasicBlock] | type[Bottleneck]) -> ResNet:
    return ResNet(block, (1, 2), num_classes=CLASSES, width=4)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def filled(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.rand(shape) for name, shape in shapes.items()}


def pairs(name: str, out: int, *inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, *inner), f"{name}.bias": (out,)}


def timm_vit() -> dict[str, Tensor]:
    shapes = {"cls_token": (1, 1, DIM), "pos_embed": (1, 5, DIM), **pairs("patch_embed.proj", DIM, 3, 8, 8)}
    for block in ("blocks.0", "blocks.1"):
        shapes |= pairs(f"{block}.norm1", DIM) | pairs(f"{block}.norm2", DIM)
        shapes |= pairs(f"{block}.attn.qkv", 3 * DIM, DIM) | pairs(f"{block}.attn.proj", DIM, DIM)
        shapes |= pairs(f"{block}.mlp.fc1", MLP, DIM) | pairs(f"{block}.mlp.fc2", DIM, MLP)
    return filled(shapes | pairs("norm", DIM) | pairs("head", CLASSES, DIM))


def hugging_face_vit() -> Any:
    sizes = {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": MLP}
    shape = {"image_size": 16, "patch_size": 8, "num_labels": CLASSES, "layer_norm_eps": 1e-6}
    return randomise(ViTForImageClassification(ViTConfig(**sizes, **shape)))


def hugging_face_resnet(kind: str, width: int) -> Any:
    """One block and two of twice the width."""
    return randomise(
        ResNetForImageClassification(
            ResNetConfig(
                embedding_size=4, hidden_sizes=[width, 2 * width], depths=[1, 2], layer_type=kind, num_labels=CLASSES
            )
        )
    )


def randomise(model: Any) -> Any:
    """Give every tensor values of its own: equal ones would hide a mistake."""
    torch.manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.uniform_(0.1 if "running_var" in name else -0.5, 0.5)
    return model.eval()


@pytest.mark.parametrize("wrap", ["", "model.", "module.backbone.", "_orig_mod.net.", "student.visual."])
def test_timms_vit_loads_whole(wrap: str) -> None:
    """Loading refuses a name that is missing or left over, so that it succeeds says that all were found."""
    model, weights = tiny_vit(), timm_vit()
    load_classifier_(model, {f"{wrap}{k}": v for k, v in weights.items()}, source="x", replace_head=False)
    values = list(weights.values())
    assert all(any(torch.equal(tensor, value) for value in values) for tensor in model.state_dict().values())
    assert torch.equal(model.conv_proj.weight, values[2])


@pytest.mark.parametrize("is_released", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (tiny_vit, hugging_face_vit),
        (lambda: tiny_resnet(Bottleneck), lambda: hugging_face_resnet("bottleneck", 16)),
        (lambda: tiny_resnet(BasicBlock), lambda: hugging_face_resnet("basic", 4)),
    ],
    ids=["vit", "resnet50", "resnet18"],
)
def test_hugging_faces_weights_compute_the_same(ours: Any, theirs: Any, is_released: bool, tmp_path: Path) -> None:
    """transformers names them differently in released files than in `state_dict()`."""
    model, original = ours(), theirs()
    original.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") if is_released else original.state_dict()
    load_classifier_(model, weights, source="x", replace_head=False)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), original(images).logits, rtol=1e-4, atol=1e-4)


def test_a_headless_vit_of_hugging_face_starts_a_new_head(tmp_path: Path) -> None:
    hugging_face_vit().vit.save_pretrained(tmp_path)
    body = load_file(tmp_path / "model.safetensors")
    pooler = filled(pairs("pooler.dense", DIM, DIM))
    model = tiny_vit()
    load_classifier_(model, body | pooler, source="x", replace_head=True)
    assert torch.equal(model.class_token, body["embeddings.cls_token"])
    with pytest.raises(ModelError) as caught:
        load_classifier_(tiny_vit(), body, source="x", replace_head=False)
    assert "the file lacks heads.head.weight" in caught.value.why


def test_timms_layer_scale_is_refused_by_a_model_without_it() -> None:
    scales = filled({f"blocks.{block}.ls{part}.gamma": (DIM,) for block in (0, 1) for part in (1, 2)})
    with pytest.raises(ModelError) as caught:
        load_classifier_(tiny_vit(), timm_vit() | scales, source="x", replace_head=False)
    assert "the model has no encoder.layers.encoder_layer_0.ls_1.gamma" in caught.value.why


@pytest.mark.parametrize(
    "nest",
    [
        lambda state: {"model_state_dict": state, "epoch": 3, "optimizer_state_dict": {"state": {}}},
        lambda state: {"state_dict": {f"model.{k}": v for k, v in state.items()}, "pytorch-lightning_version": "2"},
        lambda state: {"epoch": 1, "model": {"state_dict": state}},
        lambda state: {"ema": {"module": state}, "optimizer": {}},
        lambda state: {"model": state, "ema": {k: v + 1 for k, v in state.items()}, "loss": torch.tensor(0.5)},
    ],
)
def test_weights_are_found_below_the_keys_of_training_scripts(nest: Callable[[Any], Any], tmp_path: Path) -> None:
    theirs, ours = small(), small()
    torch.save(nest(dict(theirs.state_dict())), tmp_path / "a.pth")
    load_weights_(ours, read_weights(tmp_path / "a.pth")[0], source="a.pth")
    assert torch.equal(ours[0].weight, theirs[0].weight)  # type: ignore[arg-type]


def test_a_model_with_parts_named_as_wrappers_loads_its_own_file() -> None:
    def parts() -> nn.ModuleDict:
        return nn.ModuleDict({"backbone": nn.Linear(2, 2), "model": nn.Linear(2, 2)})

    theirs, ours = parts(), parts()
    load_weights_(ours, {f"module.{name}": value for name, value in theirs.state_dict().items()}, source="x")
    assert torch.equal(ours["model"].weight, theirs["model"].weight)  # type: ignore[arg-type]


def test_two_networks_of_one_file_are_not_taken_for_one() -> None:
    state = small().state_dict()
    both = {f"{part}.{name}": value for part in ("model", "net") for name, value in state.items()}
    with pytest.raises(ModelError) as caught:
        load_weights_(small(), both, source="x")
    assert "the model has no net.0.weight" in caught.value.why


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    model = small()
    before = model[0].weight.clone()  # type: ignore[operator]
    weights = {name: value.clone() for name, value in small().state_dict().items()}
    weights["1.running_var"][1] = bad
    with pytest.raises(ModelError, match=r"not finite: 1.running_var"):
        load_weights_(model, weights, source="x.pth")
    assert torch.equal(model[0].weight, before)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "it is a web page"),
        (b"", "incomplete"),
        (b"PK\x03\x04 nothing", "damaged"),
        (b"\x80\x02}q\x00(X", "damaged"),
        (b"just words", "damaged"),
        (b"\x00" * 100, "damaged"),
    ],
)
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_file_that_holds_no_weights_is_named_in_our_words(
    content: bytes, says: str, ending: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_weights(path)
    assert str(path) in caught.value.what
    assert caught.value.fix
    assert "weights_only" not in str(caught.value)
    assert says in str(caught.value)


class Runs:
    """A call when it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (argparse.Namespace(lr=1), "argparse.Namespace"),
        (Runs(os.mkdir, "made-by-a-pickle"), f"{os.name}.mkdir"),
        (Runs(eval, "__import__('os').mkdir('made-by-a-pickle')"), "eval"),
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
def test_python_objects_are_named_and_never_made(
    made: Any, name: str, is_zip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "args": made}, "a.pth", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ModelError) as caught:
        read_weights(tmp_path / "a.pth")
    assert caught.value.why == f"it contains Python objects ({name}), and halfstep does not execute code from a file"
    assert "torch.save(model.state_dict(), FILE)" in caught.value.fix
    assert "safetensors" in caught.value.fix
    assert "weights_only" not in str(caught.value)
    assert os.listdir() == ["a.pth"]


def test_a_plain_pickle_is_refused_without_a_warning_of_torchs(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(pickle.dumps({"weight": 1}, protocol=4))
    with pytest.raises(ModelError, match="cannot read the weights"):  # a warning would be an error here
        read_weights(tmp_path / "a.pth")


def test_a_folder_and_a_file_without_tensors_are_told_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="it is a folder") as caught:
        read_weights(tmp_path)
    assert "model.safetensors" in caught.value.fix
    torch.save({"epoch": 3, "best": 0.5}, tmp_path / "a.pth")
    with pytest.raises(ModelError, match="contains no weights") as caught:
        read_weights(tmp_path / "a.pth")
    assert "epoch, best" in caught.value.why
