"""The numbers that were to be reached, beside those that were."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from halfstep_train.report.bench_view import format_digits
from halfstep_train.report.console import make_columns_table
from readme_tables import fastest
from speed_cases import CASES, Goal

Row = dict[str, Any]
DEVICE = "H200"
VARIANTS = {"documented": "x documented", "tuned": "x tuned", "graphs": "x reduce-overhead"}


def show_goals(problems: dict[str, Any], console: Console) -> None:
    """One line a case that was measured, now or before."""
    lines = [goal_line(name, problems) for name in CASES if name in problems]
    device = next(iter(problems.values()))["device"]
    console.print(f"goals of one {DEVICE}, measured on {device}; in brackets the speedup asked for", style="bold")
    console.print(
        make_columns_table({name: [line[name] for line in lines] for name in lines[0]}, left=("model, batch",))
    )


def goal_line(name: str, problems: dict[str, Any]) -> dict[str, str]:
    """What was asked for, what was reached, and the fastest row's other numbers."""
    goal, found = CASES[name].goal, problems[name]
    own = own_row(found)
    asked = {"documented": goal.over_documented, "tuned": goal.over_tuned, "graphs": None}
    return {
        "model, batch": found["title"],
        "goal": wording(goal),
        "ms/step": format_digits(own["ms"]) if own else "-",
        "verdict": verdict(goal, own, row_beside(name, problems)),
        **{VARIANTS[variant]: over(own, found, variant, wish) for variant, wish in asked.items()},
        "of floor": f"{own['floor_share']:.0%}" if own and own["floor_share"] is not None else "-",
        "peak GB": format_digits(own["peak_bytes"] / 1e9) if own and own["peak_bytes"] else "-",
        "J/sample": format_digits(own["joules_per_sample"]) if own else "-",
        "loss": format_digits(own["loss"], 4) if own else "-",
    }


def wording(goal: Goal) -> str:
    if goal.ms is not None:
        return f"<= {goal.ms:g} ms"
    return f"<= {goal.gb:g} GB at +{goal.extra_time:.0%}"


def verdict(goal: Goal, own: Row | None, beside: Row | None) -> str:
    """Reached, missed and by how much, or not measured."""
    if own is None or goal.beside and beside is None:
        return "not measured"
    if goal.ms is not None:
        over = own["ms"] / goal.ms - 1
        return "reached" if over <= 0 else f"missed by {over:.0%}" if over >= 0.01 else f"missed by {over:.1%}"
    assert goal.gb is not None
    assert beside is not None
    misses = []
    if own["peak_bytes"] > goal.gb * 1e9:
        misses.append(f"memory by {own['peak_bytes'] / 1e9 / goal.gb - 1:.0%}")
    if own["ms"] > (1 + goal.extra_time) * beside["ms"]:
        misses.append(f"time, which is {own['ms'] / beside['ms'] - 1:+.0%}")
    return f"missed {' and '.join(misses)}" if misses else "reached"


def over(own: Row | None, found: dict[str, Any], variant: str, asked: float | None) -> str:
    peer = fastest(found["rows"], lambda row: row["variant"] == variant)
    if own is None or peer is None:
        return "-"
    return f"{peer['ms'] / own['ms']:.2f}" + (f" ({asked:g})" if asked else "")


def row_beside(name: str, problems: dict[str, Any]) -> Row | None:
    """What a case is held against: measured with it, or else the row of that other case."""
    goal, together = CASES[name].goal, problems[name].get("beside")
    return own_row({"rows": together} if together else problems.get(goal.beside, {"rows": []}))


def own_row(found: dict[str, Any]) -> Row | None:
    return fastest(found["rows"], lambda row: row["name"] == "halfstep")
