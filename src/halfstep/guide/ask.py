"""Questions as data, and the two ways to answer them: line by line from a person or a pipe, or from given answers."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from rich.console import Console
from rich.text import Text

from halfstep.config.statements import file_statements
from halfstep.config.yaml_source import read_yaml
from halfstep.errors import ConfigError, HalfstepError, Interrupted, nearest

Value = TypeVar("Value")
NO_DEFAULT = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One thing to ask; `key` names it in a file of answers."""

    key: str
    text: str
    choices: Mapping[str, str] = field(default_factory=dict)
    """Name to explanation; empty where any text may come."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other words for a choice."""
    default: str = NO_DEFAULT
    empty_means: str = ""
    """What an empty answer stands for, where that is not the default."""

    def chosen(self, answer: str) -> str:
        """The choice that an answer means: by name, number or beginning; free text as it is."""
        if not self.choices:
            return answer
        names, word = list(self.choices), answer.lower().replace(" ", "")
        word = self.aliases.get(word, word)
        if word.isdigit() and 1 <= int(word) <= len(names):
            return names[int(word) - 1]
        squeezed = {name.replace(" ", ""): name for name in names}
        matching = [name for short, name in squeezed.items() if short == word or word and short.startswith(word)]
        matching = [squeezed[word]] if word in squeezed else matching
        if len(matching) != 1:
            raise ConfigError(f"{self.key}: {answer!r} is not a choice", fix=nearest(answer, names))
        return matching[0]


class Asker(Protocol):
    """Gets the answer to a question; `check` turns it into a value or raises a HalfstepError that says why not."""

    @property
    def is_watched(self) -> bool:
        """Whether somebody sees what is shown while the questions are asked."""
        ...

    def ask(self, question: Question, check: Callable[[str], Value]) -> Value: ...

    def finish(self) -> None:
        """All questions were asked; raises where an answer was given to one that was not."""


class Prompt:
    """Asks on the console and reads lines, from a terminal or a pipe; a bad answer is explained and asked again."""

    def __init__(self, console: Console, lines: TextIO) -> None:
        self.console, self.lines = console, lines

    @property
    def is_watched(self) -> bool:
        return self.lines.isatty()

    def ask(self, question: Question, check: Callable[[str], Value]) -> Value:
        show_question(self.console, question)
        while True:
            try:
                return check(question.chosen(self._line(question) or question.default))
            except Interrupted:
                raise
            except HalfstepError as error:
                show_refusal(self.console, error)

    def finish(self) -> None:
        """A person answers what is asked."""

    def _line(self, question: Question) -> str:
        print("> ", end="", flush=True)
        # A Ctrl-C between a look for signals and a read would wait for the next key: so wait in short turns.
        while self.lines.isatty() and os.name == "posix" and not select.select([self.lines], [], [], 0.1)[0]:
            pass
        try:
            line = self.lines.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{question.key}: the answer is not {error.encoding} text") from error
        if not line:
            print()
            raise Interrupted(
                f"the input ended at the question {question.key!r}",
                why="nothing was written",
                fix="--yes takes the defaults, --answers FILE gives answers",
            )
        answer = line.strip()
        if not self.lines.isatty():  # a pipe does not show what was typed
            print(answer or question.default)
        return answer


class Scripted:
    """Answers given in advance, defaults for the rest; every one is printed, a bad one is an error."""

    is_watched = False

    def __init__(self, console: Console, answers: Mapping[str, str]) -> None:
        self.console, self.answers = console, answers
        self._asked: set[str] = set()

    def ask(self, question: Question, check: Callable[[str], Value]) -> Value:
        self._asked.add(question.key)
        given = question.key in self.answers
        answer = question.chosen(self.answers.get(question.key) or question.default)
        source = "given" if given else "default"
        shown = answer or question.empty_means or "nothing"
        self.console.print(Text.assemble((f"{question.key}: ", "bold"), shown, (f"  ({source})", "dim")))
        return check(answer)

    def finish(self) -> None:
        idle = sorted(self.answers.keys() - self._asked)
        if idle:
            raise ConfigError(
                f"answered, but not asked: {', '.join(idle)}",
                why="other answers made the question needless",
                fix="remove it, or correct the other answers",
            )


def path_in(answer: str) -> Path:
    """The path that an answer names, with ~ as the shell has it."""
    try:
        answer.encode()  # a name that is not text cannot stand in a config
        return Path(answer).expanduser()
    except (RuntimeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{answer!r} is not a usable path", why=str(error)) from error


def read_answers(path: Path, questions: Sequence[Question]) -> dict[str, str]:
    """Answers from a YAML or JSON file: `key: value` for any of the questions, each choice checked at once."""
    if not path.exists():
        raise ConfigError(f"no file of answers at {path}", fix="give a YAML or JSON file, or leave --answers out")
    known = {question.key: question for question in questions}
    answers: dict[str, str] = {}
    for statement in file_statements(read_yaml(path)):
        if statement.path not in known:
            raise ConfigError(f"{statement.origin}: no question {statement.path!r}", fix=nearest(statement.path, known))
        if statement.value is not None and not isinstance(statement.value, str):
            raise ConfigError(f"{statement.origin}: {statement.path} is {statement.value!r}", fix="write one word")
        answer = (statement.value or "").strip()
        if answer:
            known[statement.path].chosen(answer)
        answers[statement.path] = answer
    return answers


def show_question(console: Console, question: Question) -> None:
    console.print()
    console.print(Text(question.text, style="bold"))
    width = max((len(name) for name in question.choices), default=0)
    for number, (name, explanation) in enumerate(question.choices.items(), 1):
        console.print(Text.assemble((f"  {number} {name:{width}}  ", "cyan"), explanation))
    hint = question.empty_means or question.default
    if hint:
        console.print(Text(f"  Enter: {hint}", style="dim"))


def show_refusal(console: Console, error: HalfstepError) -> None:
    console.print(Text(error.what, style="red"))
    for label, text in (("why", error.why), ("fix", error.fix)):
        if text:
            console.print(Text(f"  {label}: {text}"))
