"""What a source says about a run, in one vocabulary: a `Declaration` a topic, a `Source` a file, call or command."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from halfstep_check.document import Node, Scalar
from halfstep_check.findings import Edit, Finding, Place

Topic = Literal[
    "precision",
    "weights",
    "reduce",
    "scaling",
    "optimizer state",
    "clip",
    "accumulate",
    "batch",
    "global batch",
    "devices",
    "tf32",
]

TABLE_TOPICS: tuple[Topic, ...] = (
    *("precision", "weights", "reduce", "scaling", "optimizer state"),
    *("clip", "accumulate", "batch", "global batch"),
)

SHOWN_TOPICS: tuple[Topic, ...] = (*TABLE_TOPICS, "devices", "tf32")
"""What a source is shown to say; what it takes in effect is not resolved for the last two."""

AUTO = "auto"
"""The source leaves this to another one; never part of a conflict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """One topic, its value in our words, how the source spells it, and how it would spell another value."""

    topic: Topic
    value: str
    spelled: str
    place: Place
    rewrites: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    number: Node | None = None
    """Where a number is written, so that any other number can be written there."""

    def rewritten(self, value: str) -> tuple[Edit, ...]:
        """Return the edits that make this source say `value`; empty when it cannot."""
        if value in self.rewrites:
            return self.rewrites[value]
        return (self.number.rewritten(value),) if self.number is not None else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A config file that this source names, and where it does."""

    name: str
    spelled: str
    place: Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One config file, constructor call, command line or environment, read by the rules of its dialect."""

    name: str
    dialect: str
    declarations: tuple[Declaration, ...] = ()
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """What resolving needs besides the table: `strategy`, `version`, `backend`."""
    references: tuple[Reference, ...] = ()
    named_by: Place | None = None
    """Who names this file, when the user did not."""

    def get_declaration(self, topic: Topic) -> Declaration | None:
        return next((s for s in self.declarations if s.topic == topic), None)

    def get_value(self, topic: Topic) -> str:
        declaration = self.get_declaration(topic)
        return declaration.value if declaration else ""


class Draft:
    """A source in the making: readers add what they find, `freeze()` returns it."""

    def __init__(self, root: Node, dialect: str) -> None:
        self.root, self.dialect = root, dialect
        self.declarations: list[Declaration] = []
        self.findings: list[Finding] = []
        self.facts: dict[str, str] = {}
        self.references: list[Reference] = []

    def say(self, topic: Topic, value: str, key: str, rewrites: Mapping[str, tuple[Edit, ...]] | None = None) -> None:
        """`key` is where it is written; a topic that follows from another key names that key."""
        node = self.root.get(key)
        spelled = f"{key}: {format_value(node)}" if node is not None else key
        place = node.place if node is not None else self.root.place
        self.declarations.append(
            Declaration(topic=topic, value=value, spelled=spelled, place=place, rewrites=rewrites or {})
        )

    def say_autocast(self, precision: str, key: str, rewrites: Mapping[str, tuple[Edit, ...]] | None = None) -> None:
        """A precision of autocast's: fp16 comes with a scaler."""
        self.say("precision", precision, key, rewrites)
        if precision == "fp16":
            self.say("scaling", "dynamic", key)

    def read_word(self, key: str, words: Mapping[str, str], owner: str, word: str = "") -> str | None:
        """State the precision that the word at `key` names; report a word that the framework does not accept."""
        node = self.root.get(key)
        if node is None:
            return None
        word = word or str(node.scalar)
        if word not in words:
            message = f"{owner} does not know {key} {word!r}"
            self.find("unknown-value", message, key, fix=f"one of {', '.join(words)}")
            return None
        edits = {precision: self.edit(key, name) for name, precision in words.items()}
        self.say_autocast(words[word], key, {precision: edit for precision, edit in edits.items() if edit})
        return words[word]

    def say_reduced(self, precision: str, key: str, message: str, *, fix: str, edits: tuple[Edit, ...] = ()) -> None:
        """State that gradients are reduced in half, and report it."""
        self.say("reduce", precision, key)
        self.find("low-precision-reduce", message, key, fix=fix, edits=edits)

    def say_number(self, topic: Topic, key: str) -> None:
        """Say a number if the key holds one; `auto` is passed on as such."""
        node = self.root.get(key)
        value = None if node is None else node.scalar
        if node is None or value is None or isinstance(value, bool):
            return
        if value == AUTO:
            self.say(topic, AUTO, key)
        elif (text := parse_number(value)) is not None:
            spelled = f"{key}: {format_value(node)}"
            self.declarations.append(
                Declaration(topic=topic, value=text, spelled=spelled, place=node.place, number=node)
            )

    def find(self, rule: str, message: str, key: str, *, fix: str = "", edits: tuple[Edit, ...] = ()) -> None:
        node = self.root.get(key)
        place = node.place if node is not None else self.root.place
        self.findings.append(Finding(rule=rule, message=message, place=place, fix=fix, edits=edits))

    def refer(self, key: str, suffixes: tuple[str, ...]) -> None:
        """Remember the file that `key` names; what does not look like one (`none`, base64) names none."""
        node = self.root.get(key)
        if node is not None and isinstance(node.value, str) and node.value.endswith(suffixes):
            self.references.append(Reference(name=node.value, spelled=f"{key}: {format_value(node)}", place=node.place))

    def edit(self, key: str, text: str) -> tuple[Edit, ...]:
        """Return the edit that writes `text` at `key`; empty if the key is missing."""
        node = self.root.get(key)
        return (node.rewritten(text),) if node is not None and not isinstance(node.value, (dict, list)) else ()

    def freeze(self) -> Source:
        return Source(
            name=self.root.path,
            dialect=self.dialect,
            declarations=tuple(self.declarations),
            findings=tuple(self.findings),
            facts=self.facts,
            references=tuple(self.references),
        )


def parse_number(value: Scalar) -> str | None:
    """Return one text for `8`, `8.0` and `"8"`; None for anything that is not a finite number."""
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):
        return None
    return f"{number:g}" if math.isfinite(number) else None


def format_value(node: Node | None) -> str:
    """Return a value as its file would show it, cut to a table's width."""
    if node is None:
        return ""
    if isinstance(node.value, (dict, list)):
        return "…"
    text = str(node.value) if not isinstance(node.value, bool) else str(node.value).lower()
    return text if len(text) <= 40 else text[:39] + "…"


def is_on(value: Scalar) -> bool:
    """Return whether a switch is on: true, `"true"`, `"yes"`, 1."""
    return value is True or value == 1 or str(value).lower() in ("true", "yes", "on")
