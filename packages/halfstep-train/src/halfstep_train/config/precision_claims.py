"""Read all precision keys of one layer together, as one statement.

One key alone can mislead: `use_amp: false` with `amp_dtype: bfloat16` is fp32, because the switch is off; `amp: true`
with `fp16: false` is bf16, because mixed precision is on and fp16 is excluded. So a layer's keys are first sorted into
a name, a switch, a type and exclusions, and then read together. Keys that contradict each other raise an error that
names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from halfstep.errors import ConfigError
from halfstep.precision.names import MIXED, normalise_precision
from halfstep_train.config.aliases import PRECISION_KEYS
from halfstep_train.config.section import parse_scalar
from halfstep_train.config.statements import Origin, Statement

HALF_TYPES = ("bf16", "fp16")
"""The candidates for `use_amp: true` without a type, the safer one first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """The precision after the layers so far (empty if not set), and the last half type that any of them named."""

    value: str = ""
    type: str = ""
    origin: Origin | None = None
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class PrecisionKeys:
    """The precision keys of one layer, sorted by what they set; two keys for the same thing must agree."""

    name: str = ""
    switch: bool | None = None
    type: str = ""
    excluded: set[str] = field(default_factory=set)
    optimizations: bool = False
    given_by: dict[str, Statement] = field(default_factory=dict)

    def set_once(self, part: str, value: object, statement: Statement) -> None:
        """Set one of the fields; a second statement with another value is an error."""
        earlier = self.given_by.setdefault(part, statement)
        if earlier is statement:
            setattr(self, part, value)
        elif getattr(self, part) != value:
            raise make_disagreement(earlier, statement)


def make_disagreement(one: Statement, other: Statement) -> ConfigError:
    """Return the error for two statements of one layer that contradict each other."""
    why = f"both are of the same layer ({one.origin.layer}), so neither has priority"
    return ConfigError(f"{one} and {other} disagree", why=why, fix="keep one of them")


def read_layer(statements: Sequence[Statement], below: Stated) -> Stated:
    """Return the precision after one layer's keys, on top of the layers below it."""
    parts = sort_keys(statements)
    check_name(parts)
    value, notes = read_together(parts, below)
    if not value:
        return replace(below, notes=notes) if notes else below
    # Remembered for a stronger layer that only switches mixed precision on.
    kind = parts.type or (parts.name if parts.name in MIXED else "") or below.type
    return Stated(value=value, type=kind, origin=join_origins(statements), notes=notes)


def sort_keys(statements: Iterable[Statement]) -> PrecisionKeys:
    """Sort the statements of one layer by what they set."""
    parts = PrecisionKeys()
    for statement in statements:
        role = PRECISION_KEYS[statement.path]
        value = parse_scalar(statement.value) if isinstance(statement.value, str) else statement.value
        if role == "switch or name":
            role = "switch" if isinstance(value, bool) else "name"
        if role in ("name", "type"):
            name = normalise_precision(statement.value, str(statement.origin))
            # `amp_dtype: float32` names a precision; only a half format can be the type of mixed precision.
            parts.set_once(role if name in MIXED else "name", name, statement)
        elif not isinstance(value, bool):
            raise ConfigError(f"{statement}: expected true or false", fix="to name a precision: `precision: bf16`")
        elif role in ("switch", "optimizations"):
            parts.set_once(role, value, statement)
        elif value:
            # `fp16: true` sets two things: mixed precision is on, and its type is fp16.
            parts.set_once("switch", True, statement)
            parts.set_once("type", role, statement)
        else:
            parts.excluded.add(role)
            parts.given_by[f"not {role}"] = statement
    return parts


def check_name(parts: PrecisionKeys) -> None:
    """Check that a precision given by name agrees with the layer's switches."""
    if not parts.name:
        return
    fits_switch = {None: True, True: parts.name in MIXED, False: parts.name in ("fp32", "tf32")}[parts.switch]
    fits = {
        "switch": fits_switch,
        "type": parts.switch is False or not parts.type or parts.name == parts.type,
        "not fp16": not (parts.name == "fp16" and "fp16" in parts.excluded),
        "not bf16": not (parts.name in ("bf16", "bf16-true") and "bf16" in parts.excluded),
        # use_optimizations switches TF32 on, but `fp32` means strict fp32.
        "optimizations": not (parts.optimizations and parts.name == "fp32"),
    }
    for part, holds in fits.items():
        if not holds:
            raise make_disagreement(parts.given_by["name"], parts.given_by[part])


def read_together(parts: PrecisionKeys, below: Stated) -> tuple[str, tuple[str, ...]]:
    """Return the precision that the sorted keys mean together (empty if none), and notes for the user."""
    if parts.name:
        return parts.name, ()
    if parts.switch is False:
        return ("tf32" if parts.optimizations else "fp32"), ()
    if parts.type in parts.excluded:
        raise make_disagreement(parts.given_by["type"], parts.given_by[f"not {parts.type}"])
    if parts.switch:
        return parts.type or choose_half_type(parts, below), ()
    if parts.type:
        return read_type_alone(parts, below)
    # `fp16: false` alone: fp32, unless a weaker layer chose another format.
    if parts.excluded and below.value in {"", *parts.excluded}:
        return "fp32", ()
    if parts.optimizations and below.value == "fp32":
        return "tf32", ()
    return "", ()


def choose_half_type(parts: PrecisionKeys, below: Stated) -> str:
    """Return the half format of mixed precision without a type: one from below, else the safest allowed."""
    # Keep a mixed precision that a weaker layer chose, then its type, then the safest allowed.
    already = [below.value] if below.value in MIXED else []
    wanted = [*already, *([below.type] if below.type else []), *HALF_TYPES]
    allowed = [name for name in wanted if name not in parts.excluded]
    if not allowed:
        raise make_disagreement(parts.given_by["switch"], parts.given_by["not bf16"])
    return allowed[0]


def read_type_alone(parts: PrecisionKeys, below: Stated) -> tuple[str, tuple[str, ...]]:
    """Read a type without a switch: it does not turn mixed precision on, but `auto` may have done so."""
    given = parts.given_by["type"]
    if below.value in MIXED:
        return parts.type, ()
    if below.value in ("", "auto"):
        others = "most scripts ignore this key and train in fp32 unless mixed precision is switched on"
        return parts.type, (f"{given} is read as precision={parts.type}; {others}",)
    off = f"precision is {below.value} ({below.origin})"
    return "", (f"{given} has no effect: {off}; use precision={parts.type} instead",)


def join_origins(statements: Sequence[Statement]) -> Origin:
    """Join the origins of all keys that were read together."""
    first = statements[0].origin
    where = list(dict.fromkeys(statement.origin.where for statement in statements))
    key = list(dict.fromkeys(statement.origin.key for statement in statements))
    return Origin(layer=first.layer, where=" ".join(where), key=" + ".join(key))
