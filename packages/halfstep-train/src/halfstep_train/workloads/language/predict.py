"""`halfstep predict` for language models: write texts that continue a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.errors import DataError
from halfstep_train.report.results import Answer, Failure
from halfstep_train.report.run_report import Bar
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.using import Input, PredictRequest, TrainedModel
from halfstep_train.workloads.language.build import build_model
from halfstep_train.workloads.language.config import LanguageConfig
from halfstep_train.workloads.language.data import load_stored_tokenizer
from halfstep_train.workloads.language.gpt2 import GPT2
from halfstep_train.workloads.language.tokenizers import Tokenizer
from halfstep_train.workloads.language.writing import Sampling, continue_text


class Writer:
    """Predictor that writes texts."""

    endings = ()

    def __init__(self, config: LanguageConfig, store: Store) -> None:
        self.model = build_model(config, store)
        tokenizer = load_stored_tokenizer(store)
        if tokenizer is None:
            raise DataError(
                "this run has no tokenizer: it was trained on token ids",
                why="without one, text and ids cannot be converted",
                fix="train with data.tokenizer=tiktoken:gpt2, or with the tokenizer.json those ids were made with",
            )
        self.tokenizer: Tokenizer = tokenizer

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        options = request.options
        bar.total = options["num"]
        model, prompt = trained.model, options["prompt"]
        assert isinstance(model, GPT2)
        for number in range(options["num"]):
            settings = {name: options[name] for name in ("temperature", "top_k", "top_p")}
            sampling = Sampling(**settings, seed=options["seed"] + number)
            with trained.inference():
                new = continue_text(model, self.tokenizer, prompt, num_tokens=options["tokens"], sampling=sampling)
            found = {"prompt": prompt, "seed": sampling.seed, "text": prompt + new}
            yield Answer(file=f"text {number + 1}", found=found, brief={"text": prompt + new})
