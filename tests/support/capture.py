"""A step captured as torch's manual has it: warmed up on a side stream first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph, and where its replays put the step's result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with warnings.catch_warnings():
        # A result that the caller still holds keeps its parameters' nodes on the stream where it was computed.
        warnings.filterwarnings("ignore", ".*AccumulateGrad node's stream", UserWarning)
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
    return graph, result
