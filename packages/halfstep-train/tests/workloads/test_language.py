"""The demo's text: its entropy is what its own rules give, and a small model learns in seconds what pairs cannot."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from halfstep.errors import ConfigError, DataError, ModelError
from halfstep_train.data.loader import Loader
from halfstep_train.models import initial_values
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.folder import RunFolder, describe_changed_data
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.use.predict import predict
from halfstep_train.workloads import load
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.language.build import (
    Sampling,
    compute_probabilities,
    continue_text,
    draw_token,
    write_tokens,
)
from halfstep_train.workloads.language.config import LanguageConfig
from halfstep_train.workloads.language.demo import BRACKETS, DEEPEST, write_demo
from halfstep_train.workloads.language.gpt2 import GPT2, build_gpt2
from halfstep_train.workloads.language.gpt2_weights import save_gpt2
from halfstep_train.workloads.language.tokenizers import Bpe
from tiny_runs import Told
from whole_runs import final_state, resume


def cost_of(line: str) -> float:
    """Nats of one line, read off the text alone: which choices there were, and how many of each."""
    cost = math.log(3)
    if re.fullmatch(r"\d\+\d=\d+", line):
        return cost + 2 * math.log(10)
    if line[0] in "([{":
        depth = 0
        for place, character in enumerate(line):
            opens = character in "([{"
            if 0 < depth < DEEPEST and place:
                cost += math.log(2)
            cost += math.log(len(BRACKETS)) if opens else 0.0
            depth += 1 if opens else -1
        return cost
    nouns = line.count("the ")
    return cost + nouns * (math.log(8) + math.log(2)) + math.log(2) + math.log(8)


def test_the_entropy_is_that_of_the_choices_that_can_be_read_off_the_text(tmp_path: Path) -> None:
    write_demo(tmp_path / "data", num_train=400, num_val=100)
    stored = json.loads((tmp_path / "data" / "entropy.json").read_text())["nats_per_character"]
    for part in ("train", "val"):
        text = (tmp_path / "data" / f"{part}.txt").read_text()
        assert sum(map(cost_of, text.splitlines())) / len(text) == pytest.approx(stored[part], rel=1e-9)


# --- runs: data, weights, accumulation, resume, bad input ---

TINY = {"model.depth": 1, "model.heads": 2, "model.dim": 16, "model.context": 8, "data.num_workers": 0, "device": "cpu",
        "log.quiet": True, "train.batch_size": 4, "schedule.warmup_steps": 1, "precision.default": "fp32",
        "data.tokenizer": "characters"}  # fmt: skip
TEXT = "to be or not to be, that is the question.\n" * 30


def save_weights(model: GPT2, folder: Path) -> None:
    save_gpt2(model.state_dict(), model.size, folder)


def overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in {**TINY, **values}.items()]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text" / "input.txt"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


def built(data: Path, **values: Any) -> Workload:
    named = {key.replace("__", "."): value for key, value in values.items()}
    return build_workload(load("gpt2", overrides=overrides({"data.dir": str(data), **named})).config)


def trained(out: Path, data: Path, **values: Any) -> Path:
    named = {key.replace("__", "."): value for key, value in values.items()}
    return train(load("gpt2", overrides=overrides({"data.dir": str(data), **named})), out=out)


def scores(run: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, float] = [line for line in lines if line["kind"] == "val"][-1]
    return found


def test_a_run_learns_a_text_and_counts_its_tokens_and_bytes(tmp_path: Path, text: Path) -> None:
    run = trained(tmp_path / "run", text, train__max_steps=60, train__epochs=2, optimizer__lr=0.01, train__batch_size=8)
    found = scores(run)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-6), "one byte a character"
    assert found["perplexity"] < 8, "of 16 characters"
    assert (run / "model" / "config.json").is_file()


def test_validation_is_exact_over_the_whole_part(tmp_path: Path, text: Path) -> None:
    """The loss of a plain pass in fp64 over all windows, the last of which is short."""
    run = trained(tmp_path / "run", text, train__max_steps=2, train__batch_size=5)
    tensors, _ = final_state(run)
    workload = built(text)
    model = workload.model.double().eval()
    model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")})
    nats, count = 0.0, 0
    assert len(workload.val_samples) % 5, "a batch is short, too"
    for index in range(len(workload.val_samples)):
        sample = workload.val_samples.sample(index, key=(0, 0, index))
        with torch.no_grad():
            logits = model(sample["tokens"][None])[0]
        nats += F.cross_entropy(logits, sample["targets"], ignore_index=-1, reduction="sum").item()
        count += int((sample["targets"] >= 0).sum())
    assert count == len(TEXT) - int(len(TEXT) * 0.9) - 1
    assert scores(run)["loss"] == pytest.approx(nats / count, rel=1e-6)


def test_accumulating_weighs_micro_batches_by_their_tokens(text: Path) -> None:
    """Two micro-batches, of which one has few tokens that count, give the gradient of all tokens at once."""
    from halfstep.hardware.probe import probe
    from halfstep.precision.decide import decide
    from halfstep.step.step import GuardedStep

    workload = built(text)
    config = load("gpt2", overrides=overrides({})).config
    batch = next(Loader(workload.train_samples, batch_size=4).iterate_epoch(0))
    batch["targets"][2:, 1:] = -1
    parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    plan = decide(config.precision, probe("cpu"), workload.model)

    def loss(given: dict[str, torch.Tensor]) -> Any:
        return workload.loss(workload.forward(workload.model, given), given)

    norms = []
    for window in ([batch], parts):
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.0, fused=True)
        step = GuardedStep(workload.model, optimizer, plan, accumulate=len(window))
        facts = step.compute(loss, window)
        step.commit(facts)
        norms.append((facts.read().loss, facts.read().grad_norm))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_run_that_was_stopped_in_an_epoch_goes_on_to_the_same_bits(tmp_path: Path, text: Path) -> None:
    settings: dict[str, Any] = {"model__dropout": 0.1, "train__checkpoint_every": 5, "train__accumulate": 2}
    steady = {**settings, "schedule__name": "constant"}  # others depend on max_steps, which is not the same at first
    whole = trained(tmp_path / "whole", text, train__max_steps=12, train__epochs=1, **steady)
    part = trained(tmp_path / "part", text, train__max_steps=5, train__epochs=1, **steady)
    resume(part, "train.max_steps=12")
    left, right = final_state(whole)[0], final_state(part)[0]
    assert all(torch.equal(left[name], right[name]) for name in left if name.startswith("model."))


def test_a_text_that_changed_since_a_run_began_is_named_once(tmp_path: Path, text: Path) -> None:
    run = trained(tmp_path / "run", text, train__max_steps=1)
    text.write_text(TEXT * 2)
    assert len(describe_changed_data(built(text), RunFolder.open(str(run)))) == 1


def test_a_tokenizer_that_does_not_fit_the_weights_is_refused(tmp_path: Path, text: Path) -> None:
    save_weights(build_gpt2("gpt2", depth=1, heads=2, dim=16, context=8, vocab=500), tmp_path / "weights")
    with pytest.raises(ModelError, match=r"500 tokens, but this tokenizer has 16"):
        built(text, model__weights=str(tmp_path / "weights"))
    with pytest.raises(ModelError, match=r"model\.vocab=400, but the tokenizer has 16"):
        built(text, model__vocab=400)


def test_stored_weights_are_used_without_drawing_others(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, save = trained(tmp_path / "run", text, train__max_steps=2), tmp_path / "weights"
    model = built(text).model
    assert isinstance(model, GPT2)
    save_weights(model, save)

    def draw_(job: object) -> None:
        raise AssertionError("values that nobody reads")

    monkeypatch.setattr(initial_values, "_draw_", draw_)
    report = Told(run).report
    predict(run, [], report=report, request=PredictRequest(options={"prompt": "to", "tokens": 2, "num": 1}))
    evaluate(run, report=report)
    built(text, model__weights=str(save))
    resume(run, "train.max_steps=3")
    with pytest.raises(AssertionError, match="nobody reads"):
        built(text)


def test_the_tokenizer_beside_the_weights_is_taken_where_none_is_named(tmp_path: Path, text: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=280, special_tokens=["<|endoftext|>"])
    save_weights(
        build_gpt2("gpt2", depth=1, heads=2, dim=16, context=8, vocab=bpe.get_vocab_size()), tmp_path / "weights"
    )
    bpe.save(str(tmp_path / "weights" / "tokenizer.json"))
    for weights in (tmp_path / "weights", tmp_path / "weights" / "model.safetensors"):
        workload = built(text, model__weights=str(weights), data__tokenizer="auto")
        assert workload.store["vocab"] == bpe.get_vocab_size()
        assert dict(workload.about)["tokenizer"].startswith("BPE")
    padded = build_gpt2("gpt2", depth=1, heads=2, dim=16, context=8, vocab=512)  # more than our own padding
    save_weights(padded, tmp_path / "weights")
    workload = built(text, model__weights=str(tmp_path / "weights"), data__tokenizer="auto")
    rows = workload.model.get_parameter("transformer.wte.weight")[: bpe.get_vocab_size()]
    assert torch.equal(rows, padded.transformer.wte.weight[: len(rows)])
    (tmp_path / "weights" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="has 512 tokens"):  # whose they are nobody knows
        built(text, model__weights=str(tmp_path / "weights"), data__tokenizer=str(tmp_path / "tokenizer.json"))


def test_a_runs_own_weights_bring_their_characters(tmp_path: Path, text: Path) -> None:
    run = trained(tmp_path / "run", text, train__max_steps=1, train__epochs=1)
    (tmp_path / "other.txt").write_text("not that question\n" * 9)  # fewer characters
    wish = {"model__weights": str(run / "model"), "data__cache": False}
    followed = built(tmp_path / "other.txt", **wish, data__tokenizer="auto")
    assert followed.store["tokenizer"] == {
        "kind": "characters",
        "alphabet": "".join(sorted(set(TEXT))),
        "has_end": False,
    }
    with pytest.raises(DataError, match="another tokenizer: characters, 16 tokens"):  # its rows would still fit
        built(tmp_path / "other.txt", **wish, data__tokenizer="characters")


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path, text: Path) -> None:
    """They are within the vocabulary: only meta.pkl next to them reveals it."""
    for part in ("train", "val"):
        np.arange(200, dtype=np.uint16).__mod__(3).astype(np.uint16).tofile(tmp_path / f"{part}.bin")
    meta = {"itos": dict(enumerate("abc")), "stoi": {letter: number for number, letter in enumerate("abc")}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    run = trained(tmp_path / "run", text, train__max_steps=1, train__epochs=1)
    with pytest.raises(DataError, match=r"another tokenizer: characters, 3 tokens"):
        evaluate(run, report=Told(run).report, data=tmp_path)
    assert built(tmp_path, data__tokenizer="auto").store["vocab"] == 3


def test_bad_texts_are_refused_and_leave_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"4 tokens, but one sample needs 8") as error:
        built(folder / "a.txt")
    assert error.value.fix == "more text"  # no context is as short
    with pytest.raises(DataError, match="does not exist"):
        built(tmp_path / "nowhere")
    (folder / "a.txt").write_text(TEXT)
    with pytest.raises(ConfigError, match=r"model\.path"):
        built(folder / "a.txt", model__path="my:model")
    for key in ("data__image_size", "image_size"):
        with pytest.raises(ConfigError, match=rf"unknown key '{key.replace('__', '.')}'") as unknown:
            built(folder / "a.txt", **{key: 8})
        assert "image_size" not in unknown.value.fix


def test_files_of_ids_train_with_gpt2s_vocabulary_and_ids_past_it_are_refused(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(50257, size=200).astype(np.uint16)
    for name in ("train", "val"):
        ids.tofile(tmp_path / f"{name}.bin")
    workload = built(tmp_path, data__tokenizer="auto")
    assert workload.store["vocab"] == 50257
    assert isinstance(workload.model, GPT2)
    assert workload.model.transformer.wte.weight.shape[0] == 50304
    np.append(ids, np.uint16(50300)).tofile(tmp_path / "val.bin")
    with pytest.raises(DataError, match="token 50,300 at position 200"):
        built(tmp_path, data__tokenizer="auto")


def test_predict_writes_the_same_text_for_the_same_seed(tmp_path: Path, text: Path) -> None:
    run = trained(tmp_path / "run", text, train__max_steps=2)
    told = Told(run)
    options = {"prompt": "to be", "tokens": 30, "num": 2, "seed": 3}
    first, second = (predict(run, [], report=told.report, request=PredictRequest(options=options)) for _ in range(2))
    texts = [answer.found["text"] for answer in first.answers]
    assert texts == [answer.found["text"] for answer in second.answers]
    assert texts[0] != texts[1]
    assert all(text.startswith("to be") and len(text) == 35 for text in texts), "past the context of 8"
    with pytest.raises(DataError, match="'X'"):
        predict(run, [], report=told.report, request=PredictRequest(options={"prompt": "X"}))
    with pytest.raises(ConfigError, match="top-p 2"):
        predict(run, [], report=told.report, request=PredictRequest(options={"top_p": 2.0}))


def test_another_text_is_evaluated_whole_and_nothing_is_written_beside_it(tmp_path: Path, text: Path) -> None:
    run = trained(tmp_path / "run", text, train__max_steps=2)
    other = tmp_path / "other.txt"
    other.write_text("to be, or not")
    found = evaluate(run, report=Told(run).report, data=other)
    assert found.samples == 2
    assert found.metrics["bits_per_byte"] > 0
    assert not list(tmp_path.glob(".other*"))


def test_two_texts_are_drawn_for_the_report(tmp_path: Path, text: Path) -> None:
    run = trained(tmp_path / "run", text, train__max_steps=2, train__sample_every=1)
    files = sorted(path.name for path in (run / "report" / "samples" / "00000002").iterdir())
    assert files == ["text_0.txt", "text_1.txt"]


def test_nanogpts_words_for_its_settings_are_known() -> None:
    words = ("n_layer=6", "n_head=6", "n_embd=384", "block_size=256", "dropout=0.2", "max_iters=5000", "warmup_iters=9")
    config = load("gpt2", overrides=["data.dir=x", *words, "eval_interval=250", "grad_clip=1.0"]).config
    assert isinstance(config, LanguageConfig)
    size = config.model
    assert (size.depth, size.heads, size.dim, size.context, size.dropout) == (6, 6, 384, 256, 0.2)
    assert (config.train.max_steps, config.train.validate_every_steps, config.schedule.warmup_steps) == (5000, 250, 9)
    with pytest.raises(ConfigError, match="unknown key 'n_embd'"):
        load("unet", overrides=["n_embd=3"])


def test_temperature_top_k_and_top_p_say_what_may_be_drawn() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert compute_probabilities(logits, Sampling()).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])
    for coldest in (0, 1e-45):
        assert compute_probabilities(logits, Sampling(temperature=coldest)).tolist() == [1, 0, 0, 0]
    assert compute_probabilities(logits, Sampling(top_k=2)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert compute_probabilities(logits, Sampling(top_p=0.8)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert compute_probabilities(logits, Sampling(top_p=0.01)).tolist() == [1, 0, 0, 0]
    cold = compute_probabilities(logits, Sampling(temperature=0.5))
    assert cold.tolist() == pytest.approx((logits * 2).softmax(0).tolist())


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"temperature": math.nan}, {"top_p": 0}, {"top_p": math.nan}])
def test_what_nothing_can_be_drawn_by_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"temperature .*top-p"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_what_is_drawn_from_the_cache_is_what_the_whole_text_would_give() -> None:
    torch.manual_seed(0)
    model = build_gpt2("gpt2", depth=2, heads=2, dim=16, context=32, vocab=20).eval()
    sampling = Sampling(seed=4)
    start = torch.tensor([1, 2, 3])
    with torch.no_grad():
        found = list(write_tokens(model, start, num_tokens=12, sampling=sampling, end=None))
        seen = start.tolist()
        for number, token in enumerate(found):
            assert draw_token(compute_probabilities(model(torch.tensor([seen]))[0, -1], sampling), 4, number) == token
            seen.append(token)


def test_a_text_ends_where_a_document_does() -> None:
    torch.manual_seed(0)
    model = build_gpt2("gpt2", depth=1, heads=1, dim=8, context=8, vocab=3).eval()
    with torch.no_grad():
        found = list(write_tokens(model, torch.tensor([0]), num_tokens=200, sampling=Sampling(), end=2))
    assert found[-1] == 2
    assert 2 not in found[:-1]


def test_what_is_written_goes_on_after_the_prompt_with_the_space_between() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = build_gpt2("gpt2", depth=1, heads=1, dim=8, context=8, vocab=2).eval()
    with torch.no_grad():
        more = continue_text(model, Bpe(words.to_str()), "a b", num_tokens=3, sampling=Sampling())
    assert re.fullmatch("( [ab]){3}", more)
