"""Language: the next token of a text. GPT-2 in its four sizes."""

from halfstep.workloads.base.kind import Kind
from halfstep.workloads.base.options import Option
from halfstep.workloads.language.config import LanguageConfig, context_of

KIND = Kind.in_folder(
    __name__,
    config=LanguageConfig,
    kept=("data.tokenizer", "model.vocab"),
    guide=None,
    peer_prepare=".build:peer_prepare",
    evaluation=".scores:LanguageEvaluation",
    predictor=".predict:Writer",
    predict_options=(
        Option("prompt", str, "", "What the text begins with"),
        Option("tokens", int, 256, "At most this many tokens are written", least=1),
        Option("num", int, 1, "How many texts, with consecutive seeds", least=1),
        Option("temperature", float, 0.8, "Below 1 favours probable tokens; 0: always the most probable one"),
        Option("top_k", int, 0, "Draw from this many of the most probable tokens only; 0: all", least=0),
        Option("top_p", float, 1.0, "Draw from the most probable tokens that together reach this probability"),
        Option("seed", int, 0, "Another seed, another text", least=0),
    ),
    needs_input=False,
    export=".build:export",
    unit="token",
    units_per_sample=".config:context_of",
    flops_per_sample=".build:flops_per_sample",
    sample_size=lambda config: f"{context_of(config):,} tokens",
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
