"""`halfstep plan` prints what training would run, also for hardware that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfstep_train.cli.main import build_app, main
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo

SMALL = ("data.image_size=32", "model.base_channels=2", "model.depth=1")


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_fp8_on_a_gpu_that_is_not_here_says_that_nothing_was_timed() -> None:
    small = ("data.image_size=32", "model.depth=1", "model.heads=2", "model.dim=64")
    said = printed("vit_s_16", *small, "--precision", "fp8", "--gpu", "h100")
    assert "warning: no layer was timed" in said


def test_without_a_data_folder_it_says_that_the_model_is_the_demos(tmp_path: Path) -> None:
    assert "this is the plan of the DEMO" in printed("unet", *SMALL)
    write_demo(tmp_path / "data", num_images=2, side=32)
    assert "DEMO" not in printed("unet", *SMALL, "--data-dir", str(tmp_path / "data"))


def test_json_is_the_plan_a_run_stores() -> None:
    plan = json.loads(printed("unet", *SMALL, "--precision", "bf16", "--gpu", "h200", "--json"))
    assert plan["granted"] == "bf16"
    assert {"loss.dice", "loss.cross_entropy"} <= {row["module"] for row in plan["rows"]}


def test_a_part_of_the_model_can_have_its_own_precision() -> None:
    said = printed("unet", *SMALL, "precision.modules.outc=fp32", "--precision", "bf16", "--gpu", "a100")
    row = next(line for line in said.splitlines() if "outc" in line)
    assert row.split()[-5:-3] == ["fp32", "fp32"]


def test_the_memory_plan_has_a_row_for_each_precision_and_level_what_fits_and_what_the_gpu_lacks() -> None:
    words = ("unet", *SMALL, "train.batch_size=4", "--memory", "--precision", "bf16", "--mode", "eager")
    found = json.loads(printed(*words, "--fit", "1GB", "--gpu", "V100", "--json"))
    assert [row["memory"] for row in found["rows"]][:2] == ["normal", "8-bit optimizer"]
    assert all(row["peak_bytes"] == sum(row["components"].values()) for row in found["rows"])
    assert all(list(row["peak_bytes_by_mode"]) == ["eager"] for row in found["rows"])  # and no time for other modes
    assert found["fits"][0]["largest_batch"] > 4
    assert found["fits"][0]["batch_size"] == 4
    assert any("only emulates bf16: a run on this GPU would use a different" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--precision", "fp7"), "unknown precision 'fp7'"),
        (("--fit", "24GB"), "--memory --fit 24GB"),
        (("--memory", "--ranks", "99"), "--ranks 99 does not fit train.batch_size"),
        (("--memory", "data.image_size=100000000000000"), "must be less than or equal to 1000000000000"),
        (("--memory", "data.image_size=10000000000"), "Storage size calculation overflowed"),
    ],
)
def test_mistakes_are_clear_errors(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "unet", *SMALL[1:], *words])
    assert stopped.value.code == 2 or stopped.value.code == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_memory_plan_for_a_gpu_of_several_memory_sizes_asks_for_one() -> None:
    words = ("unet", *SMALL, "--memory", "--precision", "bf16", "--mode", "eager", "--json")
    notes = json.loads(printed(*words, "--gpu", "M2 Ultra"))["notes"]
    assert any("is sold with several memory sizes: give one with --fit" in note for note in notes)


def test_the_guides_memory_table_by_component_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", "unet", *SMALL, "--memory", "--precision", "bf16", "--fit", "1GB"]
    said = CliRunner().invoke(build_app(), words).stdout
    assert "…" not in said
    tables, below = said.split("\nfits ")
    title, rows = tables.split("precision", 1)
    table = [line for line in rows.splitlines() if line.startswith(("precision", "bf16", "─"))]
    assert max(map(len, [*title.splitlines(), *table])) <= 80
    for column in ("weights", "optimizer", "activations", "compile"):
        assert column in tables
    assert below.startswith("1.0 GB, fastest (predicted) first")
    assert "docs/memory.md explains the columns" in below


def test_a_memory_plan_reports_its_progress() -> None:
    from halfstep_train.use.plan_memory import plan_memory

    told: list[str] = []
    flags = dict.fromkeys(("data_dir", "device", "strict", "simulate")) | {"precision": "bf16"}
    config = load("unet", overrides=[*SMALL]).config
    plan = plan_memory(config, flags, told.append, size=10**9, mode="eager", is_made_up=True)
    num = len(plan.rows)
    assert told[0] == f"predicting bf16, normal (1 of {num})"
    assert f"finding the largest batch: bf16, normal (1 of {num})" in told
    assert len(told) == 2 * num


@pytest.mark.slow
def test_a_memory_plan_of_ranks_has_a_row_for_each_layout_and_says_what_fits() -> None:
    words = ("gpt2", "model.depth=2", "model.heads=2", "model.dim=32", "model.context=8", "model.vocab=64")
    asked = ("--memory", "--precision", "fp32", "--mode", "eager", "--fit", "24GB", "--ranks", "4")
    found = json.loads(printed(*words, "train.batch_size=8", *asked, "--json"))
    assert found["ranks"] == 4
    assert {row["layout"] for row in found["rows"]} == {"ddp", "shard"}
    ddp, shard = (next(row for row in found["rows"] if row["layout"] == layout) for layout in ("ddp", "shard"))
    assert shard["components"]["weights"] < 0.3 * ddp["components"]["weights"]
    # Whole models fit, so none needs to be divided; the batch counts all ranks' samples.
    assert [(fit["layout"], fit["batch_size"], fit["accumulate"]) for fit in found["fits"]][0] == ("ddp", 8, 1)
    words_to_type = ["--precision", "fp32", "--gpus", "4", "train.batch_size=8", "train.accumulate=1"]
    assert found["fits"][0]["words"] == [*words_to_type, "train.shard=false"]
    assert "ddp" in printed(*words, "train.batch_size=8", *asked)
