"""Demo data: a text whose entropy is known, so that the loss of the best possible model is known too.

Each line is one of three kinds with equal probability: a sum (`7+8=15`), nested brackets of three kinds (`([]{})`), or
a sentence whose verb agrees with its subject, across another noun (`the cats near the dog sleep`). Every choice is
drawn with a known probability and can be recognised in the text. The product of these is the probability of the text;
its negative logarithm per character is the loss that no model can beat, except by chance. What follows from earlier
text (the result of a sum, the closing bracket, the ending of the verb) adds nothing to it. A model that sees only the
previous character stays far above this loss.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from halfstep_train.data.files import create_folder

NUM_TRAIN, NUM_VAL = 40_000, 2_000
"""Number of lines per split."""
BRACKETS = ("()", "[]", "{}")
DEEPEST = 4
NOUNS = ("cat", "dog", "bird", "horse", "king", "queen", "child", "farmer")
VERBS = ("sleep", "run", "jump", "sing", "eat", "dream", "walk", "wait")
PLURALS = {"child": "children"}
ENTROPY = "entropy.json"


class Lines:
    """Generates lines, and sums the information of their random choices in nats."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random, self.nats = random, 0.0

    def draw_line(self) -> str:
        return (self.draw_sum, self.draw_brackets, self.draw_sentence)[self.draw_choice(3)]() + "\n"

    def draw_choice(self, count: int) -> int:
        """Draw a number below `count`, which is log(count) nats of information."""
        self.nats += math.log(count)
        return int(self.random.integers(count))

    def draw_sum(self) -> str:
        one, other = self.draw_choice(10), self.draw_choice(10)
        return f"{one}+{other}={one + other}"

    def draw_brackets(self) -> str:
        """Return nested brackets: opening and closing have equal probability if both are possible."""
        opened: list[str] = []
        text = ""
        while not text or opened:
            if not opened or len(opened) < DEEPEST and self.draw_choice(2):
                kind = BRACKETS[self.draw_choice(len(BRACKETS))]
                opened.append(kind[1])
                text += kind[0]
            else:
                text += opened.pop()
        return text

    def draw_sentence(self) -> str:
        subject, is_plural = self.draw_noun()
        attached = f" near the {self.draw_noun()[0]}" if self.draw_choice(2) else ""
        verb = VERBS[self.draw_choice(len(VERBS))]
        return f"the {subject}{attached} {verb if is_plural else verb + 's'}"

    def draw_noun(self) -> tuple[str, bool]:
        name, is_plural = NOUNS[self.draw_choice(len(NOUNS))], bool(self.draw_choice(2))
        return (PLURALS.get(name, name + "s") if is_plural else name), is_plural


def write_demo(folder: Path, *, seed: int = 0, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL) -> None:
    """Write `train.txt`, `val.txt` and their entropy in nats per character to `folder`, which appears when complete."""
    with create_folder(folder) as unfinished:
        costs = {}
        for number, (part, num_lines) in enumerate((("train", num_train), ("val", num_val))):
            lines = Lines(np.random.default_rng([seed, number]))
            text = "".join(lines.draw_line() for _ in range(num_lines))
            (unfinished / f"{part}.txt").write_text(text, encoding="utf-8", newline="")
            costs[part] = lines.nats / len(text)
        (unfinished / ENTROPY).write_text(json.dumps({"nats_per_character": costs}) + "\n")
