"""Cut batches into micro-batches after an out-of-memory error, or explain the error and suggest settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import MemoryLimitError, summarise_error
from halfstep.hardware.memory import describe_memory
from halfstep.precision.plan import Plan
from halfstep_train.config.schema import TrainConfig

OutOfMemory = torch.OutOfMemoryError


def split_window(window: list[dict[str, Tensor]], pieces: int) -> list[dict[str, Tensor]]:
    """Cut every batch into `pieces` micro-batches; the step weighs them by their samples, so the loss is the same."""
    if pieces == 1:
        return window
    found: list[dict[str, Tensor]] = []
    for batch in window:
        chunks = zip(*(tensor.chunk(pieces) for tensor in batch.values()), strict=True)
        found += [type(batch)(zip(batch, parts, strict=True)) for parts in chunks]
    return found


def count_parts(rows: int, pieces: int) -> int:
    """Return how many micro-batches `split_window` makes of a batch with so many rows."""
    rows = max(rows, 1)
    return -(-rows // -(-rows // pieces))


def explain_out_of_memory(
    error: OutOfMemory,
    train: TrainConfig,
    each: str,
    pieces: int,
    device: torch.device,
    num_ranks: int = 1,
    planned: Iterable[str] = (),
) -> MemoryLimitError:
    """Return the error of a step that did not fit, with suggestions: first those that are `planned` to fit.

    `each` describes the size of a sample.
    """
    size, accumulate = train.batch_size, train.accumulate * pieces
    smaller = max(size // (2 * pieces), num_ranks)
    ways = list(planned)
    if size > num_ranks:
        by_itself = "automatically" if num_ranks == 1 else "as predicted before the run"
        ways.append(
            f"train.batch_size={smaller} train.accumulate={accumulate * -(-size // (pieces * smaller))}"
            f" (same effective batch{'' if train.auto_batch else f'; train.auto_batch=true does this {by_itself}'})"
        )
    ways.append("--precision bf16 (activations take half the memory)")
    if train.memory != "low":
        ways.append("train.memory=low (measures what saves memory here for at most 10 % more time)")
    ways.append("train.activation_checkpointing=true (one more forward pass in each step)")
    what = f"out of memory on {device} with batch size {size}{f' at {each}' if each else ''}"
    what += f", {-(-size // num_ranks)} per rank" if num_ranks > 1 else ""
    return _make_error(what, error, device, ways)


def explain_model_too_large(error: OutOfMemory, model: nn.Module, plan: Plan, *, has_ema: bool) -> MemoryLimitError:
    """Return the error of a model that does not fit even without a batch."""
    num_parameters = sum(p.numel() for p in model.parameters())
    ways = ["a smaller model", "--precision bf16-true (weights take half the bytes)"]
    if has_ema:
        ways.append("ema.enabled=false (the average is a second copy of the weights)")
    ways.append("a device with more memory, or one that is not in use (--device)")
    size = f"{type(model).__name__} with its {num_parameters:,} parameters"
    return _make_error(
        f"{size} does not fit on {plan.device}, even without a batch", error, torch.device(plan.device), ways
    )


def _make_error(what: str, error: OutOfMemory, device: torch.device, ways: Iterable[str]) -> MemoryLimitError:
    why = "\n       ".join([summarise_error(error), *describe_memory(device).splitlines()])
    return MemoryLimitError(what, why=why, fix="one of:\n       " + "\n       ".join(ways))


def describe_halving(pieces: int, batch_size: int, model: Any) -> str:
    """Return the line that announces a smaller micro-batch."""
    micro = -(-batch_size // pieces)
    has_batch_norm = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())
    note = "; BatchNorm now sees smaller batches" if has_batch_norm else ""
    return (
        f"out of memory: continuing with micro-batches of {micro} instead of {batch_size}, "
        f"{pieces} times as many of them (same effective batch){note}"
    )
