"""What will in effect run: which source wins, as the frameworks really resolve it, and where sources disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfstep_check.declarations import AUTO, TABLE_TOPICS, Declaration, Source, Topic
from halfstep_check.findings import Finding, Severity
from halfstep_check.rules import RULES

PRECEDENCE: dict[str, str] = {
    "deepspeed": "DeepSpeed's engine follows its own JSON",
    "FSDP policy": "FSDP casts by the policy it is given",
    "Accelerator call": "an explicit constructor argument beats accelerate's file and environment",
    "amp/fp16 trainer": "its trainer passes mixed_precision to the Accelerator, which beats accelerate's file",
    "lightning call": "the Trainer uses the argument it is given",
    "transformers flags": "a flag beats the file",
    "transformers call": "TrainingArguments overwrite ACCELERATE_MIXED_PRECISION",
    "transformers": "TrainingArguments overwrite ACCELERATE_MIXED_PRECISION",
    "command line": "a flag beats the file",
    "lightning flags": "an override beats the file",
    "torchtitan flags": "a flag beats the file",
    "mixed_precision/precision_type flags": "the script is started with these flags",
    "use_amp/amp_dtype": "the script reads this dict",
    "halfstep": "halfstep runs its own config",
    "lightning": "the Trainer is built from this file",
    "composer": "Composer is built from this file",
    "torchtitan": "torchtitan reads this file",
    "accelerate launch": "a launcher flag beats the launcher's file",
    "accelerate": "accelerate launch exports it, and nothing stronger overrides it",
    "environment": "nothing stronger overrides it",
    "script": "the script does it itself",
}
"""Dialects from the one that wins to the one that loses, each with the reason it wins."""

REFUSES = {
    frozenset(("deepspeed", "accelerate")): "accelerate launch stops with a ValueError",
    frozenset(("deepspeed", "transformers")): "the Trainer stops with a ValueError",
    frozenset(("deepspeed", "transformers call")): "the Trainer stops with a ValueError",
    frozenset(("deepspeed", "transformers flags")): "the Trainer stops with a ValueError",
}
"""Pairs of dialects that check each other; every other pair runs on in silence."""

CONFLICT_RULES: dict[Topic, str] = {
    "precision": "precision-conflict",
    "clip": "clip-conflict",
    "accumulate": "accumulation-conflict",
    "batch": "batch-conflict",
    "global batch": "batch-conflict",
}
NOT_ALIGNED = (
    "\nA guide calls such a pair aligned; it is not: this trainer hands mixed_precision to the Accelerator itself."
    '\nMeasured on an H200, public RadioDiff under bf16 stops with "Unsupported dtype BFloat16" in its FFT block.'
)
SWITCHED_OFF = "\nA guide calls this pair a configuration conflict, and it is one: nothing is computed in bf16."
NAMES: dict[Topic, str] = {"clip": "gradient clipping", "accumulate": "accumulation", "batch": "batch size"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective:
    """The value of a topic that takes effect, its source, and why that source wins."""

    topic: Topic
    value: str
    source: str
    spelled: str
    reason: str


Claim = tuple[Source, Declaration]


def rank_claims(sources: Sequence[Source], topic: Topic) -> list[Claim]:
    """Return the claims about a topic (auto does not count), the winner first."""
    order = list(PRECEDENCE)
    claims = [(source, said) for source in sources for said in source.declarations if said.topic == topic]
    stated = [(source, said) for source, said in claims if said.value != AUTO]
    return sorted(stated, key=lambda claim: order.index(claim[0].dialect))


def resolve_effective(sources: Sequence[Source]) -> tuple[Effective, ...]:
    """Return one row per topic that a source states."""
    rows = [resolve_topic(sources, topic) for topic in TABLE_TOPICS]
    return tuple(row for row in rows if row is not None)


def resolve_topic(sources: Sequence[Source], topic: Topic) -> Effective | None:
    claims = rank_claims(sources, topic)
    precision = rank_claims(sources, "precision")
    if topic in ("weights", "reduce", "scaling") and precision:
        # These follow from the precision: only the source that decides it can state them.
        winner = precision[0][0]
        claims = [claim for claim in claims if claim[0] is winner]
        if (
            topic == "weights"
            and winner.dialect != "deepspeed"
            and is_cast_by_deepspeed(sources, precision[0][1].value)
        ):
            return make_cast_weights_row(sources, precision[0][1].value)
    if not claims:
        return None
    source, said = claims[0]
    reason = PRECEDENCE[source.dialect]
    if topic in ("weights", "reduce", "scaling"):
        reason = "follows from the precision"
    elif len(claims) == 1 and topic != "precision":
        reason = "nothing else sets it"
    return Effective(topic=topic, value=said.value, source=source.name, spelled=said.spelled, reason=reason)


def is_cast_by_deepspeed(sources: Sequence[Source], precision: str) -> bool:
    """Return whether an engine casts the weights: its JSON leaves the precision open, or nothing but its use is
    known."""
    engines = [source for source in sources if source.dialect == "deepspeed"]
    fills = any(engine.get_value("precision") == AUTO for engine in engines)
    used = not engines and any(source.facts.get("strategy") == "deepspeed" for source in sources)
    return (fills or used) and precision in ("bf16", "fp16")


def make_cast_weights_row(sources: Sequence[Source], precision: str) -> Effective:
    name = next((s.name for s in sources if s.dialect == "deepspeed"), "")
    reason = "DeepSpeed fills its auto with this precision and casts the weights"
    if not name:
        name = next(s.name for s in sources if s.facts.get("strategy") == "deepspeed")
        reason = "DeepSpeed's engine casts the weights and keeps an fp32 master"
    return Effective(topic="weights", value=f"{precision} + fp32 master", source=name, spelled="auto", reason=reason)


def find_conflicts(sources: Sequence[Source]) -> list[Finding]:
    """Find every declaration that disagrees with the one that takes effect."""
    found: list[Finding] = []
    for topic in CONFLICT_RULES:
        # What a script does by hand comes on top of what a framework does; it is not a setting that could lose.
        claims = [claim for claim in rank_claims(sources, topic) if claim[0].dialect != "script"]
        if claims:
            found += [report_conflict(claims[0], loser) for loser in claims[1:] if disagree(claims[0], loser)]
    return found


def disagree(winner: Claim, loser: Claim) -> bool:
    """Return whether two claims conflict; two calls of one kind in one script are two uses, not two declarations of one
    run."""
    same_kind = (winner[0].name, winner[0].dialect) == (loser[0].name, loser[0].dialect)
    # fp8 is for matmuls; the engine around it casts parameters to bf16.
    around_fp8 = {winner[1].value, loser[1].value} == {"fp8", "bf16"} and winner[0].dialect in (
        "FSDP policy",
        "deepspeed",
    )
    return winner[1].value != loser[1].value and not same_kind and not around_fp8


def report_conflict(winner: Claim, loser: Claim) -> Finding:
    (winning, wins), (losing, loses) = winner, loser
    refused = REFUSES.get(frozenset((winning.dialect, losing.dialect)), "")
    outcome = refused or f"{wins.value} runs: {PRECEDENCE[winning.dialect]}"
    message = (
        f"{NAMES.get(wins.topic, wins.topic)}: {loses.value} here ({loses.spelled}), "
        f"{wins.value} in {wins.place} ({wins.spelled}). {outcome}"
    )
    if winning.dialect == "amp/fp16 trainer" and loses.value == "bf16":
        message += SWITCHED_OFF if wins.value == "fp32" else NOT_ALIGNED
    rule = CONFLICT_RULES[wins.topic]
    return Finding(
        rule="launch-refused" if refused and RULES[rule].severity is Severity.WARNING else rule,
        message=message,
        place=loses.place,
        related=(wins.place,),
        fix=f"say {wins.value} in both places",
        edits=loses.rewritten(wins.value),
    )
