"""Frozen parts: a precision of their own, in no checkpoint, known by a checksum, the same in every command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import frozen_workload
from halfstep.errors import CheckpointError, ConfigError, PrecisionError
from halfstep.hardware.probe import probe
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import Assembly, build_workload, decide_plan
from halfstep_train.run.engine import Engine, RunRehearsal
from halfstep_train.run.frozen_modules import compute_checksum
from halfstep_train.use.evaluate import evaluate
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.base.workload import Workload
from tiny_runs import Told
from whole_runs import assemble_run, final_state, newest, resume
from whole_runs import run as run_tiny

SETTINGS: dict[str, Any] = {
    "device": "cpu", "data.num_workers": 0, "train.batch_size": 4, "train.fast": "off", "log.quiet": True,
    "precision.default": "bf16", "precision.simulate": True, "ema.enabled": True, "schedule.name": "constant",
}  # fmt: skip


def config_of(**values: Any) -> RunConfig:
    changed = {name.replace("__", "."): value for name, value in values.items()}
    return from_dict("frozen_workload:build", {**SETTINGS, **changed}).config


def assembled(**values: Any) -> Assembly:
    return assemble_run(config_of(**values))


def run(out: Path, **values: Any) -> Path:
    changed = {name.replace("__", "."): value for name, value in values.items()}
    return run_tiny(out, {**SETTINGS, **changed}, "frozen_workload:build")


def encoder_of(parts: Assembly) -> frozen_workload.Encoder:
    return parts.workload.frozen["encoder"].module


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an epoch whose part came from no file, with snapshots."""
    return run(tmp_path_factory.mktemp("made") / "run", train__max_steps=6, guard__on_fault="rollback")


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose frozen part was loaded from `encoder.safetensors` next to it."""
    folder = tmp_path_factory.mktemp("file")
    torch.manual_seed(7)
    save_file(frozen_workload.Encoder().state_dict(), folder / "encoder.safetensors")
    return run(folder / "run", train__max_steps=2, model__options={"encoder": str(folder / "encoder.safetensors")})


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


@pytest.fixture
def file(from_file: Path) -> Iterator[Path]:
    """That file, to be damaged."""
    path = from_file.parent / "encoder.safetensors"
    content = path.read_bytes()
    yield path
    path.write_bytes(content)


# --- precision ---


def test_by_default_weights_that_autocast_would_cast_are_stored_in_half() -> None:
    encoder = encoder_of(assembled())
    assert encoder.layers[0].weight.dtype == torch.bfloat16
    assert encoder.norm.weight.dtype == torch.float32
    assert encoder.scale.dtype == torch.float32
    assert not encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize("pattern", ["encoder", "encoder.*"])
def test_both_spellings_name_the_whole_part(pattern: str) -> None:
    parts = assembled(precision__modules={pattern: "fp32"})
    encoder = encoder_of(parts)
    assert encoder.layers[0].weight.dtype == torch.float32
    with parts.plan.forward(), torch.no_grad():
        found = encoder.encode(torch.ones(2, frozen_workload.SIDE))
    with torch.no_grad():
        expected = encoder.encode(torch.ones(2, frozen_workload.SIDE))
    assert torch.equal(found, expected), "autocast around it changes nothing"
    assert "encoder" in str(parts.plan)


def test_a_half_part_gives_the_bits_that_autocast_gives() -> None:
    parts, config = assembled(precision__default="bf16"), config_of(precision__default="bf16")
    torch.manual_seed(config.train.seed)
    plain = build_workload(config).frozen["encoder"].module.eval()
    x = torch.rand(3, frozen_workload.SIDE)
    with parts.plan.forward(), torch.no_grad():
        assert torch.equal(encoder_of(parts).encode(x), plain.encode(x).float())


def test_a_part_inside_a_part_has_its_own_row() -> None:
    parts = assembled(precision__modules={"encoder": "fp32", "encoder.layers.1": "fp16"})
    encoder = encoder_of(parts)
    assert encoder.layers[0].weight.dtype == torch.float32
    assert encoder.layers[1].weight.dtype == torch.float16
    rows = {row.module: row for row in parts.plan.frozen}
    assert rows["encoder.layers.1"].compute == "fp16"
    assert "asked for fp16" in rows["encoder.layers.1"].reason


@pytest.mark.parametrize("pattern", ["encoder.layer", "encodr"])
def test_a_pattern_that_names_nothing_is_refused_with_the_nearest_name(pattern: str) -> None:
    with pytest.raises(PrecisionError, match=pattern):
        assembled(precision__modules={pattern: "fp32"})


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "tf32"])
def test_training_works_in_every_simulated_format(precision: str) -> None:
    parts = assembled(precision__default=precision, scaler__init_scale=64.0)
    engine = Engine(parts, "eager", lambda text, level: pytest.fail(text))
    losses = [engine([batch]).read().loss for batch in parts.train_loader.iterate_epoch(0)]
    assert len(losses) == 6
    assert int(parts.step.committed) == 6


# --- what it is not part of ---


def test_it_is_in_no_optimizer_average_checkpoint_or_snapshot(made_here: Path) -> None:
    tensors, _ = final_state(made_here)
    assert [name for name in tensors if "snapshots" in name]
    assert not [name for name in tensors if "layers" in name]
    known = newest(made_here).state["frozen"]["encoder"]
    assert known["source"] == ""
    assert len(known["checksum"]) == 64


def test_trials_share_it() -> None:
    config = from_dict("frozen_workload:build", SETTINGS).config
    workload = build_workload(config)
    with RunRehearsal(config, workload).begin(decide_plan(config, workload, probe("cpu"))) as trial:
        assert trial.parts.workload.frozen["encoder"].module is workload.frozen["encoder"].module
        assert trial.parts.model is not workload.model


# --- its file ---


def test_a_part_made_here_is_stored_once_before_it_is_cast(made_here: Path) -> None:
    stored = load_file(made_here / "frozen" / "encoder.safetensors")
    assert stored["layers.0.weight"].dtype == torch.float32
    assert [path.name for path in (made_here / "frozen").iterdir()] == ["encoder.safetensors"]


def test_a_part_from_a_file_is_not_stored_again(from_file: Path, file: Path) -> None:
    assert not (from_file / "frozen").exists()
    assert newest(from_file).state["frozen"]["encoder"]["source"] == str(file)


def test_a_resumed_run_goes_on_bit_for_bit(made_here: Path, tmp_path: Path) -> None:
    halves = run(tmp_path / "halves", train__max_steps=3, guard__on_fault="rollback")
    resume(halves, "train.max_steps=6")
    (expected, _), (found, _) = final_state(made_here), final_state(halves)
    model = [name for name in expected if name.startswith(("model.", "ema."))]
    assert all(torch.equal(found[name], expected[name]) for name in model)


def uses_of(folder: Path) -> tuple[Callable[[], object], ...]:
    return (lambda: resume(folder, "train.max_steps=4"), lambda: evaluate(folder, report=Told(folder).report))


def changed(path: Path) -> None:
    tensors = load_file(path)
    tensors["layers.0.weight"][0, 0] += 1e-3
    save_file(tensors, path)


def test_a_run_with_a_part_from_a_file_goes_on_and_is_evaluated(from_file: Path, tmp_path: Path) -> None:
    folder = copied(from_file, tmp_path / "run")
    for use in uses_of(folder):
        use()
    assert int(newest(folder).state["step"]["attempted"]) == 4


def test_another_part_is_refused_by_its_checksum(from_file: Path, file: Path) -> None:
    changed(file)
    for use in uses_of(from_file):
        with pytest.raises(CheckpointError, match="checksum") as caught:
            use()
        assert str(file) in caught.value.what


def test_a_lost_file_is_named(from_file: Path, file: Path) -> None:
    file.unlink()
    for use in uses_of(from_file):
        with pytest.raises(CheckpointError, match="encoder") as caught:
            use()
        assert str(file) in caught.value.what


def test_a_part_made_here_that_is_lost_or_damaged_is_refused(made_here: Path, tmp_path: Path) -> None:
    folder = copied(made_here, tmp_path / "run")
    path = folder / "frozen" / "encoder.safetensors"
    changed(path)
    with pytest.raises(CheckpointError, match="checksum"):
        resume(folder, "train.max_steps=8")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"encoder\.safetensors"):
        evaluate(folder, report=Told(tmp_path).report)


def test_evaluation_finds_what_validation_found(made_here: Path, tmp_path: Path) -> None:
    best = json.loads((made_here / "checkpoints" / "best.json").read_text())["value"]
    found = evaluate(made_here, report=Told(tmp_path).report, out=tmp_path / "out").metrics["error"]
    assert found == pytest.approx(best, rel=1e-6)


def test_the_checksum_tells_names_shapes_formats_and_bytes() -> None:
    one = torch.nn.Linear(2, 3)
    twin = torch.nn.Linear(2, 3)
    twin.load_state_dict(one.state_dict())
    assert compute_checksum(one) == compute_checksum(twin)
    assert len({compute_checksum(one), compute_checksum(twin.half()), compute_checksum(torch.nn.Linear(3, 2))}) == 3


# --- mistakes ---


@pytest.mark.parametrize(("name", "part"), [("a.b", torch.nn.Linear(1, 1)), ("vae", "vae.safetensors"), ("head", None)])
def test_what_cannot_be_a_frozen_part_is_refused(name: str, part: Any) -> None:
    workload = assembled().workload
    fields = {slot: getattr(workload, slot) for slot in Workload.__dataclass_fields__}
    with pytest.raises(ConfigError, match=name):
        Workload(**{**fields, "frozen": {name: torch.nn.Linear(1, 1) if part is None else part}})
