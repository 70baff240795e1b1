"""Write text with a language model: draw one token after another from the predicted probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.islands import fp32_island
from halfstep_train.data.seeds import make_generator
from halfstep_train.workloads.language.gpt2 import GPT2
from halfstep_train.workloads.language.tokenizers import Characters, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Settings for drawing the next token."""

    temperature: float = 1.0
    """Divides the logits; 0 always chooses the most probable token."""
    top_k: int = 0
    """Draw only from this many of the most probable tokens; 0: all."""
    top_p: float = 1.0
    """Draw only from the most probable tokens whose probabilities sum up to this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"cannot sample with temperature {self.temperature:g}, top-k {self.top_k}, top-p {self.top_p:g}",
                why="temperature and top-k are 0 or more, and finite; top-p is above 0 and at most 1",
                fix="--temperature 0.8 --top-k 200 --top-p 0.95",
            )


def compute_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return probabilities (N, vocab) in fp32 after temperature, top-k and top-p, in this order."""
    with fp32_island():
        logits = logits.float()
        if sampling.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        # The largest stays finite at tiny temperatures.
        logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
        if 0 < sampling.top_k < logits.shape[-1]:
            least = logits.topk(sampling.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if sampling.top_p < 1:
            logits = _drop_tail(logits, sampling.top_p)
        return logits.softmax(-1)


def _drop_tail(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose probabilities reach `top_p`; at least one token."""
    ordered, order = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    is_tail = probabilities.cumsum(-1) - probabilities >= top_p
    return logits.masked_fill(torch.zeros_like(is_tail).scatter(-1, order, is_tail), float("-inf"))


def write_tokens(model: GPT2, start: Tensor, *, num_tokens: int, sampling: Sampling, end: int | None) -> Iterator[int]:
    """Yield tokens after `start` (T,), until the end of the document or `num_tokens`.

    Keys and values of earlier tokens are cached. When the context is full, generation continues from its last half.
    Tokens are drawn on the CPU, each from its own key: a text depends only on the seed and the probabilities.
    """
    context, caches = model.size.context, model.make_caches()
    seen = start[-context:].tolist()
    # `fresh` are the tokens whose keys and values are not cached yet.
    fresh = seen
    for number in range(num_tokens):
        if len(seen) > context:
            seen = seen[-max(1, context // 2) :]
            fresh, caches = seen, model.make_caches()
        logits = model.compute_next_logits(torch.tensor([fresh], device=start.device), caches)
        token = draw_token(compute_probabilities(logits[0], sampling), sampling.seed, number)
        yield token
        if token == end:
            return
        seen, fresh = [*seen, token], [token]


def draw_token(probabilities: Tensor, seed: int, number: int) -> int:
    """Draw token `number` of a text by inverting the cumulative probabilities at a uniform draw from (seed, number)."""
    total = probabilities.double().cpu().cumsum(0)
    draw = torch.rand((), dtype=torch.float64, generator=make_generator(seed, number)) * total[-1]
    return int(torch.searchsorted(total, draw, right=True).clamp(max=len(total) - 1))


def continue_text(model: GPT2, tokenizer: Tokenizer, prompt: str, *, num_tokens: int, sampling: Sampling) -> str:
    """Return the text that the model writes after a prompt; without one, after the end of a document or a line
    break."""
    ids = tokenizer.encode(prompt or _choose_beginning(tokenizer), source="the prompt").tolist()
    start = torch.tensor(ids or [tokenizer.end or 0], device=model.transformer.wte.weight.device)
    new = list(write_tokens(model, start, num_tokens=num_tokens, sampling=sampling, end=tokenizer.end))
    # Many tokenizers drop a leading space when decoding, so decode the new tokens together with the prompt.
    before, whole = tokenizer.decode(ids), tokenizer.decode([*ids, *new])
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(new)


def _choose_beginning(tokenizer: Tokenizer) -> str:
    if tokenizer.end is not None:
        return ""
    return "\n" if not isinstance(tokenizer, Characters) or "\n" in tokenizer.alphabet else ""
