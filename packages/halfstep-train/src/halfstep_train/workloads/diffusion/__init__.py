"""Diffusion models for images, and the VAE whose latents they can work on; both use diffusers' networks."""

from dataclasses import replace

from halfstep_train.workloads.base.kind import (
    SYNTHETIC,
    EvaluateCommand,
    GuideEntry,
    Kind,
    Option,
    PredictCommand,
    SampleUnit,
    describe_pixels,
)
from halfstep_train.workloads.diffusion.config import DiffusionConfig, VaeConfig

PICTURE = SampleUnit(name="image", size=describe_pixels)

DIFFUSION = Kind.from_package(
    __name__,
    config=DiffusionConfig,
    kept=("model.channels", "model.layers", "model.attention", "model.dropout", "model.conditioning"),
    task="diffusion",
    export=".build:export",
    sample=PICTURE,
    evaluate=EvaluateCommand(
        ".evaluate:DiffusionEvaluation",
        options=(
            Option("features", str, None, "TorchScript file whose features FID and KID compare"),
            Option("num", int, None, "Samples for FID and KID; default: as many as held-out images", least=2),
            Option("seed", int, 0, "Seed of the samples", least=0),
        ),
    ),
    predict=PredictCommand(
        ".evaluate:SamplePredictor",
        options=(
            Option("num", int, 16, "Samples to draw", least=1),
            Option("steps", int, None, "Sampling steps; default: the run's sample.steps", least=1),
            Option("seed", int, 0, "Seed of the noise", least=0),
            Option("sampler", str, None, "ddim or dpm; default: the run's sample.sampler"),
            Option("guidance", float, None, "Classifier-free guidance; default: the run's sample.guidance", least=0),
            Option("prompt", str, None, "Text that describes the images, if the run was trained with captions"),
            Option("class", str, None, "Class of the images, if the run was trained with classes"),
        ),
        needs_input=False,
        writes_files=True,
    ),
    guide=GuideEntry(
        about="generate images: any folder of images", models={"diffusion": "114 M parameters at its defaults"}
    ),
)

VAE = Kind.from_package(
    __name__,
    builder=".vae:build",
    config=VaeConfig,
    kept=("model.channels", "model.layers", "model.latent_channels"),
    task="autoencoder",
    export=".build:export_vae",
    sample=PICTURE,
    synthetic=replace(SYNTHETIC, over=".build:build_vae_on_samples"),
    evaluate=EvaluateCommand(".evaluate:VaeEvaluation"),
    guide=GuideEntry(
        guide=".build:VaeGuide",
        about="latents for a diffusion model: any folder of images",
        models={"vae": "84 M parameters at its defaults"},
    ),
)
