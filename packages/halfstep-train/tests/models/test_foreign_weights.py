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
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep_train.models.vit import ViT, ViTSize
from halfstep_train.models.weights import load_weights_, read_weights
from halfstep_train.workloads.classification.build import load_classifier_
from halfstep_train.workloads.classification.resnet import Bottleneck, ResNet

DIM, MLP, CLASSES = 8, 16, 3


def tiny_vit() -> ViT:
    size = ViTSize(depth=2, heads=2, dim=DIM, mlp_dim=MLP, patch=8)
    return ViT(size, num_classes=CLASSES, image_size=16)


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


def hf_vit() -> dict[str, Tensor]:
    """As released."""
    start = "vit.embeddings"
    shapes = {f"{start}.cls_token": (1, 1, DIM), f"{start}.position_embeddings": (1, 5, DIM)}
    shapes |= pairs(f"{start}.patch_embeddings.projection", DIM, 3, 8, 8)
    for layer in ("vit.encoder.layer.0", "vit.encoder.layer.1"):
        shapes |= pairs(f"{layer}.layernorm_before", DIM) | pairs(f"{layer}.layernorm_after", DIM)
        for part in ("query", "key", "value"):
            shapes |= pairs(f"{layer}.attention.attention.{part}", DIM, DIM)
        shapes |= pairs(f"{layer}.attention.output.dense", DIM, DIM)
        shapes |= pairs(f"{layer}.intermediate.dense", MLP, DIM) | pairs(f"{layer}.output.dense", DIM, MLP)
    return filled(shapes | pairs("vit.layernorm", DIM) | pairs("classifier", CLASSES, DIM))


def hf_vit_in_memory() -> dict[str, Tensor]:
    """As version 5 names them in `state_dict()`."""
    names = {
        "vit.encoder.layer.": "vit.layers.", "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj", "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
    }  # fmt: skip
    found = {}
    for name, tensor in hf_vit().items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def norm(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{part}": (channels,) for part in parts} | {f"{name}.num_batches_tracked": ()}


def hf_resnet() -> dict[str, Tensor]:
    """One bottleneck of width 4 and two of width 8."""
    shapes = {"resnet.embedder.embedder.convolution.weight": (4, 3, 7, 7)}
    shapes |= norm("resnet.embedder.embedder.normalization", 4)
    for stage, layer, width, before in ((0, 0, 4, 4), (1, 0, 8, 16), (1, 1, 8, 32)):
        block = f"resnet.encoder.stages.{stage}.layers.{layer}"
        if layer == 0:
            shapes[f"{block}.shortcut.convolution.weight"] = (4 * width, before, 1, 1)
            shapes |= norm(f"{block}.shortcut.normalization", 4 * width)
        sizes = [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
        for number, size in enumerate(sizes):
            shapes[f"{block}.layer.{number}.convolution.weight"] = size
            shapes |= norm(f"{block}.layer.{number}.normalization", size[0])
    return filled(shapes | pairs("classifier.1", CLASSES, 32))


@pytest.mark.parametrize("wrap", ["", "model.", "module.backbone.", "_orig_mod.net.", "student.visual."])
@pytest.mark.parametrize("theirs", [timm_vit, hf_vit, hf_vit_in_memory])
def test_other_projects_vit_loads_whole(theirs: Callable[[], dict[str, Tensor]], wrap: str) -> None:
    """Loading refuses a name that is missing or left over, so that it succeeds says that all were found."""
    model, weights = tiny_vit(), theirs()
    load_classifier_(model, {f"{wrap}{k}": v for k, v in weights.items()}, source="x", replace_head=False)
    values = list(weights.values())
    own = model.state_dict()
    assert all(
        any(torch.equal(tensor, value) for value in values) for name, tensor in own.items() if "in_proj" not in name
    )
    assert torch.equal(own["conv_proj.weight"], values[2])
    if theirs is not timm_vit:
        layer = "vit.encoder.layer.1.attention.attention"
        rows = [hf_vit()[f"{layer}.{part}.weight"] for part in ("query", "key", "value")]
        assert torch.equal(own["encoder.layers.encoder_layer_1.self_attention.in_proj_weight"], torch.cat(rows))


def test_a_headless_vit_of_hugging_face_starts_a_new_head() -> None:
    body = {name.removeprefix("vit."): value for name, value in hf_vit().items() if not name.startswith("classifier")}
    pooler = filled(pairs("pooler.dense", DIM, DIM))
    model = tiny_vit()
    load_classifier_(model, body | pooler, source="x", replace_head=True)
    assert torch.equal(model.class_token, body["embeddings.cls_token"])
    with pytest.raises(ModelError) as caught:
        load_classifier_(tiny_vit(), body, source="x", replace_head=False)
    assert "the file lacks heads.head.weight" in caught.value.why


def test_hugging_faces_resnet_loads_whole() -> None:
    model, weights = ResNet(Bottleneck, (1, 2), num_classes=CLASSES, width=4), hf_resnet()
    load_classifier_(model, weights, source="x", replace_head=False)
    block = "resnet.encoder.stages.1.layers.1.layer"
    assert torch.equal(model.state_dict()["layer2.1.conv3.weight"], weights[f"{block}.2.convolution.weight"])
    assert torch.equal(model.state_dict()["layer2.1.bn1.running_var"], weights[f"{block}.0.normalization.running_var"])


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
