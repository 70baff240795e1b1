"""Prefetched batches arrive in order, whole, and with the time that the host waited for them."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.prefetching import prefetch


def test_prefetching_keeps_batches_order_and_counts_the_waiting() -> None:
    def slow() -> object:
        for i in range(3):
            time.sleep(0.02)
            yield {"image": torch.full((2,), float(i))}

    batches = prefetch(slow(), "cpu")  # type: ignore[arg-type,var-annotated]
    assert [int(batch["image"][0]) for batch in batches] == [0, 1, 2]
    assert 0.06 <= batches.waited_s < 5


class Pair(NamedTuple):
    image: Tensor
    name: str


@dataclass(frozen=True)
class Example:
    pair: Pair
    others: list[Tensor]


def test_prefetching_takes_any_nest_of_tensors_and_leaves_the_rest() -> None:
    """To the meta device, so that what was not sent shows."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"example": Example(Pair(torch.ones(2), "a"), [torch.ones(1)]), "count": 3, "both": (torch.ones(1), None)}
    sent = next(iter(prefetch([OrderedDict(batch)], "meta")))
    assert type(sent) is OrderedDict
    assert sent["example"].pair.image.is_meta
    assert sent["example"].pair.name == "a"
    assert sent["example"].others[0].is_meta
    assert sent["both"][0].is_meta
    assert (sent["count"], sent["both"][1]) == (3, None)
    assert not batch["example"].others[0].is_meta, "the loader's own batch stays as it is"  # type: ignore[attr-defined]
    assert next(prefetch([torch.ones(1)], "meta")).is_meta
    assert torch.equal(next(prefetch([packed], "cpu")).data, packed.data)
