"""Peak memory as `halfstep plan --memory` predicts it, beside what a GPU measured.

    python benchmarks/memory_plan.py [--only unet,gpt2] [--modes eager,compile] [--held-out] [--seconds 240] [--out DIR]
    python benchmarks/memory_plan.py --again [--stored FILE]    # predict anew for stored rows; needs no GPU

Each row makes a few steps as `halfstep train` makes them, on random data; rows run in several processes side by side,
and memory is each process's own. Measured is the larger of max_memory_allocated before a step is captured and reserved
memory after it, from the third step on. `within`: at most 10 % off (captured steps: 15 %), at most 5 % below. Rows are
stored as they come, so that a machine that is taken away leaves what it has; stored rows that were not asked for stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep.hardware.memory import get_peak_memory_bytes, release_unused_memory, reset_peak
from halfstep.hardware.probe import probe
from halfstep.prefetching import prefetch
from halfstep_train.bench.problem import build_random_workload, load_bench_config, set_mode, set_precision
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import assemble, decide_plan
from halfstep_train.run.engine import make_engine
from halfstep_train.run.memory.out_of_memory import summarise_error
from halfstep_train.run.memory.planner import Cell, MemoryPlanner
from halfstep_train.run.memory.traceable_step import build_traceable_step
from halfstep_train.tune.modes import UNCAPTURED, Mode
from halfstep_train.tune.trials import MemorySetting
from halfstep_train.workloads import KINDS
from recording import RESULTS, store

LEAST, MOST = -0.05, {"eager": 0.10, "compile": 0.10, "graph": 0.15}
SETTLED, STEPS = 2, {"eager": 4, "compile": 4, "graph": UNCAPTURED + 3}


class Row(NamedTuple):
    """A workload with its settings, and one cell of its table."""

    words: str
    precision: str
    mode: Mode
    level: str = ""
    """`pointwise`, `blocks`, `8bit`, or two of them with a +."""

    @property
    def setting(self) -> MemorySetting:
        levels = self.level.split("+") if self.level else []
        recompute: Any = next((level for level in levels if level != "8bit"), "none")
        return MemorySetting(recompute=recompute, optimizer_bits=8 if "8bit" in levels else 32)


UNET = "unet data.image_size=256 train.batch_size=8"
RESNET = "resnet50 train.batch_size=64"
VIT = "vit_b_16 train.batch_size=32"
GPT2 = "gpt2 train.batch_size=8"
MEDIUM = "gpt2_medium train.batch_size=4"
SHORT_GPT2 = "gpt2 model.depth=6 train.batch_size=16"
VAE = "vae data.image_size=256 train.batch_size=2"
DIFFUSION = "diffusion data.image_size=64 train.batch_size=16"
RADIO = "radiodiff train.batch_size=2"
RADIO_VAE = "radiodiff_vae train.batch_size=2"
STEVE = "steve train.batch_size=4"
SLOTS = "slotcontrast preset=movi_e model.backbone_weights=random train.batch_size=16"
ROWS: tuple[Row, ...] = (
    Row(UNET, "fp32", "eager"), Row(UNET, "bf16", "eager"), Row(GPT2, "bf16", "eager"), Row(RESNET, "bf16", "eager"),
    Row(VIT, "bf16", "eager"), Row(STEVE, "bf16", "eager"), Row(VAE, "bf16", "eager"), Row(SLOTS, "bf16", "eager"),
    Row(UNET, "tf32", "eager"), Row(UNET, "bf16", "eager", "pointwise"), Row(UNET, "fp16", "eager", "blocks+8bit"),
    Row(RESNET, "fp32", "eager"), Row(RESNET, "fp16", "eager"), Row(VIT, "tf32", "eager"),
    Row(VIT, "bf16", "eager", "blocks"), Row(GPT2, "fp32", "eager"), Row(GPT2, "bf16", "eager", "blocks"),
    Row(GPT2, "bf16-true", "eager"), Row(GPT2, "bf16-true", "eager", "pointwise+8bit"), Row(VAE, "fp32", "eager"),
    Row(DIFFUSION, "bf16", "eager"), Row(RADIO_VAE, "bf16", "eager"), Row(RADIO, "bf16", "eager"),
    Row(STEVE, "fp32", "eager"),
    Row(SHORT_GPT2, "bf16", "compile"), Row(UNET, "bf16", "compile"), Row(VIT, "bf16", "compile"),
    Row(RESNET, "bf16", "compile"), Row(UNET, "bf16", "graph"), Row(SHORT_GPT2, "bf16", "graph"),
    Row("gpt2 train.batch_size=16", "bf16", "graph"),
    Row(SHORT_GPT2, "bf16-true", "compile", "8bit"), Row(SHORT_GPT2, "bf16", "compile", "pointwise"),
    Row(STEVE, "bf16", "compile"), Row(SLOTS, "bf16", "compile"), Row(RADIO_VAE, "bf16", "compile"),
    Row(UNET, "bf16", "compile", "pointwise"), Row(RESNET, "tf32", "compile"), Row(VIT, "fp16", "graph"),
    Row(UNET, "bf16", "graph", "pointwise+8bit"), Row(RESNET, "bf16", "graph"), Row(VAE, "bf16", "compile"),
    Row(DIFFUSION, "fp16", "compile"),
)  # fmt: skip
"""The quickest first, and one of each kind before a second."""

HELD_OUT = (
    Row("unet data.image_size=384 train.batch_size=4", "fp32", "eager"), Row(MEDIUM, "bf16", "eager"),
    Row("unet data.image_size=128 train.batch_size=16", "fp32", "eager"), Row(MEDIUM, "bf16-true", "eager", "8bit"),
    Row("resnet50 train.batch_size=32", "fp32", "eager"), Row(DIFFUSION, "fp32", "eager"),
    Row("vit_b_16 train.batch_size=64", "fp16", "eager", "pointwise"), Row(MEDIUM, "bf16", "compile"),
    Row("resnet50 train.batch_size=128", "bf16", "compile"), Row("vit_b_16 train.batch_size=64", "fp16", "compile"),
)  # fmt: skip
"""Measured once the plan was finished: nothing in it was fitted to them."""
ROWS += HELD_OUT


def config_of(row: Row) -> RunConfig:
    target, *overrides = row.words.split()
    config = load_bench_config(target, overrides, {}, small=False)
    return set_mode(set_precision(config, row.precision), row.mode)


def predicted(row: Row) -> dict[str, Any]:
    config, began = config_of(row), time.perf_counter()
    planner = MemoryPlanner(build_traceable_step(config))
    size = config.train.batch_size
    found = planner.predict(Cell(precision=row.precision, mode=row.mode, setting=row.setting, batch_size=size))
    return {
        "predicted_gb": found.total / 1e9,
        "components_gb": {name: size / 1e9 for name, size in found.components.items() if size},
        "planned_s": time.perf_counter() - began,
    }


def measured(row: Row) -> dict[str, Any]:
    """A few steps of the run's own assembly and engine; what an earlier row left is told."""
    config, device = config_of(row), torch.device("cuda", 0)
    torch.cuda.init()
    torch._dynamo.reset()
    release_unused_memory(device)
    reset_peak(device)
    left_over = torch.cuda.memory_allocated()
    workload = build_random_workload(config)
    made = KINDS.of(config.workload).synthetic.make_batch(config, workload.store)
    plan = decide_plan(config, workload, probe("cuda"))
    plan = dataclasses.replace(plan, mode=row.mode, memory=dataclasses.asdict(row.setting))
    parts = assemble(config, workload, plan)
    said: list[str] = []
    engine = make_engine(parts, row.mode, lambda text, level: said.append(text), workload.metrics().update)
    start_peak = 0
    for number, loaded in enumerate(prefetch(itertools.repeat(made, STEPS[row.mode]), device)):
        engine([loaded])
        if number + 1 == SETTLED:
            torch.cuda.synchronize()
            start_peak = get_peak_memory_bytes(device) or 0
            reset_peak(device)
    torch.cuda.synchronize()
    if engine.mode != row.mode:
        raise RuntimeError("; ".join(said))
    peak, reserved = get_peak_memory_bytes(device) or 0, torch.cuda.memory_reserved()
    engine.forget_graphs()
    return {
        "measured_gb": (peak - left_over) / 1e9,
        "start_gb": (start_peak - left_over) / 1e9,
        "reserved_gb": reserved / 1e9,
        "left_over_gb": left_over / 1e9,
        "measured_on": time.strftime("%Y-%m-%d %H:%M"),
    }


def whole_row(row: Row) -> dict[str, Any]:
    """Measured, then predicted; what fails says why."""
    found: dict[str, Any] = row._asdict()
    for part in (measured, predicted):  # the device is what may be taken away
        try:
            found |= part(row)
        except Exception as error:
            found["problem"] = f"{part.__name__}: {type(error).__name__}: {summarise_error(error)}"
    return judged(found)


def row_of(found: dict[str, Any]) -> Row:
    return Row(found["words"], found["precision"], found["mode"], found["level"])


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """A row with how far off it is, where both numbers are there."""
    if "measured_gb" not in found or "predicted_gb" not in found:
        return found
    off = found["predicted_gb"] / found["measured_gb"] - 1
    return found | {"off": off, "within": bool(LEAST <= off <= MOST[found["mode"]])}


def show(row: dict[str, Any]) -> None:
    names = ("measured_gb", "start_gb", "predicted_gb", "off")
    numbers = " ".join(f"{name} {row[name]:.3f}" for name in names if name in row)
    verdict = {True: "within", False: "OFF", None: row.get("problem", "")}[row.get("within")]
    print(row["words"], row["precision"], row["mode"], row["level"] or "normal", numbers, verdict, flush=True)


def kept(rows: Iterable[dict[str, Any]], out: str | None, device: torch.device) -> None:
    ordered = sorted(rows, key=lambda row: (row["words"], row["mode"], row["precision"], row["level"]))
    both = [row for row in ordered if "within" in row]
    facts = {"rows_within": sum(row["within"] for row in both), "rows_measured": len(both), "rows": ordered}
    store("memory_plan", facts, device, out)


def measure_all(asked: argparse.Namespace) -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    only, modes = set(filter(None, asked.only.split(","))), asked.modes.split(",")
    possible = HELD_OUT if asked.held_out else ROWS
    wanted = [row for row in possible if row.mode in modes and (not only or row.words.split()[0] in only)]
    pool = ProcessPoolExecutor(asked.at_once, mp_context=multiprocessing.get_context("spawn"))
    rows = {row_of(found): found for found in json.loads(asked.stored.read_text())["rows"]}
    num_left = len(wanted)
    try:
        for done in as_completed([pool.submit(whole_row, row) for row in wanted], timeout=asked.seconds or None):
            found = done.result()
            show(found)
            num_left -= 1
            if "measured_gb" in found:
                rows[row_of(found)] = found
                kept(rows.values(), asked.out, torch.device("cuda"))
    except OutOfTime:
        print(f"{num_left} rows had no time", flush=True)
    for worker in multiprocessing.active_children():
        worker.terminate()
    os._exit(0)  # the pool would wait for rows that are still compiling


def predict_again(stored: Path) -> None:
    record = json.loads(stored.read_text())
    rows = []
    for old in record["rows"]:
        if "measured_gb" not in old:
            continue
        rows.append(judged(old | predicted(row_of(old))))
        show(rows[-1])
    record |= {"rows_within": sum(row["within"] for row in rows), "rows_measured": len(rows), "rows": rows}
    stored.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{record['rows_within']} of {len(rows)} rows within the bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="workloads, with commas")
    parser.add_argument("--modes", default="eager,compile,graph")
    parser.add_argument("--held-out", action="store_true", help="only rows that nothing was fitted to")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0, help="store what there is after so many; 0: no limit")
    parser.add_argument("--out")
    parser.add_argument("--again", action="store_true", help="predict anew for the rows that are stored")
    parser.add_argument("--stored", type=Path, default=RESULTS / "memory_plan.json")
    asked = parser.parse_args()
    if asked.again:
        predict_again(asked.stored)
    else:
        measure_all(asked)


if __name__ == "__main__":
    main()
