"""Classification: one class per image, with ResNets and ViTs."""

from dataclasses import replace

from halfstep_train.workloads.base.kind import (
    SYNTHETIC,
    EvaluateCommand,
    ExportCommand,
    GuideEntry,
    Kind,
    Option,
    PredictCommand,
    SampleUnit,
    describe_pixels,
)
from halfstep_train.workloads.classification.config import CLASSIFIER_SCHEMAS

KIND = Kind.from_package(
    __name__,
    config=CLASSIFIER_SCHEMAS,
    kept=("model.replace_head",),
    task="classification",
    export_command=ExportCommand("image", ".build:describe_export"),
    usual="resnet50",
    sample=SampleUnit(name="image", size=describe_pixels),
    synthetic=replace(SYNTHETIC, peer_prepare=".build:make_peer_prepare"),
    evaluate=EvaluateCommand(".evaluate:ClassificationEvaluation"),
    predict=PredictCommand(
        ".evaluate:ClassPredictor", (Option("top_k", int, 5, "How many classes per file", least=1),)
    ),
    guide=GuideEntry(
        about="one label per image: train/<class>/*.jpg",
        models={
            "resnet18": "11.7 M parameters",
            "resnet34": "21.8 M",
            "resnet50": "25.6 M, the usual choice on a GPU",
            "resnet101": "44.5 M",
            "resnet152": "60.2 M",
            "vit_s_16": "22 M, a transformer: for large data, or with model.weights",
            "vit_b_16": "86.6 M",
            "vit_l_16": "304 M",
        },
        usual_on_cpu="resnet18",
    ),
)
