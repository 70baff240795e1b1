"""Does `hs.Step(watch=20)` warn of trouble at least 100 steps before it happens, and stay silent in healthy runs?

    python benchmarks/watch_ramps.py label [--set SET] [--only NAME]              # unwatched: results/watch_labels.json
    python benchmarks/watch_ramps.py tuning|unseen|second|healthy [--only NAME]   # watched: results/watch_ramps.json

A ramp is a small training in which a number grows or shrinks until it fails. Its label is the first failure of a run
without watch, measured by the hooks below: (module, kind, threshold, step F). Every module and kind is measured, so the
label is what failed first, wherever that is. The ramps of `watch_ramps_unseen.py` and `watch_ramps_second.py` were
labelled before their first watched run, by someone who had not read the code of watch; those of
`watch_ramps_tuning.py` are there to develop with.

What counts as a failure is in THRESHOLDS. A tensor that "fails" within the first 20 steps does so by construction (the
zeros behind a mask) and is ignored.

A hit: the first warning of the run names the label's module or its direct parent, and its kind, at step F - 100 or
earlier. An interval is right if low <= F <= high. In a healthy run every warning is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from recording import RESULTS, store
from watch_ramps_tuning import TUNING, Ramp

WATCH, LEAD, STRUCTURAL = 20, 100, 20
SETS = ("tuning", "unseen", "second")

THRESHOLDS = {
    # The largest absolute value of a module's output, in the dtype of that output: in fp16 those of Linear, conv, ...
    "fp16 maximum": ("above", 65504.0),
    "bf16 maximum": ("above", 3.3895e38),
    "fp32 maximum": ("above", 3.4028e38),
    # The share of exact zeros in a module's output: its units are dead.
    "99 % zeros": ("above", 0.99),
    # The share of exact zeros in the (scaled) gradient of a module's fp16 output, or of a weight used in fp16.
    "90 % zeros in fp16": ("above", 0.9),
    # The smallest running variance of a BatchNorm: that of its eps.
    "variance 1e-5": ("below", 1e-5),
    # The share of a module's bf16 weights that a committed step left unchanged, as the mean of the last 20 steps.
    "50 % lost updates": ("above", 0.5),
    # fp8 scales each tensor to e4m3's maximum of 448: the share of its non-zero values that are then below e4m3's
    # smallest normal number 2**-6, because an outlier takes the range.
    "50 % below e4m3's range": ("above", 0.5),
    "loss scale 1": ("below", 1.0),
}  # fmt: skip
IN_FP16 = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.RNNBase, nn.MultiheadAttention)
"""Modules whose weights autocast casts to fp16."""

Key = tuple[str, str, str]  # module, kind, threshold


def is_failing(threshold: str, value: float) -> bool:
    side, limit = THRESHOLDS[threshold]
    if side == "below":
        return value <= limit
    return value >= limit if limit <= 1 else value > limit


class Instruments:
    """Measure every module of an unwatched run by plain hooks; `history` holds one number per step and key."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.model, self.precision = model, precision
        self.history: dict[Key, list[float]] = defaultdict(list)
        self.now: dict[Key, float] = {}
        self.before: dict[str, list[Tensor]] = {}
        self.kept: dict[str, list[float]] = defaultdict(list)
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *given, name=name: self.see_output(name, *given))

    def note(self, key: Key, value: float, combine: Callable[..., float] = max) -> None:
        # A module may run several times in a step: zeros count only if all of its outputs have them.
        self.now[key] = combine(self.now[key], value) if key in self.now else value

    @hs.fp32_island()  # under autocast the products below would be rounded
    def see_output(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() == 0:
            return
        x = output.detach().float()
        fmt = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(output.dtype, "fp32")
        largest = x.abs().max().item()
        self.note((name, "activation", f"{fmt} maximum"), largest if math.isfinite(largest) else math.inf)
        self.note((name, "activation", "99 % zeros"), (x == 0).float().mean().item(), min)
        if self.precision == "fp8":
            sizes = x[x != 0].abs()
            lost = (sizes < sizes.max() * 2**-6 / 448).float().mean().item() if len(sizes) else 0.0
            self.note((name, "activation", "50 % below e4m3's range"), lost)
        if hasattr(module, "qk"):  # the ramps' own attention
            q, k = (part.detach().float() for part in module.qk)
            self.note((name, "attention logits", "fp16 maximum"), (q @ k.mT).abs().max().item() / q.shape[-1] ** 0.5)
        if isinstance(module, nn.MultiheadAttention):
            self.note((name, "attention logits", "fp16 maximum"), find_largest_logit(module, *given[:2]))
        if output.requires_grad and output.dtype == torch.float16:
            key = (name, "activation gradient", "90 % zeros in fp16")
            output.register_hook(lambda g: self.note(key, (g == 0).float().mean().item(), min))

    def see_gradients(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if self.precision == "fp16" and isinstance(module, IN_FP16) and weight is not None:
                zeros = (weight.grad == 0).float().mean().item() if weight.grad is not None else 1.0
                self.note((name, "weight gradient", "90 % zeros in fp16"), zeros)
            if self.precision == "bf16-true":
                self.before[name] = [weight.detach().clone() for weight in module.parameters(recurse=False)]

    def end_step(self, scale: float, committed: bool) -> list[Key]:
        """Measure what the step left behind; return what fails, in the order in which it was computed."""
        for name, module in self.model.named_modules():
            weights = [weight.detach() for weight in module.parameters(recurse=False)]
            if weights and self.precision == "fp16" and isinstance(module, IN_FP16):
                self.note((name, "weight", "fp16 maximum"), max(weight.abs().max().item() for weight in weights))
            if weights and self.precision == "bf16-true" and committed:
                kept = sum((old == new).sum().item() for old, new in zip(self.before[name], weights, strict=True))
                recent = self.kept[name][-19:] + [kept / sum(map(Tensor.numel, weights))]
                self.kept[name] = recent
                self.note((name, "update", "50 % lost updates"), sum(recent) / len(recent))
            if isinstance(getattr(module, "running_var", None), Tensor):
                self.note((name, "variance", "variance 1e-5"), module.running_var.min().item())
        if self.precision == "fp16":
            self.note(("", "loss scale", "loss scale 1"), scale)
        for key, value in self.now.items():
            self.history[key].append(value)
        failing = [key for key, value in self.now.items() if is_failing(key[2], value)]
        self.now = {}
        return failing


def find_largest_logit(attention: nn.MultiheadAttention, query: Tensor, key: Tensor) -> float:
    size = attention.embed_dim
    weight, bias = attention.in_proj_weight.detach().float(), attention.in_proj_bias.detach().float()
    heads = (-1, attention.num_heads, size // attention.num_heads)
    q = (query.detach().float() @ weight[:size].T + bias[:size]).unflatten(-1, heads[1:]).transpose(-3, -2)
    k = (key.detach().float() @ weight[size : 2 * size].T + bias[size : 2 * size]).unflatten(-1, heads[1:])
    return (q @ k.transpose(-3, -2).mT).abs().max().item() / heads[2] ** 0.5


def label(build: Callable[[], Ramp]) -> dict[str, Any]:
    """Train without watch until something fails, and describe it."""
    ramp = build_seeded(build)
    instruments = Instruments(ramp.model, ramp.precision)
    step = make_step(ramp, on_gradients=instruments.see_gradients)
    structural: set[Key] = set()
    for number in range(ramp.steps):
        outcome = step(ramp.loss_fn, [ramp.batch(number)])
        failing = instruments.end_step(outcome.scale, outcome.committed)
        if number < STRUCTURAL:
            structural.update(failing)
        elif first := [key for key in failing if key not in structural]:
            values = instruments.history[first[0]]
            course = {f"F-{back}": f"{values[number - back]:.4g}" for back in (300, 200, 100, 50, 1, 0)}
            found = dict(zip(("module", "kind", "threshold"), first[0], strict=True))
            return found | {"F": number, "also failing": [" ".join(key) for key in first[1:]], "course": course}
    raise RuntimeError(f"{build.__name__}: nothing failed in {ramp.steps} steps")


def build_seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build()


def make_step(ramp: Ramp, **options: Any) -> hs.Step:
    simulate = ramp.precision != "fp32"
    precision = hs.Precision(ramp.precision, simulate=simulate, force=simulate)
    return hs.Step(ramp.model, ramp.optimizer, precision, **ramp.options, **options)


def train_watched(run: Ramp, steps: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the warnings of a watched run in the order in which they were issued, and its losses."""
    step, losses = make_step(run, watch=WATCH), []
    try:
        for number in range(steps):
            losses.append(step(run.loss_fn, [run.batch(number)]).loss)
        step.finish()
    except hs.TrainingStopped as stopped:
        print(f"  stopped: {str(stopped).splitlines()[0]}")
    fields = ("module", "kind", "threshold", "step", "at", "low", "high", "message")
    issued = sorted(step.watched.warnings, key=lambda warning: warning.step)
    return [{field: getattr(warning, field) for field in fields} for warning in issued], losses


def score(expected: Mapping[str, Any], issued: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the first warning with the label."""
    first = issued[0] if issued else None
    module = expected["module"]
    names = {module, module.rpartition(".")[0]}
    is_hit = first is not None and first["module"] in names and first["kind"] == expected["kind"]
    is_hit = is_hit and first["step"] <= expected["F"] - LEAD
    has_interval = first is not None and first["low"] is not None and first["high"] is not None
    contains = first["low"] <= expected["F"] <= first["high"] if has_interval else None
    wanted = {field: expected[field] for field in ("module", "kind", "threshold", "F")}
    return {"label": wanted, "hit": bool(is_hit), "interval contains F": contains, "first warning": first,
            "later warnings": len(issued[1:])}  # fmt: skip


def summarise(name: str, runs: Mapping[str, Any]) -> dict[str, Any]:
    if name == "healthy":
        return {"runs": len(runs), "warnings": sum(len(run["warnings"]) for run in runs.values())}
    hits = [run for run in runs.values() if run["hit"]]
    right = sum(run["interval contains F"] is True for run in hits)
    return {"ramps": len(runs), "hits": len(hits), "intervals of hits that contain F": right}


def read(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def find_set(name: str) -> dict[str, Callable[[], Ramp]]:
    if name == "tuning":
        return TUNING
    if name == "unseen":
        from watch_ramps_unseen import UNSEEN

        return UNSEEN
    if name == "second":
        from watch_ramps_second import SECOND

        return SECOND
    from watch_healthy import HEALTHY

    return HEALTHY


def measure(task: str, one: str, key: str, build: Callable[[], Ramp]) -> dict[str, Any]:
    """Label a ramp, or train it or a healthy run with watch."""
    if task == "label":
        return label(build)
    run = build_seeded(build)
    if one == "healthy":
        issued, losses = train_watched(run, run.steps)
        means = {"first loss": statistics.fmean(losses[:50]), "last loss": statistics.fmean(losses[-50:])}
        return {"precision": run.precision, "steps": len(losses), **means, "warnings": issued}
    expected = read("watch_labels")[one][key]
    return score(expected, train_watched(run, expected["F"])[0])


def keep(task: str, one: str, key: str, result: Mapping[str, Any]) -> None:
    """Add one result to what is stored, which is read again because several processes may share the work."""
    name = "watch_labels" if task == "label" else "watch_ramps"
    results = {part: value for part, value in read(name).items() if isinstance(value, dict)}
    runs = results.setdefault(one, {}) if task == "label" else results.setdefault(one, {"runs": {}})["runs"]
    runs[key] = result
    if task != "label":
        results[one]["summary"] = summarise(one, runs)
        print(results[one]["summary"])
    store(name, results, torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("label", *SETS, "healthy"))
    parser.add_argument("--set", choices=SETS, help="label only this set")
    parser.add_argument("--only", help="names of ramps or runs, with commas")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [arguments.task]
    if arguments.task == "label":
        chosen = [arguments.set] if arguments.set else list(SETS)
    for one in chosen:
        for key, build in find_set(one).items():
            if arguments.only and key not in arguments.only.split(","):
                continue
            start = time.process_time()
            result = measure(arguments.task, one, key, build)
            print(key, f"{time.process_time() - start:.0f} s", json.dumps(result), flush=True)
            keep(arguments.task, one, key, result)


if __name__ == "__main__":
    main()
