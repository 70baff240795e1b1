from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from halfstep_train.report.run_report import Bar, RunReport, write_lines
from hand_clock import HandClock


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
        warnings=["fp8 requested, bf16 runs", "fp8 requested, bf16 runs"],
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
        "warning: fp8 requested, bf16 runs",
        "Epoch 1/1 [Train] 0/3",
        "warning: step 2 skipped: loss is nan (samples img_[3].png)",
        "checkpoint saved",
        screen.text.splitlines()[7],
        "Epoch 1/1 train: mean loss 0.2345",
        "Epoch 1/1 val:   iou 0.6234",
        "Epoch 1/1   train     val",
        "─────────────────────────",
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
        "warning: fp8 requested, bf16 runs",
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


FIELDS = {"loss": "0.234", "iou": "0.654", "lr": "1.0e-3", "precision": "bf16", "memory": "4.8 GB"}


def drawn(bar: Bar, width: int) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(bar, end="")
    return capture.get()


def bar_at(done: int, total: int, *, step_s: float, label: str = "Epoch 1/100 [Train]") -> Bar:
    clock = HandClock()
    bar = Bar(label, total, clock=clock)
    for _ in range(done):
        clock.now_s += step_s
        bar.advance(FIELDS)
    return bar


def test_the_bar_shows_count_rate_fields_and_time_left() -> None:
    line = drawn(bar_at(50, 150, step_s=0.3), 120)
    assert line.startswith("Epoch 1/100 [Train] ━━━━━━━━")
    assert line.endswith(" 50/150 30 s left bf16 loss 0.234 iou 0.654 3.3 it/s lr 1.0e-3 4.8 GB")


def test_at_80_columns_the_least_important_fields_go_first() -> None:
    line = drawn(bar_at(150, 150, step_s=0.3), 80)
    assert "\n" not in line
    assert "150/150 0 s left bf16 loss 0.234 iou 0.654 3.3 it/s" in line
    assert "GB" not in line


def test_position_and_time_left_of_a_long_run_survive_at_80_columns() -> None:
    clock = HandClock()
    bar = Bar("Epoch 12/100", 1000, whole=lambda: ("step 11,234/100,000", "1 h 10 min left"), clock=clock)
    clock.now_s += 1.0
    bar.advance({"mean loss": "0.2345", "accuracy": "0.654", "lr": "1.0e-3", "precision": "mp bf16"})
    assert drawn(bar, 80).endswith(" step 11,234/100,000 1 h 10 min left mp bf16 mean loss 0.2345")
    assert "accuracy 0.654" in drawn(bar, 100)


def test_no_width_makes_the_bar_wrap() -> None:
    for width in range(1, 140):
        line = drawn(bar_at(7, 150, step_s=0.3), width)
        assert "\n" not in line
        assert len(line) <= width


def test_the_rate_recovers_from_a_slow_first_step() -> None:
    clock = HandClock()
    bar = Bar("Epoch", 1000, clock=clock)
    clock.now_s += 60.0
    for _ in range(200):
        clock.now_s += 0.1
        bar.advance()
        parts = bar.format_parts()
    assert "10.0 it/s" in parts


def test_a_step_that_compiled_is_in_the_time_but_not_in_the_rate_or_what_is_left() -> None:
    clock = HandClock()
    bar = Bar("Epoch", 21, clock=clock)
    clock.now_s += 60.0
    bar.advance(begins_pace=True)
    assert bar.format_parts() == ["1/21", "", "", ""]
    for _ in range(10):
        clock.now_s += 1.0
        bar.advance()
    assert bar.format_parts() == ["11/21", "10 s left", "", "1.0 it/s"]
    bar.is_over = True
    assert bar.format_parts() == ["11/21", "in 1 min", "", "1.0 it/s"]


def test_a_log_file_gets_a_line_at_start_and_end_and_one_every_half_minute() -> None:
    clock, lines = HandClock(), list[str]()
    with write_lines(bar := Bar("Epoch 1/2 [Train]", 100, clock=clock), lines.append):
        for _ in range(100):
            clock.now_s += 1.0
            bar.advance({"loss": "0.5"})
    assert lines == [
        "Epoch 1/2 [Train] 0/100",
        "Epoch 1/2 [Train] 30/100 1 min left loss 0.5 1.0 it/s",
        "Epoch 1/2 [Train] 60/100 40 s left loss 0.5 1.0 it/s",
        "Epoch 1/2 [Train] 90/100 10 s left loss 0.5 1.0 it/s",
        "Epoch 1/2 [Train] 100/100 in 2 min loss 0.5 1.0 it/s",
    ]


def test_a_pass_that_is_summarised_afterwards_adds_a_line_to_a_log_file_only_after_minutes() -> None:
    clock, lines = HandClock(), list[str]()
    with write_lines(bar := Bar("Epoch 1/2", 400, clock=clock), lines.append, is_summarised=True):
        for _ in range(400):
            clock.now_s += 1.0
            bar.advance({"loss": "0.5"})
    assert lines == ["Epoch 1/2 300/400 2 min left loss 0.5 1.0 it/s"]


def test_a_log_file_hears_of_an_item_that_takes_minutes() -> None:
    clock, lines = HandClock(), list[str]()
    with write_lines(bar := Bar("Predicting", 1, clock=clock), lines.append):
        for tile in range(4):
            bar.show({"tile": f"{tile + 1}/4"})
            clock.now_s += 20.0
    assert lines[1:-1] == ["Predicting 0/1 tile 3/4"]


PASS_ON_A_TERMINAL = """
import sys, time
from rich.console import Console
from halfstep_train.report.run_report import Bar, show_live
bar = Bar("Epoch 1/1 [Train]", 1000)
try:
    with show_live(bar, Console(width=60)):
        print("printed by others")
        sys.stderr.write("and a warning\\n")
        while True:
            bar.advance({"loss": "0.234", "memory": "4.8 GB"})
            time.sleep(0.01)
except KeyboardInterrupt:
    print("over")
"""

FORK_WHILE_DRAWING = """
import os, sys, threading
from rich.console import Console
from halfstep_train.report.run_report import Bar, show_live
console = Console()
with show_live(Bar("Epoch", 10), console):
    held, done = threading.Event(), threading.Event()
    def hold():
        with console._lock:
            held.set()
            done.wait()
    threading.Thread(target=hold).start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        print("a worker speaks", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    done.set()
print("over")
"""


def seen_on_a_terminal(script: str, *, interrupt_on: str = "") -> str:
    """Everything the script writes to a terminal of its own; Ctrl-C as soon as the text to wait for is there."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=follower, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    seen, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline and b"over\r\n" not in seen:
        if select.select([leader], [], [], 0.2)[0]:
            seen += os.read(leader, 65536)
        if interrupt_on and interrupt_on.encode() in seen:
            process.send_signal(signal.SIGINT)
            interrupt_on = ""
    process.kill()
    process.wait()
    os.close(leader)
    return seen.decode()


def test_ctrl_c_stops_the_bar_and_gives_the_cursor_back() -> None:
    seen = seen_on_a_terminal(PASS_ON_A_TERMINAL, interrupt_on="loss 0.234")
    assert "printed by others\r\n" in seen
    assert "and a warning\r\n" in seen
    assert seen.endswith("over\r\n")
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


def test_a_forked_worker_can_print_while_the_bar_is_being_drawn() -> None:
    seen = seen_on_a_terminal(FORK_WHILE_DRAWING)
    assert "a worker speaks" in seen
    assert seen.endswith("over\r\n")
