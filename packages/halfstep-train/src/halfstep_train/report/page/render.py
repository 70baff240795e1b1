"""Render runs or a comparison as one HTML page: sections of plain HTML, and charts. All text from a run is escaped."""

from __future__ import annotations

import base64
import json
import math
import mimetypes
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from halfstep.errors import format_bytes, format_duration, suggest_command
from halfstep_train.report.config_view import format_setting
from halfstep_train.report.page.read_run import SAMPLES, RunRecord, describe_progress, find_rate_key, format_rate_unit

MOST_ROWS = 200
"""Rows shown per table; further rows are only counted."""


def render_runs(runs: Sequence[RunRecord]) -> str:
    """Render the page of one or several runs."""
    title = ", ".join(run.name for run in runs)
    if len(runs) == 1:
        title = f"{runs[0].plan.get('granted', '')} {runs[0].summary.get('workload', title)}".strip()

    def render_each(heading: str, render: Callable[[RunRecord], str], has_any: Callable[[RunRecord], object]) -> str:
        found = [(f"{heading}: {run.name}" if len(runs) > 1 else heading, run) for run in runs if has_any(run)]
        return "".join(_render_section(name, render(run)) for name, run in found)

    sections = [
        *(_render_cards(run) for run in runs),
        _render_section("Curves", _render_charts(build_charts(runs))),
        render_each("Plan", _render_plan, lambda run: run.plan),
        render_each("Where the time went", _render_time, lambda run: run.summary.get("elapsed_s")),
        render_each("Faults", _render_faults, lambda run: True),
        render_each("Ranges", _render_watch, lambda run: run.select_kind("watch")),
        render_each("What really ran", _render_ledger, lambda run: run.ledger),
        render_each("Samples", _render_samples, lambda run: run.samples),
        _render_section("Settings", _render_settings([(run.name, run.settings) for run in runs])),
        render_each("Made by", lambda run: _render_origin(run.summary), lambda run: run.summary),
    ]
    return _render_page(f"halfstep: {title}", "".join(sections))


def render_comparison(
    name: str,
    about: str,
    columns: Mapping[str, Sequence[str]],
    notes: Sequence[str],
    charts: Sequence[Chart],
    settings: Mapping[str, Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> str:
    """Render the table of `halfstep compare` with its notes, every setting of each row, and a run's origin."""
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    rows = [list(cells) for cells in zip(*columns.values(), strict=True)]
    body = _render_section("Result", _render_table(list(columns), rows) + f"<ul class=faint>{listed}</ul>")
    body += _render_section("Curves", _render_charts(charts))
    rows_settings = [
        (row, {key: (format_setting(one), "") for key, one in known.items()}) for row, known in settings.items()
    ]
    body += _render_section("Settings", _render_settings(rows_settings)) if rows_settings else ""
    body += _render_section("Made by", _render_origin(summary)) if summary else ""
    return _render_page(f"halfstep compare: {name}", f"<p class=faint>{escape(about)}</p>{body}")


# --- sections ---


def _render_cards(run: RunRecord) -> str:
    """Render the main numbers of a run as cards."""
    summary = run.summary
    train, best = run.select_kind("train"), run.best
    progress = f" Step {describe_progress(train[-1])}." if train and not run.has_ended else ""
    unfinished = f"<p class=bad>This run has not ended: the page shows the records so far.{escape(progress)}</p>"
    state = "" if run.has_ended else unfinished
    pairs = [
        (f"best {run.metric}", _format_optional(best[run.metric] if best else summary.get("best"), "{:.4f}")),
        ("mean loss of the last epoch", _format_optional(run.epoch_loss, "{:.4f}")),
        ("time", format_duration(summary["elapsed_s"]) if "elapsed_s" in summary else ""),
        ("speed", _format_optional(summary.get(rate := find_rate_key(summary)), f"{{:,.1f}} {format_rate_unit(rate)}")),
        ("peak memory", _format_size(summary.get("peak_memory_bytes"))),
        ("energy", _format_optional(summary.get("joules"), "{:,.0f} J")),
        ("skipped steps", _format_optional(summary.get("skipped"), "{:.0f}")),
        ("precision", str(run.plan.get("granted", "")) + (" (simulated)" if run.plan.get("simulated") else "")),
        ("steps run", str(summary.get("steps_run", run.plan.get("mode", "")))),
        ("device", str(run.plan.get("device_name", ""))),
    ]
    cards = "".join(
        f"<div class=card><span class=faint>{escape(n)}</span><b>{escape(v)}</b></div>" for n, v in pairs if v
    )
    return f"<p class=faint>{escape(run.name)}</p>{state}<div class=cards>{cards}</div>"


def _render_charts(charts: Sequence[Chart]) -> str:
    if not charts:
        return "<p>Nothing is recorded.</p>"
    hint = "Zoom with the wheel or + and −, pan by dragging or with arrow keys, reset with a double click or 0."
    return f"<p class=faint>{hint}</p><div class=charts>{''.join(map(_render_chart, charts))}</div>"


def _render_chart(chart: Chart) -> str:
    description = escape(chart.description, quote=True)
    return (
        f"<figure class=chart><svg viewBox='0 0 460 230' role=img tabindex=0 aria-label=\"{description}\"></svg>"
        f"<figcaption>{escape(chart.caption)}</figcaption><div class=legend></div>"
        f"<script type='application/json'>{_dump_safe_json(asdict(chart))}</script></figure>"
    )


def _render_plan(run: RunRecord) -> str:
    plan, titles = run.plan, ("module", "stored", "computes in", "why")
    lines = [f"asked {plan.get('asked')}, granted {plan.get('granted')}: {plan.get('reason', '')}"]
    lines += [f"steps run {plan['mode']}: {plan.get('mode_reason', '')}"] if plan.get("mode") else []
    reasons = "".join(f"<p>{escape(line)}</p>" for line in lines)
    warned = "".join(f"<p class=bad>{escape(str(line))}</p>" for line in plan.get("warnings", ()))
    rows = [(row["module"], row["storage"], row["compute"], row["reason"]) for row in plan.get("rows", ())]
    special = [cells for cells, row in zip(rows, plan.get("rows", ()), strict=True) if row.get("kind") != "default"]
    whole = f"<details><summary>every module ({len(rows)})</summary>{_render_table(titles, rows)}</details>"
    return reasons + warned + (_render_table(titles, special) if special else "") + whole


def _render_time(run: RunRecord) -> str:
    whole, trained, waited = (float(run.summary[key]) for key in ("elapsed_s", "trained_s", "waited_s"))
    parts = {
        "training": trained - waited,
        "waiting for data": waited,
        "validation, checkpoints, start": whole - trained,
    }
    rows = [[name, format_duration(seconds), f"{seconds / whole:.0%}"] for name, seconds in parts.items()]
    return _render_table(["part", "time", "share"], rows)


def _render_faults(run: RunRecord) -> str:
    """Render the events and capsules of a run as tables."""
    events = run.select_kind("event")
    if not events and not run.capsules:
        return "<p>None recorded.</p>"
    rows = [
        [
            str(e.get("bad_step", e.get("step", ""))),
            str(e.get("event", "")) + (f" ({e['phase']})" if e.get("phase") else ""),
            str(e.get("reason", "")),
            ", ".join(map(str, e.get("files") or e.get("sample_ids") or ()))[:120],
        ]
        for e in events
    ]
    found = _render_table(["step", "event", "reason", "samples"], rows) if rows else ""
    capsules = [
        [c["name"], str(c.get("reason", "")), suggest_command("replay", run.path / "capsules" / c["name"])]
        for c in run.capsules
    ]
    return found + (_render_table(["capsule", "reason", "find the cause"], capsules) if capsules else "")


MOST_COLUMNS = 48
"""Observations in a heat map; of more, each column shows the least headroom of several."""
FULL_BITS = 16.0
"""Headroom from which a cell has no colour: the largest value is at most 1."""


def _render_watch(run: RunRecord) -> str:
    """Render the headroom of modules over time as a heat map: darker cells are nearer to fp16's largest number.

    One hue of growing strength reads the same with any colour vision and on a light or dark page; cells below 3 bits
    also carry their number."""
    records = run.select_kind("watch")
    size = -(-len(records) // MOST_COLUMNS)
    groups = [records[k : k + size] for k in range(0, len(records), size)]
    cells: dict[str, list[float | None]] = {}
    for place, group in enumerate(groups):
        for name, bits in ((n, b) for record in group for n, b in record["headroom"].items()):
            row = cells.setdefault(name, [None] * len(groups))
            row[place] = min(bits, FULL_BITS if row[place] is None else row[place])
    lines = []
    for name, row in cells.items():
        shown = "".join(
            _render_cell(bits, f"{name or 'the model'}, step {group[-1]['step']:,}")
            for bits, group in zip(row, groups, strict=True)
        )
        lines.append(f"<tr><th scope=row><bdi>{escape(name or '(model)')}</bdi></th>{shown}</tr>")
    first, last = records[0]["step"], records[-1]["step"]
    head = f"<tr><th></th><td colspan={len(groups)} class=faint>step {first:,} to {last:,}</td></tr>"
    keys = "".join(f"<span><i style='--heat:{_find_heat(k):.0f}%'></i>{k} bits</span>" for k in (0, 4, 8, 12))
    found = [[str(r["step"]), w["message"]] for r in records for w in r["warnings"]]
    table = _render_table(["step", "warning"], found) if found else "<p>No warnings.</p>"
    return (
        f"{table}<p>Headroom below fp16's largest number, the least of each module's activations, weights and "
        f"gradients:</p><div class='legend heat'>{keys}</div>"
        f"<div class=scroll><table class=heat>{head}{''.join(lines)}</table></div>"
    )


def _render_cell(bits: float | None, where: str) -> str:
    if bits is None:
        return "<td></td>"
    text = f"{bits:.0f}" if bits < 3 else ""
    return f"<td style='--heat:{_find_heat(bits):.0f}%' title=\"{escape(where)}: {bits:.1f} bits\">{text}</td>"


def _find_heat(bits: float) -> float:
    return 100 * min(max(1 - bits / FULL_BITS, 0.0), 1.0) ** 1.5  # the usual headroom stays pale


def _render_ledger(run: RunRecord) -> str:
    rows = [[str(value) for value in row.values()] for row in run.ledger.get("rows", ())]
    titles = list(run.ledger["rows"][0]) if rows else []
    return f"<p>{escape(str(run.ledger.get('summary', '')))}</p>" + (_render_table(titles, rows) if rows else "")


def _render_samples(run: RunRecord) -> str:
    return f"<div class=samples>{''.join(_render_sample(path, run.path) for path in run.samples)}</div>"


def _render_sample(path: Path, root: Path) -> str:
    name = escape(str(path.relative_to(root / "report" / "samples")))
    if path.suffix == ".txt":
        text = escape(path.read_text(errors="replace")[:2000])
        return f"<figure><pre>{text}</pre><figcaption>{name}</figcaption></figure>"
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<figure><img alt='sample {name}' src='data:{kind};base64,{data}'><figcaption>{name}</figcaption></figure>"


def _render_settings(runs: Sequence[tuple[str, Mapping[str, tuple[str, str]]]]) -> str:
    """Render the settings, one column per run; mark those that differ and fold the others."""
    if len(runs) == 1:
        return _render_table(["setting", "value", "from"], [[key, *cells] for key, cells in runs[0][1].items()])
    titles = ["setting", *(name for name, _ in runs)]
    keys = dict.fromkeys(key for _, settings in runs for key in settings)
    rows = [[key, *(settings.get(key, ("",))[0] for _, settings in runs)] for key in keys]
    same = [row for row in rows if len(set(row[1:])) == 1]
    differ = [row for row in rows if row not in same]
    count = "1 setting differs and is" if len(differ) == 1 else f"{len(differ)} settings differ and are"
    marked = _render_table(titles, differ, style="differs") if differ else ""
    rest = f"<details><summary>the same in all ({len(same)})</summary>{_render_table(titles, same)}</details>"
    return f"<p class=faint>{count} marked.</p>{marked}{rest}"


def _render_origin(summary: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())
    command = " ".join(map(shlex.quote, map(str, summary.get("command", ()))))
    return f"<p>{escape(versions)}; {escape(str(summary.get('device', '')))}</p><pre>{escape(command)}</pre>"


# --- building blocks ---


def _render_page(title: str, body: str) -> str:
    style, script = (resources.files(__package__).joinpath(name).read_text() for name in ("page.css", "page.js"))
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{style}</style></head>"
        f"<body><h1>{escape(title)}</h1><main>{body}</main><script>{script}</script></body></html>\n"
    )


def _render_section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _render_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, style: str = "") -> str:
    """Render a table; `style` is the CSS class of its rows."""
    head = "".join(f"<th scope=col>{escape(title)}</th>" for title in titles)
    begin = f"<tr class={style}>" if style else "<tr>"
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows[:MOST_ROWS])
    body = "".join(f"{begin}{row}</tr>" for row in cells)
    rest = f"<p class=faint>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{rest}"


def _format_optional(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else ""


def _format_size(size: object) -> str:
    return format_bytes(size, digits=3) if isinstance(size, int | float) else ""


def _dump_safe_json(value: object) -> str:
    """Return JSON that cannot close the surrounding script element."""
    return json.dumps(value, allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\!--")


Point = TypeVar("Point")
MOST_POINTS = 800
"""Longer curves are thinned to this many points."""
BY_PHASE = {"loss", "grad_norm", "lr"}
"""Values recorded per phase if phases alternate."""
MONITOR = {
    "utilization": ("GPU busy, %", 1.0),
    "power_w": ("power, W", 1.0),
    "clock_mhz": ("clock, MHz", 1.0),
    "temperature_c": ("temperature, °C", 1.0),
    "memory_bytes": ("device memory, GB", 1e-9),
}
"""Title and scale of the chart of each value that the GPU's monitor records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    points: list[tuple[float, float]]
    dashed: bool = False
    colour: int = 0
    """Index into the palette; a run has the same colour in all charts of a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart of the page."""

    title: str
    x: str
    series: list[Series] = field(default_factory=list)
    log: bool = False
    high: float | None = None
    """The end of the x axis, which starts at 0; None: that of the points."""
    faults: list[tuple[float, str]] = field(default_factory=list)
    """Steps to mark, each with what happened."""

    @property
    def caption(self) -> str:
        return f"{self.title} over {self.x}{', logarithmic scale' if self.log else ''}"

    @property
    def description(self) -> str:
        """Return a description for screen readers and text browsers."""
        ranges = [f"{s.name or self.title} from {s.points[0][1]:.4g} to {s.points[-1][1]:.4g}" for s in self.series]
        return f"{self.title} over {self.x}: {'; '.join(ranges)}"


def build_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Build all charts that have points."""
    losses = [*_build_series(runs, "train", "loss", "train, last"), *_build_series(runs, "val", "loss", "validation")]
    if len(runs) == 1:  # several runs would have too many lines
        means = [record for record in runs[0].records if record.get("kind") in ("val", "epoch")]
        colour = 2 * len(runs[0].phases or [""])
        points = _collect_points(means, "step", "train_loss")
        losses.insert(1, Series(name="train, mean of the epoch", points=points, colour=colour))
    scores = {
        metric: [
            *_build_series(runs, "val", f"train_{metric}", "train"),
            *_build_series(runs, "val", metric, "validation"),
        ]
        for metric in dict.fromkeys(run.metric for run in runs if run.metric)
    }
    # A format that needs no scaling has a scale of 1.
    scales = [s for s in _build_series(runs, "train", "scale") if any(value != 1 for _, value in s.points)]
    rates = {run.rate for run in runs}
    rate = rates.pop() if len(rates) == 1 else SAMPLES
    charts = [
        Chart(title="loss", x="step", log=True, series=losses),
        *(Chart(title=metric, x="step", series=series) for metric, series in scores.items()),
        Chart(title="learning rate", x="step", series=[*_build_series(runs, "train", "lr")]),
        Chart(title="gradient norm", x="step", log=True, series=[*_build_series(runs, "train", "grad_norm")]),
        Chart(title="loss scale", x="step", log=True, series=scales),
        Chart(title=format_rate_unit(rate), x="step", series=[*_build_series(runs, "train", rate)]),
        *(
            Chart(title=title, x="seconds", series=[*_build_series(runs, "monitor", key, scale=scale)])
            for key, (title, scale) in MONITOR.items()
        ),
    ]
    charts = [replace(chart, series=[line for line in chart.series if line.points]) for chart in charts]
    # Charts over the same quantity share their axis, so that what happened at one step is found in all of them.
    highs: dict[str, float] = {}
    for chart in charts:
        highs[chart.x] = max([highs.get(chart.x, 0.0), *(x for line in chart.series for x, _ in line.points)])
    faults = [fault for run in runs for fault in run.faults]
    return [
        replace(
            chart,
            # A logarithmic axis cannot show an adversarial loss, which may be negative.
            log=chart.log and all(y > 0 for line in chart.series for _, y in line.points),
            high=highs[chart.x],
            faults=_thin(faults) if chart.x == "step" else [],
        )
        for chart in charts
        if chart.series
    ]


def _build_series(
    runs: Sequence[RunRecord], kind: str, key: str, label: str = "", *, scale: float = 1.0
) -> Iterable[Series]:
    """Yield one series per run, with separate colours for training and validation of a single run, and per phase."""
    is_validation = label == "validation"
    for run, name, first in _distinguish_runs(runs):
        records, axis = (run.monitor, "elapsed_s") if kind == "monitor" else (run.select_kind(kind), "step")
        in_turn = run.phases if kind == "train" and key in BY_PHASE else []
        # With one run, validation gets a colour of its own; with several, colours tell the runs apart.
        first += len(run.phases or [""]) if is_validation and len(runs) == 1 else 0
        for number, phase in enumerate(in_turn or [""]):
            points = [(x, y * scale) for x, y in _collect_points(records, axis, f"{key}/{phase}" if phase else key)]
            series_name = f"{name} {phase or label}".strip()
            yield Series(name=series_name, points=points, dashed=is_validation, colour=first + number)


def _distinguish_runs(runs: Sequence[RunRecord]) -> Iterable[tuple[RunRecord, str, int]]:
    """Yield each run with its label (its folder's name, numbered if not unique; empty for one run) and first colour."""
    names, colour = [run.name for run in runs], 0
    for number, run in enumerate(runs, 1):
        name = run.name if names.count(run.name) == 1 else f"{run.name} ({number})"
        yield run, name if len(runs) > 1 else "", colour
        colour += len(run.phases or [""])


def _collect_points(records: Sequence[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    found = [(float(r[x]), float(r[y])) for r in records if _is_number(r.get(x)) and _is_number(r.get(y))]
    return _thin(found)


def _thin(points: list[Point]) -> list[Point]:
    """Return at most about MOST_POINTS of them; the last one, which shows the final value, is kept."""
    step = math.ceil(len(points) / MOST_POINTS)
    return points if step < 2 else [*points[::step], points[-1]]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
