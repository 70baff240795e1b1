"""The workload of language models: GPT-2 on windows of tokens."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from halfstep.disk import write_atomically
from halfstep.errors import ConfigError, DataError, ModelError
from halfstep.islands import fp32_island
from halfstep.tensor_files import LazyTensors
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.loader import Batch, Key, Samples, make_generator
from halfstep_train.models.initial_values import skip_initialisation
from halfstep_train.report.run_report import Answer, Bar, Failure
from halfstep_train.workloads import get_model_name
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.sums import Sums
from halfstep_train.workloads.base.using import (
    Guiding,
    Input,
    PlainEvaluation,
    PredictRequest,
    TrainedModel,
    use_folder,
)
from halfstep_train.workloads.base.workload import OpenedData, Sample, Workload
from halfstep_train.workloads.language.config import LanguageConfig, get_context
from halfstep_train.workloads.language.data import (
    TokenSamples,
    is_weights_tokenizer,
    load_stored_tokenizer,
    open_language_data,
)
from halfstep_train.workloads.language.gpt2 import GPT2, GPT2S, GPT2Size, get_size
from halfstep_train.workloads.language.gpt2_weights import load_gpt2_, save_gpt2
from halfstep_train.workloads.language.tokenizers import Bpe, Characters, Tokenizer, save_tokenizer

# --- writing texts ---


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


# --- halfstep predict ---


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


# --- scores ---


def count_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Count the targets that are not padding, on the device."""
    return (batch["targets"] >= 0).sum()


class LanguageMetrics(Sums):
    """Perplexity and bits per byte, from sums over tokens on the device in fp64.

    `byte_lengths` holds the number of bytes of each token; if all are 0, there are no bits per byte.
    """

    def __init__(self, byte_lengths: Tensor) -> None:
        super().__init__()
        self.byte_lengths = byte_lengths

    def update(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Add a batch by its mean loss (`outputs`), without waiting for the device."""
        targets = batch["targets"]
        self.byte_lengths = self.byte_lengths.to(targets.device)
        count = count_targets(batch).double()
        num_bytes = torch.where(targets >= 0, self.byte_lengths[targets.clamp(min=0)], 0).sum().double()
        self.add(sums=torch.stack([outputs.detach().double() * count, count, num_bytes]))

    def compute(self) -> dict[str, float]:
        """Return `perplexity` and, if lengths are known, `bits_per_byte`; waits for the device."""
        nats, tokens, num_bytes = self.sums["sums"].tolist() if self.sums else (0, 0, 0)
        if not tokens:
            return {}
        mean = nats / tokens
        found = {"perplexity": math.exp(mean) if mean < 700 else math.inf}
        return found | ({"bits_per_byte": nats / math.log(2) / num_bytes} if num_bytes else {})


class LanguageEvaluation(PlainEvaluation):
    """Evaluation of language models; another text is evaluated as a whole, unless it has a validation split."""

    @staticmethod
    def change_data_folder(config: RunConfig, folder: Path) -> RunConfig:
        return use_folder(config, folder, val_fraction=0.0, cache=False)  # no cache file is written to that folder

    @staticmethod
    def use_all_samples(workload: Workload) -> Workload:
        samples = workload.train_samples
        if len(workload.val_samples) or not isinstance(samples, TokenSamples):
            return workload
        whole = TokenSamples(samples.tokens, context=samples.context, vocab=samples.vocab, is_training=False)
        return replace(workload, val_samples=whole)


SAMPLE_TOKENS = 200
"""Tokens of each text that is written during training."""
FRAGILE = ("loss.cross_entropy: log of a sum over the whole vocabulary, and sums over all tokens of a step",)


def build(config: LanguageConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`; the `store` of an earlier run contains its tokenizer."""
    data = open_language_data(config, store)
    is_new = store is None
    if store is None:
        store = data.store
        if config.model.vocab not in (0, store["vocab"]):
            raise ModelError(
                f"model.vocab={config.model.vocab:,}, but the tokenizer has {store['vocab']:,} tokens",
                why="the embedding has one row per token",
                fix=f"leave model.vocab out, or set data.tokenizer to one with {config.model.vocab:,} tokens",
            )
    model = _load_start_weights(config, store) if is_new and config.model.weights else build_model(config, store)
    return make_workload(config, model, replace(data, store=store))


def make_workload(config: LanguageConfig, model: GPT2, data: OpenedData) -> Workload:
    """Build the workload from its model and samples."""
    tokenizer = load_stored_tokenizer(data.store)
    lengths = _read_byte_lengths(tokenizer, model.size.vocab)
    return Workload(
        name=config.workload,
        model=model,
        forward=lambda model, batch: model(batch["tokens"], batch["targets"]),
        loss=lambda outputs, batch: (outputs, count_targets(batch)),
        metrics=lambda: LanguageMetrics(lengths),
        metric="perplexity",
        mode="min",
        scoring="every token of the validation split once, in windows of model.context",
        fragile=FRAGILE,
        sample=_make_sampler(tokenizer),
        **data.to_fields(),
    )


def _make_sampler(tokenizer: Tokenizer | None) -> Sample | None:
    """Return a function that writes two texts during training, with the same draws each time."""
    if tokenizer is None:
        return None

    def sample(model: nn.Module, key: Key) -> dict[str, str]:
        assert isinstance(model, GPT2)
        found = {}
        for seed in range(2):
            sampling = Sampling(temperature=0.8, seed=seed)
            found[f"text_{seed}"] = continue_text(model, tokenizer, "", num_tokens=SAMPLE_TOKENS, sampling=sampling)
        return found

    return sample


def _load_start_weights(config: LanguageConfig, store: Store) -> GPT2:
    """Build the model and load `model.weights`."""
    assert config.model.weights is not None
    with skip_initialisation():
        model = build_model(config, store)
    load_gpt2_(
        model, Path(config.model.weights), has_its_tokenizer=is_weights_tokenizer(load_stored_tokenizer(store), config)
    )
    return model


def build_model(config: LanguageConfig, store: Mapping[str, Any]) -> GPT2:
    """Build the model without data, as prediction needs it."""
    return GPT2(
        get_model_size(config, store),
        dropout=config.model.dropout,
        bias=config.model.bias,
        checkpointing=config.train.activation_checkpointing,
    )


def get_model_size(config: LanguageConfig, store: Mapping[str, Any]) -> GPT2Size:
    """Return the size of the model: published, as configured, and with the vocabulary of the tokenizer."""
    sizes = config.model.model_dump(include={"depth", "heads", "dim", "context"})
    return get_size(get_model_name(config), **sizes, vocab=store["vocab"])


def _read_byte_lengths(tokenizer: Tokenizer | None, vocab: int) -> Tensor:
    """Return the number of bytes of each token; 0 if unknown."""
    lengths = torch.zeros(vocab, dtype=torch.int64)
    known = tokenizer.get_byte_lengths() if tokenizer is not None else None
    if known is not None:
        lengths[: len(known)] = torch.from_numpy(known)
    return lengths


def make_random_store(config: LanguageConfig) -> dict[str, Any]:
    return {"vocab": config.model.vocab or GPT2S[get_model_name(config)].vocab, "tokenizer": None}


def make_random_batch(config: LanguageConfig, store: Store) -> Batch:
    """Return random ids as the loader returns them."""
    generator, size = make_generator(config.train.seed), config.train.batch_size
    ids = torch.randint(store["vocab"], (size, get_context(config) + 1), generator=generator)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "index": torch.arange(size)}


def build_on_samples(config: LanguageConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload on given samples."""
    return make_workload(config, build_model(config, store), OpenedData(train=samples, val=samples, store=store))


def compute_flops_per_sample(config: LanguageConfig, store: Store) -> float:
    """Return the operations of forward and backward per sample (Chowdhery et al. 2022).

    These are 6 per weight of a matmul and token, plus 12 · depth · dim · context per token for attention. The causal
    mask halves attention, but it is usually counted in full, as here.
    """
    size, context = get_model_size(config, store), get_context(config)
    in_blocks = 12 * size.depth * size.dim**2
    return 6.0 * context * (in_blocks + size.vocab * size.dim) + 12.0 * size.depth * size.dim * context**2


def export(weights: LazyTensors, config: LanguageConfig, store: Store, folder: Path, device: torch.device) -> None:
    """Export the model and its tokenizer in Hugging Face's format."""
    tokenizer = load_stored_tokenizer(store)
    ends_at = tokenizer.end if tokenizer is not None else None
    save_gpt2(weights, get_model_size(config, store), folder, ends_at=ends_at)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def read_export_(model: GPT2, folder: Path) -> None:
    """Load the weights that `export` wrote."""
    load_gpt2_(model, folder, has_its_tokenizer=True)


def describe_export(config: LanguageConfig, store: Store, folder: Path) -> dict[str, Any]:
    """Return what the model takes and returns, and write its tokenizer."""
    tokenizer = load_stored_tokenizer(store)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    if isinstance(tokenizer, Bpe):  # AutoTokenizer would rebuild it as GPT-2's, without its normalizer
        end = None if tokenizer.end is None else tokenizer.loaded.id_to_token(tokenizer.end)
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        write_atomically(folder / "tokenizer_config.json", json.dumps(facts))
    return {
        "input": "token ids, int64 (N, tokens); onnx takes at least 2 tokens",
        "output": "logits of the next token (N, tokens, vocab)",
        "vocab": store["vocab"],
        "context": get_context(config),
        "end_of_text": tokenizer.end if tokenizer is not None else None,
        "tokenizer": "tokenizer.json (Hugging Face), or halfstep_tokenizer.json, whose ids are bytes of UTF-8, "
        "positions in its alphabet, or those of a tiktoken encoding",
    }


# --- halfstep guide ---


PICTURE_SIDE, FONT_SIZE, LINE_CHARACTERS, LINES = 160, 11, 24, 10
"""Of a picture of text, in pixels; the last two are what fits."""


class Guide(Guiding):
    """Guide to language models."""

    small_on_cpu = {"model.depth": 4, "model.heads": 4, "model.dim": 128}

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None

    def open(self, config: LanguageConfig) -> OpenedData:
        # Tokenise in memory: the guide writes nothing next to the data.
        data = open_language_data(config.replace(data={"cache": False}))
        self._tokenizer = load_stored_tokenizer(data.store)
        return data

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Draw the beginning of a window as text, or as ids if there is no tokenizer."""
        ids = sample["tokens"][: LINE_CHARACTERS * LINES].tolist()
        text = self._tokenizer.decode(ids) if self._tokenizer is not None else " ".join(map(str, ids))
        lines = [part for line in text.splitlines() for part in textwrap.wrap(line, LINE_CHARACTERS) or [""]]
        picture = Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE), "white")
        font = ImageFont.load_default(FONT_SIZE)
        ImageDraw.Draw(picture).multiline_text((4, 4), "\n".join(lines[:LINES]), fill="black", font=font)
        return f"window {index}", picture
