"""Traps that only show when sources are read together: batch arithmetic, `auto` that nothing fills, TF32 off."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from halfstep_check.declarations import AUTO, Source, Topic
from halfstep_check.findings import Finding, Place
from halfstep_check.resolve import rank_claims

FILLERS = (
    *("transformers", "transformers call", "transformers flags", "accelerate", "Accelerator call"),
    "accelerate launch",
)
FILLING_MODULES = {"transformers", "accelerate", "lightning", "pytorch_lightning", "trl"}
CLIPPING = ("deepspeed", "lightning", "lightning call", "lightning flags", "transformers", "transformers call")
"""Dialects whose framework clips by itself when a value is set."""


def find_traps(sources: Sequence[Source]) -> list[Finding]:
    alone = [*find_batch_arithmetic(sources), *find_unfilled_auto(sources), *find_tf32_off(sources)]
    return [
        *alone,
        *find_double_clipping(sources),
        *find_autocast_around_deepspeed(sources),
        *find_idle_optimizer(sources),
    ]


def list_stated_numbers(sources: Sequence[Source], topic: Topic) -> list[int]:
    """Return the numbers stated for a topic, the one that takes effect first."""
    return [int(float(said.value)) for _, said in rank_claims(sources, topic)]


def find_batch_arithmetic(sources: Sequence[Source]) -> list[Finding]:
    """Compare the global batch with micro batch × accumulation × processes.

    Another rule reports sources that disagree about a factor; here no choice of their values gives the global batch.
    """
    topics: tuple[Topic, ...] = ("batch", "accumulate", "devices")
    factors = [list_stated_numbers(sources, topic) or ([1] if topic == "accumulate" else []) for topic in topics]
    products = [math.prod(chosen) for chosen in itertools.product(*factors)]
    whole = rank_claims(sources, "global batch")
    if not whole or not products or min(factors[2]) < 1:
        return []
    said = whole[0][1]
    reported = any(finding.rule == "batch-arithmetic" for source in sources for finding in source.findings)
    if float(said.value) in products or reported:
        return []
    product = products[0]
    micro, steps, devices = (numbers[0] for numbers in factors)
    message = f"{said.spelled}, but {micro} × {steps} accumulated × {devices} processes = {product}"
    return [
        Finding(
            rule="batch-arithmetic",
            message=message,
            place=said.place,
            fix=f"set it to {product}, or leave it out",
            edits=said.rewritten(str(product)),
        )
    ]


def find_unfilled_auto(sources: Sequence[Source]) -> list[Finding]:
    """Find `auto` that nothing fills in: DeepSpeed itself reads it as text and fails."""
    # Who could fill it may be in a file that is not here: only a script that starts DeepSpeed itself settles it.
    scripts = [source.facts["imports"].split() for source in sources if "imports" in source.facts]
    bare = any("deepspeed" in names and not set(names) & FILLING_MODULES for names in scripts)
    if not bare or any(source.dialect in FILLERS for source in sources):
        return []
    return [
        Finding(
            rule="auto-unfilled",
            message=f"{said.spelled}: nothing here fills it in, and DeepSpeed alone does not support auto",
            place=said.place,
            fix="write the value, or start through accelerate or the HF Trainer",
        )
        for source in sources
        for said in source.declarations
        if source.dialect == "deepspeed" and said.value == AUTO
    ]


def find_tf32_off(sources: Sequence[Source]) -> list[Finding]:
    return [
        Finding(
            rule="tf32-off",
            message=f"{said.spelled}: fp32 matmuls run without tensor cores",
            place=said.place,
            fix="set it to true, unless strict fp32 is what you want",
        )
        for source in sources
        for said in source.declarations
        if said.topic == "tf32" and said.value == "off" and source.dialect != "environment"
    ]


def find_double_clipping(sources: Sequence[Source]) -> list[Finding]:
    """Find a framework that clips, and a script that clips as well."""
    claims = rank_claims(sources, "clip")
    layers = [(source, said) for source, said in claims if source.dialect in CLIPPING and float(said.value) > 0]
    own = [said for source, said in claims if source.dialect == "script"]
    if not layers:
        return []
    source, said = layers[0]
    return [
        Finding(
            rule="clip-two-layers",
            message=f"the script clips here, and {source.dialect} clips too ({said.spelled} in {said.place})",
            place=script.place,
            related=(said.place,),
            fix="leave clipping to one of them",
        )
        for script in own
    ]


def find_autocast_around_deepspeed(sources: Sequence[Source]) -> list[Finding]:
    """Find torch.autocast in the script, although DeepSpeed's engine casts the weights or nothing."""
    engine = next((source for source in sources if source.dialect == "deepspeed"), None)
    if engine is None or (engine.get_value("weights") == "fp32" and engine.get_value("precision") != "fp32"):
        return []
    said = engine.get_declaration("precision")
    return [
        Finding(
            rule="autocast-around-deepspeed",
            message="the script opens autocast around a DeepSpeed engine whose config does not: "
            "some versions stop with an AssertionError, later ones ignore the block",
            place=Place(path=source.name, line=int(source.facts["autocast_line"])),
            related=(said.place,) if said else (),
            fix='drop the block, or set "torch_autocast": {"enabled": true} in the JSON instead of fp16/bf16',
        )
        for source in sources
        if "autocast_line" in source.facts and "deepspeed" in source.facts["imports"].split()
    ]


def find_idle_optimizer(sources: Sequence[Source]) -> list[Finding]:
    """Find an `optim` without effect: the Trainer builds no optimizer when DeepSpeed's JSON has one (transformers
    `integrations/deepspeed.py`)."""
    claims = rank_claims(sources, "optimizer state")
    if not claims or claims[0][0].dialect != "deepspeed":
        return []
    wins = claims[0][1]
    return [
        Finding(
            rule="ignored-key",
            message=f"{said.spelled}: the Trainer leaves the optimizer to {wins.place} ({wins.spelled})"
            + (", and stops with a ValueError at adafactor" if said.spelled.endswith("adafactor") else ""),
            place=said.place,
            related=(wins.place,),
            fix="delete it here, or the optimizer block there",
        )
        for source, said in claims[1:]
        if source.dialect.startswith("transformers")
    ]
