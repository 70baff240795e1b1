from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from halfstep_train.report.run_report import RunReport


class Screen:
    """A console that remembers, as a terminal or as a log file."""

    def __init__(self, *, is_terminal: bool, width: int = 80) -> None:
        self.file = StringIO()
        self.console = Console(
            file=self.file, force_terminal=is_terminal, force_interactive=is_terminal, width=width, _environ={}
        )

    @property
    def text(self) -> str:
        return self.file.getvalue()


def whole_run(report: RunReport) -> None:
    report.show_header(
        "halfstep train unet",
        [("device", "NVIDIA H200"), ("precision", "bf16: native, 7.9x faster than fp32")],
        warnings=["fp8 asked for, bf16 runs", "fp8 asked for, bf16 runs"],
    )
    with report.show_phase("Epoch 1/1 [Train]", 3) as bar:
        for _ in range(3):
            bar.advance({"loss": "0.234"})
        report.notice("step 2 skipped: loss is nan (samples img_[3].png)", "warning")
        report.notice("checkpoint saved")
    rows = [("loss", "0.2345", "0.2567"), ("iou", "0.6543", "0.6234")]
    report.show_epoch("Epoch 1/1", ["Epoch 1/1 train: mean loss 0.2345", "Epoch 1/1 val:   iou 0.6234"], rows)
    report.finish("Trained", [("best iou", "0.6234")])
    report.close()


def test_a_log_file_gets_plain_lines_without_control_codes(tmp_path: Path) -> None:
    screen = Screen(is_terminal=False)
    whole_run(RunReport(tmp_path, verbose=True, console=screen.console))
    assert "\x1b" not in screen.text
    assert screen.text.splitlines() == [
        "halfstep train unet",
        "  device: NVIDIA H200",
        "  precision: bf16: native, 7.9x faster than fp32",
        "warning: fp8 asked for, bf16 runs",
        "Epoch 1/1 [Train] 0/3",
        "warning: step 2 skipped: loss is nan (samples img_[3].png)",
        "checkpoint saved",
        screen.text.splitlines()[7],
        "Epoch 1/1 train: mean loss 0.2345",
        "Epoch 1/1 val:   iou 0.6234",
        "Epoch 1/1   train     val",
        "loss       0.2345  0.2567",
        "iou        0.6543  0.6234",
        "Trained",
        "  best iou: 0.6234",
    ]
    assert screen.text.splitlines()[7].startswith("Epoch 1/1 [Train] 3/3 ")


def test_a_summarised_pass_leaves_its_two_lines_and_the_table_needs_verbose(tmp_path: Path) -> None:
    screen = Screen(is_terminal=False)
    report = RunReport(tmp_path, console=screen.console)
    with report.show_phase("Epoch 1/1", 3, is_summarised=True) as bar:
        for _ in range(3):
            bar.advance({"loss": "0.234"})
    report.show_epoch("Epoch 1/1", ["train line", "val line"], [("loss", "0.2345", "0.2567")])
    assert screen.text.splitlines() == ["train line", "val line"]


def test_a_terminal_gets_panels_a_bar_and_its_cursor_back(tmp_path: Path) -> None:
    screen = Screen(is_terminal=True)
    whole_run(RunReport(tmp_path, console=screen.console))
    assert "╭" in screen.text
    assert "━━━" in screen.text
    assert "loss 0.234" in screen.text
    assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("\x1b[?25l")


def test_quiet_leaves_warnings_and_the_final_summary(tmp_path: Path) -> None:
    screen = Screen(is_terminal=False)
    whole_run(RunReport(tmp_path, quiet=True, console=screen.console))
    assert screen.text.splitlines() == [
        "warning: fp8 asked for, bf16 runs",
        "warning: step 2 skipped: loss is nan (samples img_[3].png)",
        "Trained",
        "  best iou: 0.6234",
    ]


def test_long_lines_of_a_log_file_are_not_broken(tmp_path: Path) -> None:
    screen = Screen(is_terminal=False, width=40)
    RunReport(tmp_path, console=screen.console).notice("word " * 40 + "end", "error")
    assert len(screen.text.splitlines()) == 1


def test_warnings_are_broken_between_words_on_a_terminal_and_long_paths_stay_whole(tmp_path: Path) -> None:
    screen = Screen(is_terminal=True)
    path = "/data/" + "a-long-name/" * 9 + "image.png"
    text = f"left out {path}: it holds three-dimensional half-precision values that are not finite; " + "word " * 30
    RunReport(tmp_path, console=screen.console).notice(text, "warning")
    lines = Text.from_ansi(screen.text).plain.splitlines()
    assert [word for line in lines for word in line.split()] == f"warning: {text}".split()
    assert all(len(line.rstrip()) <= 80 or line.strip() == f"{path}:" for line in lines)
    assert len(lines) < 8


def test_an_error_inside_a_pass_ends_the_bar_and_goes_on(tmp_path: Path) -> None:
    screen = Screen(is_terminal=True)
    report = RunReport(tmp_path, console=screen.console)
    with pytest.raises(KeyboardInterrupt), report.show_phase("Epoch 1/1 [Train]", 3):
        raise KeyboardInterrupt
    assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("\x1b[?25l")
    with report.show_phase("Epoch 1/1 [Val]", 1) as bar:
        bar.advance()
