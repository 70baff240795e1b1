"""The guard and the captured step inside the transformers Trainer, with real Trainers and tiny models."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import halfstep as hs
from halfstep.errors import ConfigError, TrainingStopped
from host_faults import FAULTS, Fault, Net, copy_state, make_data, same_bits, seeded
from replay_stand_in import replays_on_cpu

transformers = pytest.importorskip("transformers")
from accelerate import DistributedType  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip

HalfstepMixin = hs.integrations.transformers.HalfstepMixin
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo", "ignore:.*lru_cache:UserWarning")


class MyTrainer(HalfstepMixin, Trainer):  # type: ignore[misc, valid-type]
    pass


class Points(Dataset[Any]):
    """Rows for Net; `bad` rows hold NaN."""

    def __init__(self, bad: Sequence[int] = (), num: int = 256) -> None:
        self.x, self.y = make_data(num)
        self.x[list(bad), 1] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": self.x[number], "labels": self.y[number]}


class Tokens(Dataset[Any]):
    def __init__(self, num: int = 256, length: int = 16, has_class: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(4, 64, (num, length), generator=generator)
        self.has_class = has_class

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self.tokens[number]
        return {"input_ids": row, "labels": row[0] % 2 if self.has_class else row.clone()}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Plants a fault in chosen steps, and keeps the state before and after each."""

    def __init__(self, faults: dict[int, Fault]) -> None:
        self.faults, self.states = faults, []
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        net = self.trainer.model
        net.fault = self.faults.get(state.global_step) if isinstance(net, Net) else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer.model.fault = None
        held = [trainer.model, trainer.optimizer, trainer.lr_scheduler]
        scaler = trainer.accelerator.scaler
        self.states.append(copy_state(*held, *([] if scaler is None else [scaler])))


def make_gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_bert() -> nn.Module:
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    return BertForSequenceClassification(config)


MODELS: dict[str, Any] = {"net": (Net, Points), "gpt2": (make_gpt2, Tokens),
                          "bert": (make_bert, lambda: Tokens(has_class=True))}  # fmt: skip


def make_trainer(
    folder: Path, kind: type[Any] = MyTrainer, *, model: str = "net", data: Any = None, steps: int = 6,
    accumulate: int = 1, faults: dict[int, Fault] | None = None, given: dict[str, Any] | None = None,
    scale: bool = False, **more: Any,
) -> Any:  # fmt: skip
    make, dataset = MODELS[model]
    args = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=accumulate,
        use_cpu=True, report_to=[], disable_tqdm=True, optim="adamw_torch_fused",
        **{"save_strategy": "no", "logging_steps": 3, "lr_scheduler_type": "cosine", "learning_rate": 1e-2,
           **(given or {})},
    )  # fmt: skip
    watch = Watch(faults or {})
    trainer = kind(model=seeded(make), args=args, train_dataset=data or dataset(), callbacks=[watch], **more)
    if scale:  # Accelerate makes none on a CPU
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        trainer.accelerator.state._mixed_precision = "fp16"
    watch.trainer, trainer.watch = trainer, watch
    return trainer


def train(*args: Any, resume: Any = None, **kwargs: Any) -> Any:
    trainer = make_trainer(*args, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def read_logs(trainer: Any) -> list[Any]:
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss")
    return [{key: row[key] for key in kept if key in row} for row in trainer.state.log_history]


# --- guard ---


@pytest.mark.parametrize(("schedule", "accumulate", "model"), [
    ("read", 1, "net"), ("exact", 1, "net"), ("exact", 2, "gpt2"), ("read", 2, "gpt2"), ("exact", 1, "bert"),
])  # fmt: skip
def test_thirty_steps_have_the_hosts_bits(tmp_path: Path, schedule: str, accumulate: int, model: str) -> None:
    given = {"model": model, "steps": 30 if accumulate == 1 else 15, "accumulate": accumulate}
    plain = train(tmp_path / "plain", Trainer, **given)
    guarded = train(tmp_path / "guarded", schedule=schedule, **given)
    assert same_bits(guarded.watch.states, plain.watch.states)
    assert read_logs(guarded) == read_logs(plain)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("schedule", "accumulate"), [("exact", 1), ("read", 2)])
def test_a_planted_fault_leaves_every_bit(tmp_path: Path, fault: Fault, schedule: str, accumulate: int) -> None:
    trainer = train(tmp_path, schedule=schedule, accumulate=accumulate, faults={2: fault, 4: fault})
    states = trainer.watch.states
    assert [same_bits(before, after) for before, after in zip(states, states[1:], strict=False)] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    assert all(torch.tensor(row["loss"]).isfinite() for row in read_logs(trainer) if "loss" in row)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_planted_fault_in_half_precision(tmp_path: Path, fault: Fault, name: str) -> None:
    with hs.simulate(name):
        trainer = train(tmp_path, schedule="exact", faults={2: fault}, scale=name == "fp16", steps=4)
    states = trainer.watch.states
    assert same_bits(states[1][:3], states[2][:3])
    is_overflow = name == "fp16" and fault == "gradient"
    assert same_bits(states[1], states[2]) != is_overflow  # an overflow lowers the scale
    assert not same_bits(states[2][0], states[3][0])


@pytest.mark.parametrize(("level", "accumulate"), [("guard", 1), ("guard", 2), ("captured", 2)])
def test_a_dropped_step_does_not_lower_the_logged_loss(tmp_path: Path, level: str, accumulate: int) -> None:
    faults: dict[int, Fault] = {3: "batch", 5: "batch"}
    given = {"logging_steps": 3, "learning_rate": 1e-9}
    with replays_on_cpu():
        trainer = train(tmp_path, halfstep=level, faults=faults, given=given, accumulate=accumulate)
    losses = [row["loss"] for row in read_logs(trainer) if "loss" in row]
    # The weights hardly move, so the mean loss of the second log is that of the first up to what batches differ by.
    assert losses[1] == pytest.approx(losses[0], rel=0.15)
    assert trainer.num_dropped == 2


def test_bad_steps_before_the_first_good_one_are_logged_as_0_as_by_the_host(tmp_path: Path) -> None:
    trainer = train(tmp_path, faults={0: "batch", 1: "batch", 3: "batch"}, given={"logging_steps": 1})
    losses = [row["loss"] for row in read_logs(trainer) if "loss" in row]
    assert losses[:2] == [0, 0]
    assert losses[2] == losses[3] > 0
    assert trainer.args.logging_nan_inf_filter  # as it was given
    seldom = train(tmp_path / "seldom", faults={0: "batch", 1: "batch", 3: "batch"}, given={"logging_steps": 4})
    logged = next(row["loss"] for row in read_logs(seldom) if "loss" in row)
    assert logged == pytest.approx(losses[2] / 2)  # 0 twice, and a dropped one counted as the one before it


@pytest.mark.parametrize("schedule", ["read", "exact"])
def test_checkpoints_are_the_hosts_and_resume(tmp_path: Path, schedule: str) -> None:
    given = {"given": {"save_strategy": "steps", "save_steps": 4}, "steps": 8}
    whole = train(tmp_path / "whole", schedule=schedule, faults={2: "batch", 6: "batch"}, **given)
    resumed = train(tmp_path / "again", schedule=schedule, faults={6: "batch"},
                    resume=str(tmp_path / "whole" / "checkpoint-4"), **given)  # fmt: skip
    assert same_bits(resumed.watch.states[-1], whole.watch.states[-1])
    plain = train(tmp_path / "plain", Trainer, resume=str(tmp_path / "whole" / "checkpoint-4"), **given)
    other = train(tmp_path / "other", schedule=schedule, resume=str(tmp_path / "whole" / "checkpoint-4"), **given)
    assert same_bits(plain.watch.states, other.watch.states)


def test_a_trainer_trains_twice_and_evaluates(tmp_path: Path) -> None:
    given = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
             "load_best_model_at_end": True}  # fmt: skip
    trainer = make_trainer(tmp_path, schedule="exact", faults={1: "batch"}, steps=3, given=given,
                           eval_dataset=Points(num=16))  # fmt: skip
    for _ in range(2):
        trainer.train()
        assert trainer.halfstep is None
        losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        assert len(losses) == 3
        assert losses[0] == losses[1] != losses[2]  # the second step was dropped
    assert isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)


@pytest.mark.parametrize("level", ["guard", "captured"])
def test_a_smaller_batch_is_found_and_the_schedule_begins_again(tmp_path: Path, level: str) -> None:
    class Small(MyTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if len(inputs["x"]) > 4 and self.state.global_step == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return super().compute_loss(model, inputs, *args, **kwargs)

    given = {"auto_find_batch_size": True, "logging_steps": 1}
    with replays_on_cpu():
        trainer = train(tmp_path, Small, schedule="exact", given=given, steps=4, halfstep=level)
    rates = [row["learning_rate"] for row in read_logs(trainer) if "learning_rate" in row]
    plain = train(tmp_path / "plain", Trainer, given={"logging_steps": 1}, steps=4)
    assert rates == [row["learning_rate"] for row in read_logs(plain) if "learning_rate" in row]


def test_a_model_that_the_trainer_compiles_is_guarded(tmp_path: Path) -> None:
    given = {"given": {"torch_compile": True, "torch_compile_backend": "eager"}, "steps": 4}
    plain = train(tmp_path / "plain", Trainer, **given)
    guarded = train(tmp_path / "guarded", schedule="exact", **given)
    assert same_bits(guarded.watch.states, plain.watch.states)
    data = Points(bad=range(8, 16))
    trainer = train(tmp_path / "bad", schedule="exact", data=data, **given)
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    torch._dynamo.reset()


def test_several_bad_steps_in_a_row_stop(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, faults=dict.fromkeys(range(6), "batch"), max_consecutive=3)
    with pytest.raises(TrainingStopped, match="3 bad steps in a row") as stopped:
        trainer.train()
    assert "TrainingArguments(max_grad_norm=1.0)" in stopped.value.fix
    assert "hs.Step" not in str(stopped.value)
    trainer.watch.faults = {}
    trainer.train()  # and it can go on


class Fragile(nn.Module):
    """A logarithm that fails for one sample whose numbers are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.fragile = Logarithm()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.fragile(self.inner(x), x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Logarithm(nn.Module):
    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return hidden + (x.sum(1, keepdim=True) + 100).log()


@pytest.mark.parametrize(("accumulate", "compiled", "level"), [
    (1, False, "guard"), (2, False, "guard"), (1, True, "guard"), (1, False, "captured"),
])  # fmt: skip
def test_a_nan_names_the_sample_and_the_module(tmp_path: Path, accumulate: int, compiled: bool, level: str) -> None:
    data = Points(num=64)
    data.x[37, 0] = -200.0
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=8, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", optim="adamw_torch_fused", gradient_accumulation_steps=accumulate,
        torch_compile=compiled, torch_compile_backend="eager" if compiled else None,
    )  # fmt: skip
    trainer = MyTrainer(
        model=seeded(Fragile), args=args, train_dataset=data, capsules=tmp_path / "capsules", halfstep=level
    )
    with warnings.catch_warnings(record=True) as warned, replays_on_cpu():
        warnings.simplefilter("always")
        trainer.train()
    (capsule,) = (tmp_path / "capsules").iterdir()
    call = f"hs.integrations.transformers.replay(trainer, {str(capsule)!r})"
    assert any(call in str(one.message) for one in warned)
    found = str(hs.integrations.transformers.replay(trainer, capsule))
    assert "sample 37" in found, found
    assert "fragile" in found, found


# --- captured ---


@pytest.mark.parametrize(("model", "accumulate"), [("bert", 1), ("gpt2", 2)])
def test_captured_steps_train_as_the_host_does(
    tmp_path: Path, model: str, accumulate: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"model": model, "steps": 10, "accumulate": accumulate, "given": {"max_grad_norm": 0.0}}
    plain = train(tmp_path / "plain", Trainer, **given)
    with replays_on_cpu():
        captured = train(tmp_path / "captured", halfstep="captured", fast="graph", **given)
    assert "captured as a CUDA graph" in capsys.readouterr().err
    for own, host in zip(captured.watch.states[-1][0].values(), plain.watch.states[-1][0].values(), strict=True):
        # Adam divides by the root of a small second moment: sums in another order differ in its first steps.
        torch.testing.assert_close(own, host, rtol=1e-4, atol=1e-4)
    assert captured.watch.states[-1][2] == plain.watch.states[-1][2]  # the scheduler
    for own, host in zip(read_logs(captured), read_logs(plain), strict=True):
        assert own == pytest.approx(host, rel=1e-4)


@pytest.mark.parametrize("fault", ["batch", "statistics"])
def test_a_captured_step_with_a_fault_leaves_every_bit(tmp_path: Path, fault: Fault) -> None:
    faults: dict[int, Fault] = dict.fromkeys((2, 7), fault)
    with replays_on_cpu():
        states = train(tmp_path, halfstep="captured", fast="graph", faults=faults, steps=9).watch.states
    changed = [not same_bits(before, after) for before, after in zip(states, states[1:], strict=False)]
    assert changed == [True, False, True, True, True, True, False, True]


def test_captured_checkpoints_resume_as_the_hosts(tmp_path: Path) -> None:
    given: dict[str, Any] = {"given": {"save_strategy": "steps", "save_steps": 4, "max_grad_norm": 0.0}, "steps": 8}
    with replays_on_cpu():
        whole = train(tmp_path / "whole", halfstep="captured", fast="graph", faults={2: "batch"}, **given)
        again = train(tmp_path / "again", halfstep="captured", fast="graph",
                      resume=str(tmp_path / "whole" / "checkpoint-4"), **given)  # fmt: skip
    plain = train(tmp_path / "plain", Trainer, resume=str(tmp_path / "whole" / "checkpoint-4"), **given)
    for state in (again.watch.states[-1], plain.watch.states[-1]):
        assert state[2] == whole.watch.states[-1][2]
        for own, other in zip(state[0].values(), whole.watch.states[-1][0].values(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_captured_is_guarded_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, halfstep="captured", steps=1)
    assert "instead of capturing them: a CUDA graph needs a CUDA device, not cpu" in capsys.readouterr().err

    class Own(MyTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().training_step(*args, **kwargs)

    with replays_on_cpu():
        train(tmp_path, Own, halfstep="captured", steps=1)
    assert "instead of capturing them: Own has its own training_step" in capsys.readouterr().err


# --- bad input ---


def test_the_order_of_bases_is_checked() -> None:
    with pytest.raises(ConfigError, match="HalfstepMixin before Trainer"):
        type("Wrong", (Trainer, HalfstepMixin), {})
    with pytest.raises(ConfigError, match="HalfstepMixin before Trainer"):
        type("Wrong", (HalfstepMixin,), {})


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="halfstep='graph' is not one of"):
        make_trainer(tmp_path, halfstep="graph")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "XLA"])
def test_setups_that_step_by_themselves_are_refused(tmp_path: Path, kind: str) -> None:
    class Sharded(MyTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.state.distributed_type = DistributedType[kind]

    with pytest.raises(ConfigError, match=f"{kind} cannot be guarded"):
        make_trainer(tmp_path, Sharded)
