"""MONAI's SupervisedTrainer, with the real package. `make integrations` runs this file."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from host_faults import FAULTS, Fault, Net, copy_state, make_data, same_bits, seeded
from host_pages import run_page
from ranks_together import together
from replay_stand_in import replays_on_cpu

if importlib.util.find_spec("monai") is None:
    pytest.skip("MONAI is not installed, `make integrations` has it: this was NOT tested", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ignite.engine import Events
    from monai.data import MetaTensor
    from monai.engines import SupervisedTrainer
    from monai.engines.utils import IterationEvents
    from monai.handlers import CheckpointLoader, CheckpointSaver

import halfstep as hs
from halfstep.errors import ConfigError  # noqa: E402
from halfstep.integrations.monai import HalfstepUpdate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


class Training:
    """One training of a few batches; `states[i]` is the state before iteration i, the last one that at the end."""

    def __init__(
        self, update: Any = None, *, num: int = 30, faults: dict[int, Fault] | None = None, is_meta: bool = False,
        ddp: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        self.net: Any = seeded(Net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2, fused=True)
        x, y = make_data(8 * num)
        wrap = MetaTensor if is_meta else (lambda tensor: tensor)
        batches = [{"image": wrap(x[i : i + 8]), "label": y[i : i + 8]} for i in range(0, 8 * num, 8)]
        self.trainer = SupervisedTrainer(
            device="cpu", max_epochs=1, train_data_loader=batches, optimizer=self.optimizer,
            network=torch.nn.parallel.DistributedDataParallel(self.net) if ddp else self.net,
            loss_function=self.compute_loss, iteration_update=update, decollate=False, **more,
        )  # fmt: skip
        self.states: list[Any] = []
        self.losses: list[float] = []
        self.faults = faults or {}
        self.trainer.add_event_handler(Events.ITERATION_STARTED, self.begin)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self.end)

    def compute_loss(self, logits: Any, labels: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return loss * float("inf") if self.net.fault == "loss" else loss

    def begin(self, engine: Any) -> None:
        self.states.append(copy_state(self.net, self.optimizer))
        self.net.fault = self.faults.get(engine.state.iteration - 1)

    def end(self, engine: Any) -> None:
        self.losses.append(float(engine.state.output["loss"]))

    def run(self) -> Training:
        self.trainer.run()
        self.states.append(copy_state(self.net, self.optimizer))
        return self


def test_the_hooks_of_monai_are_as_expected() -> None:
    assert "iteration_update" in inspect.signature(SupervisedTrainer).parameters
    assert [event.name for event in IterationEvents][:4] == [
        "FORWARD_COMPLETED", "LOSS_COMPLETED", "BACKWARD_COMPLETED", "MODEL_COMPLETED",
    ]  # fmt: skip
    trainer = Training().trainer
    assert {"prepare_batch", "non_blocking", "to_kwargs", "inferer", "loss_function", "amp"} <= set(dir(trainer))
    assert trainer._event_handlers[IterationEvents.LOSS_COMPLETED] == []


def test_a_run_without_faults_equals_monais_own() -> None:
    own, ours = Training().run(), Training(HalfstepUpdate("fp32")).run()
    assert same_bits(own.states, ours.states)
    assert own.losses == ours.losses


@pytest.mark.parametrize("is_meta", [False, True])
def test_a_captured_run_equals_monais_own(is_meta: bool) -> None:
    own, update = Training(is_meta=is_meta).run(), HalfstepUpdate("fp32")
    with replays_on_cpu():
        ours = Training(update, is_meta=is_meta).run()
    assert update.step is not None
    assert update.step.mode == "graph"
    assert same_bits(own.states[-1], ours.states[-1])
    assert own.losses == ours.losses
    assert isinstance(ours.trainer.state.output["pred"], MetaTensor) == is_meta


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_bad_step_leaves_everything_as_it_was(precision: str, captured: bool) -> None:
    if captured and precision != "fp32":
        pytest.skip("simulated precisions are not captured")
    faults = {14 + 3 * number: fault for number, fault in enumerate(FAULTS)}
    update = HalfstepUpdate(hs.Precision(precision, simulate=precision != "fp32"), guard={"max_consecutive": 9})
    if captured:
        with replays_on_cpu():
            training = Training(update, faults=faults).run()
    else:
        training = Training(update, faults=faults).run()
    same = [n for n in range(30) if same_bits(training.states[n], training.states[n + 1])]
    assert same == sorted(faults)


def test_events_inside_the_step_are_fired() -> None:
    heard: list[str] = []
    training = Training(HalfstepUpdate("fp32"), num=3)
    for event in list(IterationEvents)[:4]:
        training.trainer.add_event_handler(event, lambda engine, event=event: heard.append(event.name))
    training.run()
    assert heard == ["FORWARD_COMPLETED", "LOSS_COMPLETED", "BACKWARD_COMPLETED", "MODEL_COMPLETED"] * 3


def test_a_checkpoint_resumes(tmp_path: Path) -> None:
    whole = Training(HalfstepUpdate("fp32"), num=20).run()
    update = HalfstepUpdate("fp32")
    begun = Training(update, num=20)
    saved = {"network": begun.net, "optimizer": begun.optimizer, "halfstep": update}
    CheckpointSaver(save_dir=str(tmp_path), save_dict=saved, save_interval=0, save_final=True).attach(begun.trainer)
    begun.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=10), lambda engine: engine.terminate())
    begun.run()
    (path,) = tmp_path.glob("*.pt")
    update = HalfstepUpdate("fp32")
    resumed = Training(update, num=20)
    loaded = {"network": resumed.net, "optimizer": resumed.optimizer, "halfstep": update}
    CheckpointLoader(load_path=str(path), load_dict=loaded).attach(resumed.trainer)
    resumed.trainer.data_loader = resumed.trainer.data_loader[10:]
    resumed.trainer.state.epoch_length = 10
    resumed.run()
    assert same_bits(whole.states[-1], resumed.states[-1])
    assert update.step is not None
    assert update.step.attempted == 20


def test_accumulation_of_the_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"accumulation_steps=2\) is not supported"):
        Training(HalfstepUpdate("fp32"), num=2, accumulation_steps=2).run()


def test_autocast_of_the_trainer_is_refused() -> None:
    training = Training(HalfstepUpdate("fp32"), num=2)
    training.trainer.amp = True
    with pytest.raises(ConfigError, match="amp=True"):
        training.run()


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("monai")


# --- two ranks ---


def train_on_a_rank(rank: int, size: int, port: int) -> list[int]:
    """Train with DDP while one rank alone is at fault; return the steps that changed nothing."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    faults: dict[int, Fault] = {3: "batch", 5: "statistics"} if rank == 1 else {}
    states = Training(HalfstepUpdate("fp32"), num=8, faults=faults, ddp=True).run().states
    return [n for n in range(8) if same_bits(states[n], states[n + 1])]


@pytest.mark.ranks
def test_a_fault_of_one_rank_drops_the_step_on_both(tmp_path: Path) -> None:
    assert together(2, train_on_a_rank, tmp_path) == [[3, 5]] * 2
