"""Known accelerators by name: what a GPU that is not here can do. No torch."""

from __future__ import annotations

import difflib
import functools
import re

from halfstep.errors import HardwareError
from halfstep.hardware.facts import Hardware
from halfstep.hardware.known import KnownGPU, read_known

__all__ = ["KNOWN", "KnownGPU", "find_known", "known_gpu"]

KNOWN: tuple[KnownGPU, ...] = tuple(read_known())

VENDOR_WORDS = ("nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "intel", "apple", "google")
NOISE = frozenset((*VENDOR_WORDS, "r", "tm", "gpu", "graphics", "generation", "edition", "workstation"))
"""Words that vendors and drivers put around a model name, on either side of the comparison."""

FORM_FACTOR = re.compile(r"sxm\d?|pcie|nvl|dgxs|hbm\d?e?|3e|oam|\d+gb?")
"""Words that may follow the model without making it another one."""

GIB = 2**30


@functools.cache  # every name is held against every row
def words(name: str) -> frozenset[str]:
    """`NVIDIA A100-SXM4-80GB` -> a100, sxm4, 80gb; `rtx4090`, `M2Max` and `v100 32 GB` are split and joined alike."""
    text = re.sub(r"(\d+)\s*gi?b\b", r" \1gb ", name.lower())
    text = re.sub(r"\b(rtx|gtx|rx|arc|tpu|titan|quadro|max)(?=[a-z]?\d)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super|xtx|xt|pro|max|ultra|ada|pcie|nvl)", r" \1 ", text)
    text = re.sub(r"(?<=\bti)(?=super)", " ", text)
    return frozenset(re.findall(r"[a-z0-9]+", text)) - NOISE


def find_known(name: str) -> KnownGPU | None:
    """The device a driver (`Tesla T4`) or a person (`4090`) means by this name; None when no single one fits."""
    rows = _rows_for(words(name))
    return rows[0] if len(rows) == 1 else None


def _rows_for(asked: frozenset[str]) -> list[KnownGPU]:
    # A longer name than ours, by words that do not make it another model: the row that says most of it.
    within = [gpu for gpu in KNOWN if words(gpu.name) <= asked and _only_form_factor(asked - words(gpu.name))]
    if within:
        return [max(within, key=lambda gpu: len(words(gpu.name)))]
    # A shorter one: the rows that add least to it. `3080 12gb` is a row of its own.
    model = frozenset(word for word in asked if not FORM_FACTOR.fullmatch(word))
    around = _rows_around(asked) or _rows_around(model) if model else []
    least = min((len(words(gpu.name)) for gpu in around), default=0)
    return [gpu for gpu in around if len(words(gpu.name)) == least]


def _rows_around(wanted: frozenset[str]) -> list[KnownGPU]:
    return [gpu for gpu in KNOWN if wanted <= words(gpu.name)]


def _only_form_factor(extra: frozenset[str]) -> bool:
    return all(FORM_FACTOR.fullmatch(word) for word in extra)


def known_gpu(name: str) -> Hardware:
    """Facts of a known accelerator, from the table: `known_gpu("v100")`, `known_gpu("NVIDIA A100-SXM4-80GB")`."""
    gpu = find_known(name)
    if gpu is None:
        raise _no_single_row(name)
    return Hardware(
        kind=gpu.kind,
        device="",
        name=f"{gpu.vendor} {gpu.name}",
        vendor=gpu.vendor,
        capability=gpu.capability,
        architecture=gpu.architecture,
        memory_total_bytes=_memory_gb(gpu, name) * GIB,
        support=gpu.support,
        tensor_cores=gpu.tensor_cores,
        source="table",
        published_tflops=gpu.tflops,
        published_source=gpu.source,
        published_check=gpu.verification,
        notes=(*gpu.notes, *_memory_note(gpu)),
    )


def _memory_gb(gpu: KnownGPU, asked: str) -> int:
    named = [size for size in gpu.memory_gb if f"{size}gb" in words(asked)]
    return (named or [*gpu.memory_gb, 0])[0]


def _memory_note(gpu: KnownGPU) -> tuple[str, ...]:
    if len(gpu.memory_gb) < 2:
        return ()
    return (
        "sold with " + " or ".join(f"{size} GB" for size in gpu.memory_gb) + ": add the size to the name to choose",
    )


def _no_single_row(name: str) -> HardwareError:
    everything = "all known names: halfstep detect --gpu list"
    if rows := _rows_for(words(name)):
        return HardwareError(
            f"{name!r} is the name of {len(rows)} GPUs",
            fix=f"name one of {', '.join(gpu.name for gpu in rows[:6])}; {everything}",
        )
    return HardwareError(
        f"unknown GPU {name!r}", fix=f"nearest known names: {', '.join(nearest_names(name))}; {everything}"
    )


def nearest_names(name: str, *, count: int = 5) -> list[str]:
    """The known names most like this one: those that share a word with it first, then by spelling."""

    def likeness(gpu: KnownGPU) -> tuple[int, float]:
        spelling = difflib.SequenceMatcher(None, name.lower(), gpu.name.lower()).ratio()
        return len(words(name) & words(gpu.name)), spelling

    return [gpu.name for gpu in sorted(KNOWN, key=likeness, reverse=True)[:count]]
