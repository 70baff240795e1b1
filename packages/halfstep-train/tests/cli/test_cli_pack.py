from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from command_line import run_command
from data.picture_folders import write_split
from diffusion_tiny import pictures, vae_folder
from halfstep_train.report.run_report import PackingBar


def test_packing_says_what_it_packed_and_finds_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path)
    code, text, _ = run_command(capsys, "pack", str(tmp_path), "--size", "32")
    assert code == 0
    assert "8 training and 4 validation images of 2 classes at 32 pixels" in text
    assert text.strip().endswith(f"--data-dir {tmp_path} data.cache=true data.cache_size=32")
    written = (tmp_path / ".halfstep-32.pack").stat().st_mtime_ns
    code, text, _ = run_command(capsys, "pack", str(tmp_path), "--size", "32", "--json")
    summary = json.loads(text)
    assert (code, summary["train"], summary["val"], summary["left_out"]) == (0, 8, 4, [])
    assert (tmp_path / ".halfstep-32.pack").stat().st_mtime_ns == written
    code, text, said = run_command(capsys, "pack", str(tmp_path), "--size", "32")
    assert (code, said) == (0, "")
    assert "nothing was packed" in text


def test_bad_files_are_named_and_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path)
    (tmp_path / "train" / "cat" / "bad.jpg").write_text("text")
    code, _, error = run_command(capsys, "pack", str(tmp_path), "--size", "16")
    assert code == 2
    assert "bad.jpg" in error
    code, text, _ = run_command(capsys, "pack", str(tmp_path), "--size", "16", "--on_bad_file", "skip")
    assert code == 0
    assert "left out: cannot read" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gone",), "gone does not exist\n  fix: give the folder of train/<class>/*"),
        (("train/bird/0.jpg",), "is a file"),
        ((".", "--on-bad-file", "maybe"), "--on-bad-file maybe: 'maybe' is not one of"),
        ((".", "--out", "nowhere/a.pack"), "cannot write"),
        ((".", "--out", "train/bird/0.jpg"), "exists and is not a packed cache"),
    ],
)
def test_mistakes_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    write_split(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, error = run_command(capsys, "pack", *arguments)
    assert code == 2
    assert message in error


@pytest.mark.slow
def test_a_config_packs_its_latents_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, vae, config = pictures(tmp_path / "data", num=6), vae_folder(tmp_path / "vae"), tmp_path / "latent.yaml"
    capsys.readouterr()
    settings = {
        "workload": "diffusion",
        "device": "cpu",
        "data": {"dir": str(data), "image_size": 8, "cache": "latents"},
        "model": {"vae": str(vae), "channels": [8]},
    }
    config.write_text(json.dumps(settings))
    code, text, _ = run_command(capsys, "pack", str(config))
    assert code == 0
    assert "latents of 6 images, with flips, encoded in fp32" in text
    code, text, _ = run_command(capsys, "pack", str(config), "--json")
    summary = json.loads(text)
    assert (code, summary["made"], summary["format"]) == (0, False, "fp32")
    assert run_command(capsys, "pack", str(config), "--size", "64")[0] == 2
    settings["data"] = {"dir": str(data), "image_size": 8}
    config.write_text(json.dumps(settings))
    code, _, error = run_command(capsys, "pack", str(config))
    assert code == 2
    assert "data.cache=latents" in error
    config.write_text(json.dumps({"workload": "unet"}))
    assert run_command(capsys, "pack", str(config))[0] == 2


@pytest.mark.parametrize("is_config", [False, True])
def test_a_scheduler_that_ends_it_is_told_so_and_finds_nothing_half_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_config: bool
) -> None:
    former = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody listened"))
    monkeypatch.setattr(PackingBar, "__call__", lambda *_: signal.raise_signal(signal.SIGTERM))
    folder, vae, config = tmp_path / "data", tmp_path / "vae", tmp_path / "latent.yaml"
    if is_config:
        model = {"vae": str(vae_folder(vae)), "channels": [8]}
        data = {"dir": str(pictures(folder, num=6)), "image_size": 8, "cache": "latents"}
        config.write_text(json.dumps({"workload": "diffusion", "device": "cpu", "data": data, "model": model}))
    else:
        write_split(folder)
    before = set(folder.rglob("*"))
    try:
        code, _, error = run_command(capsys, "pack", str(config if is_config else folder))
    finally:
        signal.signal(signal.SIGTERM, former)
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM while packing; nothing was left behind" in error
    assert set(folder.rglob("*")) == before
