"""The one place that decides where a fast form runs instead of torch's own layer.

A fast form gives the layer's result up to the order of sums. It is written in plain torch operations that the compiler
fuses with their neighbours, so it pays inside `torch.compile` on a GPU and costs time everywhere else: eager code and
the CPU run torch's layers, to the bit. `forced` overrules that, for tests and for measuring a form alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

Form = Literal["few_channels", "batch_norm", "max_pool", "patches", "class_token", "upsampling"]
FORMS: tuple[Form, ...] = get_args(Form)

_forced: dict[Form, bool] = {}  # read while tracing: the compiler guards on it, so a change traces anew


def wanted(form: Form, x: Tensor) -> bool:
    """Whether the layer that got `x` should compute in this form."""
    return _forced.get(form, torch.compiler.is_compiling() and x.is_cuda)


@contextlib.contextmanager
def forced(on: bool, *forms: Form) -> Iterator[None]:
    """Switch these forms, or all, on or off whatever the device; to be entered outside of compiled code."""
    before = dict(_forced)
    _forced.update(dict.fromkeys(forms or FORMS, on))
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
