"""What it costs to look whether the weights that an optimizer wrote are finite, on the weights of GPT-2 124M.

    python benchmarks/weight_check_cost.py [--out DIR]

`select` optimizers are looked at in every step; fused ones with eps > 0 are not. Stored are milliseconds of one commit
of AdamW, of the look alone, and its share of a training step of GPT-2 (16x1024 tokens, in bf16: 32.0 ms, compiled by
halfstep; benchmarks/gpt2_speed.py) if every step made it. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from halfstep.step.commit import Committer, commit_all
from recording import store

STEP_MS = 32.0
ROUNDS, REPEATS = 7, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    good = torch.zeros((), dtype=torch.bool, device="cuda")
    fused, selected = committer(fused=True), committer(capturable=True, foreach=True)
    calls: dict[str, Callable[[], object]] = {
        "fused commit": lambda: commit_all([fused], good, None),
        "selected commit": lambda: commit_all([selected], good, None),
        "look": selected.left_non_finite,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):  # in turns: what disturbs one disturbs all
        for name, call in calls.items():
            found[name].append(in_ms(call))
    ms = {name: {"median": statistics.median(own), "spread": max(own) - min(own)} for name, own in found.items()}
    shares = {
        "of a selected commit": ms["look"]["median"] / ms["selected commit"]["median"],
        "of a training step, if fused ones were looked at": ms["look"]["median"] / STEP_MS,
    }
    print(ms, shares, flush=True)
    store("weight_check_cost", {"ms": ms, "shares": shares}, torch.device("cuda"), arguments.out)


def committer(**options: bool) -> Committer:
    """GPT-2 124M's weights, each with a gradient and state."""
    shapes = [(50257, 768), (1024, 768), (768,), (768,)]
    for _ in range(12):
        shapes += [(768,)] * 4 + [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    parameters = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    made = Committer(torch.optim.AdamW(parameters, 1e-4, **options), None)
    commit_all([made], torch.zeros((), dtype=torch.bool, device="cuda"), None)
    return made


def in_ms(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad():
        call()
        torch.cuda._sleep(50_000_000)  # launches queue up meanwhile
        begin.record()
        for _ in range(REPEATS):
            call()
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS


if __name__ == "__main__":
    main()
