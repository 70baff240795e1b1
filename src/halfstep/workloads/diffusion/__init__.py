"""Diffusion: models that make pictures, and the VAE whose latents they may work on. On diffusers' networks."""

from halfstep.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep.workloads.kind import Kind
from halfstep.workloads.options import Option

_HERE = "halfstep.workloads.diffusion"

DIFFUSION = Kind(
    builder=f"{_HERE}.build:build",
    config=DiffusionConfig,
    pack=f"{_HERE}.pack:pack",
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:over",
    evaluation=f"{_HERE}.evaluate:DiffusionEvaluation",
    evaluate_options=(
        Option("features", str, None, "TorchScript file whose features FID and KID compare"),
        Option("num", int, None, "Samples for FID and KID; as many as held-out pictures", least=2),
        Option("seed", int, 0, "Seed of the samples", least=0),
    ),
    predictor=f"{_HERE}.predict:SamplePredictor",
    predict_options=(
        Option("num", int, 16, "Samples to draw", least=1),
        Option("steps", int, None, "Sampling steps; the run's sample.steps", least=1),
        Option("seed", int, 0, "Seed of the noise", least=0),
        Option("sampler", str, None, "ddim or dpm; the run's sample.sampler"),
        Option("guidance", float, None, "Classifier-free guidance; the run's sample.guidance", least=0),
        Option("prompt", str, None, "What to draw, where the run was trained with captions"),
        Option("class", str, None, "Class to draw, where the run was trained with classes"),
    ),
    needs_input=False,
    writes_files=True,
    export=f"{_HERE}.export:export",
    guide=f"{_HERE}.guide:Guide",
    unit="image",
    sample_size=lambda config: f"{config.data.image_size} pixels",
    task="diffusion",
    about="make pictures: any folder of them",
    models={"diffusion": "114 M parameters at its defaults"},
)

VAE = Kind(
    builder=f"{_HERE}.vae:build",
    config=VaeConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:vae_over",
    evaluation=f"{_HERE}.evaluate:VaeEvaluation",
    predictor=f"{_HERE}.predict:ReconstructionPredictor",
    writes_files=True,
    export=f"{_HERE}.export:export_vae",
    guide=f"{_HERE}.guide:VaeGuide",
    unit="image",
    sample_size=lambda config: f"{config.data.image_size} pixels",
    task="autoencoder",
    about="latents for a diffusion model: any folder of pictures",
    models={"vae": "84 M parameters at its defaults"},
)
