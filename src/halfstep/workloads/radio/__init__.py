"""Radio maps: path gain of a transmitter in a city, by RadioDiff's two stages."""

from typing import Any

from halfstep.workloads.base.kind import Kind
from halfstep.workloads.base.options import Option
from halfstep.workloads.radio.config import RadioDiffConfig, RadioVaeConfig

_STEPS = Option("steps", int, None, "Steps of a sample; default: the run's model.sampling_steps", least=1)
SAMPLING_OPTIONS = (_STEPS, Option("part", str, "val", "Which maps: val, test or train"))
PREDICT_OPTIONS = (_STEPS, Option("seed", int, 0, "Seed of the noise that samples start from", least=0))

_BOTH: dict[str, Any] = {
    "writes_files": True,
    "sample_size": ".build:sample_size",
    "unit": "map",
    "task": "radio maps",
    "about": "path gain of a transmitter from buildings and antenna: RadioMapSeer's png/ and gain/",
    "models": {
        "radiodiff_vae": "first stage, an autoencoder of maps: 55 M parameters at its defaults",
        "radiodiff": "second stage, the diffusion model: start it with model.vae=RUN of a first stage",
    },
    "usual": "radiodiff_vae",
    "usual_on_cpu": "radiodiff_vae",
}

VAE_KIND = Kind.in_folder(
    __name__,
    builder=".build_vae:build_vae",
    config=RadioVaeConfig,
    export=".build_vae:export",
    evaluation=".evaluate:RadioEvaluation",
    predictor=".predict:ReconstructionPredictor",
    **_BOTH,
)

KIND = Kind.in_folder(
    __name__,
    config=RadioDiffConfig,
    kept=("model.scale_factor", "model.first_stage.", "model.pyramid.weights", "data.image_size"),
    pack=".first_stage:pack",
    evaluation=".evaluate:SamplingEvaluation",
    evaluate_options=SAMPLING_OPTIONS,
    predictor=".predict:MapPredictor",
    predict_options=PREDICT_OPTIONS,
    foreign=".foreign:claim",
    guide=".guide:SecondGuide",
    **_BOTH,
)
