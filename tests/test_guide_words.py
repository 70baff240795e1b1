"""What readers of the five guides type, in the guides' own words, and what halfstep does with it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halfstep_check.dialects.own import PRESETS
from halfstep_train.cli.main import main
from halfstep_train.workloads import KINDS
from whole_runs import learning_rates, run


def show(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The config that `halfstep train` would use."""
    with pytest.raises(SystemExit) as stopped:
        main(["train", *words, "--show-config", "--json"])
    assert not stopped.value.code
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def be_rank(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """torchrun's variables."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


# --- guide 3: torchrun --nproc_per_node=8 ... --bf16 globals.BATCH_SIZE_PER_GPU=4 ---


@pytest.mark.parametrize("word", ["globals.BATCH_SIZE_PER_GPU=4", "per_device_train_batch_size=4"])
def test_a_batch_size_per_gpu_is_multiplied_by_the_ranks(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_rank(monkeypatch, 8)
    found = show(capsys, "slotcontrast_steve", "--bf16", word)["settings"]["train.batch_size"]
    assert (found["value"], found["source"]["where"]) == (32, f"{word} × 8 ranks")
    own = show(capsys, "slotcontrast_steve", word, "--batch-size", "16")
    assert own["settings"]["train.batch_size"]["value"] == 16, "batch_size counts all ranks"


@pytest.mark.parametrize("word", ["BATCH_SIZE_PER_GPU=4", "train.per_device_train_batch_size=4"])
def test_a_misspelled_batch_size_per_gpu_leads_to_one_per_gpu(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"did you mean {word.lower().removeprefix('train.').removesuffix('=4')}" in fail(
        capsys, "train", "unet", word
    )


def test_the_guides_configs_come_with_halfstep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = show(capsys, "configs/integrated_v2_movi_e.yaml", "--bf16")
    assert "configs/integrated_v2_movi_e.yaml does not exist here" in found["notes"][0]
    expected = {"workload": "slotcontrast", "model.slots": 15, "train.batch_size": 32, "train.val_batch_size": 4}
    assert {key: found["settings"][key]["value"] for key in expected} == expected
    be_rank(monkeypatch, 8)
    lowmem = show(capsys, "configs/integrated_v2_movi_e_lowmem.yaml", "--bf16", "globals.BATCH_SIZE_PER_GPU=4")
    expected = {"workload": "slotcontrast_steve", "model.vocabulary": 512, "train.batch_size": 32, "optimizer.lr": 1e-4}
    assert {key: lowmem["settings"][key]["value"] for key in expected} == expected


def test_a_file_that_exists_is_read_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "integrated_v2_movi_e.yaml").write_text("workload: unet\n")
    monkeypatch.chdir(tmp_path)
    assert show(capsys, "integrated_v2_movi_e.yaml")["settings"]["workload"]["value"] == "unet"


def test_ranks_that_gpus_starts_are_counted_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = show(capsys, "unet", "--gpus", "8", "globals.BATCH_SIZE_PER_GPU=4")
    assert found["settings"]["train.batch_size"]["value"] == 32


def test_a_resumed_run_keeps_its_total_whichever_way_it_is_given_per_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", {"train.max_steps": 1, "train.batch_size": 4})
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--resume", str(folder), "--max-steps", "2", "globals.BATCH_SIZE_PER_GPU=2", "--quiet"])
    assert not stopped.value.code
    assert "train.batch_size stays 4, although globals.BATCH_SIZE_PER_GPU=2 is 2" in "".join(capsys.readouterr())


# --- guide 4: two files that must agree, and Accelerate's variables ---

ACCELERATE = "mixed_precision: bf16     # BF16 mixed precision enabled\ndistributed_type: MULTI_GPU\ngpu_ids: 1,2\n"
TRAINER = "trainer:\n  amp: True\n  fp16: False\n  lr: 1e-5\n"


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_accelerates_precision_is_used(
    precision: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    found = show(capsys, "unet")["settings"]["precision.default"]
    assert (found["value"], found["source"]["where"]) == (precision, f"ACCELERATE_MIXED_PRECISION={precision}")
    if precision != "fp8":
        with pytest.raises(SystemExit):
            main(["plan", "unet", "--gpu", "A100"])
        assert f"asked {precision}" in capsys.readouterr().out


def test_accelerates_no_is_no_statement_and_a_different_precision_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert show(capsys, "unet")["settings"]["precision.default"]["value"] == "auto"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    agreed, other = show(capsys, "unet", "--bf16"), show(capsys, "unet", "--fp16")
    assert (agreed["warnings"], other["settings"]["precision.default"]["value"]) == ([], "fp16")
    assert "fp16 (--fp16) overrides bf16 (ACCELERATE_MIXED_PRECISION=bf16)" in other["warnings"][0]
    before = tmp_path / "radio_train_m.yaml"
    before.write_text("workload: radiodiff\n" + TRAINER.replace("True", "False"))
    assert "overrides bf16 (ACCELERATE_MIXED_PRECISION=bf16)" in show(capsys, str(before))["warnings"][0]


def fail(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code
    return " ".join("".join(capsys.readouterr()).split())


def test_the_trainers_yaml_alone_leads_to_its_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "radio_train_m.yaml"
    config.write_text(TRAINER)
    assert "add `workload: radiodiff`" in fail(capsys, "train", str(config))
    config.write_text("workload: radiodiff\n" + TRAINER)
    found = show(capsys, str(config))["settings"]
    assert (found["precision.default"]["value"], found["optimizer.lr"]["value"]) == ("bf16", 1e-5)


@pytest.mark.parametrize(
    ("key", "typed"),
    [("gpu_ids: 1,2", "--gpus 1,2"), ("gpu_ids: 1,2", "CUDA_VISIBLE_DEVICES=1,2")]
    + [("distributed_type: MULTI_GPU", "--gpus 2"), ("distributed_type: MULTI_GPU", "train.shard=true")],
)
def test_keys_of_the_launcher_are_refused_with_what_to_type(
    key: str, typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(f"workload: radiodiff\n{key}\n")
    assert typed in fail(capsys, "train", str(config))


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ("trainer:\n  amp: False\n  fp16: False\n", "A guide calls this pair a configuration conflict"),
        (TRAINER, "A guide calls such a pair aligned; it is not"),
        ("workload: unet\nuse_amp: false\n", "fp32 runs: halfstep runs its own config"),
        ("workload: unet\npreset: stable\n", "fp32 runs: halfstep runs its own config"),
        ("workload: unet\ntrainer: {precision: 32-true}\n", "fp32 runs: halfstep runs its own config"),
        ("workload: unet\nuse_amp: true\namp_dtype: float16\n", "fp16 runs: halfstep runs its own config"),
    ],
)
def test_check_compares_the_two_files(
    trainer: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = tmp_path / "radio_train_m.yaml", tmp_path / "default_config.yaml"
    ours.write_text(trainer)
    theirs.write_text(ACCELERATE)
    assert told in fail(capsys, "check", str(ours), str(theirs))


def test_check_knows_the_precision_of_the_presets_of_all_workloads() -> None:
    for name in KINDS:
        presets = KINDS.of(name).get_schema(name).presets
        assert {preset: presets[preset]["precision.default"] for preset in PRESETS} == PRESETS


def test_check_finds_that_two_halfstep_spellings_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "own.yaml", tmp_path / "default_config.yaml"
    ours.write_text("workload: radiodiff\n" + TRAINER)
    theirs.write_text(ACCELERATE)
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(ours), str(theirs)])
    assert not stopped.value.code, capsys.readouterr().out


def test_train_log_has_the_learning_rate_and_every_line(tmp_path: Path) -> None:
    folder = run(tmp_path / "radiodiff_Vae", {"train.max_steps": 3, "train.report_every": 1})  # quiet
    found = subprocess.run(
        'grep "lr:" radiodiff_Vae/train.log | tail -10', shell=True, cwd=tmp_path, capture_output=True, text=True
    )
    rates = [float(line.partition("lr: ")[2].partition(",")[0]) for line in found.stdout.splitlines()]
    assert rates == pytest.approx(learning_rates(folder), rel=1e-3)
    text = (folder / "train.log").read_text()
    assert "precision: fp32" in text
    assert "Epoch 1/" in text
    assert "peak memory" in text
