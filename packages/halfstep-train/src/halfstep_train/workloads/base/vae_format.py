"""Choose the format of a frozen VAE: as requested, or the half format with the smaller round-trip error on samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError, ModelError
from halfstep.islands import fp32_island
from halfstep_train.config.schema import PrecisionConfig, RunConfig

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST_ERROR = 0.02
"""Largest round-trip error of a half format, relative to the standard deviation of the fp32 pixels; above it the VAE
stays in fp32."""
RoundTrip = Callable[[Any, Tensor], Tensor]
"""(vae, images) -> the images, encoded and decoded again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChoice:
    """The VAE's format, and the reason."""

    name: str
    why: str


def pick_training_device(config: RunConfig) -> torch.device:
    """Return the device on which to try the VAE and encode samples; this happens before the precision plan exists."""
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_vae_format(
    vae: Any,
    trip: RoundTrip,
    images: Callable[[], Tensor],
    device: torch.device,
    requested: str,
    precision: PrecisionConfig,
) -> FormatChoice:
    """Choose the format for `precision.modules: {vae: requested}` by trying real samples; refuse one that overflows."""
    # TF32 is one switch for the whole process: a run that uses it cannot keep one module in fp32.
    whole = "tf32" if precision.default == "tf32" else "fp32"
    if requested not in ("auto", *HALF):
        return FormatChoice(name=requested, why="requested")
    if requested == "auto" and device.type == "cpu" and not precision.simulate:
        return FormatChoice(name=whole, why="auto: no half format is fast on a CPU")
    tried = images().to(device)
    errors = measure_round_trips(vae, trip, tried, tuple(HALF) if requested == "auto" else (requested,))
    finite = {name: error for name, error in errors.items() if error is not None}
    if requested != "auto" and not finite:
        raise ConfigError(
            f"precision.modules: {{vae: {requested}}} overflows",
            why=f"the VAE gives NaN or infinity for {len(tried)} of your samples in {requested}, not in fp32",
            fix="set precision.modules={vae: auto}, or bf16 or fp32 instead of auto",
        )
    measured = ", ".join(f"{name} {'overflows' if e is None else f'{e:.2%}'}" for name, e in errors.items())
    if requested != "auto":
        return FormatChoice(name=requested, why=f"requested, encode-decode error: {measured}")
    best = min(finite, key=lambda name: finite[name], default="")
    if not best or finite[best] > LARGEST_ERROR:
        return FormatChoice(name=whole, why=f"auto: no half format stays below {LARGEST_ERROR:.0%} ({measured})")
    return FormatChoice(name=best, why=f"chosen by auto, smallest encode-decode error ({measured})")


def measure_round_trips(vae: Any, trip: RoundTrip, images: Tensor, formats: tuple[str, ...]) -> dict[str, float | None]:
    """Return each format's RMS round-trip error against fp32, divided by the pixels' standard deviation; None: not
    finite."""
    vae = copy.deepcopy(vae).to(images.device)
    exact = _run_in_format(vae, trip, images, "fp32")
    if not bool(exact.isfinite().all()):
        raise ModelError("the VAE gives NaN or infinity for your samples in fp32", fix="use another VAE: model.vae=DIR")
    spread = float((exact - exact.mean()).square().mean().sqrt()) or 1.0
    errors: dict[str, float | None] = {}
    for name in formats:
        found = _run_in_format(vae, trip, images, name)
        error = float((found - exact).square().mean().sqrt()) / spread
        errors[name] = error if bool(found.isfinite().all()) else None
    return errors


@torch.no_grad()
def _run_in_format(vae: Any, trip: RoundTrip, images: Tensor, format_name: str) -> Tensor:
    """Return the round trip in a format. The oneDNN switch stays as it was."""
    onednn = torch._C._get_mkldnn_enabled()
    with use_format(format_name, images.device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # CPUs without native bf16
        try:
            return trip(vae, images).float()
        finally:
            # After that failure torch disables oneDNN for the rest of the process. A resumed run does not try formats
            # and would keep oneDNN on, so its results would differ.
            torch._C._set_mkldnn_enabled(onednn)


def use_format(format_name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that computes as frozen modules do during a run: autocast, with norms in fp32."""
    if format_name not in HALF:
        return fp32_island()
    return torch.autocast(device.type, dtype=HALF[format_name])
