"""Radio maps: predict the path gain of a transmitter in a city, with RadioDiff's two stages."""

from dataclasses import replace
from functools import partial

from halfstep_train.workloads.base.kind import (
    EvaluateCommand,
    GuideEntry,
    Kind,
    Option,
    PredictCommand,
    SampleUnit,
    describe_pixels,
)
from halfstep_train.workloads.radio.config import RadioDiffConfig, RadioVaeConfig

_STEPS = Option("steps", int, None, "Steps of a sample; default: the run's model.sampling_steps", least=1)
_GUIDE = GuideEntry(
    about="path gain of a transmitter from buildings and antenna: RadioMapSeer's png/ and gain/",
    models={
        "radiodiff_vae": "first stage, an autoencoder of maps: 55 M parameters at its defaults",
        "radiodiff": "second stage, the diffusion model: start it with model.vae=RUN of a first stage",
    },
    usual_on_cpu="radiodiff_vae",
)
_radio_kind = partial(
    Kind.from_package,
    __name__,
    task="radio maps",
    usual="radiodiff_vae",
    sample=SampleUnit(name="map", size=describe_pixels),
)

VAE_KIND = _radio_kind(
    builder=".first_stage:build_vae",
    config=RadioVaeConfig,
    export=".first_stage:export_vae",
    evaluate=EvaluateCommand(".evaluate:RadioEvaluation"),
    predict=PredictCommand(".evaluate:GainPredictor", writes_files=True),
    guide=_GUIDE,
)

KIND = _radio_kind(
    config=RadioDiffConfig,
    kept=("model.scale_factor", "model.first_stage.", "model.pyramid.weights", "data.image_size"),
    foreign=".foreign:translate_config",
    evaluate=EvaluateCommand(
        ".evaluate:SamplingEvaluation", (_STEPS, Option("part", str, "val", "Which maps: val, test or train"))
    ),
    predict=PredictCommand(
        ".evaluate:MapPredictor",
        (_STEPS, Option("seed", int, 0, "Seed of the noise that samples start from", least=0)),
        writes_files=True,
    ),
    guide=replace(_GUIDE, guide=".build:SecondGuide"),
)
