"""Command lines: a launcher's flags, a trainer's flags, and `key=value` overrides, from a shell script or as text.

Guide 1's `--mixed_precision --precision_type bf16` is one declaration; a bare `--bf16` (guide 3) sets the Trainer's
precision over the YAML; `accelerate launch --mixed_precision` beats accelerate's file.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator

from halfstep_check.declarations import Draft, Source, is_on
from halfstep_check.dialects import lightning, torchtitan, transformers
from halfstep_check.document import Node, read_scalar
from halfstep_check.links import list_names_in_command
from halfstep_check.spellings import ACCELERATE_WORDS, parse_dtype

COMMAND = re.compile(r"\b(python3?|torchrun|accelerate|deepspeed|composer)\b")
FORMAT_FLAGS = ("precision", "dtype", "model_dtype", "amp_dtype")
SWITCHES = ("fp16", "bf16", "amp", "use_amp", "use_fp16", "use_bf16")
BARE = ("fp16", "bf16", "use_fp16", "use_bf16")
"""Flags that name a format, and are on or off."""
TRUTHS = {"true", "false", "yes", "no", "on", "off", "0", "1"}
COMMAND_LINE = "command_line"
"""The fact that says which line of a shell script a source comes from: two commands are two runs."""
HF_FLAGS = ("output_dir", "per_device_train_batch_size", "half_precision_backend", "tf32", "max_grad_norm", "optim")


def read_commands(text: str, path: str, *, lightning_version: str = "") -> list[Source]:
    """Return what each training command in this text says."""
    return [
        dataclasses.replace(source, facts={**source.facts, COMMAND_LINE: str(line)})
        for line, words in split_commands(text)
        for part in split_launcher(words)
        if (source := read_command(part, path, line, lightning_version)) is not None
    ]


def list_named_files(text: str) -> dict[int, list[str]]:
    """Return the scripts and configs that each command names, by its line."""
    return {line: list_names_in_command(words) for line, words in split_commands(text)}


def split_launcher(words: list[str]) -> list[list[str]]:
    """Split `accelerate launch` into the launcher's flags and, after the script, the script's; others are one part."""
    if "accelerate" not in words or "launch" not in words:
        return [words]
    script = next((i for i, word in enumerate(words) if word.endswith(".py") or word in ("-m", "--module")), len(words))
    return [words[:script], words[script:]]


def split_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Return (line, words) of every command that starts a Python program; continued lines are joined."""
    line = 1
    # A backslash at the very end continues nothing.
    whole = text.rstrip().rstrip("\\")
    for logical in re.sub(r"\\\r?\n", "\\\n", whole).replace("\\\n", "\x00").split("\n"):
        if COMMAND.search(logical) and not logical.lstrip().startswith("#"):
            try:
                words = shlex.split(logical.replace("\x00", " ").replace("${#", "${"), comments=True)
            except ValueError:  # an open quote: a here-document or a broken line, nothing to read
                words = []
            if any("--" in word or "=" in word for word in words):
                yield line, words
        line += 1 + logical.count("\x00")


def read_command(words: list[str], path: str, line: int, lightning_version: str) -> Source | None:
    root = parse_flags(words, path, line)
    if "accelerate" in words and "launch" in words:
        return read_accelerate_launch(root)
    if root.has("training.mixed_precision_param"):
        return dataclasses.replace(torchtitan.read(root), dialect="torchtitan flags")
    by_word = read_accelerate_precision(root) or find_format_flag(root)
    if by_word and not root.has("bf16") and not root.has("fp16") and not root.has("precision_type"):
        return read_bare_flag(root)
    if any(root.has(flag) for flag in HF_FLAGS) and not root.has("use_fp16") and not root.has("use_bf16"):
        return dataclasses.replace(transformers.read(root), dialect="transformers flags")
    if root.has("trainer.precision"):
        return dataclasses.replace(lightning.read(root, version=lightning_version), dialect="lightning flags")
    if root.has("precision_type") or is_switch(root.get("mixed_precision")):
        return read_precision_type(root)
    return read_bare_flag(root) if any(map(root.has, BARE)) else None


def parse_flags(words: list[str], path: str, line: int) -> Node:
    """Parse `--a.b 1 --flag key.sub=2` into nested nodes; flags are spelled with underscores."""
    nested: dict[str, Node] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            is_bare = key in SWITCHES and (position == len(words) or words[position].lower() not in TRUTHS)
            if not equals and not is_bare and position < len(words) and not words[position].startswith("-"):
                # `--fp16 train.py`: the value of a switch is a word of its own only when it is one.
                value, position = words[position], position + 1
            put_nested(nested, key.replace("-", "_"), value or "true", path, line)
        elif re.fullmatch(r"[\w.]+=\S*", word):
            key, _, value = word.partition("=")
            put_nested(nested, key, value, path, line)
    return Node(value=nested, path=path, start=(line, 0), end=(line, 0))


def put_nested(nested: dict[str, Node], dotted: str, text: str, path: str, line: int) -> None:
    *parents, last = dotted.split(".")
    for parent in parents[:8]:
        child = nested.get(parent)
        if child is None or not isinstance(child.value, dict):
            child = nested[parent] = Node(value={}, path=path, start=(line, 0), end=(line, 0))
        assert isinstance(child.value, dict)
        nested = child.value
    nested[last] = Node(value=read_scalar(text), path=path, start=(line, 0), end=(line, 0))


def is_switch(node: Node | None) -> bool:
    """Match a flag that was given bare, or followed by something that is not a precision and no `no`."""
    word = None if node is None else node.scalar
    return word not in (None, False) and str(word).lower() not in ACCELERATE_WORDS and parse_dtype(word) is None


def find_format_flag(root: Node) -> str:
    """Return the flag that names a format for training: `--dtype bf16`."""
    return next((key for key in FORMAT_FLAGS if parse_dtype(root.scalar_at(key)) in ("fp16", "bf16")), "")


def read_accelerate_precision(root: Node) -> str | None:
    """Return what `--mixed_precision WORD` asks for; an unquoted `no` was read as a bool."""
    word = root.scalar_at("mixed_precision")
    return ACCELERATE_WORDS.get("no" if word is False else str(word).lower())


def read_accelerate_launch(root: Node) -> Source:
    draft = Draft(root, "accelerate launch")
    draft.facts["strategy"] = "fsdp" if root.has("use_fsdp") else "deepspeed" if root.has("use_deepspeed") else ""
    draft.refer("config_file", (".yaml", ".yml", ".json"))
    draft.refer("deepspeed_config_file", (".json",))
    word = root.scalar_at("mixed_precision")
    draft.read_word(
        "mixed_precision", ACCELERATE_WORDS, "accelerate launch", "no" if word is False else str(word).lower()
    )
    draft.say_number("devices", "num_processes")
    return draft.freeze()


def read_precision_type(root: Node) -> Source:
    draft = Draft(root, "mixed_precision/precision_type flags")
    dtype = parse_dtype(root.scalar_at("precision_type") or "bf16")
    if is_switch(root.get("mixed_precision")):
        draft.say("precision", dtype or "bf16", "mixed_precision")
        draft.say("weights", "fp32", "mixed_precision")
    else:
        draft.say("precision", "fp32", "precision_type")
        message = f"--precision_type {root.scalar_at('precision_type')} without --mixed_precision: trains in fp32"
        draft.find("ignored-key", message, "precision_type", fix="add --mixed_precision")
    draft.say_number("accumulate", "accumulation_steps")
    draft.say_number("batch", "batch_size")
    return draft.freeze()


def read_bare_flag(root: Node) -> Source:
    draft = Draft(root, "command line")
    given = [name for name in BARE if root.has(name)]
    on = [name for name in given if is_on(root.scalar_at(name)) or is_switch(root.get(name))]
    if len(on) == 2:
        draft.find("two-precisions", "--fp16 and --bf16 in one command", "bf16", fix="keep one of them")
    elif on:
        draft.say("precision", on[0][-4:], on[0])
    elif precision := read_accelerate_precision(root):
        draft.say("precision", precision, "mixed_precision")
    elif key := find_format_flag(root):
        draft.say("precision", parse_dtype(root.scalar_at(key)) or "", key)
    elif given:
        draft.say("precision", "fp32", given[0])
    draft.say_number("batch", "batch_size")
    draft.say_number("accumulate", "gradient_accumulation_steps")
    return draft.freeze()
