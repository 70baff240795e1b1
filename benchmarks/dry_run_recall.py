"""How often a dry run is right: what it says from fp32 steps, against simulated fp16 of one module at a time.

    python benchmarks/dry_run_recall.py [--out DIR] [--only unet,resnet18,gpt2]

Three families as they come and with weights planted: scaled so that a module's numbers leave fp16 at the top or at the
bottom, some of them narrowly. The truth of a module is a step in which it alone computes in fp16, simulated. It is bad
where a number of its operations is not finite, or where a tenth of those that are not zero in fp32 became zero: of its
weights, and where they and what it is given survive the cast to fp16, of activations and gradients. Else that is
another's fault, and they are not judged. Modules are those with weight matrices.

Losses are multiplied by a scale, as fp16 trains: without one most gradients would be lost before they reach a module.

Updates that bf16 weights would not feel are held against AdamW's own step on weights that are bf16.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.evidence.attempts import LossFn, Subject, attempt
from halfstep.evidence.dry_run import MUCH, judge_modules, judge_updates
from halfstep.evidence.ranges import Operation, RangeTrace
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import Assembly
from halfstep_train.use.observe_step import assemble_step, build_subject, read_windows
from recording import store

FAMILIES = {
    "unet": ["data.image_size=32", "model.base_channels=8", "model.depth=2", "train.batch_size=2"],
    "resnet18": ["data.image_size=32", "train.batch_size=4"],
    "gpt2": ["model.depth=2", "model.dim=32", "model.heads=2", "model.context=32", "train.batch_size=2"],
}
FACTORS = (2.0**20, 2.0**-24, 2.0**17, 2.0**-20, 2.0**14, 2.0**-14)
SCALE = 2.0**12
SEEDS = (0, 1, 2)
"""The first is not planted."""
GOAL = {"recall": 0.9, "precision": 0.8}

Verdicts = dict[tuple[str, str], bool]


def layers(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))}


@torch.no_grad()
def plant(model: nn.Module, seed: int) -> dict[str, float]:
    """Every second layer, from one that depends on the seed on."""
    chosen = list(layers(model))[seed % 2 :: 2] if seed else []
    planted = {name: FACTORS[(seed + k) % len(FACTORS)] for k, name in enumerate(chosen)}
    for name, factor in planted.items():
        model.get_parameter(f"{name}.weight").mul_(factor)
    return planted


def scaled(loss: LossFn) -> LossFn:
    def times_scale(batch: Any) -> Any:
        value, *more = loss(batch)
        return (value * SCALE, *more)

    return times_scale


def said(subject: Subject, window: list[dict[str, torch.Tensor]]) -> Verdicts:
    known = layers(subject.model)
    rows = judge_modules(subject, "fp16", [window])
    return {(row.module, row.kind): row.is_bad for row in rows if row.module in known}


def shown(subject: Subject, config: RunConfig, parts: Assembly) -> Verdicts:
    """By simulation, one module at a time."""
    in_fp32 = attempt(subject, "fp32", subject.plan_for("fp32", {}), traced=True).trace
    assert in_fp32 is not None
    found: Verdicts = {}
    for name in layers(subject.model):
        request = config.precision.model_copy(
            update={"default": "fp32", "modules": {name: "fp16"}, "simulate": True, "strict": False}
        )
        plan = decide(request, probe("cpu"), parts.model, fragile=parts.workload.fragile)
        alone = attempt(subject, name, plan, traced=Casting)
        assert isinstance(alone.trace, Casting)
        assert not alone.error, alone.error
        found |= {(name, kind): bad for kind, bad in _verdicts(name, alone.trace, in_fp32)}
    return found


class Casting(RangeTrace):
    """A trace that knows which casts are of weights, and which lose what they are given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model
        self.of_weights: set[int] = set()
        self.losing: set[int] = set()

    def _record(self, func: Any, name: str, given: list[Tensor], before: Any, found: list[Tensor]) -> None:
        first = len(self.operations)
        super()._record(func, name, given, before, found)
        if name == "_to_copy" and given and len(self.operations) > first:
            source, result = given[0], found[0]
            if any(source.data_ptr() == p.data_ptr() for p in self.model.parameters() if p.ndim > 1):
                self.of_weights.add(first)
            is_lost = (source != 0) & (result == 0)
            if not result.isfinite().all() or is_lost.sum() > MUCH * (source != 0).sum():
                self.losing.add(first)


def _verdicts(name: str, alone: Casting, in_fp32: RangeTrace) -> Iterator[tuple[str, bool]]:
    weights = [op for op in _of(alone, name, False) if op.index in alone.of_weights]
    is_lost = any(op.index in alone.losing for op in weights)
    yield "weights", is_lost
    for kind, is_backward in (("activations", False), ("gradients", True)):
        own = [op for op in _of(alone, name, is_backward) if op.output.dtype == "float16" and op not in weights]
        given = [op for op in own if op.name == "_to_copy"]
        made = [op for op in own if op not in given]
        exact = _of(in_fp32, name, is_backward)
        if made and not is_lost and not any(op.index in alone.losing for op in given):
            yield kind, _is_bad(made, exact)


def _is_bad(made: list[Operation], exact: list[Operation]) -> bool:
    names = {op.name for op in made}
    before = sum(op.output.num_zero for op in exact if op.name in names)
    zeros, numel = sum(op.output.num_zero for op in made), sum(op.output.numel for op in made)
    return any(not op.output.is_finite for op in made) or (zeros - before) / max(numel - before, 1) > MUCH


def _of(trace: RangeTrace, name: str, is_backward: bool) -> list[Operation]:
    return [op for op in trace.operations if op.module == name and op.is_backward == is_backward]


def updates(parts: Assembly, window: list[dict[str, torch.Tensor]]) -> tuple[Verdicts, Verdicts]:
    """What the dry run says of AdamW's first updates, and what AdamW does to bf16 weights."""
    model = parts.model
    value, *_ = parts.eager(window[0])
    model.zero_grad()
    value.backward()
    trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        own = {n: nn.Parameter(p.detach().to(dtype)) for n, p in trained.items()}
        for name, parameter in own.items():
            parameter.grad = trained[name].grad.to(dtype)  # type: ignore[union-attr]
        before = {n: p.detach().clone() for n, p in own.items()}
        torch.optim.AdamW(own.values(), lr=1e-3, weight_decay=0.0).step()
        found.append((before, {n: p.detach() for n, p in own.items()}))
    (before, after), (half_before, half_after) = found
    predicted = {(row.module, "updates"): row.is_bad for row in judge_updates(before, after)}
    counts: dict[str, Counter[str]] = {}
    for name in trained:
        own_counts = counts.setdefault(name.rpartition(".")[0] or "(root)", Counter())
        made = before[name] != after[name]
        own_counts["made"] += int(made.sum())
        own_counts["lost"] += int((made & (half_before[name] == half_after[name])).sum())
    return predicted, {(module, "updates"): n["lost"] > MUCH * n["made"] for module, n in counts.items()}


def compared(predicted: Mapping[tuple[str, str], bool], true: Mapping[tuple[str, str], bool]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for key, is_bad in true.items():
        told = predicted.get(key, False)
        counts["right"] += told and is_bad
        counts["missed"] += is_bad and not told
        counts["false"] += told and not is_bad
        counts["good"] += not told and not is_bad
        if told != is_bad:
            print("   ", *key, "missed" if is_bad else "false alarm", flush=True)
    return counts


def rates(counts: Mapping[str, int]) -> dict[str, float]:
    right = counts["right"]
    return {
        "recall": right / max(right + counts["missed"], 1),
        "precision": right / max(right + counts["false"], 1),
    }


def of_family(workload: str) -> list[dict[str, object]]:
    rows = []
    for seed in SEEDS:
        words = [*FAMILIES[workload], "data.num_workers=0", "train.fast=off", f"train.seed={seed}"]
        flags = {"precision": "fp32", "device": "cpu"}
        with assemble_step(workload, flags=flags, overrides=words) as (config, parts, engine, _):
            planted = plant(parts.model, seed)
            (window,) = read_windows(parts, 1)
            subject = build_subject(engine, window, config.precision)  # type: ignore[arg-type]
            subject.loss = scaled(subject.loss)
            counts = {"fp16": compared(said(subject, window), shown(subject, config, parts))}
            counts["fp16"]["not_judged"] = 3 * len(layers(parts.model)) - counts["fp16"].total()
            counts["bf16-true updates"] = compared(*updates(parts, copy.copy(window)))
        for target, found in counts.items():
            rows.append({"workload": workload, "seed": seed, "planted": len(planted), "target": target, **found})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", default=",".join(FAMILIES))
    arguments = parser.parse_args()
    rows = [row for name in arguments.only.split(",") for row in of_family(name)]
    totals = {}
    for target in ("fp16", "bf16-true updates"):
        counts = Counter({key: sum(int(r.get(key, 0)) for r in rows if r["target"] == target)  # type: ignore[call-overload]
                          for key in ("right", "missed", "false", "good", "not_judged")})  # fmt: skip
        totals[target] = {**counts, **rates(counts)}
        print(target, totals[target])
    store("dry_run_recall", {"goal": GOAL, "totals": totals, "rows": rows}, torch.device("cpu"), arguments.out)


if __name__ == "__main__":
    main()
