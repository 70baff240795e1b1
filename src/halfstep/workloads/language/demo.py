"""A text whose entropy is known: what is left for the best model to be surprised by can be written down.

Each line is one of three kinds, equally often: a sum (`7+8=15`), nested brackets of three kinds (`([]{})`), or a
sentence whose verb agrees with its subject, past another noun (`the cats near the dog sleep`). Every choice is drawn
with a known probability and can be read off the text, so the text's probability under its own rules is the product of
these: minus its logarithm, over the number of characters, is the loss that no model can beat but by chance. What
follows from what stood before (a sum's result, which bracket closes, the verb's ending) costs nothing to a model that
looks back; one that sees only the character before stays far above.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from halfstep.data.files import create_folder

NUM_TRAIN, NUM_VAL = 40_000, 2_000
"""Lines of each split."""
BRACKETS = ("()", "[]", "{}")
DEEPEST = 4
NOUNS = ("cat", "dog", "bird", "horse", "king", "queen", "child", "farmer")
VERBS = ("sleep", "run", "jump", "sing", "eat", "dream", "walk", "wait")
PLURALS = {"child": "children"}
ENTROPY = "entropy.json"


class Lines:
    """Draw lines and add up the cost of their choices, in nats."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random, self.nats = random, 0.0

    def line(self) -> str:
        return (self.sum, self.brackets, self.sentence)[self.choice(3)]() + "\n"

    def choice(self, count: int) -> int:
        self.nats += math.log(count)
        return int(self.random.integers(count))

    def sum(self) -> str:
        one, other = self.choice(10), self.choice(10)
        return f"{one}+{other}={one + other}"

    def brackets(self) -> str:
        """Open or close with equal probability where both are possible."""
        opened: list[str] = []
        text = ""
        while not text or opened:
            if not opened or len(opened) < DEEPEST and self.choice(2):
                kind = BRACKETS[self.choice(len(BRACKETS))]
                opened.append(kind[1])
                text += kind[0]
            else:
                text += opened.pop()
        return text

    def sentence(self) -> str:
        subject, is_plural = self.noun()
        attached = f" near the {self.noun()[0]}" if self.choice(2) else ""
        verb = VERBS[self.choice(len(VERBS))]
        return f"the {subject}{attached} {verb if is_plural else verb + 's'}"

    def noun(self) -> tuple[str, bool]:
        name, is_plural = NOUNS[self.choice(len(NOUNS))], bool(self.choice(2))
        return (PLURALS.get(name, name + "s") if is_plural else name), is_plural


def write_demo(folder: Path, *, seed: int = 0, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL) -> None:
    """Write `train.txt`, `val.txt` and their cost in nats per character into `folder`, which appears when complete."""
    with create_folder(folder) as unfinished:
        costs = {}
        for number, (part, num_lines) in enumerate((("train", num_train), ("val", num_val))):
            lines = Lines(np.random.default_rng([seed, number]))
            text = "".join(lines.line() for _ in range(num_lines))
            (unfinished / f"{part}.txt").write_text(text, encoding="utf-8", newline="")
            costs[part] = lines.nats / len(text)
        (unfinished / ENTROPY).write_text(json.dumps({"nats_per_character": costs}) + "\n")
