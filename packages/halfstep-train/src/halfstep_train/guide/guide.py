"""`halfstep guide`: ask questions, inspect the machine and the data, suggest configs, and write the chosen one.

Nothing is written outside `scratch` before the last question is answered.
"""

from __future__ import annotations

import dataclasses
import math
import os
import select
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

import yaml
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from halfstep.disk import find_unused_path, make_absolute
from halfstep.errors import (
    ConfigError,
    HalfstepError,
    Interrupted,
    format_bytes,
    format_count,
    suggest_command,
    suggest_nearest,
)
from halfstep.hardware.describe import describe_identity
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.advice import advise
from halfstep.precision.decide import decide
from halfstep_train.config.dump import Dumper
from halfstep_train.config.load import nest_paths
from halfstep_train.config.schema import ADAM_LIKE, RunConfig
from halfstep_train.config.section import count_cores
from halfstep_train.config.statements import read_file_statements
from halfstep_train.config.yaml_source import read_yaml
from halfstep_train.guide.inspect_data import DataSummary, describe_data, inspect_data, inspect_demo, save_grid
from halfstep_train.report.console import make_pairs_table
from halfstep_train.run.memory.sizing import Planners, StepCost, predict_step_cost
from halfstep_train.workloads import KINDS, from_dict
from halfstep_train.workloads.base.using import choose_side

# --- suggestions ---


ORDER = {
    "fast": ("fast", "lowmem", "stable"),
    "quality": ("quality", "fast", "stable"),
    "lowmem": ("lowmem", "fast", "stable"),
    "stable": ("stable", "quality", "lowmem"),
}
"""Presets for each goal: its own first, then alternatives."""
REASONS = {
    "fast": "the fastest precision of this machine, compiled if that is faster, and the shortest recipe",
    "quick": "small data: small images and 20 epochs, the quickest way to a first result",
    "quality": "a long recipe with averaged weights, validated during training",
    "lowmem": "activations are recomputed instead of stored, about a third slower",
    "stable": "strict fp32 and plain eager PyTorch; faults are rolled back instead of ending the run",
}
HOW_IT_RUNS = ("train.fast", "train.memory", "train.activation_checkpointing", "guard.on_fault")
"""Settings of a preset that apply to demo data, which have their own recipe."""
SMALL_SET = 10_000
"""Training images below which `quick` replaces `fast`: its recipe is for a few thousand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One suggested config, with its expected results."""

    name: str
    values: Mapping[str, Any]
    """Content of its file, nested."""
    config: RunConfig
    facts: tuple[tuple[str, str], ...]
    """Names and values to print, the reason first."""

    def to_yaml(self) -> str:
        """Return the file: reasons as comments, then the values."""
        comments = [f"# {name}: {' '.join(value.split())}" for name, value in self.facts]
        text = yaml.dump(dict(self.values), Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
        return "\n".join(["# Written by `halfstep guide`. Change what you like.", *comments, text])


def make_suggestions(situation: Situation) -> tuple[Suggestion, ...]:
    """Return the config for the goal and alternatives, without duplicates."""
    found: list[Suggestion] = []
    planners: Planners = {}
    for preset in ORDER[situation.goal]:
        one = _make_suggestion(situation, _adapt_to_small_data(preset, situation), planners)
        if one.config not in [other.config for other in found]:
            found.append(one)
    return tuple(found)


def _adapt_to_small_data(preset: str, situation: Situation) -> str:
    is_small = situation.data.num_train < SMALL_SET
    has_quick = "quick" in KINDS.of(situation.workload).get_schema(situation.workload).presets and not situation.is_demo
    return "quick" if preset == "fast" and is_small and has_quick else preset


def _make_suggestion(situation: Situation, preset: str, planners: Planners) -> Suggestion:
    """Build one suggestion: choose precision, batch and learning rate, each with its reason."""
    precision = decide("fp32" if preset == "stable" else "auto", situation.hardware).granted
    paths = {"precision": precision, **_choose_base_settings(situation, preset)}
    facts = [("why", REASONS[preset]), ("precision", _explain_precision(situation, precision))]
    size_fact = _fit_to_pictures(situation, preset, paths)
    start = _build_config(situation, preset, paths)
    cost = predict_step_cost(start, situation.data.opened.store, situation.hardware, precision, planners)
    size, size_facts = choose_batch(situation, preset, start, cost)
    rate, rate_fact = choose_learning_rate(start, size["train.batch_size"] * size["train.accumulate"])
    paths |= {**rate, **size}
    facts += [*size_facts, rate_fact, *size_fact, *_list_remarks(situation, paths)]
    values = _nest_settings(situation, preset, paths)
    return Suggestion(name=preset, values=values, config=_build_config(situation, preset, paths), facts=tuple(facts))


def _choose_base_settings(situation: Situation, preset: str) -> dict[str, Any]:
    """Return the settings that follow from the situation alone."""
    values = KINDS.of(situation.workload).get_schema(situation.workload).presets[preset]
    paths: dict[str, Any] = {"device": situation.device} if situation.device else {}
    if situation.is_demo:
        paths |= {key: values[key] for key in HOW_IT_RUNS if key in values}
    if situation.data_dir:
        paths["data.dir"] = situation.data_dir
    if situation.data.on_bad_file == "skip":
        paths["data.on_bad_file"] = "skip"
    return paths | _choose_smaller(situation)


def _fit_to_pictures(situation: Situation, preset: str, paths: dict[str, Any]) -> list[tuple[str, str]]:
    """Limit the image size to that of the data, with matching first layers; update `paths`, return the reason."""
    data, config = situation.data, _build_config(situation, preset, paths)
    if data.opened.sides is None or situation.is_demo:
        return []
    side = choose_side(data.opened.sides)
    if side >= config.data.image_size:
        return []
    paths |= KINDS.of(situation.workload).make_guide().suggest_for_side(config, side)
    width, height = data.opened.sides
    return [("image size", f"{side} pixels: the images have {width}×{height}, and upscaling adds nothing")]


def _choose_smaller(situation: Situation) -> dict[str, Any]:
    if situation.hardware.kind != "cpu" or situation.is_demo:
        return {}
    return dict(KINDS.of(situation.workload).make_guide().small_on_cpu)


def _explain_precision(situation: Situation, precision: str) -> str:
    advice = advise(situation.hardware)
    if precision == advice.precision:
        return advice.headline.removeprefix("use ")
    return f"{precision}: no rounding to fewer digits ({advice.precision} would be faster here)"


def _list_remarks(situation: Situation, paths: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if situation.is_demo:
        yield "demo", "the demo has a small model and few epochs; your choice changes only how it runs"
    if smaller := _choose_smaller(situation):
        settings = ", ".join(f"{key}={paths[key]}" for key in smaller)
        yield "on a CPU", f"smaller than the default: {settings}"
    elif not situation.is_demo:
        yield from situation.data.opened.remarks


def _nest_settings(situation: Situation, preset: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {} if situation.is_demo else {"preset": preset}
    return nest_paths({"workload": situation.workload, **chosen, **paths})


def _build_config(situation: Situation, preset: str, paths: Mapping[str, Any]) -> RunConfig:
    return from_dict(situation.workload, _nest_settings(situation, preset, paths)).config


STEPS_AN_EPOCH = 10
"""Minimum optimizer steps per epoch: with fewer, a small set learns too slowly."""
SMALLEST_BATCH = 8
"""Minimum batch: BatchNorm's statistics over fewer samples are noise (Wu and He 2018, figure 1)."""
LARGEST_GROWTH = 4
"""Largest factor by which `fast` enlarges its batch: larger ones need more epochs (McCandlish et al. 2018)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Everything that suggestions depend on."""

    workload: str
    goal: str
    hardware: Hardware
    data: DataSummary
    data_dir: str | None
    device: str | None
    """As given by the user, to be written to the config; None: the run chooses."""

    @property
    def is_demo(self) -> bool:
        return self.data.is_demo


def choose_batch(
    situation: Situation, preset: str, start: RunConfig, cost: StepCost
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Choose batch and accumulation: the recipe's samples per step, more for `fast`, limited by data and memory."""
    num_train, hardware = situation.data.num_train, situation.hardware
    memory = hardware.memory_free_bytes or hardware.memory_total_bytes
    recipe = start.train.batch_size * start.train.accumulate
    fits = _round_to_power_of_two(cost.find_largest_batch(memory)) if memory else recipe
    # A larger batch is not faster on a CPU.
    grows = preset == "fast" and not situation.is_demo and hardware.kind != "cpu"
    grown = max(recipe, min(recipe * LARGEST_GROWTH, fits)) if grows else recipe
    # A quarter if the recipe's batch is small: a U-Net's BatchNorm sees many pixels of few samples.
    smallest = min(SMALLEST_BATCH, max(2, recipe // 4), num_train)
    # Small data limit the batch: an epoch needs at least STEPS_AN_EPOCH steps.
    by_data = _round_to_power_of_two(max(num_train // STEPS_AN_EPOCH, smallest))
    a_step = min(grown, by_data)
    # `lowmem` keeps the recipe's micro-batch and accumulates instead.
    micro = max(1, min(start.train.batch_size if preset == "lowmem" else a_step, a_step, fits))
    accumulate = math.ceil(a_step / micro)
    if a_step < grown:
        steps = math.ceil(num_train / a_step)
        made = f"{format_count(num_train, 'sample')} make {format_count(steps, 'step')} per epoch"
        why = f"less than the recipe's {recipe}: {made}"
    else:
        why = f"the recipe's {recipe}" + (f" times {a_step // recipe}" if a_step > recipe else "")
    times = f" x {accumulate} accumulated" if accumulate > 1 else ""
    facts = [("batch", f"{micro}{times} ({why})"), ("memory", _describe_memory(cost, micro, fits, memory))]
    return {"train.batch_size": micro, "train.accumulate": accumulate}, facts


def _describe_memory(cost: StepCost, micro: int, fits: int, memory: int) -> str:
    a_sample = f"{format_bytes(cost.fixed_bytes)} + {format_bytes(cost.sample_bytes)} per sample"
    needed = f"about {format_bytes(cost.predict_bytes(micro))} ({a_sample}; an estimate)"
    if not memory:
        return f"{needed}; the memory size of this device is unknown"
    if not fits:
        return f"{needed}: NOT EVEN ONE SAMPLE FITS {format_bytes(memory)}; use a smaller data.image_size or model"
    return f"{needed}; {format_bytes(memory)} are free, enough for a batch of {fits:,} (an estimate)"


def _round_to_power_of_two(number: int) -> int:
    """Round down to a power of two; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def choose_learning_rate(start: RunConfig, samples: int) -> tuple[dict[str, Any], tuple[str, str]]:
    """Scale the rate linearly with the batch for SGD (Goyal et al. 2017), by its root for Adam (Malladi 2022)."""
    optimizer, recipe = start.optimizer, start.train.batch_size * start.train.accumulate
    if optimizer.lr_per:
        peak, per, rule = optimizer.compute_peak_lr(samples), optimizer.lr_per, "linear, as in this recipe"
        paths: dict[str, Any] = {}
        shown = f"{optimizer.lr:g} x {samples}/{per}"
    elif optimizer.name in ADAM_LIKE:
        peak, rule = optimizer.lr * math.sqrt(samples / recipe), "square root of the batch, for Adam"
        shown, paths = f"{optimizer.lr:g} x sqrt({samples}/{recipe})", {"optimizer.lr": float(f"{peak:.4g}")}
    else:
        peak, rule = optimizer.lr * samples / recipe, "linear in the batch, for SGD"
        shown, paths = f"{optimizer.lr:g} x {samples}/{recipe}", {"optimizer.lr_per": recipe}
    if samples == recipe and not optimizer.lr_per:
        return {}, (
            "learning rate",
            f"{optimizer.lr:g}, the recipe's own at {format_count(samples, 'sample')} per step",
        )
    return paths, ("learning rate", f"{peak:.4g} = {shown} ({rule})")


def describe_length(config: RunConfig, num_train: int) -> str:
    """Return `20 epochs`, or `5,000 steps` if max_steps ends the run first."""
    train = config.train
    steps = train.epochs * num_train / (train.batch_size * train.accumulate)
    if train.max_steps and train.max_steps <= steps:
        return format_count(train.max_steps, "step")
    return format_count(train.epochs, "epoch")


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
            raise ConfigError(f"{self.key}: {answer!r} is not one of the choices", fix=suggest_nearest(answer, names))
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
