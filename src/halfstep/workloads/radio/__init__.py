"""Radio maps: path gain of a transmitter in a city, by RadioDiff's two stages."""

from typing import Any

from halfstep.workloads.kind import Kind
from halfstep.workloads.options import Option
from halfstep.workloads.radio.config import RadioDiffConfig, RadioVaeConfig

_HERE = "halfstep.workloads.radio"

_STEPS = Option("steps", int, None, "Steps of a sample; default: the run's model.sampling_steps", least=1)
SAMPLING_OPTIONS = (_STEPS, Option("part", str, "val", "Which maps: val, test or train"))
PREDICT_OPTIONS = (_STEPS, Option("seed", int, 0, "Seed of the noise that samples start from", least=0))

_BOTH: dict[str, Any] = {
    "demo": f"{_HERE}.demo:write_demo",
    "random_store": f"{_HERE}.random_data:random_store",
    "random_batch": f"{_HERE}.random_data:random_batch",
    "over": f"{_HERE}.random_data:over",
    "writes_files": True,
    "sample_size": f"{_HERE}.random_data:sample_size",
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

VAE_KIND = Kind(
    builder=f"{_HERE}.build_vae:build_vae",
    config=RadioVaeConfig,
    export=f"{_HERE}.build_vae:export",
    evaluation=f"{_HERE}.evaluate:RadioEvaluation",
    predictor=f"{_HERE}.predict:ReconstructionPredictor",
    guide=f"{_HERE}.guide:Guide",
    **_BOTH,
)

KIND = Kind(
    builder=f"{_HERE}.build:build",
    config=RadioDiffConfig,
    pack=f"{_HERE}.latents:pack",
    evaluation=f"{_HERE}.evaluate:SamplingEvaluation",
    evaluate_options=SAMPLING_OPTIONS,
    predictor=f"{_HERE}.predict:MapPredictor",
    predict_options=PREDICT_OPTIONS,
    foreign=f"{_HERE}.foreign:claim",
    guide=f"{_HERE}.guide:SecondGuide",
    **_BOTH,
)
