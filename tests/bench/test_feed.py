"""The feed: whole batches, epoch after epoch, and no more than asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.bench.ours import Feed
from halfstep.data.loader import Loader

CPU = torch.device("cpu")


class Numbers:
    def __len__(self) -> int:
        return 7

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return {"number": torch.tensor(index)}


def loader(num_workers: int = 0) -> Loader:
    return Loader(Numbers(), batch_size=2, num_workers=num_workers)


def test_epochs_follow_each_other_without_their_odd_last_batch() -> None:
    batches = [batch["number"].tolist() for batch in Feed(loader(), 2, 7, CPU)]
    assert [len(batch) for batch in batches] == [2] * 7
    for epoch in (batches[:3], batches[3:6]):
        assert len({number for batch in epoch for number in batch}) == 6
    assert batches[:3] != batches[3:6]


def test_what_was_read_ahead_is_thrown_away_and_the_next_batch_is_a_later_one() -> None:
    plain = [batch["number"].tolist() for batch in Feed(loader(2), 2, 8, CPU)]
    feed = Feed(loader(2), 2, 3, CPU)
    found = []
    for batch in feed:
        found.append(batch["number"].tolist())
        if len(found) == 1:
            feed.use_up()
    assert found == [plain[0], plain[5], plain[6]]
    assert feed.waited_s > 0
