"""Which algorithms cuDNN picks for convolutions in strict fp32, by their workspaces: what the memory plan cannot know.

    python benchmarks/convolution_workspaces.py [--sides 24,40] [--seconds 60] [--out DIR]   # on a GPU: each shape
    python benchmarks/convolution_workspaces.py --write                                      # as the plan's table

3x3 convolutions with stride 1 of [n, c, side, side] to k channels. A workspace names its algorithm: none is an implicit
product, and run/memory/step_trace.py has the sizes of the three others. Stored shapes are not asked
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from halfstep_train.run.memory.step_trace import ALGORITHMS, SIDES, Convolution
from recording import RESULTS, store

COUNTS = (1, 2, 4, 8, 16, 32, 64)
CHANNELS = (32, 64, 128, 256, 512, 1024)
MOST_BYTES, MOST_WORK = 2e9, 2e12
TABLE = Path(__file__).parents[1] / "packages/halfstep-train/src/halfstep_train/tune/planner/cudnn_choices.txt"
HEAD = """# cuDNN's choices in strict fp32 on {device}, cuDNN {cudnn}.
# Made by `python benchmarks/convolution_workspaces.py --write`. After n, c and k a digit for each side of
# `convolutions.SIDES`: 1 forward by FFT, 2 gradient of the input by FFT of tiles, 4 that of the weight by Winograd,
# added up; a dot was not asked for.
"""


def shapes(sides: Sequence[int]) -> list[Convolution]:
    """In an order that leaves an even grid where the time is up."""
    found = [
        Convolution(n, c, k, side, side, 3)
        for n, c, k, side in itertools.product(COUNTS, CHANNELS, CHANNELS, sides)
        if max(c, k) <= 2 * min(c, k) and 4 * n * side**2 * max(c, k) <= MOST_BYTES
    ]
    affordable = [shape for shape in found if work_of(shape) <= MOST_WORK]
    random.Random(0).shuffle(affordable)
    return affordable


def work_of(shape: Convolution) -> float:
    return 2 * 9 * shape.n * shape.height * shape.width * shape.c * shape.k


def workspace(run: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    made = run()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del made
    return extra


def asked(shape: Convolution) -> list[int]:
    """Bytes forward, for the input's gradient and for the weight's."""
    x = torch.empty(shape.n, shape.c, shape.height, shape.width, device="cuda")
    weight = torch.empty(shape.k, shape.c, 3, 3, device="cuda")
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    forward = workspace(lambda: torch.ops.aten.convolution(x, weight, None, *how))
    d_out = torch.empty(shape.n, shape.k, shape.height, shape.width, device="cuda")

    def backward(*wanted: bool) -> int:
        return workspace(lambda: torch.ops.aten.convolution_backward(d_out, x, weight, None, *how, wanted))

    return [forward, backward(True, False, False), backward(False, True, False)]


def measure(sides: Sequence[int], seconds: float, out: str | None) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    began, version = time.monotonic(), torch.backends.cudnn.version()
    record = json.loads((RESULTS / "convolution_workspaces.json").read_text())
    rows = record["rows"] if record["cudnn"] == version else []  # another version chooses otherwise
    known = {tuple(map(int, row.split()[:4])) for row in rows}
    missing = [shape for shape in shapes(sides) if shape[:4] not in known]
    num_asked = 0
    for shape in missing:
        if time.monotonic() - began > seconds:
            break
        rows.append(" ".join(map(str, (*shape[:4], *asked(shape)))))
        num_asked += 1
        torch.cuda.empty_cache()  # workspaces of many sizes would fill the device, and leave cuDNN no choice
    facts = {"cudnn": version, "columns": "n c k side forward d_input d_weight", "rows": rows}
    store("convolution_workspaces", facts, torch.device("cuda"), out)
    print(num_asked, "shapes of", len(missing))


def write() -> None:
    record = json.loads((RESULTS / "convolution_workspaces.json").read_text())
    table: dict[tuple[int, int, int], list[str]] = {}
    for row in record["rows"]:
        n, c, k, side, *sizes = map(int, row.split())
        digits = table.setdefault((n, c, k), ["."] * len(SIDES))
        shape = Convolution(n, c, k, side, side, 3)
        is_known = [abs(size / law(shape) - 1) < 0.25 for size, law in zip(sizes, ALGORITHMS.values(), strict=True)]
        digits[SIDES.index(side)] = str(sum(2**bit for bit, known in enumerate(is_known) if known))
    lines = [f"{n} {c} {k} {''.join(digits)}\n" for (n, c, k), digits in sorted(table.items())]
    TABLE.write_text(HEAD.format(device=record["device"], cudnn=record["cudnn"]) + "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default=",".join(map(str, SIDES)))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        write()
    else:
        measure([int(side) for side in given.sides.split(",")], given.seconds, given.out)


if __name__ == "__main__":
    main()
