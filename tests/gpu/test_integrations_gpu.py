"""The guard and the captured step inside other trainers on a real GPU: no wait, and real graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.integrations.guard import HostGuard
from host_faults import ADVICE, FAULTS, Fault, Net, copy_state, make_data, same_bits, seeded
from no_waiting import no_host_wait

# torch warns once of lru_cache in transformers' code, and the warning would end the trace here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache")]


class Loop:
    """A host with a fused optimizer and a schedule, whose data is on the device."""

    def __init__(self, *, scaled: bool = False, **more: Any) -> None:
        self.model = seeded(Net).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if scaled else None
        self.guard = HostGuard("a loop", self.model, self.optimizer, ADVICE, scaler=self.scaler, **more)
        self.scheduler = self.guard.follow(torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10_000))
        self.x, self.y = (one.cuda() for one in make_data(256))

    def train(self, number: int, fault: Fault | None = None) -> None:
        self.model.fault = fault
        at = 8 * (number % 32)
        with torch.autocast("cuda", torch.float16 if self.scaler is not None else torch.bfloat16):
            loss = F.cross_entropy(self.model(self.x[at : at + 8]), self.y[at : at + 8])
        loss = loss * (float("nan") if fault == "loss" else 1.0)
        self.guard.record(loss)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = list(self.model.parameters())
        self.guard.note_norm(nn.utils.clip_grad_norm_(parameters, 1.0), parameters)
        self.guard.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> list[Any]:
        return copy_state(self.model, self.optimizer, self.scheduler)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_guarded_step_waits_for_nothing(scaled: bool) -> None:
    loop = Loop(scaled=scaled)
    assert loop.guard.schedule == "exact"
    for number in range(5):
        loop.train(number)
    with no_host_wait():
        for number in range(300):  # longer than a schedule is asked for ahead
            loop.train(number)
    loop.guard.finish()
    assert loop.scheduler.inner.last_epoch == loop.guard.committed


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("schedule", ["exact", "read"])
def test_a_planted_fault_leaves_every_bit(fault: Fault, schedule: Any) -> None:
    loop = Loop(schedule=schedule)
    loop.train(0, fault)
    for number in range(3):
        loop.train(number)
    before = loop.state
    loop.train(3, fault)
    assert same_bits(loop.state, before)
    loop.train(4)
    assert not same_bits(loop.state, before)


# --- the transformers Trainer ---


class Tokens(torch.utils.data.Dataset[Any]):
    def __init__(self, num: int = 256) -> None:
        self.tokens = torch.randint(4, 64, (num, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number].clone()}


def train(folder: Path, *, num_steps: int = 12, accumulate: int = 1, given: Any = None, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()

    class MyTrainer(hs.integrations.transformers.HalfstepMixin, transformers.Trainer):  # type: ignore[misc, name-defined]
        pass

    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    args = transformers.TrainingArguments(
        str(folder), max_steps=num_steps, per_device_train_batch_size=8, gradient_accumulation_steps=accumulate,
        report_to=[], disable_tqdm=True, save_strategy="no", learning_rate=1e-3, optim="adamw_torch_fused",
        logging_steps=4, **(given or {}),
    )  # fmt: skip
    kind = MyTrainer if more else transformers.Trainer
    trainer = kind(
        model=seeded(lambda: transformers.GPT2LMHeadModel(config)), args=args, train_dataset=Tokens(), **more
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(("bf16", "accumulate"), [(False, 1), (True, 1), (True, 2)])
def test_the_trainer_is_captured_and_trains_as_it_does(
    tmp_path: Path, bf16: bool, accumulate: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"accumulate": accumulate, "given": {"bf16": bf16}}
    plain = train(tmp_path / "plain", **given)
    capsys.readouterr()
    captured = train(tmp_path / "captured", halfstep="captured", fast="graph", **given)
    assert "captured as a CUDA graph" in capsys.readouterr().err
    # bf16 has 8 bits: losses after 12 steps differ in the third digit at most.
    own, host = ([row["loss"] for row in one.state.log_history if "loss" in row] for one in (captured, plain))
    assert own == pytest.approx(host, rel=1e-2 if bf16 else 1e-4)
    assert captured.lr_scheduler.state_dict()["last_epoch"] == plain.lr_scheduler.state_dict()["last_epoch"]


def test_the_guarded_trainer_has_the_losses_of_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(tmp_path / "plain", given={"bf16": True})
    guarded = train(tmp_path / "guarded", halfstep="guard", given={"bf16": True})
    assert "exact without a wait" in capsys.readouterr().err
    own, host = ([row["loss"] for row in one.state.log_history if "loss" in row] for one in (guarded, plain))
    assert own == pytest.approx(host, rel=1e-3)  # the rate is read in fp32
