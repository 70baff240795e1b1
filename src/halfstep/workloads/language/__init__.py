"""Language: the next token of a text. GPT-2 in its four sizes."""

from halfstep.workloads.kind import Kind
from halfstep.workloads.language.config import LanguageConfig

_HERE = "halfstep.workloads.language"

KIND = Kind(
    builder=f"{_HERE}.build:build",
    config=LanguageConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:over",
    peer_prepare=f"{_HERE}.random_data:peer_prepare",
    evaluation=f"{_HERE}.evaluate:LanguageEvaluation",
    predictor=f"{_HERE}.predict:Writer",
    task="language",
    about="the next token of a text: a text file, a folder of them, or files of token ids",
    models={
        "gpt2": "124 M parameters",
        "gpt2_medium": "355 M",
        "gpt2_large": "774 M",
        "gpt2_xl": "1.56 B",
    },
    usual="gpt2",
    usual_on_cpu="gpt2",
)
