"""RadioDiff on a GPU: the captured step in bf16 and fp16, the filter alike on both devices, torchvision's Swin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfstep_train.report.metrics_file import read
from halfstep_train.workloads.radio.config import PyramidConfig
from halfstep_train.workloads.radio.swin import SwinPyramid
from halfstep_train.workloads.radio.unet import FourierFilter
from tiny_radio import train_diffusion, write_tiny_demo, write_tiny_vae

pytestmark = pytest.mark.gpu

CUDA = {"device": "cuda", "train__max_steps": 24}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_demo(tmp_path_factory.mktemp("radio") / "RadioMapSeer")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("fast", ["off", "graph"])
def test_both_formats_train_without_a_bad_step(tmp_path: Path, data: Path, precision: str, fast: str) -> None:
    """In bf16 the public code stops at its FFT."""
    vae = write_tiny_vae(tmp_path / "vae")
    asked = {**CUDA, "precision__default": precision, "train__fast": fast, "scaler__init_scale": 1024.0}
    run = train_diffusion(tmp_path / "run", data, vae, **asked)
    steps = [row for row in read(run / "metrics.jsonl") if row["kind"] == "train"]
    assert len(steps) == 24
    assert steps[-1]["skipped"] == 0


def test_the_filter_gives_the_same_on_both_devices() -> None:
    """The product is not Hermitian: FFT libraries disagree about such spectra, sine and cosine do not."""
    torch.manual_seed(0)
    layer, x = FourierFilter(8, (8, 8)), torch.randn(2, 8, 8, 8)
    torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), layer.cpu()(x), rtol=1e-5, atol=1e-5)


def test_the_pyramid_equals_torchvisions_swin_b_with_its_weights() -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision's swin_b is what it is compared with")
    torch.manual_seed(0)
    theirs = models.swin_b().eval().cuda()
    ours = SwinPyramid(PyramidConfig()).eval().cuda()
    state = {name: value for name, value in theirs.state_dict().items() if not name.startswith(("norm.", "head."))}
    ours.load_state_dict(state)
    image = torch.randn(2, 3, 256, 256, device="cuda")
    x, expected = image, []
    with torch.no_grad():
        for place, layer in enumerate(theirs.features):
            x = layer(x)
            if place % 2 == 1:
                expected.append(x.permute(0, 3, 1, 2))
        found = ours(image)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
