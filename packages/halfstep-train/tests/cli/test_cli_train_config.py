"""`halfstep train` from argv to a config: flags, --show-config, and mistakes without a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfstep_train.cli.main import main
from halfstep_train.config.dump import dump_values, to_yaml
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.folder import RunFolder, Settled
from halfstep_train.workloads import load

Capture = pytest.CaptureFixture[str]


def halfstep(*words: str) -> int:
    """Run the command line in this process; its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


def shown(capsys: Capture, *words: str) -> dict[str, Any]:
    """Settings as `--show-config --json` prints them."""
    assert halfstep("train", *words, "--show-config", "--json") == 0
    view: dict[str, Any] = json.loads(capsys.readouterr().out)
    return view


def value(view: dict[str, Any], key: str) -> object:
    return view["settings"][key]["value"]


def test_guide_1s_flags_work_as_written(capsys: Capture) -> None:
    flags = "--data_dir D --mixed_precision --precision_type bf16 --batch_size 64 --epochs 100 --lr 0.1 --num_workers 8"
    view = shown(capsys, "unet", *flags.split())
    keys = ["data.dir", "precision.default", "train.batch_size", "train.epochs", "optimizer.lr", "data.num_workers"]
    assert [value(view, key) for key in keys] == ["D", "bf16", 64, 100, 0.1, 8]
    assert view["settings"]["precision.default"]["source"]["where"] == "--mixed-precision --precision-type bf16"


def test_every_other_flag_reaches_its_setting(capsys: Capture) -> None:
    flags = "--strict --simulate --device cpu --seed 7 --max-steps 9 -q --track tensorboard,wandb --preset debug --fp16"
    flags += " --image-size 48"
    view = shown(capsys, "unet", *flags.split())
    expected = {
        "precision.strict": True,
        "precision.simulate": True,
        "device": "cpu",
        "train.seed": 7,
        "train.max_steps": 9,
        "data.image_size": 48,
        "log.quiet": True,
        "log.track": ["tensorboard", "wandb"],
        "preset": "debug",
        "precision.default": "fp16",
    }
    assert {key: value(view, key) for key in expected} == expected


@pytest.mark.parametrize("word", ["false", "no", "off", "null"])
def test_a_word_for_off_is_taken_on_the_command_line_as_in_yaml(word: str, capsys: Capture, tmp_path: Path) -> None:
    assert value(shown(capsys, "diffusion", f"data.cache={word}"), "data.cache") == "off"
    (tmp_path / "my.yaml").write_text(f"workload: diffusion\ndata: {{cache: {word}}}\n")
    assert value(shown(capsys, str(tmp_path / "my.yaml")), "data.cache") == "off"


def test_show_config_prints_each_value_with_its_source_and_what_was_overridden(capsys: Capture) -> None:
    assert (
        halfstep("train", "unet", "--show-config", "--preset", "fast", "train.epochs=3", "--precision_type", "bf16")
        == 0
    )
    out = capsys.readouterr().out
    assert "train.epochs = 3  (train.epochs=3)\n    Passes over the training set" in out
    assert "train.batch_size = 16  (preset fast)" in out
    assert "train.seed = 0  (default)" in out
    assert "overridden: train.epochs = 3 (train.epochs=3) overrides 50 (preset fast)" in out
    assert "\nglobals = {}" in out


def stored_run(path: Path, config: RunConfig, decided: dict[str, list[Any]] | None = None) -> None:
    (path / "config.yaml").write_text(to_yaml(config))
    RunFolder(path).write_settled(Settled(settings=dump_values(config), decided=decided or {}, code={}))


def test_resume_reads_the_runs_own_config_and_takes_changes(capsys: Capture, tmp_path: Path) -> None:
    stored_run(tmp_path, load("unet", overrides=["train.batch_size=3"]).config)
    view = shown(capsys, "--resume", str(tmp_path), "train.epochs=7")
    assert (value(view, "train.batch_size"), value(view, "train.epochs")) == (3, 7)
    (tmp_path / "more.yaml").write_text("train: {epochs: 9}\n")
    view = shown(capsys, "unet", "--resume", str(tmp_path), "--config-overrides-file", str(tmp_path / "more.yaml"))
    assert value(view, "train.epochs") == 9
    assert halfstep("train", "resnet50", "--resume", str(tmp_path), "--show-config") == 2
    assert "is a unet run, not resnet50" in capsys.readouterr().err


def test_a_run_goes_on_by_the_command_it_was_started_with(capsys: Capture, tmp_path: Path) -> None:
    written = tmp_path / "mine.yaml"
    written.write_text("workload: unet\ntrain: {batch_size: 3}\nprecision: {modules: {head: fp32}}\n")
    command = [str(written), "train.epochs=7", "--lr", "0.5"]
    (tmp_path / "run").mkdir()
    started = load(str(written), overrides=["train.epochs=7"], flags={"lr": 0.5}).config
    stored_run(tmp_path / "run", started)
    again = shown(capsys, *command, "--resume", str(tmp_path / "run"))
    stored = shown(capsys, "--resume", str(tmp_path / "run"))
    assert {key: value(again, key) for key in again["settings"]} == {
        key: value(stored, key) for key in stored["settings"]
    }
    assert not again["overridden"]
    # What the run decided by itself is shown, and where that is stored.
    decided = started.replace(precision={"modules": {"head": "bf16"}})
    stored_run(tmp_path / "run", decided, {"precision.modules": [{"head": "fp32"}]})
    again = shown(capsys, *command, "--resume", str(tmp_path / "run"))
    assert value(again, "precision.modules.head") == "bf16"
    assert again["settings"]["precision.modules.head"]["source"]["layer"] == "file"
    assert not again["overridden"]
    assert halfstep("train", str(written), "workload=resnet50", "--resume", str(tmp_path / "run")) == 2
    assert "is a unet run, not resnet50" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing to train"),
        (["configs/slotcontrast/movi_e.yaml", "--bf16"], "halfstep train slotcontrast preset=movi_e\n"),
        (["configs/slotcontrast/ytvis2021.yaml"], "halfstep train slotcontrast preset=ytvis\n"),
        (["configs/unet.yaml"], "halfstep train unet\n"),
        (["unet", "--num_train_epochs", "3"], "write settings as train.epochs=VALUE"),
        (["unet", "--patience", "3"], "write settings as train.early_stopping_patience=VALUE"),
        (["unet", "--optimizer.lr=3"], "write settings as optimizer.lr=VALUE"),
        (["unet", "--optimizer.eps=3"], "write settings as optimizer.eps=VALUE"),
        (["unet", "optimizer.name=adamm"], "did you mean 'adam' or"),
        (["unet", "--run-eval-after-training"], "halfstep evaluate RUN"),
        (["unet", "globals.BATCH_SIZE_PER_GP=4"], "did you mean 'BATCH_SIZE_PER_GPU'?"),
        (["integrated_v2_movi_e.yaml", "globals.BATCH_SIZE_PER_GP=4"], "did you mean 'BATCH_SIZE_PER_GPU'?"),
        (["unet", "--mixed_precision", "bf16"], "--precision bf16"),
        (["unet", "--json"], "--json needs --show-config"),
    ],
)
def test_a_mistake_is_exit_code_2_and_a_message(words: list[str], says: str, capsys: Capture) -> None:
    assert halfstep("train", *words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_shows_the_config(rank: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    variables = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    for name, value in {**variables, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    assert halfstep("train", "unet", "--show-config") == 0
    assert bool(capsys.readouterr().out) == (rank == 0)
