"""The demo's text: its entropy is what its own rules give, and a small model learns in seconds what pairs cannot."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from halfstep_train.workloads.language.demo import BRACKETS, DEEPEST, write_demo


def cost_of(line: str) -> float:
    """Nats of one line, read off the text alone: which choices there were, and how many of each."""
    cost = math.log(3)
    if re.fullmatch(r"\d\+\d=\d+", line):
        return cost + 2 * math.log(10)
    if line[0] in "([{":
        depth = 0
        for place, character in enumerate(line):
            opens = character in "([{"
            if 0 < depth < DEEPEST and place:
                cost += math.log(2)
            cost += math.log(len(BRACKETS)) if opens else 0.0
            depth += 1 if opens else -1
        return cost
    nouns = line.count("the ")
    return cost + nouns * (math.log(8) + math.log(2)) + math.log(2) + math.log(8)


def test_the_entropy_is_that_of_the_choices_that_can_be_read_off_the_text(tmp_path: Path) -> None:
    write_demo(tmp_path / "data", num_train=400, num_val=100)
    stored = json.loads((tmp_path / "data" / "entropy.json").read_text())["nats_per_character"]
    for part in ("train", "val"):
        text = (tmp_path / "data" / f"{part}.txt").read_text()
        assert sum(map(cost_of, text.splitlines())) / len(text) == pytest.approx(stored[part], rel=1e-9)
