"""Runs that several processes train: the same samples, weights and scores as one, faults that end all of them."""

from __future__ import annotations

import functools
import io
import json
import os
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import rank_workload
from halfstep.errors import HalfstepError
from halfstep.evidence import capsule
from halfstep.step.facts import Reading
from halfstep_train.config.statements import Launcher
from halfstep_train.report.metrics_file import read
from halfstep_train.run.engine import prepare_window
from halfstep_train.run.evidence import build_capsule_subject, load_window
from halfstep_train.run.launch import Launch, read_launch
from halfstep_train.run.multi_rank import compute_checksum
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from ranks_together import free_port, together
from whole_runs import TINY, assemble_run, assert_same_bits, newest, run

pytestmark = pytest.mark.ranks

WORKLOAD = "rank_workload:build"
Told = tuple[str, str, bool]
"""Kind and text of an error, and whether another process tells it."""


def launched(by: str, rank: int, size: int, port: int) -> Launch | None:
    """As a launcher says it in its variables."""
    if by == "srun":
        job = {"SLURM_STEP_NUM_TASKS": size, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_JOB_ID": 7,
               "SLURM_STEP_NODELIST": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        return read_launch({name: str(value) for name, value in job.items()})
    if by == "accelerate":
        of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in of_torchrun.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_MIXED_PRECISION="no")
        return read_launch(os.environ)
    return Launch(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port, by_torchrun=False)


def ranked(
    rank: int,
    size: int,
    port: int,
    out: Path | None,
    settings: dict[str, Any],
    resume: Path | None = None,
    by: str = "",
) -> Any:
    """One process of a run: None, or the error it ended with."""
    launch = launched(by, rank, size, port)
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    target = WORKLOAD if resume is None else str(resume / "config.yaml")
    try:
        train(
            load(target, overrides=overrides, launcher=Launcher(num_ranks=size)), out=out, resume=resume, launch=launch
        )
    except HalfstepError as error:
        return type(error).__name__, str(error), error.is_shown_elsewhere
    return None


COMPILE = torch.compile


def compiled(region: Any, dynamic: bool, options: Any, *, has_kernels: bool) -> Any:
    """Traced and differentiated as ever; inductor's kernels have tests of their own."""

    def no_kernels(*_: Any) -> Any:
        raise RuntimeError("no kernel for this here")

    return COMPILE(region, dynamic=dynamic, backend="aot_eager" if has_kernels else no_kernels)


def several(rank: int, size: int, port: int, ports: list[int], calls: list[dict[str, Any]]) -> list[Any]:
    """One run after another in the same processes. A setting that is a list of one for each rank is this one's."""
    ends = []
    for own_port, call in zip(ports, calls, strict=True):
        start = time.monotonic()
        settings = {k: v[rank] if isinstance(v, tuple) else v for k, v in call["settings"].items()}
        torch.compile = functools.partial(compiled, has_kernels=call.get("uncompilable") != rank)
        shown = io.StringIO()
        if rank < call.get("size", size):
            with redirect_stdout(shown), redirect_stderr(shown):
                end = ranked(
                    rank,
                    call.get("size", size),
                    own_port,
                    call.get("out"),
                    settings,
                    call.get("resume"),
                    call.get("by", ""),
                )
            ends.append((end, time.monotonic() - start, shown.getvalue(), compute_checksum(rank_workload.MADE[0])))
        else:
            ends.append((None, 0.0, "", ""))
    return ends


def scenario(rank: int, size: int, port: int, ports: list[int], calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(zip(calls, several(rank, size, port, ports, list(calls.values())), strict=True))


SETTINGS = {**TINY, "train.max_steps": 8, "train.report_every": 1, "train.rank_timeout_s": 60,
            "schedule.name": "constant", "schedule.warmup_steps": 0}  # fmt: skip
"""A schedule that does not follow the length of the run, which a resumed one changes."""
PLATEAU = {
    "schedule.name": "plateau",
    "schedule.patience": 1,
    "schedule.factor": 0.01,
    "train.max_steps": 42,
    "train.epochs": 7,
}
WITHOUT_SIZE = {key: value for key, value in SETTINGS.items() if key != "train.batch_size"}
PER_GPU = {"globals.BATCH_SIZE_PER_GPU": 4, "log.quiet": False}
OF_ONE = {key: value for key, value in SETTINGS.items() if key != "train.rank_timeout_s"}
"""The same for one process."""


def calls_in(folder: Path) -> dict[str, dict[str, Any]]:
    def new(name: str, **more: Any) -> dict[str, Any]:
        return {"out": folder / name, "settings": {**SETTINGS, **more}}

    return {
        "whole": new("whole"),
        "half": new("half", **{"train.max_steps": 3}),
        "other half": {"resume": folder / "half", "settings": {"train.max_steps": 8}},
        "per GPU": {"out": folder / "per GPU", "settings": {**WITHOUT_SIZE, **PER_GPU, "train.max_steps": 1}},
        "by three": new("by three", **{"train.max_steps": 7}) | {"size": 3},
        "per GPU by three": {"resume": folder / "per GPU", "settings": {**PER_GPU, "train.max_steps": 2}, "size": 3},
        "then by two": {"resume": folder / "by three", "settings": {"train.max_steps": 8}},
        "accumulated": new("accumulated", **{"train.accumulate": 3, "train.max_steps": 3}) | {"by": "accelerate"},
        "poisoned": new("poisoned", **{"model.options": {"poisoned": [1, 2]}}),
        "asked": new("asked", **{"model.options": {"asked": [1, 2]}}),
        "other configs": new("other configs", **{"optimizer.lr": (1e-3, 1e-2, 1e-3)}),
        "too many": new("too many", **{"train.batch_size": 1}),
        "comparing": new("comparing", **{"model.options": {"compares": True}}) | {"size": 3},
        "warning": new("warning", **{"model.options": {"warns": [1, 2]}, "log.quiet": False}),
        "uncompilable": new("uncompilable", **{"train.fast": "compile"}) | {"uncompilable": 1},
        "early": new(
            "early",
            **{
                "train.early_stopping_patience": 1,
                "train.epochs": 9,
                "optimizer.lr": 1e-12,
                "train.max_steps": 0,
                "model.options": {"rising": 1},
            },
        ),
        "plateau": new("plateau", **PLATEAU, **{"model.options": {"rising": 1}}),
        "synced": new("synced", **{"train.sync_batch_norm": True}),
        "statistics": new("statistics", **{"model.options": {"normalises": True}}),
        "bf16 sums": new("bf16 sums", **{"train.reduce": "bf16"}) | {"by": "srun"},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranked")


@pytest.fixture(scope="module")
def ends(folder: Path) -> dict[str, list[Any]]:
    """What became of each run, by rank. Two processes train most of them, a third one some."""
    calls = {name: {"size": 2, **call} for name, call in calls_in(folder).items()}
    found = together(3, scenario, folder / "ends", [free_port() for _ in calls], calls)
    for name, call in calls.items():
        trained = {own[name][3] for own in found[: call["size"]] if own[name][0] is None}
        assert len(trained) <= 1, f"after {name!r} ranks hold different weights"
    (folder / "shown").write_text(json.dumps({name: found[0][name][2] for name in calls}))
    return {name: [own[name][0] for own in found[: calls[name]["size"]]] for name in calls}


def shown_by_first(folder: Path, name: str) -> str:
    text: str = json.loads((folder / "shown").read_text())[name]
    return text


@pytest.fixture(scope="module")
def alone(folder: Path, ends: object) -> Path:
    return run(folder / "alone", OF_ONE, WORKLOAD)


def test_a_batch_size_per_gpu_is_stored_as_the_total_which_other_ranks_keep(
    folder: Path, ends: dict[str, list[Any]]
) -> None:
    assert (ends["per GPU"], ends["per GPU by three"]) == ([None] * 2, [None] * 3)
    assert "8 = 4 × 2 ranks" in shown_by_first(folder, "per GPU")
    assert "batch_size: 8" in (folder / "per GPU" / "config.yaml").read_text()
    told = " ".join(shown_by_first(folder, "per GPU by three").split())
    assert "train.batch_size stays 8, although globals.BATCH_SIZE_PER_GPU=4 × 3 ranks is 12" in told


def assert_near(left: Path, right: Path) -> None:
    """Sums in another order: eight steps of Adam apart by no more than fp32's rounding, a thousandfold."""
    other = newest(right).model
    for name, value in newest(left).model.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4)


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read(out / "metrics.jsonl") if record["kind"] == kind]


def test_two_processes_train_what_one_does(folder: Path, ends: dict[str, Any], alone: Path) -> None:
    assert ends["whole"] == [None, None]
    assert_near(folder / "whole", alone)
    ours, theirs = ([r["loss"] for r in records(out, "train")] for out in (folder / "whole", alone))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_validation_and_training_metrics_count_every_sample_once(folder: Path, ends: Any, alone: Path) -> None:
    for ours, theirs in zip(records(folder / "whole", "val"), records(alone, "val"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["accuracy"] == theirs["accuracy"]
        assert ours["train_accuracy"] == theirs["train_accuracy"]


def test_every_process_validates_the_stored_statistics(folder: Path, ends: dict[str, Any]) -> None:
    """Each has normalised its own samples. Without the others' statistics the model is the one that is stored."""
    assert ends["statistics"] == [None, None]
    config = load(str(folder / "statistics" / "config.yaml")).config
    workload = rank_workload.build(config)
    workload.model.load_state_dict(newest(folder / "statistics").model)
    samples = [workload.val_samples.sample(index, key=(0, 0, index)) for index in range(len(workload.val_samples))]
    batch = {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) for name in ("image", "label")}
    loss, _ = workload.loss(workload.model.eval()(batch["image"]), batch)
    assert records(folder / "statistics", "val")[-1]["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_resumed_run_of_as_many_processes_is_the_same_to_the_bit(folder: Path, ends: dict[str, Any]) -> None:
    assert ends["half"] == ends["other half"] == [None, None]
    assert_same_bits(newest(folder / "whole").model, newest(folder / "half").model)


def test_another_number_of_processes_goes_on(folder: Path, ends: dict[str, Any], alone: Path) -> None:
    """Three of them, of which one has no sample of the last batch, then two."""
    assert ends["by three"] == [None] * 3
    assert ends["then by two"] == [None, None]
    assert_near(folder / "by three", alone)


def test_one_process_goes_on_with_what_several_began(folder: Path, ends: dict[str, Any], alone: Path) -> None:
    train(load(str(folder / "whole" / "config.yaml"), overrides=["train.max_steps=9"]), resume=folder / "whole")
    assert newest(folder / "whole").state["step"]["attempted"] == 9


def test_windows_of_several_batches_end_with_fewer(folder: Path, ends: dict[str, Any]) -> None:
    assert ends["accumulated"] == [None, None]
    out = run(folder / "alone accumulated", {**OF_ONE, "train.accumulate": 3, "train.max_steps": 3}, WORKLOAD)
    assert_near(folder / "accumulated", out)


def test_a_bad_step_names_rank_and_samples(folder: Path, ends: dict[str, Any], alone: Path) -> None:
    assert ends["poisoned"] == [None, None]
    (event,) = records(folder / "poisoned", "event")
    assert event["bad_step"] == 2
    assert "rank 1" in event["reason"]
    assert len(event["sample_ids"]) == 2


def test_the_rank_at_fault_keeps_its_own_window_and_replay_prepares_it_as_it_was(
    folder: Path, ends: dict[str, Any], alone: Path
) -> None:
    (path,) = capsule.list_capsules(folder / "poisoned" / "capsules")
    found = capsule.read_capsule(path)
    about = found.about
    assert (about["step"], about["rank"], about["num_ranks"], about["batch_sizes"]) == (2, 1, 2, [4])
    assert found.rng
    parts = assemble_run(load(str(folder / "alone" / "config.yaml")).config)
    parts.step.attempted = 2
    whole = load_window(parts, READING)
    assert whole is not None
    assert torch.equal(found.window[0]["image"], whole[0]["image"][2:])
    prepared = prepare_window(parts, whole)
    assert torch.equal(build_capsule_subject(found, "cpu").window[0]["image"], prepared[0]["image"][2:])


READING = Reading(
    attempted=2, loss=0.0, grad_norm=0.0, is_bad=True, is_spike=False, is_empty=False, is_ruined=False, scale=1.0,
    committed=0, lr=0.1, epoch=0, window=2,
)  # fmt: skip


def test_a_signal_to_one_process_ends_all_after_the_same_step(folder: Path, ends: dict[str, Any]) -> None:
    assert [end[0] for end in ends["asked"]] == ["Interrupted"] * 2
    assert [end[2] for end in ends["asked"]].count(False) == 1
    assert all(f"continue with: halfstep train --resume {folder / 'asked'} --gpus 2" in end[1] for end in ends["asked"])
    assert newest(folder / "asked").state["step"]["attempted"] <= 6


def ended(size: int, folder: Path, *, stuck: Sequence[int] = (), **more: Any) -> list[Any]:
    """The error of each process of a run that has one of its own, and the seconds until then. They leave with it."""
    calls = {"run": {"out": folder / "run", "settings": {**SETTINGS, **more}}}
    found = together(size, scenario, folder / "ends", [free_port()], calls, stuck=stuck)
    return [None if own is None else own["run"][:2] for own in found]


def test_an_error_of_one_process_is_shown_once_and_ends_the_others(tmp_path: Path) -> None:
    found = [end for end, _ in ended(2, tmp_path, **{"model.options": {"broken": 7}})]
    (told,) = [(kind, text) for kind, text, is_told in found if not is_told]
    assert told[0] == "DataError"
    assert told[1].startswith("rank ")
    assert sorted(kind for kind, *_ in found) == ["DataError", "RankLost"]


def test_a_callback_that_fails_ends_all_with_its_message_and_the_run_goes_on(tmp_path: Path) -> None:
    failing = {"train.callbacks": ["rank_workload:fail_at_three"], "train.report_every": 1, "train.max_steps": 8}
    found = [end for end, _ in ended(2, tmp_path, **failing)]
    assert [kind for kind, *_ in found] == ["CallbackFailed"] * 2
    assert [is_told for *_, is_told in found].count(False) == 1
    assert all("rank_workload:fail_at_three raised ValueError: my own mistake" in text for _, text, _ in found)
    stopped_at = newest(tmp_path / "run").state["step"]["attempted"]
    assert 3 <= stopped_at < 8
    pending = newest(tmp_path / "run").state["guard"]["pending"]
    assert [reading["is_asked"] for reading in pending] == [False] * len(pending), "a resumed run must not stop again"


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("other configs", "optimizer.lr: 0.001 and 0.01"),
        ("too many", "train.batch_size=1 is too small for 2 ranks"),
        ("synced", "train.sync_batch_norm"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_by_all_and_shown_once(
    name: str, fact: str, folder: Path, ends: dict[str, Any]
) -> None:
    assert [kind for kind, *_ in ends[name]] == ["ConfigError"] * 2
    assert all(fact in text for _, text, _ in ends[name])
    assert [is_told for *_, is_told in ends[name]].count(False) == 1
    assert not (folder / name).exists()


def test_gradients_may_be_summed_in_bf16(folder: Path, ends: dict[str, Any], alone: Path) -> None:
    assert ends["bf16 sums"] == [None, None]
    ours, theirs = ([r["loss"] for r in records(out, "train")] for out in (folder / "bf16 sums", alone))
    assert ours == pytest.approx(theirs, rel=0.05)
    assert ours != theirs


def test_out_of_memory_in_one_process_ends_all_with_one_message_and_what_would_fit(tmp_path: Path) -> None:
    found = ended(2, tmp_path, **{"model.options": {"too large": [1, 3]}})
    (lost, _, is_told), (kind, text, is_other_told) = (end for end, _ in found)
    assert (lost, is_told) == ("RankLost", True)
    assert (kind, is_other_told) == ("MemoryLimitError", False)
    assert "rank 1: out of memory on cpu with batch size 4, 2 per rank" in text
    assert "train.batch_size=2 train.accumulate=2" in text


def test_one_process_that_cannot_compile_makes_all_run_eager(folder: Path, ends: Any, alone: Path) -> None:
    assert ends["uncompilable"] == [None, None]
    assert newest(folder / "uncompilable").state["mode"] == "eager"
    assert_near(folder / "uncompilable", alone)
    assert "rank 1: not compiled, running eager" in shown_by_first(folder, "uncompilable")


def test_a_loss_that_compares_samples_has_those_of_all_processes(folder: Path, ends: dict[str, Any]) -> None:
    """Three of them, of which one has no sample of the last batch."""
    assert ends["comparing"] == [None] * 3
    out = run(folder / "alone comparing", {**OF_ONE, "model.options": {"compares": True}}, WORKLOAD)
    assert_near(folder / "comparing", out)


def test_the_first_process_shows_what_others_warn_of(folder: Path, ends: dict[str, Any]) -> None:
    assert ends["warning"] == [None, None]
    assert "rank 1: UserWarning: odd pixels" in shown_by_first(folder, "warning")


def test_early_stopping_is_one_decision(folder: Path, ends: dict[str, Any]) -> None:
    """To the second process every validation looks better than the one before it."""
    assert ends["early"] == [None, None]
    assert newest(folder / "early").state["step"]["attempted"] == 12


def test_a_plateau_is_one_decision(folder: Path, ends: dict[str, Any]) -> None:
    assert ends["plateau"] == [None, None]
    out = run(folder / "alone plateau", {**OF_ONE, **PLATEAU}, WORKLOAD)
    rates = {record["lr"] for record in records(out, "train")}
    assert len(rates) > 1
    assert rates == {record["lr"] for record in records(folder / "plateau", "train")}
    assert_near(folder / "plateau", out)


def test_a_stuck_process_ends_the_others_within_the_limit(tmp_path: Path) -> None:
    more = {"model.options": {"stuck": [1, 2]}, "train.rank_timeout_s": 8}
    found = ended(3, tmp_path, stuck=[1], **more)
    told = [found[0], found[2]]
    assert [kind for (kind, *_), _ in told] == ["RankLost"] * 2
    assert [is_told for (_, _, is_told), _ in told].count(False) == 1
    for (_, text, _), took_s in told:
        assert text.startswith("rank 1 (process ")
        assert "did not answer for 8 s (train.rank_timeout_s)" in text
        assert took_s < 60


@pytest.mark.parametrize(("rank", "step"), [(1, 0), (1, 3), (0, 4)])
def test_a_killed_process_ends_the_others_and_the_run_goes_on(rank: int, step: int, tmp_path: Path) -> None:
    options = {"killed": [rank, step], "once": str(tmp_path / "once")}
    more = {"model.options": options, "train.checkpoint_every": 1, "train.max_steps": 6}
    ends = ended(2, tmp_path, **more)
    assert ends[rank] is None
    (kind, text, is_told), took_s = ends[1 - rank]
    assert kind == "RankLost"
    assert text.startswith(f"rank {rank} (process ")
    assert "is gone" in text
    assert not is_told
    assert took_s < 60
    if step > 0:
        resumed = {"resume": tmp_path / "run", "settings": {}}
        goes_on = together(2, scenario, tmp_path / "more", [free_port()], {"resumed": resumed})
        assert [end["resumed"][0] for end in goes_on] == [None, None]
        assert newest(tmp_path / "run").state["step"]["attempted"] == 6
