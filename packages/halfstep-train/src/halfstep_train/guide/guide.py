"""`halfstep guide`: ask questions, inspect the machine and the data, suggest configs, and write the chosen one.

Nothing is written outside `scratch` before the last question is answered.
"""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, TypeVar

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from halfstep.disk import find_unused_path, make_absolute
from halfstep.errors import (
    ConfigError,
    HalfstepError,
    Interrupted,
    suggest_command,
    suggest_nearest,
)
from halfstep.hardware.describe import describe_identity
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.advice import advise
from halfstep_train.config.section import count_cores
from halfstep_train.config.statements import read_file_statements
from halfstep_train.config.yaml_source import read_yaml
from halfstep_train.guide.inspect_data import DataSummary, describe_data, inspect_data, inspect_demo, save_grid
from halfstep_train.guide.suggest import Situation, Suggestion, describe_length, make_suggestions
from halfstep_train.report.console import make_pairs_table
from halfstep_train.workloads import KINDS

Value = TypeVar("Value")
GRID = "samples.png"


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `key` is its name in a file of answers."""

    key: str
    text: str
    choices: Mapping[str, str] = field(default_factory=dict)
    """Explanation by name; empty if any text is allowed."""
    default: str = ""
    empty_means: str = ""
    """What an empty answer means, if not the default."""

    def choose(self, answer: str) -> str:
        """Return the choice for an answer: a name, a number or the beginning of a name; free text is returned as is."""
        if not self.choices:
            return answer
        names, text = list(self.choices), answer.lower()
        if text.isdigit() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        matching = [name for name in names if name == text] or [
            name for name in names if text and name.startswith(text)
        ]
        if len(matching) != 1:
            raise ConfigError(f"{self.key}: {answer!r} is not a choice", fix=suggest_nearest(answer, names))
        return matching[0]


class Prompt:
    """Asks on the console and reads lines from a terminal or a pipe; explains a bad answer and asks again."""

    def __init__(self, console: Console, lines: TextIO) -> None:
        self.console, self.lines = console, lines

    @property
    def is_watched(self) -> bool:
        return self.lines.isatty()

    def ask(self, question: Question, check: Callable[[str], Value]) -> Value:
        show_question(self.console, question)
        while True:
            try:
                return check(question.choose(self._read_line(question) or question.default))
            except Interrupted:
                raise
            except HalfstepError as error:
                what, *advice = str(error).split("\n")
                self.console.print(Text(what, style="red"), *map(Text, advice), sep="\n")

    def finish(self) -> None:
        """Do nothing: a person answers only what is asked."""

    def _read_line(self, question: Question) -> str:
        """Read one answer; the end of the input ends the conversation."""
        print("> ", end="", flush=True)
        # readline would delay a Ctrl-C until the next key: wait for input in short intervals instead.
        while self.lines.isatty() and os.name == "posix" and not select.select([self.lines], [], [], 0.1)[0]:
            pass
        line = self.lines.readline()
        if not line:
            print()
            raise Interrupted(
                f"the input ended at the question {question.key!r}",
                why="nothing was written",
                fix="use --yes for all defaults, or --answers FILE",
            )
        answer = line.strip()
        if not self.lines.isatty():  # a pipe does not echo the answer
            print(answer or question.default)
        return answer


class Scripted:
    """Uses answers given in advance and defaults for the rest; prints each, and refuses bad ones."""

    is_watched = False

    def __init__(self, console: Console, answers: Mapping[str, str]) -> None:
        self.console, self.answers = console, answers
        self._asked: set[str] = set()

    def ask(self, question: Question, check: Callable[[str], Value]) -> Value:
        self._asked.add(question.key)
        given = question.key in self.answers
        answer = question.choose(self.answers.get(question.key) or question.default)
        source = "given" if given else "default"
        shown = answer or question.empty_means or "nothing"
        self.console.print(Text.assemble((f"{question.key}: ", "bold"), shown, (f"  ({source})", "dim")))
        return check(answer)

    def finish(self) -> None:
        idle = sorted(self.answers.keys() - self._asked)
        if idle:
            raise ConfigError(
                f"the file answers questions that were not asked: {', '.join(idle)}",
                why="other answers made them unnecessary",
                fix="remove them, or correct the other answers",
            )


Asker = Prompt | Scripted
"""Gets the answer to a question; `check` converts it to a value or raises a HalfstepError with the reason."""


def read_answers(path: Path, questions: Sequence[Question]) -> dict[str, str]:
    """Read answers from a YAML or JSON file, `key: value` for any of the questions; check each choice."""
    known = {question.key: question for question in questions}
    answers: dict[str, str] = {}
    for statement in read_file_statements(read_yaml(path)):
        if statement.path not in known:
            raise ConfigError(
                f"{statement.origin}: no question {statement.path!r}", fix=suggest_nearest(statement.path, known)
            )
        if statement.value is not None and not isinstance(statement.value, str):
            raise ConfigError(
                f"{statement.origin}: {statement.path} is {statement.value!r}", fix="write a single value"
            )
        answer = (statement.value or "").strip()
        if answer:
            known[statement.path].choose(answer)
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


FAMILIES = {kind.task: (kind.guide, kind.usual) for name in KINDS if (kind := KINDS[name]).guide is not None}
"""The guide's entry for each family, and the workload that most users want on a GPU."""
TASKS = {task: entry.about for task, (entry, _) in FAMILIES.items()}
TASK = Question("task", "What do you want to train?", TASKS, default=next(iter(FAMILIES)))
MODELS = {name: text for entry, _ in FAMILIES.values() if len(entry.models) > 1 for name, text in entry.models.items()}
MODEL = Question("model", "Which model? Larger ones want more data and time.", MODELS)
DATA = Question("data", "Where are your data?", empty_means="demo data, generated")
GOALS = {
    "fast": "done soon",
    "quality": "the best result, however long it takes",
    "lowmem": "little memory",
    "stable": "no surprises: strict fp32",
}
GOAL = Question("goal", "What matters most?", GOALS, default="fast")
PICK = Question("pick", "Which one?", default="1")
FILE = Question("file", "Write it to which file?")
START = Question("start", "Start the training now?", {"no": "only write the file", "yes": "start"}, default="no")
QUESTIONS = (TASK, MODEL, DATA, GOAL, PICK, FILE, START)


def add_task(answers: Mapping[str, str]) -> Mapping[str, str]:
    """Add the task to answers that name only a model."""
    task = next((task for task, (entry, _) in FAMILIES.items() if answers.get(MODEL.key) in entry.models), "")
    return {TASK.key: task, **answers} if task else answers


def guide(asker: Asker, console: Console, hardware: Hardware, device: str | None, scratch: Path) -> tuple[Path, bool]:
    """Ask, suggest and write a config; return its path, and whether to start it.

    `scratch` is a folder for demo data and pictures that the caller removes; `device` is as given by the user.
    """
    show_machine(console, hardware)
    workload = _ask_workload(asker, hardware)
    data_dir, data = _ask_data(asker, console, workload, scratch)
    goal = asker.ask(GOAL, str)
    situation = Situation(workload=workload, goal=goal, hardware=hardware, data=data, data_dir=data_dir, device=device)
    chosen = _ask_choice(asker, console, situation)
    name = Path(f"{workload}-{chosen.name}.yaml")
    asked = dataclasses.replace(FILE, default=str(find_unused_path(name, ".yaml")))
    file = asker.ask(asked, check_new_file)
    # The last question; nothing was written before it.
    start = asker.ask(START, lambda answer: answer == "yes")
    asker.finish()
    file.write_text(chosen.to_yaml(), encoding="utf-8")
    picture = find_unused_path(file.with_name(f"{file.stem}-samples.png"), ".png")
    shutil.copyfile(scratch / GRID, picture)
    console.print(Text(f"\nWrote {file}, {picture}", style="green"), soft_wrap=True)
    console.print(Text("Train with:"))
    console.print(Text(f"  {suggest_command('train', file)}", style="bold"), soft_wrap=True)
    return file, start


def _ask_workload(asker: Asker, hardware: Hardware) -> str:
    entry, usual = FAMILIES[asker.ask(TASK, str)]
    if len(entry.models) == 1:
        return next(iter(entry.models))
    default = entry.usual_on_cpu if hardware.kind == "cpu" else usual
    return asker.ask(dataclasses.replace(MODEL, choices=entry.models, default=default), str)


def _ask_data(asker: Asker, console: Console, workload: str, scratch: Path) -> tuple[str | None, DataSummary]:
    """Return the data folder (None: demo data) and its content."""

    def inspect(answer: str) -> DataSummary:
        with console.status("reading the data"):
            if not answer:
                return inspect_demo(workload, scratch / "demo")
            return inspect_data(workload, make_absolute(os.path.expanduser(answer)))

    found = asker.ask(DATA, inspect)
    grid = scratch / GRID
    save_grid(found, grid)
    console.print(make_pairs_table(describe_data(found)))
    if asker.is_watched:
        console.print(Text(f"A picture of a few samples: {grid}"), soft_wrap=True)
        console.print(Text("  (a temporary file; it is saved next to your config at the end)", style="dim"))
    return (None if found.is_demo else str(found.folder)), found


def _ask_choice(asker: Asker, console: Console, situation: Situation) -> Suggestion:
    with console.status("choosing batch, memory and workers"):
        offered = {one.name: one for one in make_suggestions(situation)}
    for number, one in enumerate(offered.values(), 1):
        console.print()
        console.print(Rule(Text(f"{number} {one.name}", style="bold"), align="left"))
        console.print(make_pairs_table(one.facts))
    num_train = situation.data.num_train
    question = dataclasses.replace(PICK, choices={name: _summarise(one, num_train) for name, one in offered.items()})
    return asker.ask(question, lambda name: offered[name])


def _summarise(one: Suggestion, num_train: int) -> str:
    train, each = one.config.train, KINDS.of(one.config.workload).describe_sample_size(one.config)
    times = f" x {train.accumulate}" if train.accumulate > 1 else ""
    size = f"batch {train.batch_size}{times}{f' at {each}' if each else ''}"
    return f"{one.config.precision.default}, {size}, {describe_length(one.config, num_train)}"


def check_new_file(answer: str) -> Path:
    """Check the name of a new config file, which `halfstep train` must recognise as a file."""
    path = Path(os.path.expanduser(answer))
    if path.suffix.lower() not in (".yaml", ".yml") or "=" in answer or answer.startswith("-"):
        raise ConfigError(
            f"file: {answer!r} is not a valid config file name", fix="use NAME.yaml, without = and without a leading -"
        )
    if os.path.exists(path):
        raise ConfigError(
            f"file: {answer} exists already", why="files are never overwritten", fix="choose another name"
        )
    if not os.path.isdir(path.parent):
        raise ConfigError(f"file: there is no folder {path.parent}", fix="create it first, or choose another")
    return path


def show_machine(console: Console, hardware: Hardware) -> None:
    advice = advise(hardware)
    rows = [
        *(row for row in describe_identity(hardware) if row[0] in ("architecture", "memory")),
        ("CPU cores", str(count_cores())),
        ("precision", advice.headline),
        *(("warning", warning) for warning in advice.warnings),
    ]
    console.print(Rule(Text(f"{hardware.device}  {hardware.name}", style="bold"), align="left"))
    console.print(make_pairs_table(rows))
