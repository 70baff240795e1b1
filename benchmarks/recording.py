"""What every benchmark stores: the numbers with device, versions and the command that regenerates them."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def store(name: str, results: dict[str, Any], device: torch.device, folder: str | None = None) -> Path:
    """Write `results/NAME.json` (or into another folder, for a machine that hands files back)."""
    record = {
        "benchmark": name,
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **results,
    }
    path = Path(folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Errors name files of the machine.
    path.write_text(json.dumps(record, indent=2).replace(f"{RESULTS.resolve().parents[1]}/", "") + "\n")
    print(f"stored {path}")
    return path


def command() -> str:
    """How to run this again; where its file went on some machine is not part of that."""
    words = list(sys.argv)
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(["python", *words])


def shown_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags that make a result what it is, without paths of the machine."""
    return {name: value for name, value in vars(arguments).items() if name not in ("out", "merge")} | {
        "data": Path(arguments.data).name
    }
