"""Known accelerators by name, from known_gpus.txt: what a GPU that is not in this machine can do. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Literal, cast

from halfstep.errors import HardwareError
from halfstep.hardware.device_facts import Hardware, Kind
from halfstep.hardware.support import has_matrix_units, list_formats

Checked = Literal["datasheet", "secondary", "derived", "recalled"]
VERIFICATION = {
    "datasheet": "compared with the vendor's own table",
    "secondary": "compared with public tables that quote the vendor",
    "derived": "derived: {} units x 2 x {} MHz, other formats by their ratio to fp32",
    "recalled": "recalled, not verified",
}
KINDS: dict[str, Kind] = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "xpu", "Apple": "mps", "Google": "tpu"}
OLD_BUILD = "torch 2.11 and newer run on it only in their CUDA 12.6 builds"
"""pytorch/pytorch#172352: no other build has kernels below sm_75."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGPU:
    """One accelerator."""

    name: str
    facts: Hardware
    """Without its memory."""
    memory_gb: tuple[int, ...]
    """Every size it is sold with; empty if the buyer chooses it."""
    checked: Checked
    units: int = 0
    """Multiply-adds a clock in fp32; a unit that issues two counts twice."""
    boost_mhz: int = 0


def read_known() -> Iterator[KnownGPU]:
    """Return every model of the file, in its order."""
    # An indented line is a model of the family line above it; the head of the file describes the columns.
    family: list[str] = []
    for line in resources.files(__package__).joinpath("known_gpus.txt").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("    "):
            yield _parse_model(family, *cells)
        elif not line.startswith("#"):
            family = cells


def _parse_model(family: list[str], name: str, memory: str, rates: str = "", cores: str = "") -> KnownGPU:
    vendor, architecture, chip, checked, ratios, source, *notes = family
    major, _, minor = chip.partition(".")
    capability = (int(major), int(minor)) if vendor == "NVIDIA" else None
    units, boost_mhz = (int(part) for part in (cores or "0 0").split())
    kind = KINDS[vendor]
    support = list_formats(kind, capability, chip or architecture, has_fp64=chip == "fp64")
    facts = Hardware(
        kind=kind,
        device="",
        name=f"{vendor} {name}",
        vendor=vendor,
        capability=capability,
        architecture=architecture,
        support=support,
        tensor_cores=has_matrix_units(kind, capability, name, support),
        source="table",
        published_tflops=MappingProxyType(_parse_rates(rates, _parse_numbers(ratios))),
        published_source=source,
        published_check=VERIFICATION[checked].format(units, boost_mhz),
        notes=(*notes, *((OLD_BUILD,) if capability and capability < (7, 5) else ())),
    )
    sizes = tuple(map(int, memory.split()))
    return KnownGPU(
        name=name, facts=facts, memory_gb=sizes, checked=cast(Checked, checked), units=units, boost_mhz=boost_mhz
    )


def _parse_rates(text: str, ratios: Mapping[str, float]) -> dict[str, float]:
    """Parse `fp32 10.6 fp16 21.2`, or the fp32 rate alone, from which the others follow."""
    if not text or not text[0].isdigit():
        return _parse_numbers(text)
    return {"fp32": float(text), **{name: round(float(text) * ratio, 3) for name, ratio in ratios.items()}}


def _parse_numbers(text: str) -> dict[str, float]:
    words = text.split()
    return {name: float(number) for name, number in zip(words[::2], words[1::2], strict=True)}


KNOWN: tuple[KnownGPU, ...] = tuple(read_known())

# --- by name ---

VENDOR_WORDS = ("nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "intel", "apple", "google")
NOISE = frozenset((*VENDOR_WORDS, "r", "tm", "gpu", "graphics", "generation", "edition", "workstation"))
"""Words that vendors and drivers put around a model name, on either side of the comparison."""

FORM_FACTOR = re.compile(r"sxm\d?|pcie|nvl|dgxs|hbm\d?e?|3e|oam|\d+gb?")
"""Words that may follow the model name without changing the model."""

GIB = 2**30


@functools.cache  # every name is compared with every row
def split_words(name: str) -> frozenset[str]:
    """Split `NVIDIA A100-SXM4-80GB` into a100, sxm4, 80gb; `rtx4090`, `M2Max` and `v100 32 GB` are split and joined
    alike."""
    text = re.sub(r"(\d+)\s*gi?b\b", r" \1gb ", name.lower())
    text = re.sub(r"\b(\d+)g\b", r" \1gb ", text)  # `80g`, but no A10G
    # Split glued words: `rtx4090`, `M2Max`, `4070tisuper`.
    text = re.sub(r"\b(rtx|gtx|rx|arc|tpu|titan|quadro|max)(?=[a-z]?\d)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super|xtx|xt|pro|max|ultra|ada|pcie|nvl)", r" \1 ", text)
    text = re.sub(r"(?<=\bti)(?=super)", " ", text)
    return frozenset(re.findall(r"[a-z0-9]+", text)) - NOISE


def find_known(name: str) -> KnownGPU | None:
    """Return the device a driver (`Tesla T4`) or a person (`4090`) means by this name; None if no single one fits."""
    rows = _find_rows(split_words(name))
    return rows[0] if len(rows) == 1 else None


def _find_rows(asked: frozenset[str]) -> list[KnownGPU]:
    # The name has more words than a row, and those only describe a form factor: take the row that shares most words.
    within = [
        gpu for gpu in KNOWN if split_words(gpu.name) <= asked and _is_only_form_factor(asked - split_words(gpu.name))
    ]
    if within:
        return [max(within, key=lambda gpu: len(split_words(gpu.name)))]
    # The name has fewer words than a row: take the rows that add fewest. First with its form factor (`3080 12gb` is a
    # separate row), then without.
    model = frozenset(word for word in asked if not FORM_FACTOR.fullmatch(word))
    around = _find_rows_around(asked) or _find_rows_around(model) if model else []
    least = min((len(split_words(gpu.name)) for gpu in around), default=0)
    return [gpu for gpu in around if len(split_words(gpu.name)) == least]


def _find_rows_around(wanted: frozenset[str]) -> list[KnownGPU]:
    return [gpu for gpu in KNOWN if wanted <= split_words(gpu.name)]


def _is_only_form_factor(extra: frozenset[str]) -> bool:
    return all(FORM_FACTOR.fullmatch(word) for word in extra)


def look_up_gpu(name: str) -> Hardware:
    """Return facts of a known accelerator from the table: `look_up_gpu("v100")`, `look_up_gpu("NVIDIA
    A100-SXM4-80GB")`."""
    gpu = find_known(name)
    if gpu is None:
        raise _make_unknown_gpu(name)
    # Without a size in the name, the first one listed counts.
    size_gb = next((size for size in gpu.memory_gb if f"{size}gb" in split_words(name)), [*gpu.memory_gb, 0][0])
    note = f"sold with {' or '.join(f'{size} GB' for size in gpu.memory_gb)}: add the size to the name to choose"
    notes = (*gpu.facts.notes, note) if len(gpu.memory_gb) > 1 else gpu.facts.notes
    return dataclasses.replace(gpu.facts, memory_total_bytes=size_gb * GIB, notes=notes)


def _make_unknown_gpu(name: str) -> HardwareError:
    matching = [gpu.name for gpu in _find_rows(split_words(name))]
    what = f"{name!r} matches {len(matching)} GPUs" if matching else f"unknown GPU {name!r}"
    names = ", ".join(matching[:6] or find_nearest_names(name))
    return HardwareError(what, fix=f"nearest known names: {names}; all known names: halfstep detect list")


def find_nearest_names(name: str, *, count: int = 5) -> list[str]:
    """Return the known names most like this one: those that share a word with it first, then by spelling."""

    def likeness(gpu: KnownGPU) -> tuple[int, float]:
        spelling = difflib.SequenceMatcher(None, name.lower(), gpu.name.lower()).ratio()
        return len(split_words(name) & split_words(gpu.name)), spelling

    return [gpu.name for gpu in sorted(KNOWN, key=likeness, reverse=True)[:count]]
