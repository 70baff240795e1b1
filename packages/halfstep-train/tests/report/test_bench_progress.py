"""How far a bench is."""

from __future__ import annotations

import io

from rich.console import Console

from halfstep_train.report.bench_view import RowsLeft


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left_is_unknown_until_a_row_is_done_and_then_follows_the_mean_of_its_kind() -> None:
    clock = Clock()
    left = RowsLeft(["halfstep eager"] * 4, Console(file=io.StringIO(), force_terminal=True), clock=clock)
    left.begin("halfstep eager fp32")
    clock.now = 30.0
    assert str(left) == "halfstep eager fp32 (row 1 of 4)"
    left.begin("halfstep eager tf32")
    assert left.format_time_left() == ", about 1:30 left"
    clock.now = 40.0
    assert str(left) == "halfstep eager tf32 (row 2 of 4, about 1:20 left)"
    clock.now = 80.0
    left.begin("halfstep eager bf16")
    assert left.format_time_left() == ", about 1:20 left"


def test_only_the_least_time_left_is_known_while_a_kind_of_row_is_to_come_of_which_none_is_done() -> None:
    clock = Clock()
    kinds = ["halfstep eager", "halfstep compile", "halfstep compile", "plain eager"]
    left = RowsLeft(kinds, Console(file=io.StringIO(), force_terminal=True), clock=clock)
    expected = ("", ", time left unknown", ", at least 1:40 left", ", time left unknown")
    for clock.now, said in zip((0.0, 5.0, 105.0, 205.0), expected, strict=True):
        left.begin("any")
        assert left.format_time_left() == said
    left = RowsLeft(["halfstep eager", "halfstep compile", "halfstep compile"], left._console, clock=clock)
    for clock.now in (0.0, 5.0, 186.0):
        left.begin("any")
    assert left.format_time_left() == ", about 3:01 left"


def test_a_row_that_takes_longer_than_expected_leaves_the_others() -> None:
    clock = Clock()
    left = RowsLeft(["halfstep eager"] * 3, Console(file=io.StringIO(), force_terminal=True), clock=clock)
    for clock.now in (0.0, 30.0):
        left.begin("halfstep eager fp32")
    clock.now = 61.0
    assert left.format_time_left() == ", over 0:30 left"


def test_the_first_row_once_more_takes_as_long_as_it_did() -> None:
    clock = Clock()
    kinds = ["halfstep eager"] * 2
    left = RowsLeft(kinds, Console(file=io.StringIO(), force_terminal=True), repeats_first=True, clock=clock)
    for clock.now, expected in ((0.0, ""), (5.0, ", about 0:10 left"), (65.0, ", about 0:05 left")):
        left.begin("halfstep eager fp32")
        assert left.format_time_left() == expected


def test_a_terminal_is_told_by_its_status_and_a_file_by_lines() -> None:
    said = {}
    for is_terminal in (True, False):
        out = io.StringIO()
        left = RowsLeft(
            ["halfstep documented"] * 2, Console(file=out, force_terminal=is_terminal, width=40), clock=Clock()
        )
        left.begin("halfstep documented fp32 with a name that is long")
        said[is_terminal] = out.getvalue()
        assert left.__rich__().plain == "measuring halfstep documented fp32 with a name that is long (row 1 of 2)"
    assert said == {True: "", False: "measuring halfstep documented fp32 with a name that is long (row 1 of 2)\n"}
