"""One-byte codes: the nearest of 256 values, computed without a search."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfstep.step.optim.codes import encode_signed, encode_unsigned, make_signed_table, make_unsigned_table

TABLES = [(make_signed_table(), encode_signed), (make_unsigned_table(), encode_unsigned)]
Codes = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(("table", "codes"), TABLES, ids=["signed", "unsigned"])
def test_codes_are_the_nearest_table_values(table: tuple[float, ...], codes: Codes) -> None:
    assert len(table) == 256
    entries = torch.tensor(table)
    evenly, tiny = torch.linspace(min(table), 1, 3001), torch.logspace(-8, 0, 3001)
    between = (entries[1:] + entries[:-1]) / 2
    values = torch.cat([evenly, tiny, -tiny[:-1] if min(table) < 0 else tiny, between * 0.9999, between * 1.0001])
    values = values[(values >= min(table)) & (values <= 1)]
    found = entries[codes(values).int()]
    best = (values[:, None] - entries[None]).abs().amin(dim=1)
    assert ((values - found).abs() <= best + 1e-6 * values.abs()).all()


def test_the_largest_of_a_block_may_be_off_by_a_rounding_on_either_side() -> None:
    above = torch.tensor([1 + 2.0**-23, 1 - 2.0**-24])
    assert encode_signed(above).tolist() == [255, 255]
    assert encode_signed(-above).tolist() == [0, 0]
    assert encode_unsigned(above).tolist() == [255, 255]
