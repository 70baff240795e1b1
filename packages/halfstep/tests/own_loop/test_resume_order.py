"""A resumed loop continues with the very next batch, whatever loader and sampler it has."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import halfstep as hs
from halfstep.errors import CheckpointError, ConfigError, DataError
from halfstep.own_loop.data_position import DataPosition
from resumed_loops import NUM_SAMPLES, Drawing, Loop, Plain, assert_continues, close, make_step

WEIGHTS = [1.0 + k % 3 for k in range(NUM_SAMPLES)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def load(data: Any, **more: Any) -> DataLoader[Any]:
    return DataLoader(data, **({"batch_size": 4} | more))


class Order(Sampler[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES


class NumpyOrder(Order):
    """As many write it: a generator of NumPy's of its own, drawn from while the pass runs."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            yield int(self.rng.integers(NUM_SAMPLES))


class CountingOrder(Order):
    """Counts its own epochs and seeds by them."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class EagerBatches(Sampler[list[int]]):
    """Draws in `__iter__` itself, which torch calls before it draws the seed of the workers."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(NUM_SAMPLES).tolist()
        return iter([order[k : k + 4] for k in range(0, NUM_SAMPLES, 4)])

    def __len__(self) -> int:
        return -(-NUM_SAMPLES // 4)


LOADERS: dict[str, Any] = {
    "in order": lambda data, **more: load(data, **more),
    "shuffled": lambda data, **more: load(data, shuffle=True, **more),
    "shuffled by the loader's generator": lambda data, **more: load(data, shuffle=True, generator=generator(), **more),
    "drop_last": lambda data, **more: load(data, shuffle=True, drop_last=True, **more),
    "batch_size=None": lambda data, **more: load(data, batch_size=None, sampler=BatchSampler(
        RandomSampler(data), 4, drop_last=False), collate_fn=torch.utils.data.default_convert, **more),
    "weighted": lambda data, **more: load(data, sampler=WeightedRandomSampler(WEIGHTS, 30), **more),
    "weighted, own generator": lambda data, **more: load(
        data, sampler=WeightedRandomSampler(WEIGHTS, 30, generator=generator()), **more),
    "replacement": lambda data, **more: load(data, sampler=RandomSampler(data, True, 70), **more),
    "replacement, own generator": lambda data, **more: load(
        data, sampler=RandomSampler(data, True, 70, generator()), **more),
    "more than one permutation": lambda data, **more: load(
        data, sampler=RandomSampler(data, False, 50, generator()), **more),
    "subset": lambda data, **more: load(data, sampler=SubsetRandomSampler(range(18)), **more),
    "batch sampler": lambda data, **more: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data), 5, drop_last=True), **more),
    "eager batch sampler": lambda data, **more: DataLoader(data, batch_sampler=EagerBatches(), **more),
    "a sampler with NumPy's generator": lambda data, **more: load(data, sampler=NumpyOrder(), **more),
    "a sampler that counts epochs": lambda data, **more: load(data, sampler=CountingOrder(), **more),
    "concatenated": lambda data, **more: load(ConcatDataset([Subset(data, range(9)), data]), shuffle=True, **more),
}  # fmt: skip
IN_WORKERS = [
    ("shuffled", True),
    ("batch_size=None", False),
    ("a sampler with NumPy's generator", True),
]


@pytest.mark.parametrize("kind", LOADERS)
def test_order_and_samples_are_exact_without_loading_what_is_skipped(tmp_path: Path, kind: str) -> None:
    data: list[Drawing] = []

    def make() -> Any:
        data.append(Drawing())
        return LOADERS[kind](data[-1])

    resumed = assert_continues(make, tmp_path / "state", 4, 9)
    assert resumed.warnings == []
    whole, *parts = (len(one.loaded) for one in data)
    assert parts[0] + parts[1] == parts[2] + parts[3] == whole


def test_the_last_batch_of_a_pass_may_be_the_last_of_the_stored_ones(tmp_path: Path) -> None:
    for kind in ("more than one permutation", "shuffled"):
        assert_continues(lambda kind=kind: LOADERS[kind](Drawing()), tmp_path / "state", 6, 12, 13)  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "persistent"), IN_WORKERS)
def test_workers_load_nothing_again_where_samples_draw_nothing(tmp_path: Path, kind: str, persistent: bool) -> None:
    def make() -> Any:
        return LOADERS[kind](Plain(), num_workers=2, persistent_workers=persistent)

    assert assert_continues(make, tmp_path / "state", 3, 10, epochs=2).warnings == []


def test_samples_that_draw_in_workers_are_loaded_again_and_that_is_said(tmp_path: Path) -> None:
    resumed = assert_continues(lambda: load(Drawing(), shuffle=True, num_workers=2), tmp_path / "state", 8)
    assert len(resumed.warnings) == 1
    assert resumed.warnings[0].startswith("resuming loads 2 batches again and drops them: samples draw random numbers")


def test_seeded_samples_need_no_loading_again(tmp_path: Path) -> None:
    def make() -> Any:
        return load(hs.seeded(Drawing()), shuffle=True, num_workers=2, persistent_workers=True)

    assert assert_continues(make, tmp_path / "state", 3, 8, epochs=2).warnings == []
    one = Loop(make, epochs=2).run()
    other = Loop(lambda: load(hs.seeded(Drawing()), shuffle=True), epochs=2).run()
    assert torch.equal(torch.cat(one.batches[:6]), torch.cat(other.batches[:6])), "workers do not matter"
    assert not torch.equal(one.batches[0].sort(0)[0], one.batches[6].sort(0)[0])


def test_persistent_workers_that_draw_are_exact_in_the_first_epoch_and_said_not_to_be_later(tmp_path: Path) -> None:
    def make() -> Any:
        return load(Drawing(), shuffle=True, num_workers=2, persistent_workers=True)

    assert "loads 3 batches" in assert_continues(make, tmp_path / "state", 3, epochs=2).warnings[0]
    whole = Loop(make, epochs=2).run()
    Loop(make, epochs=2).run(tmp_path / "state", stop=8)
    resumed = Loop(make, epochs=2).run(tmp_path / "state", resumes=True)
    assert all(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(resumed.batches, whole.batches[8:], strict=True))
    assert not torch.equal(resumed.batches[0][:, 1], whole.batches[8][:, 1])
    assert any("generators of workers" in text and "may not be bit-exact" in text for text in resumed.warnings)


def test_a_distributed_sampler_continues_the_epoch_it_was_set_to(tmp_path: Path) -> None:
    def make() -> Any:
        data = Plain()
        return load(data, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=3))

    def set_epoch(loader: Any, epoch: int) -> None:
        loader.sampler.set_epoch(epoch)

    assert assert_continues(make, tmp_path / "state", 5, before_pass=set_epoch).warnings == []
    # A loop may begin to count at 0 again: the pass that goes on keeps its epoch.
    begun: list[int] = []

    def set_wrongly(loader: Any, epoch: int) -> None:
        begun.append(epoch)
        loader.sampler.set_epoch(epoch if len(begun) != 6 else 0)

    assert assert_continues(make, tmp_path / "state", 5, before_pass=set_wrongly).warnings == []


class LateOrder(Order):
    """Draws from Python's global generator for every index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            yield random.randrange(NUM_SAMPLES)


class GlobalOrder(LateOrder):
    """Draws for every index from torch's global generator, as the model's dropout does."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            yield int(torch.randint(NUM_SAMPLES, ()))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_late_is_followed_by_loading_again(tmp_path: Path, workers: int) -> None:
    resumed = assert_continues(lambda: load(Drawing(), sampler=LateOrder(), num_workers=workers), tmp_path / "state", 8)
    assert "the sampler draws from the global generators during the pass" in resumed.warnings[0]
    assert len(resumed.warnings) == 1


def test_a_sampler_that_shares_the_models_generator_is_said_not_to_be_exact(tmp_path: Path) -> None:
    def make() -> Any:
        return load(Plain(), sampler=GlobalOrder())

    Loop(make).run(tmp_path / "state", stop=8)
    resumed = Loop(make).run(tmp_path / "state", resumes=True)
    assert "may not be bit-exact" in resumed.warnings[-1]


class ContinuedOrder(Sampler[list[int]]):
    """As balanced batch samplers do: a shuffled list and a position in it, which stay from pass to pass."""

    def __init__(self) -> None:
        self.rng, self.order, self.position = np.random.default_rng(3), np.arange(NUM_SAMPLES), 0

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            if self.position + 4 > NUM_SAMPLES:
                self.rng.shuffle(self.order)
                self.position = 0
            yield list(self.order[self.position : self.position + 4])
            self.position += 4

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_keeps_a_state_is_exact_in_the_first_epoch_and_said_not_to_be_later(
    tmp_path: Path, workers: int
) -> None:
    def make() -> Any:
        return DataLoader(Plain(), batch_sampler=ContinuedOrder(), num_workers=workers)

    Loop(make).run(tmp_path / "state", stop=3)
    assert Loop(make).run(tmp_path / "state", resumes=True).warnings == []
    Loop(make).run(tmp_path / "state", stop=6)
    (warning,) = Loop(make).run(tmp_path / "state", resumes=True).warnings
    assert "the skipped batches differ from those of the stored pass" in warning


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for k in range(first, NUM_SAMPLES, step):
            yield torch.tensor([k / NUM_SAMPLES, random.random(), float(np.random.rand()), 0.0])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_data_set_is_loaded_again(tmp_path: Path, workers: int) -> None:
    resumed = assert_continues(lambda: load(Stream(), num_workers=workers), tmp_path / "state", 8)
    assert len(resumed.warnings) == 1
    assert "Stream is an iterable data set" in resumed.warnings[0]


def test_persistent_or_other_workers_of_an_iterable_data_set_are_said_not_to_be_exact(tmp_path: Path) -> None:
    def make(workers: int = 2) -> Any:
        return load(Stream(), num_workers=workers, persistent_workers=True)

    assert len(assert_continues(make, tmp_path / "state", 3, epochs=2).warnings) == 1
    Loop(make, epochs=2).run(tmp_path / "state", stop=8)
    texts = Loop(make, epochs=2).run(tmp_path / "state", resumes=True).warnings
    assert "generators of workers that were started before the pass cannot be restored" in texts[-1]
    texts = Loop(lambda: make(1), epochs=2).run(tmp_path / "state", resumes=True).warnings
    assert "there are 1 loader workers, and the state was saved with 2" in texts[-1]


def test_a_list_of_batches_is_skipped_silently_and_a_generator_with_a_warning(tmp_path: Path) -> None:
    batches = [torch.full((4, 4), float(k)) / 9 for k in range(7)]
    assert assert_continues(lambda: batches, tmp_path / "state", 9).warnings == []
    once = assert_continues(lambda: (batch for batch in batches), tmp_path / "state", 3, epochs=1)
    assert "a generator has no sampler (pass the DataLoader itself to step.windows)" in once.warnings[0]


def test_prefetched_batches_count_when_the_loop_sees_them(tmp_path: Path) -> None:
    """On CUDA two batches are copied ahead; the generators that loaded those are stored."""
    for workers, kind in ((0, "shuffled"), (0, "replacement, own generator"), (2, "replacement, own generator")):

        def make(workers: int = workers, kind: str = kind) -> Any:
            return LOADERS[kind](Plain(), num_workers=workers)

        resumed = assert_continues(make, tmp_path / "state", 8, prefetch_depth=3, epochs=2)
        assert resumed.warnings == []


def test_samples_drawn_ahead_are_exact_where_the_model_draws_elsewhere(tmp_path: Path) -> None:
    """As on CUDA, where dropout draws from the GPU's generator: here the samples draw from Python's alone."""

    class PythonDraws(Plain):
        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) + random.random()

    assert_continues(lambda: load(PythonDraws(), shuffle=True), tmp_path / "state", 8, prefetch_depth=3)


# --- leaving by break, and ending a pass ---


def train(step: hs.Step, model: torch.nn.Module, loader: Any, limit: int) -> list[Tensor]:
    seen: list[Tensor] = []
    for window in step.windows(loader):
        step(lambda batch: model(batch).square().mean(), window)
        seen += window
        if len(seen) == limit:
            break
    return seen


def make_loop(workers: int) -> tuple[hs.Step, torch.nn.Module, Any]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32")
    return step, model, load(Plain(), shuffle=True, num_workers=workers, persistent_workers=workers > 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_pass_left_by_break_goes_on_or_ends_as_asked(tmp_path: Path, workers: int) -> None:
    step, model, loader = make_loop(workers)
    rest = torch.cat([*train(step, model, loader, 6)])[8:]  # the whole pass, without a break in between
    close(loader)
    step, model, loader = make_loop(workers)
    train(step, model, loader, 2)
    hs.save(tmp_path / "left", step, model)
    step.end_pass()
    hs.save(tmp_path / "ended", step, model)
    again = train(step, model, loader, 3)  # in the same process a break always begins a new pass
    hs.save(tmp_path / "second", step, model)
    last = train(step, model, loader, 6)

    close(loader)
    step, model, loader = make_loop(workers)
    hs.load(tmp_path / "left", step, model)
    assert step.epoch == 0
    with pytest.warns(UserWarning, match="was left by `break` after 2 batches and continues from there"):
        assert torch.equal(torch.cat(train(step, model, loader, 6)), rest)
    assert step.epoch == 1

    close(loader)
    step, model, loader = make_loop(workers)
    hs.load(tmp_path / "ended", step, model)
    assert step.epoch == 1
    assert torch.equal(torch.cat(train(step, model, loader, 3)), torch.cat(again))

    close(loader)
    step, model, loader = make_loop(workers)
    hs.load(tmp_path / "second", step, model)
    step.end_pass()
    assert step.epoch == 2
    assert torch.equal(torch.cat(train(step, model, loader, 6)), torch.cat(last))
    close(loader)


def test_a_state_stored_before_the_step_is_warned_about() -> None:
    step, model, loader = make_loop(0)
    for number, window in enumerate(step.windows(loader)):
        if number == 1:
            with pytest.warns(UserWarning, match="called before the step of a window"):
                step.state_dict()
        step(lambda batch: model(batch).square().mean(), window)
        step.state_dict()


def test_a_state_stored_before_epoch_ended_is_warned_about() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    schedule = hs.per_epoch(torch.optim.lr_scheduler.ConstantLR(optimizer))
    step = hs.Step(model, optimizer, "fp32", schedule=schedule)
    for window in step.windows([torch.ones(2, 4)]):
        step(lambda batch: model(batch).square().mean(), window)
    with pytest.warns(UserWarning, match="before step.epoch_ended"):
        step.state_dict()
    step.epoch_ended()
    step.state_dict()


def test_two_passes_at_once_are_warned_about() -> None:
    step, model, loader = make_loop(0)
    for a, _ in zip(step.windows(loader), step.windows(loader), strict=True):
        step(lambda batch: model(batch).square().mean(), a)
        with pytest.warns(UserWarning, match="only the newest is stored"):
            step.state_dict()
        break


def test_another_loader_is_refused_and_the_state_stays(tmp_path: Path) -> None:
    step, model, loader = make_loop(0)
    train(step, model, loader, 2)
    hs.save(tmp_path / "state", step, model)
    step, model, loader = make_loop(0)
    hs.load(tmp_path / "state", step, model)
    with pytest.raises(
        CheckpointError, match="in the middle of a pass over 6 batches, but this loader has 11"
    ) as caught:
        next(step.windows(load(Plain(), batch_size=2)))
    assert "step.end_pass()" in caught.value.fix
    assert step.epoch == 0
    with pytest.warns(UserWarning, match="left by `break`"):
        assert len(train(step, model, loader, 6)) == 4


def test_data_that_have_become_fewer_are_an_error() -> None:
    step, model, _ = make_loop(0)
    window = [torch.ones(2, 4)]
    for _ in step.windows(iter([torch.ones(2, 4)] * 5)):
        step(lambda batch: model(batch).square().mean(), window)
        state = step.state_dict()
    step, model, _ = make_loop(0)
    step.load_state_dict(state)
    with (
        pytest.warns(UserWarning, match="loads 5 batches"),
        pytest.raises(CheckpointError, match="the data ends after 3 batches, but 5 are to be skipped"),
    ):
        next(step.windows(iter([torch.ones(2, 4)] * 3)))


def test_a_step_does_not_keep_the_loader_alive() -> None:
    step, model, loader = make_loop(0)
    train(step, model, loader, 2)
    alive = weakref.ref(loader)
    del loader
    assert alive() is None
    assert step.state_dict()["position"]["pass"]["num_yielded"] == 2


def test_a_state_without_its_position_leaves_the_generators_and_begins_a_new_pass() -> None:
    step, model, loader = make_loop(0)
    train(step, model, loader, 2)
    state = step.state_dict()
    del state["position"]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    step.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(train(step, model, loader, 9)) == 6


def test_the_state_of_another_rank_gives_its_position_but_not_its_generators() -> None:
    first, other = DataPosition(0, 2), DataPosition(1, 2)
    batches = first.follow([torch.ones(1), torch.ones(2)])
    next(batches)
    torch.manual_seed(8)
    before = torch.get_rng_state()
    state = first.state_dict()
    torch.manual_seed(9)
    with pytest.warns(UserWarning, match="this is rank 1 of 2, and the state is from rank 0 of 2"):
        other.load_state_dict(state)
    assert not torch.equal(torch.get_rng_state(), before)
    assert [len(batch) for batch in other.follow([torch.ones(1), torch.ones(2)])] == [2]


# --- torchdata's loader keeps its own position ---


class CountedLoader:
    """The protocol of torchdata's StatefulDataLoader, which this environment need not have."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 6:
            self.position += 1
            yield torch.full((2, 4), float(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def test_a_loader_with_a_state_of_its_own_is_used_through_it(tmp_path: Path) -> None:
    assert assert_continues(CountedLoader, tmp_path / "state", 8).warnings == []


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_continues_with_the_very_next_batch(tmp_path: Path, workers: int) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return loaders.StatefulDataLoader(Plain(), 4, shuffle=True, num_workers=workers)

    resumed = assert_continues(make, tmp_path / "state", 3, 6, 8)
    assert [("generators of workers" in text) for text in resumed.warnings] == [True] * (workers > 0)


# --- hs.seeded ---


def test_a_seeded_sample_depends_on_seed_epoch_and_index_alone() -> None:
    data = hs.seeded(Drawing(), seed=3)
    first = data[5]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    assert torch.equal(torch.stack(data.__getitems__([2, 5]))[1], first)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert np.array_equal(before[2], after[2])
    others = [hs.seeded(Drawing(), seed=4)[5], data[6]]
    data.set_epoch(1)
    others.append(data[5])
    assert all(not torch.equal(other[1:], first[1:]) for other in others)
    assert len(data) == NUM_SAMPLES
    assert data.loaded[0] == 5, "other attributes are the data set's"


def test_what_cannot_be_seeded_is_refused() -> None:
    with pytest.raises(DataError, match="not a Stream"):
        hs.seeded(Stream())
    with pytest.raises(DataError, match="seed=-1"):
        hs.seeded(Plain(), seed=-1)
    with pytest.raises(DataError, match=r"the index \[1, 2\]"):
        hs.seeded(Plain())[[1, 2]]


def test_a_loop_without_windows_is_told_that_its_loader_starts_again(tmp_path: Path) -> None:
    model, loader = nn.Linear(4, 4), DataLoader(torch.randn(12, 4), 2)

    def make() -> hs.Step:
        return hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32")

    step = make()
    for batch in loader:
        step(lambda x: model(x).square().mean(), [batch])
    hs.save(tmp_path / "plain", step, model)
    with pytest.warns(UserWarning, match="holds no position in the data, because no batch came from step.windows"):
        hs.load(tmp_path / "plain", make(), model)
    step = make()
    for window in step.windows(loader):
        step(lambda x: model(x).square().mean(), window)
        if step.attempted == 3:
            hs.save(tmp_path / "followed", step, model)
    resumed = make()
    hs.load(tmp_path / "followed", resumed, model)
    with pytest.warns(UserWarning, match="this batch does not come from step.windows"):
        resumed(lambda x: model(x).square().mean(), [next(iter(loader))])


# --- other data, a state loaded in the middle, endless data ---


def stop_and_resume(path: Path, first: Any, second: Any, stop: int = 3) -> Loop:
    Loop(lambda: first).run(path, stop=stop)
    return Loop(lambda: second).run(path, resumes=True)


class Files(Plain):
    """As ImageFolder: a list of (path, label), and a cache that is filled while training."""

    def __init__(self, folder: str, kind: str = "cat") -> None:
        super().__init__()
        self.samples = [(f"{folder}/{kind}{k}.png", k % 2) for k in range(NUM_SAMPLES)]
        self.cache: list[Any] = [None] * NUM_SAMPLES
        self.seen = torch.zeros(NUM_SAMPLES)

    def __getitem__(self, index: int) -> Tensor:
        self.seen[index] += 1
        self.cache[index] = index
        return super().__getitem__(index)


def test_other_data_of_the_same_length_are_warned_about(tmp_path: Path) -> None:
    one, other = torch.rand(2, NUM_SAMPLES, 4, generator=generator())
    pairs = {
        "loader.dataset.samples was 22 entries from": (load(Files("a")), load(Files("a", "dog"))),
        "the type of loader.dataset was Plain and is Drawing": (load(Plain()), load(Drawing())),
        "loader.dataset.indices": (load(Subset(Plain(), range(20))), load(Subset(Plain(), list(range(1, 21))))),
        "loader.dataset.rows": (load(Rowwise(one)), load(Rowwise(other))),
        "loader.dataset.rows was float32 (22, 4)": (load(Rowwise(one.numpy())), load(Rowwise(other.numpy()))),
        "the list of batches": (list(one.split(4)), list(other.split(4))),
    }
    for text, (first, second) in pairs.items():
        if isinstance(first, DataLoader) and isinstance(first.dataset, Subset):
            first.dataset.indices = list(first.dataset.indices)
        (warning,) = stop_and_resume(tmp_path / "state", first, second).warnings
        assert "the data differ" in warning, text
        assert text in warning, warning


class Rowwise(Plain):
    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows

    def __getitem__(self, index: int) -> Tensor:
        return torch.as_tensor(self.rows[index])


def test_the_same_data_in_another_folder_or_with_what_training_wrote_are_the_same(tmp_path: Path) -> None:
    for stop in (3, 8):  # in the first and in the second epoch
        resumed = stop_and_resume(tmp_path / "state", load(Files("/disk/a")), load(Files("/other/b")), stop)
        assert resumed.warnings == []
    data = torch.rand(NUM_SAMPLES, 4)
    loaders = [
        load(torch.utils.data.TensorDataset(data), collate_fn=lambda rows: torch.stack([r[0] for r in rows]))
    ] * 2
    assert stop_and_resume(tmp_path / "state", *loaders).warnings == []


def test_a_state_loaded_inside_the_loop_ends_it_with_an_error(tmp_path: Path) -> None:
    loop = Loop(lambda: load(Plain())).run(tmp_path / "state", stop=3)
    step, model, loader = loop.step, loop.model, load(Plain())
    windows = step.windows(loader)
    for _ in range(2):
        step(lambda x: model(x).square().mean(), next(windows))
    hs.load(tmp_path / "state", step, model)
    with pytest.raises(ConfigError, match="loaded while step.windows was running") as error:
        next(windows)
    assert "call step.windows again" in str(error.value)
    assert (step.epoch, step.batch) == (0, 3)
    assert sum(len(window) for window in step.windows(loader)) == 3  # the rest of the six
    state = step.state_dict()
    del state["position"]
    for number, window in enumerate(step.windows(loader)):
        step(lambda x: model(x).square().mean(), window)
        if number == 1:
            step.load_state_dict(state)  # weights and optimizers alone
    assert number == 5


def test_the_number_of_batches_is_known_after_resuming(tmp_path: Path) -> None:
    first = Loop(lambda: load(Plain())).run(tmp_path / "state", stop=8)
    assert (first.step.epoch, first.step.batch) == (1, 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    step = make_step(model)
    assert step.batch == 0
    hs.load(tmp_path / "state", step, model)
    numbers = [(number, step.batch) for number, _ in enumerate(step.windows(load(Plain())), step.batch)]
    assert numbers == [(2, 3), (3, 4), (4, 5), (5, 6)]
    assert (step.epoch, step.batch) == (2, 0)


@pytest.mark.filterwarnings("ignore:resuming loads 3 batches again")
@pytest.mark.parametrize("way", ["list", "dicts", "generator"])
def test_an_order_drawn_before_the_pass_is_exact_only_if_it_follows_from_the_epoch(tmp_path: Path, way: str) -> None:
    """As loops without a DataLoader do: a permutation per epoch, drawn by the loop itself."""
    data = torch.rand(NUM_SAMPLES, 4, generator=generator())

    def train(*, is_seeded: bool, stop: int = -1) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.2))
        step = make_step(model)
        if stop < 0 and (tmp_path / "state").exists():
            hs.load(tmp_path / "state", step, model)
        for epoch in range(step.epoch, 3):
            own = torch.Generator().manual_seed(epoch) if is_seeded else None
            batches: Any = data[torch.randperm(NUM_SAMPLES, generator=own)].split(4)
            if way == "dicts":
                batches = [{"x": x} for x in batches]
            for window in step.windows((x for x in batches) if way == "generator" else batches):
                step(lambda x: model(x["x"] if way == "dicts" else x).square().mean(), window)
                if step.attempted == stop:
                    hs.save(tmp_path / "state", step, model)
                    return model
        return model

    whole = train(is_seeded=True)
    train(is_seeded=True, stop=9)
    resumed = train(is_seeded=True)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    train(is_seeded=False, stop=9)
    with pytest.warns(UserWarning, match="data differs: the list of|skipped batches differ") as caught:
        train(is_seeded=False)
    assert "torch.Generator().manual_seed(epoch)" in str(caught[-1].message)
