"""Language: the next token of a text. GPT-2 in its four sizes."""

from dataclasses import replace

from halfstep.workloads.base.kind import SYNTHETIC, EvaluateCommand, Kind, Option, PredictCommand, SampleUnit
from halfstep.workloads.language.config import LanguageConfig, context_of

KIND = Kind.from_package(
    __name__,
    config=LanguageConfig,
    kept=("data.tokenizer", "model.vocab"),
    task="language",
    usual="gpt2",
    export=".build:export",
    sample=SampleUnit(
        name="token",
        per_sample=".config:context_of",
        flops=".build:flops_per_sample",
        size=lambda config: f"{context_of(config):,} tokens",
    ),
    synthetic=replace(SYNTHETIC, peer_prepare=".build:peer_prepare"),
    evaluate=EvaluateCommand(".scores:LanguageEvaluation"),
    predict=PredictCommand(
        ".predict:Writer",
        options=(
            Option("prompt", str, "", "What the text begins with"),
            Option("tokens", int, 256, "At most this many tokens are written", least=1),
            Option("num", int, 1, "How many texts, with consecutive seeds", least=1),
            Option("temperature", float, 0.8, "Below 1 favours probable tokens; 0: always the most probable one"),
            Option("top_k", int, 0, "Draw from this many of the most probable tokens only; 0: all", least=0),
            Option("top_p", float, 1.0, "Draw from the most probable tokens that together reach this probability"),
            Option("seed", int, 0, "Another seed, another text", least=0),
        ),
        needs_input=False,
    ),
)
