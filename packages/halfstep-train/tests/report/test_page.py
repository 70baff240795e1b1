"""The HTML page of runs and comparisons: what stands in it, and what a real browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfstep_train.cli.main import main
from halfstep_train.report.page.read_run import read_run
from halfstep_train.report.page.render import MOST_POINTS, build_charts

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def written_run(path: Path, *, lr: float = 1e-3, odd: str = "", steps: int = 30) -> Path:
    """A run's folder as `train` leaves it."""
    (path / "report" / "samples" / "00000020").mkdir(parents=True)
    (path / "config.yaml").write_text(f"workload: unet\noptimizer:\n  lr: {lr}\n")
    plan = {"asked": "auto", "granted": "bf16", "reason": "fastest here", "device_name": f"GPU {odd}", "mode": "graph",
            "mode_reason": "31 % faster", "warnings": ["a warning"],
            "rows": [{"module": "head", "storage": "-", "compute": "-", "reason": "", "kind": "island"}]}  # fmt: skip
    (path / "plan.json").write_text(json.dumps(plan))
    summary = {"workload": "unet", "metric": "iou", "mode": "max", "best": 0.81, "elapsed_s": 10.0, "trained_s": 8.0,
               "waited_s": 1.0, "samples_per_s": 12.0, "images_per_s": 24.0, "skipped": 1,
               "versions": {"torch": "2.13.0"},
               "command": ["halfstep", "train", "unet"]}  # fmt: skip
    (path / "report" / "summary.json").write_text(json.dumps(summary))
    train = [
        {"kind": "train", "step": s, "loss": 1 / s, "lr": lr, "grad_norm": 1.0, "scale": 1.0} for s in range(1, steps)
    ]
    val = [{"kind": "val", "step": s, "loss": 1 / s, "iou": 0.02 * s} for s in (10, 20)]
    event = {"kind": "event", "step": 7, "bad_step": 5, "event": "skipped", "reason": f"loss is nan {odd}"}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (*train, *val, event)))
    (path / "monitor.jsonl").write_text('{"elapsed_s": 1, "utilization": 95}\n{"elapsed_s": 2, "utilization": 60}\n')
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(path / "report" / "samples" / "00000020" / "grid.png")
    return path


def page(*words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["report", *words])
    assert not end.value.code
    return Path(words[words.index("--out") + 1]).read_text()


def test_one_file_holds_everything_and_needs_no_network(tmp_path: Path) -> None:
    text = page(str(written_run(tmp_path / "run")), "--out", str(tmp_path / "page.html"))
    for part in ("granted bf16", "fastest here", "31 % faster", "24.0 images/s", "loss is nan", "0.8100", "a warning",
                 "torch 2.13.0", "data:image/png;base64,", "optimizer.lr", "GPU busy", "waiting for data"):  # fmt: skip
        assert part in text, part
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)


def test_what_a_run_is_called_cannot_run_in_the_page(tmp_path: Path) -> None:
    odd = "</script><script>alert(1)</script>"
    text = page(str(written_run(tmp_path / "run", odd=odd)), "--out", str(tmp_path / "page.html"))
    assert odd not in text
    assert "&lt;script&gt;alert(1)" in text


def test_several_runs_stand_side_by_side_with_what_differs_marked(tmp_path: Path) -> None:
    runs = [str(written_run(tmp_path / name, lr=lr)) for name, lr in (("slow", 1e-4), ("quick", 1e-2))]
    text = page(*runs, "--out", str(tmp_path / "page.html"))
    assert "1 setting differs" in text
    assert "<h1>halfstep: slow, quick</h1>" in text
    assert "<tr class=differs><td>optimizer.lr</td><td>0.0001</td><td>0.01</td>" in text
    assert "quick validation" in text


def test_long_curves_are_thinned_and_a_constant_scale_is_not_drawn(tmp_path: Path) -> None:
    charts = {chart.title: chart for chart in build_charts([read_run(written_run(tmp_path / "run", steps=5000))])}
    assert len(charts["loss"].series[0].points) <= MOST_POINTS + 1
    assert charts["loss"].series[0].points[-1][0] == 4999
    assert "loss scale" not in charts
    assert "iou over step: validation from 0.2 to 0.4" in charts["iou"].description


def test_one_thing_has_one_colour_in_all_charts(tmp_path: Path) -> None:
    """Of one run training and validation, of several each run, told apart where folders are called the same."""
    runs = [read_run(written_run(tmp_path / place / "run")) for place in "ab"]
    alone = [series for chart in build_charts(runs[:1]) for series in chart.series if series.name]
    assert {(series.name, series.colour, series.dashed) for series in alone} == {
        ("train, last", 0, False),
        ("validation", 1, True),
    }
    both = [series for chart in build_charts(runs) for series in chart.series]
    assert {(series.name.split(")")[0], series.colour) for series in both} == {("run (1", 0), ("run (2", 1)}


def test_charts_share_their_axis_mark_faults_and_name_a_logarithmic_scale(tmp_path: Path) -> None:
    charts = {chart.title: chart for chart in build_charts([read_run(written_run(tmp_path / "run"))])}
    over_steps = [chart for chart in charts.values() if chart.x == "step"]
    assert {chart.high for chart in over_steps} == {29.0}
    assert all(chart.faults == [(6.0, "skipped")] for chart in over_steps)
    assert (charts["GPU busy, %"].high, charts["GPU busy, %"].faults) == (2.0, [])
    assert charts["loss"].caption == "loss over step, logarithmic scale"
    assert charts["iou"].caption == "iou over step"


def test_a_run_that_has_not_ended_shows_progress_and_best_as_top_does(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    (run / "report" / "summary.json").unlink()
    more = [{"kind": "train", "step": 30, "loss": 0.1, "epoch_loss": 0.2, "total_steps": 400, "left_s": 4190.0},
            {"kind": "val", "step": 30, "loss": 0.1, "iou": 0.7, "train_loss": 0.15, "best": True}]  # fmt: skip
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in more)
    text = page(str(run), "--out", str(tmp_path / "page.html"))
    assert "Step 30 of 400, about 1 h 10 min left." in text
    assert "best iou</span><b>0.7000" in text
    assert "mean loss of the last epoch</span><b>0.1500" in text
    names = [line.name for chart in build_charts([read_run(run)]) for line in chart.series if chart.title == "loss"]
    assert names == ["train, last", "train, mean of the epoch", "validation"]


def phased(run: Path) -> Path:
    """Two networks in turn; the loss of one falls below zero."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in (one for one in records if one["kind"] == "train"):
        record |= {f"{key}/maker": record[key] for key in ("loss", "grad_norm", "lr")}
        record |= {"loss/critic": 1 - record["loss"], "grad_norm/critic": 2.0, "lr/critic": 0.01}
        record["loss/maker"] -= 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_networks_that_train_in_turn_have_a_curve_each(tmp_path: Path) -> None:
    run = read_run(phased(written_run(tmp_path / "run")))
    charts = {chart.title: chart for chart in build_charts([run])}
    colours = {"maker": 0, "critic": 1, "validation": 2}
    assert {line.name: line.colour for line in charts["loss"].series} == colours
    for title in ("learning rate", "gradient norm"):
        assert {line.name for line in charts[title].series} == {"maker", "critic"}
    assert charts["learning rate"].series[1].points[0] == (1.0, 0.01)
    assert (charts["loss"].log, charts["gradient norm"].log) == (False, True), "a loss below zero is seen as well"
    plain = read_run(written_run(tmp_path / "plain"))
    loss = next(chart for chart in build_charts([run, plain]) if chart.title == "loss")
    assert {line.name: line.colour for line in loss.series} == {
        "run maker": 0, "run critic": 1, "plain train, last": 2, "run validation": 0, "plain validation": 2
    }  # fmt: skip


def test_a_run_killed_before_its_first_record_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("workload: unet\n")
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path)])
    assert not end.value.code
    text = (tmp_path / "report" / "report.html").read_text()
    assert "has not ended" in text
    assert "Nothing is recorded." in text


def test_where_it_cannot_be_written_another_place_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run(tmp_path / "run")
    (run / "report" / "report.html").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["report", str(run)])
    assert end.value.code == 2
    assert "--out FILE.html" in capsys.readouterr().err


def test_a_run_whose_plan_is_damaged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run(tmp_path / "run")
    (run / "plan.json").write_text("{")
    with pytest.raises(SystemExit) as end:
        main(["report", str(run)])
    assert end.value.code == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the page was NOT seen in a browser")
def test_a_real_browser_draws_the_curves(tmp_path: Path) -> None:
    page(str(written_run(tmp_path / "run")), "--out", str(tmp_path / "page.html"))
    browser = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--virtual-time-budget=2000"]  # fmt: skip
    pressed = """<script>const svg = document.querySelector("figure svg"), seen = () => svg.querySelector(".series")
        .getAttribute("d"), whole = seen(); svg.focus();
        const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key}));
        press("+"); const zoomed = seen(); press("ArrowRight"); const moved = seen(); press("0");
        document.body.dataset.keys = [zoomed !== whole, moved !== zoomed, seen() === whole];</script>"""
    (tmp_path / "page.html").write_text((tmp_path / "page.html").read_text() + pressed)
    url = (tmp_path / "page.html").as_uri()
    shown = subprocess.run([*browser, "--dump-dom", url], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.count('class="series"') >= 6, "lines are drawn by the page's script"
    assert "skipped at step 6</title>" in shown, "a fault is marked"
    assert "skipped: 1</span>" in shown
    assert shown.count("<circle") > 4, "few points are drawn as such"
    assert "validation</span>" in shown, "the legend is filled in"
    assert 'data-keys="true,true,true"' in shown, "+ zooms, arrows pan, 0 shows all"
    picture = tmp_path / "shot.png"
    subprocess.run([*browser, f"--screenshot={picture}", url], capture_output=True, timeout=60, check=True)
    assert np.asarray(Image.open(picture).convert("L")).std() > 5, "not a blank page"
