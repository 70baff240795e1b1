"""`halfstep predict` of a language model: texts that begin with a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.errors import DataError
from halfstep.report.progress import Bar
from halfstep.report.results import Answer, Failure
from halfstep.workloads.base.kind import Store
from halfstep.workloads.base.using import Input, PredictRequest, TrainedModel
from halfstep.workloads.language.build import build_model
from halfstep.workloads.language.config import LanguageConfig
from halfstep.workloads.language.data import load_stored_tokenizer
from halfstep.workloads.language.gpt2 import GPT2
from halfstep.workloads.language.tokenizers import Tokenizer
from halfstep.workloads.language.writing import Sampling, continue_text


class Writer:
    """Write texts that continue a prompt."""

    endings = ()

    def __init__(self, config: LanguageConfig, store: Store) -> None:
        self.model = build_model(config, store)
        tokenizer = load_stored_tokenizer(store)
        if tokenizer is None:
            raise DataError(
                "this run has no tokenizer: it was trained on token ids alone",
                why="a text cannot become ids, nor ids a text",
                fix="train with data.tokenizer=tiktoken:gpt2, or with the tokenizer.json those ids were made with",
            )
        self.tokenizer: Tokenizer = tokenizer

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        asked = request.options
        bar.total = asked["num"]
        model, prompt = trained.model, asked["prompt"]
        assert isinstance(model, GPT2)
        _refuse_bad_utf8(prompt)
        for number in range(asked["num"]):
            sampling = Sampling(
                temperature=asked["temperature"],
                top_k=asked["top_k"],
                top_p=asked["top_p"],
                seed=asked["seed"] + number,
            )
            with trained.inside():
                more = continue_text(
                    model, self.tokenizer, prompt, num_tokens=asked["tokens"], sampling=sampling, device=trained.device
                )
            found = {"prompt": prompt, "seed": sampling.seed, "text": prompt + more}
            yield Answer(file=f"text {number + 1}", found=found, brief={"text": prompt + more})


def _refuse_bad_utf8(prompt: str) -> None:
    """Raise for a prompt with bytes that are not UTF-8: Python passes them as surrogates, which cannot be encoded."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the prompt {prompt!r} is not UTF-8",
            why=f"character {error.start + 1} of it is a byte of another encoding",
            fix="type it in a UTF-8 terminal (locale), or convert the file it comes from with iconv",
        ) from error
