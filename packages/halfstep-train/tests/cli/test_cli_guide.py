"""`halfstep guide` as users meet it: --yes, --answers, a pipe, and a real pseudo-terminal."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from command_line import run_command
from data.picture_folders import write_split
from halfstep.hardware.driver import Driver
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep_train.cli.main import main
from halfstep_train.run.memory.sizing import StepCost
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo
from warm_processes import at_terminal

QUICK = ("guide", "--device", "cpu", "--no-measure")
Capture = pytest.CaptureFixture[str]
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; temporary files and the cache are next to it."""
    here, scratch = tmp_path / "here", tmp_path / "scratch"
    here.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setattr(Driver, "list_accelerators", lambda self: ())
    return here


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes little memory: a trace takes seconds, and is no part of what is asked and answered."""
    cheap = StepCost(fixed_bytes=12 * 10**6, sample_bytes=10**6)
    monkeypatch.setattr("halfstep_train.guide.guide.predict_step_cost", lambda *given: cheap)


def assert_nothing_is_left(place: Path) -> None:
    assert list(place.iterdir()) == []
    assert list((place.parent / "scratch").glob("halfstep-*")) == []


def commands_in(text: str) -> list[str]:
    """The command that was printed, as a shell would read it."""
    line = next(line for line in text.splitlines() if line.strip().startswith("halfstep train "))
    return shlex.split(line)[1:]


def test_on_a_cpu_nothing_is_measured_and_the_precision_is_that_of_training(
    place: Path, untraced: None, capsys: Capture
) -> None:
    code, _, _ = run_command(capsys, "guide", "--device", "cpu", "--yes")
    assert code == 0
    assert list((place.parent / "cache").rglob("cpu-*.json")) == []
    assert load("resnet18-fast.yaml").config.precision.default == decide("auto", probe("cpu")).granted


def test_yes_takes_every_default_prints_it_and_writes_a_config_that_trains_beside_an_older_one(
    place: Path, capsys: Capture
) -> None:
    Path("resnet18-fast.yaml").write_text("mine")
    code, text, _ = run_command(capsys, *QUICK, "--yes")
    assert code == 0
    for answer in (
        "task: classification",
        "model: resnet18",
        "data: demo data",
        "goal: fast",
        "pick: fast",
        "start: no",
    ):
        assert f"{answer}" in text
    assert Path("resnet18-fast.yaml").read_text() == "mine"
    written = ["resnet18-fast-2-samples.png", "resnet18-fast-2.yaml", "resnet18-fast.yaml"]
    assert sorted(path.name for path in place.iterdir()) == written
    assert commands_in(text) == ["train", "resnet18-fast-2.yaml"]
    assert list((place.parent / "scratch").glob("halfstep-*")) == []
    assert str(place.parent / "scratch") not in text, "gone when it is read"
    assert all(Path(name).is_file() for name in text.split("Wrote ")[1].splitlines()[0].split(", "))
    code, shown, _ = run_command(capsys, *commands_in(text), "--show-config", "--json")
    settings = json.loads(shown)["settings"]
    assert code == 0
    assert settings["precision.default"]["value"] in ("fp32", "bf16"), "what this CPU multiplies fastest"
    assert settings["device"]["value"] == "cpu"
    assert "resnet18-fast-2.yaml" in json.dumps(settings["train.batch_size"])


@pytest.mark.usefixtures("untraced")
def test_answers_from_a_file_reach_the_config(place: Path, capsys: Capture) -> None:
    folder = place.parent / "my pairs"
    write_demo(folder, num_images=10)
    answers = {
        "task": "segmentation",
        "data": str(folder),
        "goal": "lowmem",
        "pick": "stable",
        "file": "my run.yaml",
    }
    Path("answers.json").write_text(json.dumps(answers))
    code, text, _ = run_command(capsys, *QUICK, "--answers", "answers.json")
    assert code == 0
    assert "2: mask value 0, mask value 255" in text
    assert commands_in(text) == ["train", "my run.yaml"]
    config = load("my run.yaml").config
    assert (config.data.dir, config.guard.on_fault, config.precision.default) == (str(folder), "rollback", "fp32")
    assert (config.train.batch_size, config.data.image_size) == (2, 64), "as large as the pictures"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("task: segmentation\ndata: /no/such/folder", "/no/such/folder does not exist"),
        ("task: segmentation\nmodel: resnet50", "the file answers questions that were not asked: model"),
        ("task: own", "'own' is not one of the choices"),
    ],
)
def test_wrong_answers_are_errors_and_nothing_is_written(
    place: Path, capsys: Capture, answers: str, message: str
) -> None:
    file = place.parent / "answers.yaml"
    file.write_text(answers)
    code, _, error = run_command(capsys, *QUICK, "--answers", str(file))
    assert code == 2
    assert message in error
    assert_nothing_is_left(place)


@pytest.mark.usefixtures("untraced")
def test_start_really_starts_the_training(place: Path, capsys: Capture) -> None:
    Path("runs").write_text("a file, so that the training ends where it makes its folder")
    Path("answers.yaml").write_text("task: segmentation\nstart: yes\n")
    code, text, error = run_command(capsys, *QUICK, "--answers", "answers.yaml")
    assert code == 2
    assert "runs is a file" in error
    assert commands_in(text) == ["train", "unet-fast.yaml"]
    assert load("unet-fast.yaml").config.workload == "unet"


@pytest.mark.usefixtures("untraced")
def test_piped_lines_are_answers_and_a_wrong_folder_is_asked_again(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_split(place.parent / "pictures")
    lines = ["1", "resnet34", "/no/such/folder", str(folder), "s", "", "mine.yaml", "n"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    code, text, _ = run_command(capsys, *QUICK)
    assert code == 0
    assert "/no/such/folder does not exist" in text
    assert "2: bird (4), cat (4)" in text
    config = load("mine.yaml").config
    assert (config.workload, config.preset, config.data.dir) == ("resnet34", "stable", str(folder))


@pytest.mark.parametrize("lines", ["", "segmentation\n"])
def test_input_that_ends_early_leaves_nothing_behind(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, _, error = run_command(capsys, *QUICK)
    assert code == 130
    assert "the input ended at the question" in error
    assert "--yes" in error
    assert_nothing_is_left(place)


class Terminal:
    """A process at the other end of a pseudo-terminal."""

    def __init__(self, process: ForkServerProcess, handle: int) -> None:
        self.process, self.handle, self.text = process, handle, ""

    def expect(self, words: str, *, within_s: float = 60.0) -> str:
        """Read until the words appear; what came before them is used up."""
        until = time.monotonic() + within_s
        while words not in self.text:
            assert time.monotonic() < until, f"no {words!r} in:\n{self.text}"
            self._read()
        before, _, self.text = self.text.partition(words)
        return before

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def end(self) -> tuple[int | None, str]:
        """Exit code and all that was printed since."""
        until = time.monotonic() + 60
        while self._read() and time.monotonic() < until:
            pass
        self.process.join(timeout=30)
        return self.process.exitcode, self.text

    def _read(self) -> bool:
        if not select.select([self.handle], [], [], 1.0)[0]:
            return True
        try:
            chunk = os.read(self.handle, 65536)
        except OSError:  # Linux: the other end is closed
            return False
        self.text += ANSI.sub("", chunk.decode()).replace("\r", "")
        return bool(chunk)


@contextmanager
def terminal(*argv: str) -> Iterator[Terminal]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm", "COLUMNS": "100"}.items():
            patch.setenv(name, value)
        with at_terminal(main, argv) as (process, handle):
            yield Terminal(process, handle)
            os.close(handle)


@pytest.mark.slow
def test_a_person_at_a_terminal_is_led_to_a_config(place: Path, capsys: Capture) -> None:
    with terminal(*QUICK) as person:
        person.expect("What do you want to train?")
        person.expect("> ")
        person.type("paint\n")
        person.expect("'paint' is not one of the choices")
        person.expect("> ")
        person.type("seg\n")
        person.expect("Where are your data?")
        person.expect("> ")
        person.type("/no/such/folder\n")
        person.expect("does not exist")
        person.expect("> ")
        person.type("\n")
        grid = person.expect("What matters most?").split("few samples: ")[1].split("\n")[0]
        assert Path(grid).read_bytes().startswith(b"\x89PNG")
        person.expect("> ")
        person.type("stable\n")
        person.expect("Which one?")
        person.expect("> ")
        person.type("2\n")
        person.expect("Write it to which file?")
        person.expect("> ")
        Path("taken.yaml").write_text("mine")
        person.type("taken.yaml\n")
        person.expect("exists already")
        person.expect("> ")
        person.type("new.yaml\n")
        person.expect("Start the training now?")
        person.expect("> ")
        person.type("\n")
        code, text = person.end()
    assert code == 0
    assert commands_in(text) == ["train", "new.yaml"]
    assert Path("taken.yaml").read_text() == "mine"
    assert sorted(path.name for path in place.iterdir()) == ["new-samples.png", "new.yaml", "taken.yaml"]
    assert list((place.parent / "scratch").glob("halfstep-*")) == []
    assert run_command(capsys, "train", "new.yaml", "--show-config")[0] == 0


def test_ctrl_c_leaves_nothing_behind(place: Path) -> None:
    with terminal(*QUICK) as person:
        person.expect("What do you want to train?")
        person.expect("> ")
        person.type("seg\n")
        person.expect("Where are your data?")
        person.expect("> ")
        person.type("\n")
        person.expect("What matters most?")
        person.expect("> ")
        person.type("\x03")
        code, text = person.end()
    assert code == 128 + signal.SIGINT
    assert "nothing was written" in text
    assert "Traceback" not in text
    assert_nothing_is_left(place)
