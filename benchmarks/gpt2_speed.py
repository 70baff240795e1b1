"""GPT-2 124M and XL: one training step by stock PyTorch, written plainly and used well, and by halfstep.

    python benchmarks/gpt2_speed.py [--only gpt2,gpt2_xl] [--rows plain,halfstep] [--seconds 900] [--out DIR]

Every row is a process of its own: what one compiled or reserved must not help or hurt the next; with `--at-once` rows
compile side by side and are timed one after the other (row_turns.py). AdamW, clipping to 1,
ids copied to the device within the step; rows differ in nothing else but what their names say:

    plain        Hugging Face's GPT2LMHeadModel (transformers), autocast, AdamW as it comes
    plain_tuned  the same with torch.compile and fused AdamW
    stock        halfstep's model with F.cross_entropy, model and loss compiled as one, fused AdamW
    halfstep     `halfstep train` with train.fast=graph

Peak memory is the larger of max_memory_allocated before a capture and reserved memory after it.
`--small` is for trying the script on a CPU: its bf16 matmuls can take a thousand times a GPU's time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep_train.bench.problem import load_bench_config
from halfstep_train.workloads.language.gpt2 import GPT2S, build_gpt2
from recording import store
from row_turns import Turn
from step_rows import halfstep_row, rows, rows_parser, torch_row

WARM_UP, STEPS, WINDOWS = 12, 15, 3
CONTEXT = 1024
SMALL_BATCH, SMALL_CONTEXT, SMALL_SHAPE = 2, 8, {"depth": 2, "dim": 32, "heads": 2, "vocab": 257}
SMALL = (f"model.context={SMALL_CONTEXT}", *(f"model.{name}={size}" for name, size in SMALL_SHAPE.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the table."""

    workload: str
    batch_size: int
    title: str
    precisions: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"bf16": ("plain", "stock", "halfstep")})
    words: tuple[str, ...] = ()


ALL = ("plain", "plain_tuned", "stock", "halfstep")
SPLIT = ("optimizer.moment_bits=8",)

CASES = {
    "gpt2": Case(workload="gpt2", batch_size=16, title="GPT-2 124M, 16×1024", precisions={"bf16": ALL}),
    "gpt2_xl": Case(
        workload="gpt2_xl",
        batch_size=4,
        title="GPT-2 XL 1.56B, 4×1024",
        precisions={
            "bf16": ALL,
            "fp32": ("plain", "halfstep"),
            "tf32": ("plain", "halfstep"),
            "fp16": ("plain", "halfstep"),
        },
    ),
    "gpt2_xl_split": Case(
        workload="gpt2_xl",
        batch_size=4,
        title="GPT-2 XL, bf16-true, split master, 8-bit moments",
        precisions={"bf16-true": ("halfstep",)},
        words=SPLIT,
    ),
    "gpt2_xl_split_low": Case(
        workload="gpt2_xl",
        batch_size=4,
        title="GPT-2 XL, bf16-true, split master, 8-bit moments, train.memory=low",
        precisions={"bf16-true": ("halfstep",)},
        words=(*SPLIT, "train.memory=low", "train.memory_time=1.25"),
    ),
}


def main() -> None:
    parser = rows_parser(__doc__, ALL, "CASE", "ROW", "PRECISION")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--precisions", default="", help="of those a case has; all unless given")
    arguments = parser.parse_args()
    if arguments.row:
        name, row, precision = arguments.row
        print(json.dumps(RUN[row](CASES[name], row, precision, arguments)))
        return
    if unknown := set(arguments.only.split(",")) - set(CASES):
        parser.error(f"there are {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    all_rows(arguments)


def all_rows(arguments: argparse.Namespace) -> None:
    found = dict[str, Any]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags = [f"--{name}" for name in ("small", "profile") if getattr(arguments, name)]
    jobs = [["--row", *asked, *flags] for asked in asked_for(arguments)]
    for words, result in rows(__file__, jobs, at_once=arguments.at_once, seconds=arguments.seconds):
        _, name, row, precision, *_ = words
        line = {"row": row, "precision": precision, **result}
        found.setdefault(name, {"title": CASES[name].title, "rows": []})["rows"].append(line)
        print(name, json.dumps({key: value for key, value in line.items() if key != "profile"}), flush=True)
        store("gpt2_speed", {"cases": found}, device, arguments.out)


def asked_for(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    wanted, precisions = arguments.rows.split(","), arguments.precisions.split(",") if arguments.precisions else None
    for name in arguments.only.split(","):
        for precision, possible in CASES[name].precisions.items():
            if precisions is None or precision in precisions:
                yield from ((name, row, precision) for row in possible if row in wanted)


def batch_of(case: Case, arguments: argparse.Namespace) -> int:
    return SMALL_BATCH if arguments.small else case.batch_size


# --- halfstep ---


def by_halfstep(case: Case, row: str, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    # Trials of train.memory may take a twentieth of the run, and minutes only in one that takes hours.
    words = (*case.words, f"train.max_steps={10 if arguments.small else 100_000}", *(SMALL if arguments.small else ()))
    config = load_bench_config(case.workload, words, {"batch_size": batch_of(case, arguments)}, small=False)
    return halfstep_row(config, precision, profiles=arguments.profile)


# --- stock PyTorch ---


def by_torch(case: Case, row: str, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    turn = Turn()
    turn.begin()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    model, loss_of, context = made(case, row, arguments.small)
    model = model.to(device).train()
    is_tuned = row != "plain"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=is_tuned)
    run = torch.compile(lambda tokens: loss_of(model, tokens)) if is_tuned else lambda tokens: loss_of(model, tokens)
    host = torch.randint(
        model.size.vocab if row == "stock" else model.config.vocab_size, (batch_of(case, arguments), context + 1)
    )
    host = host.pin_memory() if device.type == "cuda" else host
    counts = (2, 2, WINDOWS) if arguments.small else (WARM_UP, STEPS, WINDOWS)
    return torch_row(
        lambda: host.to(device, non_blocking=True), run, model, optimizer, turn, precision=precision, counts=counts
    )


def made(case: Case, row: str, small: bool) -> tuple[Any, Callable[[Any, Tensor], Tensor], int]:
    size = GPT2S[case.workload]
    published = {"depth": size.depth, "heads": size.heads, "dim": size.dim, "vocab": size.vocab}
    context, shape = (SMALL_CONTEXT, SMALL_SHAPE) if small else (CONTEXT, published)
    if row == "stock":
        return build_gpt2(case.workload, context=context, **shape), stock_loss, context
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2Config(
        n_layer=shape["depth"], n_head=shape["heads"], n_embd=shape["dim"], n_positions=context,
        vocab_size=shape["vocab"],
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(theirs), their_loss, context


def their_loss(model: nn.Module, ids: Tensor) -> Tensor:
    ids = ids[:, :-1]  # it shifts the targets itself, and has no position for one more
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def stock_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


RUN: dict[str, Callable[[Case, str, str, bool], dict[str, Any]]] = {
    "plain": by_torch,
    "plain_tuned": by_torch,
    "stock": by_torch,
    "halfstep": by_halfstep,
}

if __name__ == "__main__":
    main()
