"""Language: predict the next token of a text, with GPT-2 in its four sizes."""

from halfstep_train.workloads.base.kind import (
    EvaluateCommand,
    ExportCommand,
    GuideEntry,
    Kind,
    Option,
    PredictCommand,
    SampleUnit,
)
from halfstep_train.workloads.language.config import LanguageConfig, get_context

KIND = Kind.from_package(
    __name__,
    config=LanguageConfig,
    kept=("data.tokenizer", "model.vocab"),
    task="language",
    export_command=ExportCommand(
        "tokens", ".build:describe_export", longest=".config:get_context", read=".build:read_export_"
    ),
    usual="gpt2",
    export=".build:export",
    sample=SampleUnit(
        name="token",
        per_sample=".config:get_context",
        flops=".build:compute_flops_per_sample",
        size=lambda config: f"{get_context(config):,} tokens",
    ),
    evaluate=EvaluateCommand(".build:LanguageEvaluation"),
    predict=PredictCommand(
        ".build:Writer",
        options=(
            Option("prompt", str, "", "Beginning of the text"),
            Option("tokens", int, 256, "Largest number of tokens to write", least=1),
            Option("num", int, 1, "Number of texts, with consecutive seeds", least=1),
            Option("temperature", float, 0.8, "Values below 1 favour probable tokens; 0: always the most probable one"),
            Option("top_k", int, 0, "Draw only from this many of the most probable tokens; 0: all", least=0),
            Option("top_p", float, 1.0, "Draw from the most probable tokens that together reach this probability"),
            Option("seed", int, 0, "Seed of the draws", least=0),
        ),
        needs_input=False,
    ),
    guide=GuideEntry(
        about="the next token of a text: a text file, a folder of texts, or files of token ids",
        models={
            "gpt2": "124 M parameters",
            "gpt2_medium": "354 M parameters",
            "gpt2_large": "774 M parameters",
            "gpt2_xl": "1.6 G parameters",
        },
        usual_on_cpu="gpt2",
    ),
)
