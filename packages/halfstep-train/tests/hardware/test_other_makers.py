"""AMD's and Intel's GPUs: what is granted on each, by probes of cards that are not here."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from fake_driver import FakeDriver
from halfstep.hardware.driver import Accelerator
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep_train.config.schema import PrecisionConfig

HIP = {"kind": "rocm", "device": "cuda:0"}
XPU = {"kind": "xpu", "device": "xpu:0"}
CARDS = {
    "MI250X": Accelerator(name="AMD Instinct MI250X", architecture="gfx90a:sramecc+:xnack-", **HIP),  # type: ignore[arg-type]
    "MI300X": Accelerator(name="AMD Instinct MI300X", architecture="gfx942", **HIP),  # type: ignore[arg-type]
    "RDNA2": Accelerator(name="AMD Radeon RX 6800", architecture="gfx1030", **HIP),  # type: ignore[arg-type]
    "RDNA3": Accelerator(name="AMD Radeon RX 7900 XTX", architecture="gfx1100", **HIP),  # type: ignore[arg-type]
    "Xe-HPG": Accelerator(name="Intel(R) Arc(TM) A770 Graphics", **XPU),  # type: ignore[arg-type]
    "Xe-HPC": Accelerator(name="Intel(R) Data Center GPU Max 1550", **XPU),  # type: ignore[arg-type]
}
GRANTED = {
    "MI250X": {"auto": "bf16", "bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp8": "bf16"},
    "MI300X": {"auto": "bf16", "bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp8": "bf16"},
    "RDNA2": {"auto": "fp16", "bf16": "fp16", "fp16": "fp16", "tf32": "fp32", "fp8": "fp16"},
    "RDNA3": {"auto": "bf16", "bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp8": "bf16"},
    "Xe-HPG": {"auto": "bf16", "bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp8": "bf16"},
    "Xe-HPC": {"auto": "bf16", "bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp8": "bf16"},
}
"""The table of docs/precision.md."""


@pytest.mark.parametrize("card", CARDS)
def test_each_card_gets_what_it_truly_runs_and_is_told_where_that_differs(card: str) -> None:
    found = CARDS[card]
    hardware = probe(found.device, driver=FakeDriver(found))
    for asked, granted in GRANTED[card].items():
        plan = decide(PrecisionConfig(default=asked), hardware)
        assert plan.granted == granted, asked
        assert plan.needs_loss_scaling == (granted == "fp16")
        if asked not in ("auto", granted):
            assert any(f"{asked} asked for, running {granted}" in warning for warning in plan.warnings)


@pytest.mark.slow
def test_training_needs_neither_triton_nor_nvml() -> None:
    """Every Triton kernel has a fallback to torch's layers, and no NVIDIA library is required."""
    code = """
        import sys
        sys.modules["triton"] = sys.modules["pynvml"] = None
        import torch
        import halfstep_train.run.train, halfstep_train.use.predict, halfstep_train.bench.bench
        from halfstep_train.workloads.slots.backbones import build_dinov2
        from halfstep_train.workloads.slots.slotcontrast import SlotContrast, SlotContrastSize
        features = build_dinov2("vit_small_patch14_dinov2", depth=1, heads=2, dim=16, grid=2)(torch.rand(2, 3, 28, 28))
        size = SlotContrastSize(feature_dim=16, num_positions=4, num_slots=2, slot_dim=8, decoder_hidden=(8,))
        SlotContrast(size)(features.detach().unflatten(0, (1, 2)))["error"].backward()
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
