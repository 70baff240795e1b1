"""Diffusion: models that make pictures, and the VAE whose latents they may work on. On diffusers' networks."""

from halfstep.workloads.base.kind import Kind
from halfstep.workloads.base.options import Option
from halfstep.workloads.diffusion.config import DiffusionConfig, VaeConfig

DIFFUSION = Kind.in_folder(
    __name__,
    config=DiffusionConfig,
    kept=("model.channels", "model.layers", "model.attention", "model.dropout", "model.conditioning"),
    pack=".latents:pack",
    evaluation=".evaluate:DiffusionEvaluation",
    evaluate_options=(
        Option("features", str, None, "TorchScript file whose features FID and KID compare"),
        Option("num", int, None, "Samples for FID and KID; default: as many as held-out pictures", least=2),
        Option("seed", int, 0, "Seed of the samples", least=0),
    ),
    predictor=".predict:SamplePredictor",
    predict_options=(
        Option("num", int, 16, "Samples to draw", least=1),
        Option("steps", int, None, "Sampling steps; default: the run's sample.steps", least=1),
        Option("seed", int, 0, "Seed of the noise", least=0),
        Option("sampler", str, None, "ddim or dpm; default: the run's sample.sampler"),
        Option("guidance", float, None, "Classifier-free guidance; default: the run's sample.guidance", least=0),
        Option("prompt", str, None, "What to draw, where the run was trained with captions"),
        Option("class", str, None, "Class to draw, where the run was trained with classes"),
    ),
    needs_input=False,
    writes_files=True,
    export=".export:export",
    unit="image",
    sample_size=lambda config: f"{config.data.image_size} pixels",
    task="diffusion",
    about="make pictures: any folder of them",
    models={"diffusion": "114 M parameters at its defaults"},
)

VAE = Kind.in_folder(
    __name__,
    builder=".vae:build",
    config=VaeConfig,
    kept=("model.channels", "model.layers", "model.latent_channels"),
    over=".build:vae_over",
    evaluation=".evaluate:VaeEvaluation",
    predictor=".predict:ReconstructionPredictor",
    writes_files=True,
    export=".export:export_vae",
    guide=".guide:VaeGuide",
    unit="image",
    sample_size=lambda config: f"{config.data.image_size} pixels",
    task="autoencoder",
    about="latents for a diffusion model: any folder of pictures",
    models={"vae": "84 M parameters at its defaults"},
)
