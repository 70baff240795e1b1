"""halfstep against plain PyTorch, Lightning and Accelerate: one training step, same model, batch and clipping.

    python benchmarks/speed.py [--only unet,resnet50_64] [--at-once 16] [--seconds 300] [--modes auto] [KEY=VALUE]
    python benchmarks/speed.py [--only unet,resnet50_64] [--warm 5] [--seconds 540] [--modes auto] [KEY=VALUE]
    python benchmarks/speed.py --only unet --modes eager --precisions fp32,tf32,fp16 --against ""
    python benchmarks/speed.py --cold-start unet

Lightning and Accelerate run as documented with the compiler on, Lightning and plain PyTorch tuned by hand, and plain
once more with the compiler's own CUDA graphs (`graphs`, mode reduce-overhead). Rows are timed one after the other. A
row's start says whether it found its code compiled (`warm`) or not (`cold`); `--warm` compiles it before, several rows
at once, and then no start in the table is a cold one. `--at-once` gives each row a process, in which it compiles with
others and is then timed alone (speed_turns.py): half the time, but no start of a peer, and no row measured again at the
end. Starts that users will see are `--cold-start`'s: halfstep in a new process with an empty cache, and once more in
another with what that left.

Cases that are not run now keep what the file has of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from halfstep.errors import HalfstepError
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe
from halfstep_train.bench.bench import bench, conclude, describe_circumstances, summarise_results
from halfstep_train.bench.measure_row import Row
from halfstep_train.bench.peers import require_peers
from halfstep_train.bench.problem import FAST, count_step_flops
from halfstep_train.report.bench_view import show_bench
from recording import RESULTS, command, store
from speed_cases import CASES, TABLE, Case, config_of, problem_of, request_of, row_requests
from speed_processes import fill_caches, own_decisions, starts
from speed_turns import rows_in_turn

AT_ONCE = 5
ALL_PEERS = tuple(dict.fromkeys(peer for case in CASES.values() for peer in case.against))
WIDTH = 200


def main() -> None:
    began, parser = time.monotonic(), argument_parser()
    arguments = parser.parse_args()
    timed = words(arguments.only) if arguments.only or arguments.cold_start else tuple(TABLE)
    started = words(arguments.cold_start)
    if unknown := {*timed, *started} - set(CASES):
        parser.error(f"there are {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    against = words(arguments.against)
    if unknown := set(against) - set(ALL_PEERS):
        parser.error(f"peers are {', '.join(ALL_PEERS)}, not {', '.join(sorted(unknown))}")
    modes = words(arguments.modes)
    if not modes or set(modes) - set(FAST):
        parser.error(f"--modes takes {', '.join(FAST)}, not {arguments.modes!r}")
    cases = dict(CASES)
    for name, case in CASES.items():
        peers = tuple(peer for peer in case.against if peer in against)
        cases[name] = dataclasses.replace(case, against=peers, words=(*case.words, *arguments.settings))
    try:
        for name in (*timed, *started):
            config_of(cases[name])  # a setting that there is not is told before minutes of others
        require_peers(against)
        hardware = measure(probe("cuda"))
    except HalfstepError as error:
        parser.error(str(error))
    chosen = {name: cases[name] for name in timed}
    if arguments.precisions:
        chosen = {
            f"{name}_{one}": in_precision(cases[name], one) for name in timed for one in words(arguments.precisions)
        }
    deadline = began + arguments.seconds if arguments.seconds else None
    with own_decisions():
        if arguments.warm:
            fill_caches(chosen, modes, hardware, at_once=arguments.warm, deadline=deadline)
        if arguments.at_once:
            found = measured_in_turn(chosen, modes, hardware, deadline, at_once=arguments.at_once)
        else:
            found = (
                (name, measured(case, modes, hardware, deadline, cases.get(case.baseline)))
                for name, case in chosen.items()
            )
        store_problems(found, hardware, arguments.out)
        for name in started:
            first = starts(cases[name], modes[0], hardware)
            print(f"{name}: first step after {first['cold']['s']:.1f} s cold, {first['warm']['s']:.1f} s warm")
            stored = stored_parts(arguments.out, hardware)
            store_parts(stored | {"starts": stored["starts"] | {name: first}}, hardware, arguments.out)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of halfstep's run: train.tune_kernels=true")
    parser.add_argument("--only", default="", help=f"of {', '.join(CASES)}; the first table of results.md unless given")
    parser.add_argument("--modes", default="auto", help="eager, compile, graph or auto, several with commas")
    parser.add_argument("--precisions", default="", help="instead of each case's own; several with commas")
    parser.add_argument("--against", default=",".join(ALL_PEERS), help=f"peers, of {', '.join(ALL_PEERS)}")
    parser.add_argument(
        "--warm", type=int, nargs="?", const=AT_ONCE, default=0, metavar="N", help=f"compile N rows at once, {AT_ONCE}"
    )
    parser.add_argument("--at-once", type=int, default=0, metavar="N", help="N rows in processes, timed in turn")
    parser.add_argument("--cold-start", default="", metavar="CASES", help="time starts with an empty compiler cache")
    parser.add_argument("--seconds", type=float, help="no row starts after so many, or with --at-once ends")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    return parser


def words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def in_precision(case: Case, precision: str) -> Case:
    return dataclasses.replace(case, title=f"{case.title}, {precision}", precision=precision)


def store_problems(found: Iterable[tuple[str, dict[str, Any]]], hardware: Hardware, folder: str | None) -> None:
    """Add what is found to the file."""
    stored = stored_parts(folder, hardware)
    for name, problem in found:
        stored["problems"][name] = problem
        show_bench(problem, Console(width=WIDTH))
        store_parts(stored, hardware, folder)  # after each, for a machine that may end the run


def measured(
    case: Case, modes: tuple[Any, ...], hardware: Hardware, deadline: float | None, baseline: Case | None = None
) -> dict[str, Any]:
    """One case's rows, as `halfstep bench --save` would write them, and halfstep's own of the baseline."""
    problem, request = problem_of(case, hardware), request_of(case, modes, deadline)
    flops = count_step_flops(problem)
    benched = bench(problem, request, hardware, flops, lambda row: print(f"{time.strftime('%X')} {row}", flush=True))
    if benched.is_stopped:
        raise KeyboardInterrupt
    said = describe_circumstances(problem, request, hardware, flops, command())
    found = {**said, **summarise_results(benched), "title": case.title}
    if baseline is not None:
        found["baseline"] = measured(dataclasses.replace(baseline, against=()), modes, hardware, deadline)["rows"]
    return found


def measured_in_turn(
    cases: dict[str, Case], modes: tuple[Any, ...], hardware: Hardware, deadline: float | None, *, at_once: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same of all cases, a process for each row; a case is given out once its last row is there."""
    rows: dict[str, list[Row]] = {name: [] for name in cases}

    def known(case: Case) -> tuple[dict[str, Any], int]:
        problem, request = problem_of(case, hardware), request_of(case, modes, deadline)
        flops = count_step_flops(problem)
        return describe_circumstances(problem, request, hardware, flops, command()), flops

    with ThreadPoolExecutor(1) as background:  # while the rows compile
        before = {name: background.submit(known, case) for name, case in cases.items()}
        for name, row in rows_in_turn(cases, modes, hardware, at_once=at_once, deadline=deadline):
            rows[name].append(row)
            if len(rows[name]) == len(row_requests(cases[name], modes)):
                said, flops = before[name].result()
                benched = conclude(rows[name], flops, hardware)
                yield name, {**said, **summarise_results(benched), "title": cases[name].title}


def stored_parts(folder: str | None, hardware: Hardware) -> dict[str, Any]:
    """What earlier calls measured on the same device with the same torch."""
    path = Path(folder or RESULTS) / "speed.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    is_same = (found.get("device"), found.get("torch")) == (hardware.name, torch.__version__)
    return {part: dict(found.get(part, {})) if is_same else {} for part in ("problems", "starts")}


def store_parts(parts: dict[str, Any], hardware: Hardware, folder: str | None) -> None:
    store("speed", parts, torch.device(hardware.device), folder)


if __name__ == "__main__":
    main()
