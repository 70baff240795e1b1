"""The exercises show what they claim, on this machine, and read CIFAR-10 as it unpacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from command_line import run_command
from halfstep.errors import DataError
from halfstep_train.data.binary_sets import ROW_BYTES as RECORD
from halfstep_train.exercises import benchmark_formats, overflow
from halfstep_train.exercises.benchmark_formats import read_cifar
from halfstep_train.workloads import load


def exercise(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code, out, err = run_command(capsys, "exercise", *words)
    return code, out or err


@pytest.mark.parametrize("number", ["2", "3"])
def test_every_claim_of_an_exercise_is_seen_to_hold(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = exercise(capsys, number, "--out", str(tmp_path))
    assert (code, "NOT seen" in text, "  seen  " in text) == (0, False, True)
    if number == "2":
        assert (tmp_path / "exercise2.png").stat().st_size > 5000
        found = overflow.train(scale=overflow.FIRST_SCALE, steps=overflow.STEPS)
        num = len(found.skipped)
        assert found.scales[: num + 1] == [2.0 ** (40 - k) for k in range(num + 1)], "halved at each skipped step"


def test_exercise_1_compares_three_formats_with_paired_seeds_in_the_steps_its_time_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_cifar(tmp_path / "cifar")
    monkeypatch.setattr(benchmark_formats, "FEWEST_STEPS", 1)
    lines: list[str] = []
    story = benchmark_formats.run(data=str(tmp_path / "cifar"), most_s=0.0, say=lines.append)
    assert [row[0] for row in story.rows] == ["fp32", "fp16", "bf16"]
    assert ("1 step per run instead of 60" in lines[0], "s in all" in lines[0]) == (True, True)
    assert sum("accuracy" in line and "seed" in line for line in lines) == 15
    assert any("often expected" in line for line in story.comments)
    assert any("measured here: accuracy within" in line for line in story.comments)


def written_cifar(folder: Path, *, labels: int = 10) -> None:
    folder.mkdir()
    draws = np.random.default_rng(0)
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        records = draws.integers(0, 256, (20, RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(20) % labels
        records.tofile(folder / name)


def test_cifars_binary_batches_are_read_as_they_unpack(tmp_path: Path) -> None:
    written_cifar(tmp_path / "cifar-10-batches-bin")
    train, test = read_cifar(tmp_path)
    assert (len(train), len(test)) == (40, 20)
    raw = np.fromfile(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin", np.uint8)
    assert train.sample(0, key=())["image"][2, 31, 31] == raw[RECORD - 1], "blue, last pixel"


def test_so_many_test_pictures_as_two_minutes_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_cifar(tmp_path / "cifar")
    monkeypatch.setattr(benchmark_formats, "MOST_TESTED", 7)
    config = load(
        "halfstep_train.exercises.benchmark_formats:KIND", overrides=[f"data.dir={tmp_path / 'cifar'}"]
    ).config
    built = benchmark_formats.build(config)
    assert (len(built.train_samples), len(built.val_samples)) == (40, 7)


def test_what_is_no_cifar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="test_batch.bin"):
        read_cifar(tmp_path)
    written_cifar(tmp_path / "cut")
    (tmp_path / "cut" / "data_batch_2.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="3 bytes"):
        read_cifar(tmp_path / "cut")
    written_cifar(tmp_path / "hundred", labels=20)
    with pytest.raises(DataError, match="a label of 19"):
        read_cifar(tmp_path / "hundred")


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    code, text = exercise(capsys, "3", "--out", str(tmp_path / "taken"))
    assert (code, f"{tmp_path / 'taken'} exists and is not a folder" in text) == (2, True)


@pytest.mark.parametrize(("words", "said"), [(("4",), "is not one of"), (("2", "--data-dir", "x"), "needs no data")])
def test_bad_input_is_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = exercise(capsys, *words)
    assert (code, said in text) == (2, True)
