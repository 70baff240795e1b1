from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfstep.errors import CheckpointError
from halfstep_train.report.curves import draw_curves


def records(num_steps: int, *, with_validation: bool = True, scale: float = 1.0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        loss = math.exp(-step / 20)
        found.append({"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "scale": scale})
        if with_validation and step % 10 == 0:
            whole = {"loss": loss, "iou": 1 - loss, "dice": 1 - loss / 2, "train_iou": 1 - loss / 3}
            found.append({"kind": "val", "step": step, **whole, "iou/cat": 0.5, "best": True})
    return found


BROKEN = [
    {"kind": "train", "step": 1, "loss": math.nan, "lr": 0.0, "grad_norm": math.inf, "scale": 65536.0},
    {"kind": "event", "step": 1, "event": "skipped", "reason": "loss is nan"},
    {"kind": "train", "step": 2, "loss": 0.5, "lr": 1e-3, "grad_norm": None, "scale": 32768.0},
    {"kind": "val", "step": 2, "loss": math.nan, "iou": math.nan},
]


@pytest.mark.parametrize(
    "metrics",
    [records(60), records(60, with_validation=False), records(1), records(60, scale=1024.0), BROKEN, []],
    ids=["whole", "no validation", "one point", "fp16", "broken", "nothing"],
)
def test_curves_are_drawn_from_any_records(metrics: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "report" / "curves.png"
    draw_curves(metrics, path)
    with Image.open(path) as picture:
        assert picture.size > (1600, 1000)
        assert np.asarray(picture.convert("L")).std() > 1


def pixels_of(colour: tuple[int, int, int], path: Path) -> int:
    with Image.open(path) as picture:
        return int((np.asarray(picture.convert("RGB")) == colour).all(axis=-1).sum())


@pytest.mark.parametrize("event", ["skipped", "overflow"])
def test_a_step_that_was_not_committed_leaves_a_red_mark(event: str, tmp_path: Path) -> None:
    red = (0xD6, 0x2F, 0x3A)
    skipped = [{"kind": "event", "step": 32, "event": event, "bad_step": 30, "reason": "loss is nan"}]
    draw_curves(records(60), tmp_path / "clean.png")
    draw_curves(records(60) + skipped, tmp_path / "skipped.png")
    assert pixels_of(red, tmp_path / "clean.png") == 0
    assert pixels_of(red, tmp_path / "skipped.png") > 0


@pytest.mark.parametrize(("event", "colour"), [("spike", (0xB7, 0x79, 0x1F)), ("rollback", (0x8E, 0x44, 0xAD))])
def test_spikes_and_rollbacks_are_marked_too(event: str, colour: tuple[int, int, int], tmp_path: Path) -> None:
    draw_curves(records(60), tmp_path / "clean.png")
    draw_curves([*records(60), {"kind": "event", "step": 32, "event": event}], tmp_path / "marked.png")
    assert pixels_of(colour, tmp_path / "marked.png") > pixels_of(colour, tmp_path / "clean.png")


def test_a_single_point_is_visible_even_in_the_background(tmp_path: Path) -> None:
    train = [{"kind": "train", "step": 1, "loss": 0.5, "lr": 1e-3, "grad_norm": 1.0, "scale": 1.0}]
    val = {"kind": "val", "step": 1, "loss": 0.5, "iou": 0.5}
    draw_curves([*train, val], tmp_path / "without.png")
    draw_curves([*train, {**val, "train_iou": 0.9}], tmp_path / "with.png")
    pale = [np.asarray(Image.open(tmp_path / f"{name}.png").convert("L")) for name in ("without", "with")]
    assert (pale[1] < 250).sum() > (pale[0] < 250).sum()


def test_flags_and_single_classes_are_no_metrics_of_their_own(tmp_path: Path) -> None:
    third_colour, fourth_colour = (0x0B, 0x9A, 0xC0), (0xB7, 0x79, 0x1F)
    draw_curves(records(60), tmp_path / "curves.png")
    assert pixels_of((0x12, 0x80, 0x5C), tmp_path / "curves.png") > 0
    assert pixels_of(third_colour, tmp_path / "curves.png") == 0
    assert pixels_of(fourth_colour, tmp_path / "curves.png") == 0


def test_each_phase_has_a_curve_of_its_own(tmp_path: Path) -> None:
    green = (0x12, 0x80, 0x5C)
    one = records(60, with_validation=False)
    draw_curves(one, tmp_path / "one.png")
    draw_curves([{**r, "loss/generator": r["loss"], "loss/critic": 0.5} for r in one], tmp_path / "two.png")
    assert pixels_of(green, tmp_path / "one.png") == 0
    assert pixels_of(green, tmp_path / "two.png") > 0


@pytest.mark.parametrize("names", [("psnr", "l1", "mse", "kl"), ("fg_ari", "fg_ari_image", "ari", "ari_image")])
def test_a_legend_leaves_the_title_alone(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("halfstep_train.report.curves.save_figure", lambda figure, path: drawn.append(figure))
    draw_curves([{"kind": "val", "step": 2, "loss": 1.0, **dict.fromkeys(names, 0.0063791)}], Path("unused"))
    drawn[0].canvas.draw()
    metrics = drawn[0].axes[1]
    assert len(metrics.get_legend().get_texts()) == 4
    titles = [title for title in (metrics._left_title, metrics.title) if title.get_text()]
    assert not metrics.get_legend().get_window_extent().overlaps(titles[0].get_window_extent())


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write"):
        draw_curves(records(3), tmp_path / "file" / "curves.png")


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from halfstep_train.report.curves import draw_curves
draw_curves([], Path({str(tmp_path / "curves.png")!r}))
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
