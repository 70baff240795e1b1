"""Options of `evaluate` and `predict` of one family: declared by its Kind, given as words or from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """`Option("num", int, 16, "How many to draw", least=1)` is `--num 16`; of type bool it is a flag."""

    name: str
    """As in Python: `top_k` is `--top-k`."""
    type: type = str
    default: Any = None
    help: str = ""
    least: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def checked(self, value: Any) -> Any:
        """The value in the option's type, or a refusal."""
        try:
            found = value if self.type is bool and isinstance(value, bool) else self.type(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.flag} {value}: expected {EXPECTED.get(self.type, self.type.__name__)}") from None
        if self.least is not None and found < self.least:
            raise ConfigError(f"{self.flag} {value}: it must be at least {self.least:g}")
        return found


EXPECTED: Mapping[type, str] = {int: "a whole number", float: "a number", str: "a text"}


def with_defaults(options: Sequence[Option], given: Mapping[str, Any], workload: str) -> dict[str, Any]:
    """Every option by name; one that the workload does not take is refused with those it does."""
    known = {option.name: option for option in options}
    for name, value in given.items():
        if name not in known:
            flag = Option(name).flag + ("" if value is True else f" {value}")
            takes = ", ".join(option.flag for option in options)
            fix = f"leave it out; {workload} takes {takes}" if takes else "leave it out"
            raise ConfigError(f"{flag} means nothing for {workload}", fix=fix)
    return {
        name: option.checked(given[name]) if given.get(name) is not None else option.default
        for name, option in known.items()
    }
