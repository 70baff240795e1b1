"""halfstep's own config, and guide 0's flat dict of `use_amp` and `amp_dtype`."""

from __future__ import annotations

from halfstep_check.declarations import Draft, Source, Topic, is_on
from halfstep_check.document import Node
from halfstep_check.shared.errors import ConfigError
from halfstep_check.shared.precision_names import PRECISIONS, normalise_precision
from halfstep_check.spellings import parse_dtype

NAME = "halfstep"
PRESETS = {"fast": "bf16", "quality": "bf16", "lowmem": "bf16", "stable": "fp32", "debug": "fp32"}
"""Precision of the presets that every workload has."""


def recognises(root: Node) -> bool:
    return root.has("workload")


def read(root: Node) -> Source:
    draft = Draft(root, NAME)
    key = "precision.default" if root.has("precision.default") else "precision"
    if root.has(key):
        say_precision(draft, key)
    else:
        say_switches(draft)
    draft.say_number("clip", "train.clip_norm")
    draft.say_number("accumulate", "train.accumulate")
    draft.say_number("batch", "train.batch_size")
    return draft.freeze()


def say_precision(draft: Draft, key: str) -> None:
    try:
        # An unquoted `no` was read as a bool; the alias table knows that word too.
        precision = normalise_precision(draft.root.scalar_at(key))
    except ConfigError as error:
        draft.find("unknown-value", error.what, key, fix=error.fix)
        return
    draft.say_autocast(precision.removesuffix("-true"), key, {name: draft.edit(key, name) for name in PRECISIONS})
    draft.say("weights", "bf16" if precision == "bf16-true" else "fp32", key)


def say_switches(draft: Draft) -> None:
    """State the precision of `use_amp`, `amp_dtype`, `fp16` and the like, read together as halfstep reads them."""
    names = ("use_amp", "amp", "mixed_precision", "bf16", "fp16", "amp_dtype", "precision_type", "precision")
    keys = [section + name for section in ("", "trainer.", "train.") for name in names]
    given = {key: draft.root.scalar_at(key) for key in keys if draft.root.has(key)}
    formats = [(name, key) for key, value in given.items() if (name := parse_name(value))]
    formats += [(key[-4:], key) for key, value in given.items() if key[-4:] in ("bf16", "fp16") and value is True]
    switches = [key for key, value in given.items() if key[-4:] not in ("bf16", "fp16") and isinstance(value, bool)]
    is_bf16_off = any(key.endswith("bf16") and value is False for key, value in given.items())
    off = [("fp32", key) for key in switches if given[key] is False]
    on = [("fp16" if is_bf16_off else "bf16", key) for key in switches]
    # `fp16: false` alone excludes mixed precision.
    excluded = [("fp32", key) for key, value in given.items() if value is False]
    preset = [(PRESETS[name], "preset") for name in PRESETS if draft.root.scalar_at("preset") == name]
    for precision, key in [*off, *formats, *on, *excluded, *preset][:1]:
        draft.say_autocast(precision, key)
        draft.say("weights", "fp32", key)


def parse_name(word: object) -> str:
    """Return the precision that a word names, such as `bf16-mixed`; empty for a switch or an unknown word."""
    if word is None or isinstance(word, bool):
        return ""
    try:
        return normalise_precision(word).removesuffix("-true")
    except ConfigError:
        return ""


SECTIONS = ("", "training.", "train.", "trainer.", "amp.", "environment.", "runtime.")
DTYPE_KEYS = ("amp_dtype", "mixed_precision_dtype", "mixed_precision", "dtype", "amp_type", "precision")
SWITCHES = ("use_amp", "use_mixed_precision", "fp16", "bf16", "use_fp16", "use_bf16")


def recognises_flat(root: Node) -> bool:
    return find_flat_section(root) is not None


def find_flat_section(root: Node) -> str | None:
    """Return the section with `use_amp` or `mixed_precision`: the top level, a usual section, or the only one."""
    known = next((s for s in SECTIONS if root.has(s + "use_amp") or root.has(s + "mixed_precision")), None)
    known = known if known is not None else next((s for s in SECTIONS[1:] if find_format_key(root, s)), None)
    if known is not None:
        return known
    found = {key.rpartition(".")[0] + "." for key, node in root.walk() if "." in key and is_switch(key, node)}
    return found.pop() if len(found) == 1 else "" if names_format(root) else None


def is_switch(key: str, node: Node) -> bool:
    name = key.rpartition(".")[2]
    named = name == "precision" and isinstance(node.value, str) and parse_dtype(node.value) is not None
    return named or name in SWITCHES and isinstance(node.value, bool)


def find_format_key(root: Node, section: str) -> str:
    """Return the key of a section that names one format: `train.precision: bf16` or `training.fp16: true`."""
    for key in (section + "precision", section + "precision.dtype"):
        if parse_dtype(root.scalar_at(key)) is not None:
            return key
    on = [section + name for name in SWITCHES[2:] if root.scalar_at(section + name) is True]
    return on[0] if len(on) == 1 else ""


def names_format(root: Node) -> bool:
    """Match `precision: bf16` or `precision.dtype: bfloat16` at the top; a metric of that name is a number."""
    return any(parse_dtype(root.scalar_at(key)) is not None for key in ("precision", "precision.dtype"))


def read_flat(root: Node) -> Source:
    """Read a flat config: `use_amp` and its dtype are one declaration, `mixed_precision: bf16` is one by itself."""
    draft = Draft(root, "use_amp/amp_dtype")
    section = find_flat_section(root) or ""
    switched = root.scalar_at(section + "mixed_precision") is True and root.has(section + "mixed_precision_dtype")
    if root.has(section + "use_amp") or switched:
        say_flat(draft, section, "use_amp" if root.has(section + "use_amp") else "mixed_precision")
    elif root.has(section + "mixed_precision.enabled"):
        say_block(draft, section + "mixed_precision.")
    elif root.has(section + "mixed_precision"):
        say_word(draft, section + "mixed_precision")
    elif root.has(section + "use_mixed_precision"):
        say_word(draft, section + "use_mixed_precision")
    elif section and (key := find_format_key(root, section)).endswith("16"):
        draft.say("precision", key[-4:], key)
    else:
        say_word(draft, find_format_key(root, section) or section + "precision")
    for topic, keys in FLAT_NUMBERS.items():
        draft.say_number(topic, next((section + key for key in keys if root.has(section + key)), section + keys[0]))
    return draft.freeze()


FLAT_NUMBERS: dict[Topic, tuple[str, ...]] = {
    "clip": ("grad_clip", "clip_grad", "max_grad_norm"),
    "accumulate": ("accumulation_steps", "gradient_accumulation_steps", "grad_accum_steps"),
    "batch": ("batch_size",),
}


def say_word(draft: Draft, key: str) -> None:
    """State the precision of a word such as `bf16`; a bare `true` names none."""
    word = draft.root.scalar_at(key)
    precision = "fp32" if word is False or str(word).lower() in ("no", "none") else parse_dtype(word)
    if precision is None:
        return
    draft.say("precision", precision, key, {name: draft.edit(key, name) for name in ("fp16", "bf16")})
    draft.say("weights", "fp32", key)


def say_block(draft: Draft, block: str) -> None:
    """`mixed_precision: {enabled: true, dtype: float16}`, or `bf16: true` in it; on without either names no format."""
    if is_on(draft.root.scalar_at(block + "enabled")):
        if draft.root.has(block + "dtype"):
            say_word(draft, block + "dtype")
        elif key := find_format_key(draft.root, block):
            draft.say("precision", key[-4:], key)
    else:
        draft.say("precision", "fp32", block + "enabled")


def say_flat(draft: Draft, section: str, name: str) -> None:
    switch = section + name
    named = (k for k in DTYPE_KEYS if draft.root.has(section + k))
    named = (k for k in named if k != "mixed_precision" or parse_dtype(draft.root.scalar_at(section + k)) is not None)
    key = section + next(named, "amp_dtype")
    word = draft.root.scalar_at(key)
    dtype = parse_dtype(word if word is not None else "float16")
    if dtype not in ("fp16", "bf16"):
        if key.endswith("amp_dtype"):
            message = f"amp_dtype {word!r} is not a format autocast computes in"
            draft.find("unknown-value", message, key, fix="bfloat16 or float16")
        return  # `dtype: float32` may be that of the weights
    on = is_on(draft.root.scalar_at(switch))
    python = draft.root.path.endswith(".py")
    true, false = ("True", "False") if python else ("true", "false")
    rewrites = {"fp32": draft.edit(switch, false)}
    if draft.root.has(key):
        for word, precision in (("bfloat16", "bf16"), ("float16", "fp16")):
            rewrites[precision] = draft.edit(switch, true) + draft.edit(key, word)
    draft.say_autocast(dtype if on else "fp32", switch, rewrites)
    draft.say("weights", "fp32", switch)
