"""Writing: a text goes on from its beginning, one drawn token after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.data.seeds import generator_for
from halfstep.data.tokenizers import Characters, Tokenizer
from halfstep.errors import ConfigError, DataError
from halfstep.islands import fp32_island
from halfstep.models.gpt2 import GPT2
from halfstep.report.prediction_view import Answer, Failure
from halfstep.report.progress import Bar
from halfstep.workloads.kind import Store
from halfstep.workloads.language.build import model_from_store
from halfstep.workloads.language.config import LanguageConfig
from halfstep.workloads.language.data import stored_tokenizer
from halfstep.workloads.using import Input, Trained, Wishes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """0 takes the most probable one."""
    top_k: int = 0
    """Only among so many of the most probable ones; 0: all."""
    top_p: float = 1.0
    """Only among the most probable ones whose probabilities reach this sum."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"temperature {self.temperature:g}, top-k {self.top_k}, top-p {self.top_p:g}",
                why="a temperature and a count are not negative, a probability lies above 0 and up to 1",
                fix="--temperature 0.8 --top-k 200 --top-p 0.95",
            )


def chances(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (N, vocab) in fp32 after temperature, top-k and top-p, in this order."""
    with fp32_island():
        logits = logits.float()
        if sampling.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        logits = logits / sampling.temperature
        if 0 < sampling.top_k < logits.shape[-1]:
            least = logits.topk(sampling.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if sampling.top_p < 1:
            logits = _without_tail(logits, sampling.top_p)
        return logits.softmax(-1)


def _without_tail(logits: Tensor, top_p: float) -> Tensor:
    """The smallest set of most probable tokens that reaches top_p; the first one always stays."""
    ordered, order = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    is_tail = probabilities.cumsum(-1) - probabilities >= top_p
    return logits.masked_fill(torch.zeros_like(is_tail).scatter(-1, order, is_tail), float("-inf"))


def written(model: GPT2, start: Tensor, *, num_tokens: int, sampling: Sampling, end: int | None) -> Iterator[int]:
    """Tokens after `start` (T), until the end of the document or `num_tokens`.

    Keys and values of what stands before are kept; at the end of the context the last half of it is read anew.
    Tokens are drawn on the CPU by inversion, token by token from its own key: a text depends on the seed and on
    probabilities alone, not on the device.
    """
    context, memories = model.size.context, model.empty_memories()
    seen = start[-context:].tolist()
    fresh = seen
    for number in range(num_tokens):
        if len(seen) > context:
            seen = seen[-max(1, context // 2) :]
            fresh, memories = seen, model.empty_memories()
        logits = model.next_logits(torch.tensor([fresh], device=start.device), memories)
        token = drawn(chances(logits[0], sampling), sampling.seed, number)
        yield token
        if token == end:
            return
        seen, fresh = [*seen, token], [token]


def drawn(probabilities: Tensor, seed: int, number: int) -> int:
    """The token of a number of its own between 0 and 1 among the added probabilities."""
    total = probabilities.double().cpu().cumsum(0)
    draw = torch.rand((), dtype=torch.float64, generator=generator_for(seed, number)) * total[-1]
    return int(torch.searchsorted(total, draw, right=True).clamp(max=len(total) - 1))


class Writer:
    """Writes texts that begin with a prompt."""

    endings = ()

    def __init__(self, config: LanguageConfig, store: Store) -> None:
        self.model = model_from_store(config, store)
        tokenizer = stored_tokenizer(store)
        if tokenizer is None:
            raise DataError(
                "this run has no tokenizer: it was trained on token ids alone",
                why="a text cannot become ids, nor ids a text",
                fix="train with data.tokenizer=tiktoken:gpt2, or with the tokenizer.json those ids were made with",
            )
        self.tokenizer: Tokenizer = tokenizer

    def answers(self, inputs: list[Input], trained: Trained, wishes: Wishes, bar: Bar) -> Iterator[Answer | Failure]:
        asked = wishes.options
        bar.total = asked["num"]
        for number in range(asked["num"]):
            sampling = Sampling(
                temperature=asked["temperature"],
                top_k=asked["top_k"],
                top_p=asked["top_p"],
                seed=asked["seed"] + number,
            )
            text = asked["prompt"] + self.text(asked["prompt"], trained, num_tokens=asked["tokens"], sampling=sampling)
            found = {"prompt": asked["prompt"], "seed": sampling.seed, "text": text}
            yield Answer(file=f"text {number + 1}", found=found, cells=found, brief={"text": text})

    def text(self, prompt: str, trained: Trained, *, num_tokens: int, sampling: Sampling) -> str:
        """What the model writes after `prompt`; without one, what follows the end of a document, or a line break."""
        ids = self.tokenizer.encode(prompt or self._beginning(), source="the prompt").tolist()
        start = torch.tensor(ids or [self.tokenizer.end or 0], device=trained.device)
        model = trained.model
        assert isinstance(model, GPT2)
        with trained.inside():
            found = list(written(model, start, num_tokens=num_tokens, sampling=sampling, end=self.tokenizer.end))
        return self.tokenizer.decode(found)

    def _beginning(self) -> str:
        if self.tokenizer.end is not None:
            return ""
        return "\n" if not isinstance(self.tokenizer, Characters) or "\n" in self.tokenizer.alphabet else ""
